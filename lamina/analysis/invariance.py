"""Which changes of weights and data leave a normalised layer's output as it was: Table 1, measured.

``invariance_table`` runs forward passes of ``lamina.Linear``; ``networks`` asks the same of any network. A positive
factor is meant throughout: sigma grows by |delta|, so a negative one turns the normalised vector round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checks import describe, fail, one_of, positive_int
from ..layers import Linear
from ..placements import NORMS
from . import transforms
from .singular import products
from .texts import markdown, on_screen
from .transforms import Change, Draw, Probe, Transform, checked_draw, deviation, with_draw

if TYPE_CHECKING:
    from rich.table import Table

EXACT = 1e-10  # what float64 rounding may leave of an invariance; every real dependence is far above it

PAPER_ROWS: dict[str, tuple[str, Transform, tuple[str, ...]]] = {
    "weight matrix scaled": ("weight", transforms.scale, ("batch", "weight", "layer")),
    "weight matrix shifted": ("weight", transforms.add_to_rows, ("layer",)),
    "weight vector scaled": ("weight", transforms.scale_row, ("batch", "weight")),
    "data set scaled": ("data", transforms.scale, ("batch", "layer")),
    "data set shifted": ("data", transforms.shift, ("batch",)),
    "single case scaled": ("data", transforms.scale_case, ("layer",)),
}
# What the text says or leaves out: the last two are its "feature shifting", true of summed inputs only.
BEYOND_ROWS: dict[str, tuple[str, Transform, tuple[str, ...]]] = {
    "weight matrix scaled and shifted": ("weight", transforms.scale_and_add, ("layer",)),
    "single case's inputs shifted": ("data", transforms.shift_case, ()),
    "single case's summed inputs shifted": ("summed", transforms.shift_case, ("layer",)),
}


@dataclass(frozen=True)
class Entry:
    """One cell: how far the outputs moved, relative to their size, beside what the paper says.

    verdict: "invariant"; "sign flips", the normalised value only turned round (delta < 0); or "not".
    paper: Table 1's entry; without a norm, and in rows that the table lacks, what follows from it.
    predicted: the most that eps can move an output that is otherwise invariant, and whether it stayed ``within``
        that; None where the output is not invariant.
    """

    transform: str
    norm: str | None
    deviation: float
    verdict: str
    paper: str
    predicted: float | None
    within: bool | None

    @property
    def agrees(self) -> bool:
        return self.verdict == self.paper


@dataclass(frozen=True)
class InvarianceTable:
    """Table 1 as measured: a row for each transformation, a column for each norm."""

    rows: tuple[Entry, ...]
    eps: float
    delta: float

    def entry(self, transform: str, norm: str | None) -> Entry:
        return next(e for e in self.rows if (e.transform, e.norm) == (transform, norm))

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Transformation, then norm ("none" for no norm), then the figures of the cell."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for entry in self.rows:
            found.setdefault(entry.transform, {})[entry.norm or "none"] = asdict(entry)
        return found

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        norms = list(dict.fromkeys(e.norm for e in self.rows))
        names = list(dict.fromkeys(e.transform for e in self.rows))
        cells = [[name, *(_cell(self.entry(name, norm)) for norm in norms)] for name in names]
        return ["transformation", *(f"{norm} norm" if norm else "no norm" for norm in norms)], cells

    def markdown(self) -> str:
        return markdown(*self._texts())

    def rich(self) -> Table:
        return on_screen(f"Invariance, delta = {self.delta:g}, eps = {self.eps:g}", *self._texts())


def invariance_table(
    norms: Sequence[str | None] = ("batch", "weight", "layer", None),
    inputs: Tensor | None = None,
    units: int = 7,
    eps: float = 0.0,
    delta: float = 3.0,
    seed: int = 0,
    *,
    training: bool = True,
    beyond: bool = False,
) -> InvarianceTable:
    """Measure Table 1 in float64 on ``lamina.Linear`` layers with random weights, gains and biases.

    inputs: the data set [N, D]; None draws 32 cases of 5 inputs. units: H, the number of units.
    training: True recomputes batch norm's statistics on the transformed data, as the table means it; False keeps
        those of the data as they were, which is evaluation with stale statistics.
    beyond: add rows that the table lacks: both weight changes at once, one case's inputs or summed inputs shifted.

    With eps > 0 an invariant output moves by at most eps/(2 sigma^2) |1 - 1/delta^2| |g (a - mu)/sigma| (first order
    in eps, and by the mean value theorem a bound for any eps): ``predicted`` is the largest of these.
    """
    draw = checked_draw(delta, seed)
    x = _data_set(inputs, seed)
    rows = {**PAPER_ROWS, **(BEYOND_ROWS if beyond else {})}
    entries = []
    for norm in norms:
        one_of("norm", norm, NORMS)
        layer = _layer(norm, x, positive_int("units", units), eps, seed, training)
        entries += [_entry(name, layer, x, draw) for name in rows]
    order = {name: place for place, name in enumerate(rows)}
    return InvarianceTable(tuple(sorted(entries, key=lambda e: order[e.transform])), eps, draw.delta)


def _data_set(inputs: Tensor | None, seed: int) -> Tensor:
    if inputs is None:
        return torch.randn(32, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) + 0.5
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or not inputs.numel() or not inputs.is_floating_point():
        raise fail("inputs must be a data set [N, D] of floating-point numbers", describe(inputs), "Flatten the cases.")
    return inputs.detach().to(torch.float64)


def _layer(norm: str | None, x: Tensor, units: int, eps: float, seed: int, training: bool) -> Linear:
    """A layer whose gains and biases differ from their start values, which would hide a mistake in them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        layer = Linear(x.shape[1], units, device=x.device, dtype=x.dtype, norm=norm, eps=eps, momentum=None)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=x.dtype).to(x.device)
            parameter.copy_(1 + 0.3 * torch.tanh(drawn) if name == "gain" else drawn)
        if not training:
            layer(x)  # momentum None: the running statistics are those of this one batch
    return layer.train(training)


