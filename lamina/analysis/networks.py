"""Invariances of a user's network, weight by weight: changes of weights and inputs that leave its outputs the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import fail, finite, one_of
from ..recurrent_module import RecurrentModule
from . import transforms
from .texts import Texts
from .transforms import Draw, Probe, Transform, deviation

WEIGHT_CHANGES: dict[str, Transform] = {
    "scaled": transforms.scale,
    "shifted": transforms.add_to_rows,
    "scaled and shifted": transforms.scale_and_add,
    "rows scaled separately": transforms.scale_rows,
}
INPUT_CHANGES: dict[str, Transform] = {
    "scaled": transforms.scale,
    "shifted": transforms.shift,
    "one case scaled": transforms.scale_case,
}
RECURRENT = (RecurrentModule, nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Finding:
    """Effect of one transformation of one weight (or of the inputs) on the network's outputs.

    deviation: largest change of an output relative to the outputs' size. without_eps: the same with the eps of every
    norm removed. eps_bound: the largest part of ``deviation`` that eps can explain.
    verdict: "invariant", "invariant but for eps", "not", or "no effect" where the outputs do not depend on the weight.
    """

    where: str
    transform: str
    deviation: float
    without_eps: float
    eps_bound: float
    verdict: str


@dataclass(frozen=True)
class Report(Texts):
    """Findings of ``check_invariances``."""

    findings: tuple[Finding, ...]
    delta: float
    tolerance: float

    def verdict(self, where: str, transform: str) -> str:
        return self.finding(where, transform).verdict

    def finding(self, where: str, transform: str) -> Finding:
        by_name = {(f.where, f.transform): f for f in self.findings}
        one_of("weight and transformation", (where, transform), by_name)
        return by_name[where, transform]

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the figures by weight (or "inputs"), then by transformation."""
        names = dict.fromkeys(f.where for f in self.findings)
        return {name: {f.transform: asdict(f) for f in self.findings if f.where == name} for name in names}

    def _texts(self) -> tuple[str, list[str], list[list[str]]]:
        title = f"Invariances, delta = {self.delta:g}, tolerance = {self.tolerance:.1e}"
        head = ["weight", "transformation", "verdict", "deviation", "without eps", "eps bound"]
        cells = [
            [f.where, f.transform, f.verdict, f"{f.deviation:.1e}", f"{f.without_eps:.1e}", f"{f.eps_bound:.1e}"]
            for f in self.findings
        ]
        return title, head, cells


def check_invariances(
    model: nn.Module, inputs: Tensor | tuple[Any, ...], delta: float = 3.0, tolerance: float | None = None,
    *, case_axis: int | None = None,
) -> Report:  # fmt: skip
    """Check which changes of each weight, and of the inputs, leave all outputs of ``model`` the same in its own mode.

    Weights are those of linear, convolutional and recurrent layers (torch's and lamina's). W_ih and W_hh of every
    layer and direction are checked separately and together ("weight_ih_l0 + weight_hh_l0"). The model does not change.

    inputs: the model's argument, or a tuple of arguments; the first is transformed where it is floating point.
    tolerance: largest deviation of an invariance; None is the square root of the outputs' machine precision.
    case_axis: the axis of the input that counts cases; None is 1 for a 3-D input of a recurrent layer without
        batch_first and 0 otherwise.

    To tell eps from a real dependence, everything is measured again with the eps of every module replaced by
    ``EPS_OFF``. By the triangle inequality eps explains at most the change that its removal causes before plus after
    the transformation: ``eps_bound``. An eps written into a forward method stays, and its effect reads as "not".
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    weights = _weights(model)
    if not weights:
        rule = "check_invariances needs a linear, convolutional or recurrent layer to transform"
        raise fail(rule, f"{type(model).__name__} without one", "Pass a model that has weights.")
    axis = _case_axis(model, arguments[0]) if case_axis is None else case_axis
    measure = _Measure(model, arguments, Draw(delta, case_axis=axis), tolerance)
    findings = [f for where, names in weights.items() for f in measure.weight(where, names)]
    return Report((*findings, *measure.data()), measure.probe.draw.delta, measure.tolerance)


def _case_axis(model: nn.Module, first: Any) -> int:
    recurrent = [m for m in model.modules() if isinstance(m, RECURRENT)]
    time_first = any(not getattr(m, "batch_first", False) for m in recurrent)
    return 1 if time_first and isinstance(first, Tensor) and first.dim() == 3 else 0


def _weights(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the parameters that are transformed together, by the name to show."""
    together = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for names in _own_weights(module):
            label = " + ".join(names) if isinstance(module, RECURRENT) else "weight"
            together[prefix + label] = tuple(prefix + name for name in names)
    return together


def _own_weights(module: nn.Module) -> Iterator[tuple[str, ...]]:
    parameters = dict(module.named_parameters())
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        # Under torch's weight norm the row direction is a parameter; the weight itself is computed.
        stored = ("weight", "weight_v", "parametrizations.weight.original1", "parametrizations.weight.original")
        yield from [(name,) for name in stored if name in parameters][:1]
    elif isinstance(module, RECURRENT):
        yield from ((name,) for name in parameters if name.startswith("weight_"))
        pairs = ((name, name.replace("weight_ih", "weight_hh")) for name in parameters if name.startswith("weight_ih"))
        yield from (pair for pair in pairs if pair[1] in parameters)


class _Measure:
    """Measurements of one model, whose outputs before any change are computed once."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...], draw: Draw, tolerance: float | None) -> None:
        self.probe = Probe(model, arguments, draw)
        self.old, self.old_off = self.probe.outputs(), self.probe.outputs(eps_off=True)
        precision = max(torch.finfo(out.dtype).eps for out in self.old)
        self.tolerance = precision**0.5 if tolerance is None else finite("tolerance", tolerance)

    def weight(self, where: str, names: tuple[str, ...]) -> Iterator[Finding]:
        unused = deviation(self.probe.outputs(dict.fromkeys(names, transforms.add_noise)), self.old) == 0
        for label, transform in WEIGHT_CHANGES.items():
            yield self._finding(where, label, unused, dict.fromkeys(names, transform), None)

    def data(self) -> Iterator[Finding]:
        first = self.probe.arguments[0]
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return
        for label, transform in INPUT_CHANGES.items():
            yield self._finding("inputs", label, False, {}, transform)

    def _finding(
        self, where: str, label: str, unused: bool, weights: Mapping[str, Transform], data: Transform | None
    ) -> Finding:
        new, new_off = (self.probe.outputs(weights, data, off) for off in (False, True))
        moved = deviation(new, self.old)
        moved_off = deviation(new_off, self.old_off, self.old)
        bound = deviation(self.old, self.old_off, self.old) + deviation(new, new_off, self.old)
        return Finding(where, label, moved, moved_off, bound, self._verdict(moved, moved_off, unused))

    def _verdict(self, moved: float, moved_off: float, unused: bool) -> str:
        if unused:
            return "no effect"
        if moved <= self.tolerance:
            return "invariant"
        return "invariant but for eps" if moved_off <= self.tolerance else "not"
