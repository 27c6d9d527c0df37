"""Table 1 measured: the changes of weights and data that leave a normalised layer's output the same.

``invariance_table`` runs forward passes of ``lamina.Linear``; ``networks`` does the same for any network. With summed
inputs a of mean mu and standard deviation sigma, a layer returns g (a - mu)/sigma + b. The factor delta is positive
throughout: sigma grows by |delta|, so a negative factor flips the sign of the normalised vector.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import describe, fail, one_of, positive_int
from ..layers import Linear
from ..placements import NORMS
from . import transforms
from .statistics_checks import weight_products
from .texts import Texts
from .transforms import Draw, Probe, Transform, deviation

EXACT = 1e-10  # upper limit of float64 rounding in an invariance; every real dependence is far above it


def shift_summed_inputs(x: Tensor, draw: Draw) -> Tensor:
    """Add delta to the last feature of the first case, which every unit sees with weight 1."""
    out = x.clone()
    draw.case(out)[-1] += draw.delta
    return out


# For each row: the place of the change, the transformation, and the norms whose output stays the same.
PAPER_ROWS: dict[str, tuple[str, Transform, tuple[str, ...]]] = {
    "weight matrix scaled": ("weight", transforms.scale, ("batch", "weight", "layer")),
    "weight matrix shifted": ("weight", transforms.add_to_rows, ("layer",)),
    "weight vector scaled": ("weight", transforms.scale_row, ("batch", "weight")),
    "data set scaled": ("data", transforms.scale, ("batch", "layer")),
    "data set shifted": ("data", transforms.shift, ("batch",)),
    "single case scaled": ("data", transforms.scale_case, ("layer",)),
}
# Rows that the table lacks; the last two are the text's "feature shifting", which holds for summed inputs only.
BEYOND_ROWS: dict[str, tuple[str, Transform, tuple[str, ...]]] = {
    "weight matrix scaled and shifted": ("weight", transforms.scale_and_add, ("layer",)),
    "single case's inputs shifted": ("data", transforms.shift_case, ()),
    "single case's summed inputs shifted": ("summed", shift_summed_inputs, ("layer",)),
}
SCALING = (transforms.scale, transforms.scale_row, transforms.scale_case, transforms.scale_and_add)


@dataclass(frozen=True)
class Entry:
    """One cell: the largest change of the outputs relative to their size, and the paper's claim.

    verdict: "invariant"; "sign flips" where only the sign of the normalised value changes (delta < 0); or "not".
    paper: Table 1's entry; without a norm, and in rows that the table lacks, the entry that follows from it.
    predicted: the largest change that eps can cause in an otherwise invariant output; None for other outputs.
    within: whether the change stayed below ``predicted``; None as there.
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
class InvarianceTable(Texts):
    """Table 1 as measured: a row for each transformation, a column for each norm."""

    rows: tuple[Entry, ...]
    eps: float
    delta: float

    def entry(self, transform: str, norm: str | None) -> Entry:
        return next(e for e in self.rows if (e.transform, e.norm) == (transform, norm))

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the figures of every cell by transformation, then by norm ("none" for no norm)."""
        names = dict.fromkeys(e.transform for e in self.rows)
        return {name: {e.norm or "none": asdict(e) for e in self.rows if e.transform == name} for name in names}

    def _texts(self) -> tuple[str, list[str], list[list[str]]]:
        rows = {name: list(cells.values()) for name, cells in self.as_dict().items()}
        norms = [f"{cell['norm'] or 'no'} norm" for cell in next(iter(rows.values()))]
        texts = {"invariant": "Invariant", "not": "No", "sign flips": "Sign flips"}
        title = f"Invariance, delta = {self.delta:g}, eps = {self.eps:g}"
        lines = [[n, *(f"{texts[c['verdict']]} ({c['deviation']:.1e})" for c in cells)] for n, cells in rows.items()]
        return title, ["transformation", *norms], lines


def invariance_table(
    norms: Sequence[str | None] = ("batch", "weight", "layer", None), inputs: Tensor | None = None, units: int = 7,
    eps: float = 0.0, delta: float = 3.0, seed: int = 0,
    *, training: bool = True, beyond: bool = False,
) -> InvarianceTable:  # fmt: skip
    """Measure Table 1 in float64 on ``lamina.Linear`` layers with random weights, gains and biases.

    inputs: the data set [N, D] of N cases and D inputs; None draws 32 cases of 5 inputs. units: their number H.
    training: True recomputes batch norm's statistics on the transformed data, as the table assumes; False keeps
        those of the original data, which is evaluation with stale statistics.
    beyond: add rows that the table lacks: both weight changes at once, one case's inputs or summed inputs shifted.

    With eps > 0 an invariant output changes by at most eps/(2 sigma^2) |1 - 1/delta^2| |g (a - mu)/sigma|: to first
    order in eps, and by the mean value theorem a bound for any eps. ``predicted`` is the largest of these.
    """
    draw = Draw(delta, seed)
    x = _data_set(inputs, seed)
    for norm in norms:
        one_of("norm", norm, NORMS)
    layers = [_layer(norm, x, positive_int("units", units), eps, seed, training) for norm in norms]
    rows = {**PAPER_ROWS, **(BEYOND_ROWS if beyond else {})}
    return InvarianceTable(tuple(_entry(name, layer, x, draw) for name in rows for layer in layers), eps, draw.delta)


def _data_set(inputs: Tensor | None, seed: int) -> Tensor:
    if inputs is None:
        return torch.randn(32, 5, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) + 0.5
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or not inputs.numel() or not inputs.is_floating_point():
        raise fail("inputs must be a data set [N, D] of floating-point numbers", describe(inputs), "Flatten the cases.")
    return inputs.detach().to(torch.float64)


def _layer(norm: str | None, x: Tensor, units: int, eps: float, seed: int, training: bool) -> Linear:
    """Build a layer whose gains and biases differ from their start values, which could hide a dependence on them."""
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
    place, transform, invariant_norms = {**PAPER_ROWS, **BEYOND_ROWS}[name]
    if place == "summed":
        layer, x = _with_offset(layer, x)
    probe = Probe(layer, (x,), draw)
    old = probe.outputs()
    new = probe.outputs({"weight": transform}) if place == "weight" else probe.outputs(data=transform)
    moved, paper = deviation(new, old), "invariant" if layer.norm in invariant_norms else "not"
    bound = _eps_bound(layer, x, transform, draw) / float(old[0].abs().max()) if paper == "invariant" else None
    tolerance = EXACT + (bound or 0.0)
    flipped = deviation(_sizes(new, layer), _sizes(old, layer)) <= tolerance
    verdict = "invariant" if moved <= tolerance else "sign flips" if flipped else "not"
    return Entry(name, layer.norm, moved, verdict, paper, bound, None if bound is None else moved <= tolerance)


def _with_offset(layer: Linear, x: Tensor) -> tuple[Linear, Tensor]:
    """Add an input of 0 that every unit sees with weight 1: its value is added to all summed inputs."""
    wide = copy.deepcopy(layer)
    wide.weight, wide.in_features = nn.Parameter(F.pad(layer.weight.detach(), (0, 1), value=1.0)), x.shape[1] + 1
    return wide, F.pad(x, (0, 1))


def _sizes(outputs: list[Tensor], layer: Linear) -> list[Tensor]:
    return [(out - layer.bias.detach()).abs() for out in outputs]


def _eps_bound(layer: Linear, x: Tensor, transform: Transform, draw: Draw) -> float:
    """Return the largest eps/(2 sigma^2) |1 - 1/delta^2| |g (a - mu)/sigma| of the values that are scaled."""
    if layer.norm not in ("layer", "batch") or layer.gain is None or transform not in SCALING:
        return 0.0
    summed, axis = weight_products(layer, x), 1 if layer.norm == "layer" else 0
    centred = summed - summed.mean(axis, keepdim=True)
    var = centred.square().mean(axis, keepdim=True)
    normalised = (layer.gain.detach() * centred / var.sqrt()).abs()
    change = (normalised * layer.eps / (2 * var) * abs(1 - 1 / draw.delta**2)).nan_to_num(nan=0.0)  # 0/0: constant
    if transform is transforms.scale_row:
        change = change[:, :1]
    return float((change[:1] if transform is transforms.scale_case else change).max())
