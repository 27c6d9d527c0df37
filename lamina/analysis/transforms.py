"""Transformations of Table 1, and forward passes that measure their effect without changing the model.

Every measurement runs on a fresh copy of the model, with the same random seed. Parameters, running statistics, mode and
random state of the model stay, and dropout draws the same mask before and after. W are weights, X inputs with one row
for each case, delta is a factor, and gamma and c are vectors that are added.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..checks import describe, fail, finite
from ..recurrent_module import RecurrentModule
from .statistics_checks import checked_statistics

# Replaces eps = 0. With 0 itself torch's norms turn a vector of zeros (W_h h at the first step) into 0/0.
EPS_OFF = 1e-30


@dataclass(frozen=True)
class Draw:
    """Arguments of a transformation: factor, seed of the added vectors, axis that counts cases."""

    delta: float
    seed: int = 0
    case_axis: int = 0

    def __post_init__(self) -> None:
        if finite("delta", self.delta) in (0.0, 1.0):  # removes the weights, or changes nothing
            raise fail("delta must be a factor other than 0 and 1", f"delta={self.delta}", "Pass for example 3.0.")

    def vector(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Draw random numbers of the same magnitude as the entries of ``like``."""
        magnitude = like.detach().square().mean().sqrt()
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return drawn.to(like) * torch.where(magnitude > 0, magnitude, 1.0)

    def case(self, x: Tensor) -> Tensor:
        """Return the first case of ``x``, as a view."""
        return x.select(self.case_axis, 0)


Transform = Callable[[Tensor, Draw], Tensor]


def scale(values: Tensor, draw: Draw) -> Tensor:
    return draw.delta * values


def add_to_rows(weight: Tensor, draw: Draw) -> Tensor:
    """Return W + 1 gamma^T: the same gamma for every unit."""
    return weight + draw.vector(weight, weight.shape[1:])


def add_noise(weight: Tensor, draw: Draw) -> Tensor:
    """Return weights that differ at random from W in every entry."""
    return weight + draw.vector(weight, weight.shape)


def scale_and_add(weight: Tensor, draw: Draw) -> Tensor:
    """Return delta W + 1 gamma^T."""
    return draw.delta * weight + draw.vector(weight, weight.shape[1:])


def scale_row(weight: Tensor, draw: Draw) -> Tensor:
    return torch.cat([draw.delta * weight[:1], weight[1:]])


def scale_rows(weight: Tensor, draw: Draw) -> Tensor:
    """Scale each row by its own factor, from delta down to 1: a network may ignore a single row (a dead unit)."""
    powers = torch.linspace(1, 0, weight.shape[0], dtype=torch.float64)
    factors = math.copysign(1, draw.delta) * abs(draw.delta) ** powers
    return weight * factors.to(weight).reshape(-1, *[1] * (weight.dim() - 1))


def shift(x: Tensor, draw: Draw) -> Tensor:
    """Return X + 1 c^T, one number for each feature: along the last axis, in images along every axis but the first."""
    return x + draw.vector(x, x.shape[-1:] if x.dim() < 4 else x.shape[1:])


def scale_case(x: Tensor, draw: Draw) -> Tensor:
    out = x.clone()
    draw.case(out).mul_(draw.delta)
    return out


def shift_case(x: Tensor, draw: Draw) -> Tensor:
    out = x.clone()
    draw.case(out).add_(draw.vector(x, x.shape[-1:]))
    return out


def deviation(new: list[Tensor], old: list[Tensor], unit: list[Tensor] | None = None) -> float:
    """Return the largest difference over all outputs, relative to the largest value of ``unit`` (default: ``old``)."""
    sizes = [float(u.abs().max()) or 1.0 for u in unit or old]
    return max(float((n - o).abs().max()) / size for n, o, size in zip(new, old, sizes))


class Probe:
    """Outputs of a model for fixed arguments under transformations of its weights, its inputs or its eps."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...], draw: Draw) -> None:
        self.model, self.arguments, self.draw = model, arguments, draw
        tensors = [*model.parameters(), *(a for a in tree_leaves(arguments) if isinstance(a, Tensor))]
        self.devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
        unchanged = self._changed({}, eps_off=False)
        with checked_statistics(unchanged):
            self._call(unchanged, None)

    def outputs(
        self, weights: Mapping[str, Transform] | None = None, data: Transform | None = None, eps_off: bool = False
    ) -> list[Tensor]:
        """Return every floating-point tensor that the model returns; raise unless all are finite."""
        weights = weights or {}
        outputs = self._call(self._changed(weights, eps_off), data)
        if not _finite(outputs):
            changed = ", ".join(weights) or ("the inputs" if data else "nothing")
            layer = self._first_nonfinite(self._changed(weights, eps_off), data)
            received = f"NaN or infinity from {layer} with {changed} transformed"
            remedy = "Check the inputs and weights, or pass a delta nearer to 1."
            raise fail("outputs must be finite to be compared", received, remedy)
        return outputs

    def _changed(self, weights: Mapping[str, Transform], eps_off: bool) -> nn.Module:
        try:
            model = copy.deepcopy(self.model)
        except Exception as error:
            name = type(self.model).__name__
            raise fail(f"{name} must allow copy.deepcopy", f"{error}", "Detach the tensors it holds.") from error
        named = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, transform in weights.items():
                named[name].copy_(transform(named[name], self.draw))
        if eps_off:
            switch_eps_off(model)
        return model

    def _call(self, model: nn.Module, data: Transform | None) -> list[Tensor]:
        first, *others = tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, self.arguments)
        with torch.random.fork_rng(devices=self.devices), torch.no_grad():
            torch.manual_seed(0)
            returned = model(first if data is None else data(first, self.draw), *others)
        outputs = [t for t in _floating(returned) if t.numel()]
        if not outputs:
            rule = f"{type(model).__name__} must return floating-point tensors"
            raise fail(rule, describe(returned), "Return logits.")
        return outputs

    def _first_nonfinite(self, model: nn.Module, data: Transform | None) -> str:
        """Name the first layer whose output is not finite."""
        nonfinite: list[str] = []
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(partial(_note_nonfinite, nonfinite, name))
        self._call(model, data)
        return f"layer {nonfinite[0]}" if nonfinite else type(model).__name__


def _floating(returned: Any) -> list[Tensor]:
    return [t for t in tree_leaves(returned) if isinstance(t, Tensor) and t.is_floating_point()]


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _note_nonfinite(nonfinite: list[str], name: str, module: nn.Module, arguments: Any, output: Any) -> None:
    if not _finite(_floating(output)):
        nonfinite.append(f"{name or 'model'} ({type(module).__name__})")


def switch_eps_off(model: nn.Module) -> None:
    """Set every eps that a module holds to ``EPS_OFF``; an eps written into a forward method stays."""
    for module in model.modules():
        if isinstance(module, RecurrentModule):
            module.options = replace(module.options, eps=EPS_OFF)
        elif isinstance(module, nn.RMSNorm) or isinstance(getattr(module, "eps", None), float):
            module.eps = EPS_OFF  # type: ignore[assignment]
