"""Placements of the norms: a table with one row for every published "layer-normalised" cell.

A cell computes two products, ``W_x x`` and ``W_h h``, each with ``G*H`` entries (G gates of H units). Norms are
possible at four sites: ``ih`` (on ``W_x x``), ``hh`` (on ``W_h h``), ``sum`` (on their sum) and ``cell`` (on the
LSTM's c). A row lists, for each site, the groups of gates normalised together, in units of H: ``(4,)`` is one
mean and variance over all 4H entries, ``(1, 1, 1, 1)`` is one per gate, ``()`` is no norm.

Gate order is torch's: LSTM i, f, g, o; GRU r, z, n. In every placement the torch biases are added after the norm,
as the norm's own biases (beta): ``bias_ih`` after the norm of ``W_x x``, ``bias_hh`` after the norm of ``W_h h``,
both after the norm of the sum. Gains are ``gain_ih``, ``gain_hh``, ``gain_sum``, ``gain_cell``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import fail, one_of

SITES = ("ih", "hh", "sum", "cell")
NORMS = ("layer", "batch", "weight", None)
GATES = {"RNN": 1, "LSTM": 4, "GRU": 3}
STATES = {"RNN": 1, "LSTM": 2, "GRU": 1}


@dataclass(frozen=True)
class Placement:
    """Positions of the norms in a cell, one row of the table."""

    name: str
    equation: str
    source: str
    ih: tuple[int, ...] = ()
    hh: tuple[int, ...] = ()
    sum: tuple[int, ...] = ()
    cell: tuple[int, ...] = ()
    carry: bool = False  # carry the normalised c to the next step, not the raw one
    dreamer: bool = False  # GRU with the reset gate on the whole candidate and an update gate u with bias -1

    def groups(self, site: str) -> tuple[int, ...]:
        groups: tuple[int, ...] = getattr(self, site)
        return groups

    def sites(self) -> tuple[str, ...]:
        """Return the sites that have a norm, in a fixed order."""
        return tuple(site for site in SITES if self.groups(site))


PLAIN = Placement("none", "no norm: the torch.nn cell", "torch.nn")

_LSTM = (
    Placement(
        "paper",
        "[i f g o] = LN(W_x x) + LN(W_h h) + b; c = s(f) c' + s(i) tanh(g); h = s(o) tanh(LN(c)); c carried raw",
        "Ba, Kiros, Hinton 2016, appendix; Haste",
        ih=(4,),
        hh=(4,),
        cell=(1,),
    ),
    Placement(
        "cell",
        "[i f g o] = W_x x + W_h h + b; c = s(f) c' + s(i) tanh(g); h = s(o) tanh(LN(c)); c carried raw",
        "Ba, Kiros, Hinton 2016, DRAW experiment",
        cell=(1,),
    ),
    Placement(
        "carry",
        "[i f g o] = LN(W_x x) + LN(W_h h) + b; c = LN(s(f) c' + s(i) tanh(g)); h = s(o) tanh(c)",
        "PyTorch fastrnns; TensorFlow Addons LayerNormLSTMCell",
        ih=(4,),
        hh=(4,),
        cell=(1,),
        carry=True,
    ),
    Placement(
        "joint",
        "[i f g o] = LN(W_x x + W_h h) + b; c = LN(s(f) c' + s(i) tanh(g)); h = s(o) tanh(c)",
        "torchaudio RNN-T",
        sum=(4,),
        cell=(1,),
        carry=True,
    ),
    Placement(
        "gate",
        "k = LN(W_kx x + W_kh h) + b_k for each gate k; c = LN(s(f) c' + s(i) tanh(g)); h = s(o) tanh(c)",
        "TensorFlow contrib LayerNormBasicLSTMCell",
        sum=(1, 1, 1, 1),
        cell=(1,),
        carry=True,
    ),
)

_GRU = (
    Placement(
        "paper",
        "[r z] = LN(W_x x) + LN(W_h h) over 2H; n = tanh(LN(U_x x) + s(r) LN(U_h h)); h = (1-s(z)) n + s(z) h'",
        "Ba, Kiros, Hinton 2016, appendix (which writes 1-z for our z)",
        ih=(2, 1),
        hh=(2, 1),
    ),
    Placement(
        "split",
        "x = LN(W_x x), y = LN(W_h h) over 3H; r, z = s(x + y); n = tanh(x_n + r y_n); h = (1-z) n + z h'",
        "Haste LayerNormGRU",
        ih=(3,),
        hh=(3,),
    ),
    Placement(
        "joint",
        "[r u n] = LN(W [x; h']) over 3H; h = s(u-1) tanh(s(r) n) + (1 - s(u-1)) h'",
        "DreamerV2 and DreamerV3 ports",
        sum=(3,),
        dreamer=True,
    ),
)

_RNN = (
    Placement("paper", "h = f(g/sigma (a - mu) + b), a = W_x x + W_h h'", "Ba, Kiros, Hinton 2016, Eq. 4", sum=(1,)),
)

PLACEMENTS: dict[str, dict[str, Placement]] = {
    cell: {row.name: row for row in rows} for cell, rows in (("RNN", _RNN), ("LSTM", _LSTM), ("GRU", _GRU))
}


def resolve(cell: str, norm: str | None, placement: str | None) -> Placement:
    """Return the row of the table that ``norm`` and ``placement`` select for this cell."""
    one_of("norm", norm, NORMS)
    if norm in (None, "weight"):
        if placement is not None:
            raise fail(
                "placement= belongs to norm='layer' and norm='batch', because other norms have no placement to choose",
                f"norm={norm!r}, placement={placement!r}",
                "Drop placement= or choose norm='layer'.",
            )
        return PLAIN
    known = PLACEMENTS[cell]
    name = "paper" if placement is None else placement
    owners = [c for c, rows in PLACEMENTS.items() if name in rows]
    if name not in known and owners:
        rule = f"placement for {cell} must be one of {', '.join(map(repr, known))}"
        raise fail(rule, f"{name!r}, which belongs to {' and '.join(owners)}", f"Pass one of them, or use {owners[0]}.")
    one_of(f"placement for {cell}", name, known)
    return known[name]