def _entry(name: str, layer: Linear, x: Tensor, draw: Draw) -> Entry:
    site, transform, invariant = {**PAPER_ROWS, **BEYOND_ROWS}[name]
    change = with_draw(transform, draw)
    if site == "summed":
        layer, x, change = _with_offset(layer, x, draw)
    probe = Probe(layer, (x,))
    old = probe.outputs()
    new = probe.outputs({"weight": change}) if site == "weight" else probe.outputs(data=change)
    moved, paper = deviation(new, old), "invariant" if layer.norm in invariant else "not"
    bound = _eps_bound(layer, x, transform, draw) / float(old[0].abs().max()) if paper == "invariant" else None
    slack = EXACT + (bound or 0.0)
    flipped = deviation(_sizes(new, layer), _sizes(old, layer)) <= slack
    verdict = "invariant" if moved <= slack else "sign flips" if flipped else "not"
    return Entry(name, layer.norm, moved, verdict, paper, bound, None if bound is None else moved <= slack)


def _with_offset(layer: Linear, x: Tensor, draw: Draw) -> tuple[Linear, Tensor, Change]:
    """A layer with one more input that every unit sees with weight 1: its value is added to all summed inputs."""
    state = {**layer.state_dict(), "weight": nn.functional.pad(layer.weight.detach(), (0, 1), value=1.0)}
    with torch.random.fork_rng(devices=[]):
        wide = Linear(x.shape[1] + 1, layer.out_features, dtype=x.dtype, device=x.device, norm=layer.norm,
                      eps=layer.eps, momentum=None)  # fmt: skip
    wide.load_state_dict(state)
    offset = torch.zeros_like(x[:, :1])
    shifted = torch.cat([x, offset.index_fill(0, torch.tensor(0, device=x.device), draw.delta)], 1)
    return wide.train(layer.training), torch.cat([x, offset], 1), lambda _: shifted


def _sizes(outputs: list[Tensor], layer: Linear) -> list[Tensor]:
    return [(out - layer.bias.detach()).abs() for out in outputs]


def _eps_bound(layer: Linear, x: Tensor, transform: Transform, draw: Draw) -> float:
    """eps/(2 sigma^2) |1 - 1/delta^2| |g (a - mu)/sigma| at its largest over the values the transformation scales."""
    moving = transform not in (transforms.add_to_rows, transforms.shift, transforms.shift_case)
    if layer.norm not in ("layer", "batch") or layer.gain is None or not moving:
        return 0.0
    summed, axis = products(layer, x), 1 if layer.norm == "layer" else 0
    centred = summed - summed.mean(axis, keepdim=True)
    var = centred.square().mean(axis, keepdim=True)
    normalised = (layer.gain.detach() * centred / var.sqrt()).abs()
    change = (normalised * layer.eps / (2 * var) * abs(1 - 1 / draw.delta**2)).nan_to_num(nan=0.0)  # 0/0: constant
    if transform is transforms.scale_row:
        change = change[:, :1]
    return float((change[:1] if transform is transforms.scale_case else change).max())


def _cell(entry: Entry) -> str:
    text = {"invariant": "Invariant", "not": "No", "sign flips": "Sign flips"}[entry.verdict]
    return f"{text} ({entry.deviation:.1e})"
