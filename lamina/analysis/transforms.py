"""The transformations of Table 1, and forward passes that measure them without touching the model in question.

Every measurement runs on a fresh copy of the model, from one seed: parameters, running statistics, mode and random
state of the model itself stay as they were, and dropout draws the same mask before and after.
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
from .singular import watched_statistics

# Stands for eps = 0. With 0 itself torch's norms turn a vector of zeros (W_h h at the first step) into 0/0.
EPS_OFF = 1e-30


@dataclass(frozen=True)
class Draw:
    """What a transformation needs to know: the factor, the seed of the vectors added, the axis that counts cases."""

    delta: float
    seed: int = 0
    case_axis: int | None = 0

    def vector(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Random numbers of the size that the entries of ``like`` have."""
        size = like.detach().square().mean().sqrt()
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return drawn.to(like) * torch.where(size > 0, size, 1.0)

    def case(self, x: Tensor) -> Tensor:
        """The first case of ``x``, as a view."""
        return x.select(self.case_axis or 0, 0)


Transform = Callable[[Tensor, Draw], Tensor]
Change = Callable[[Tensor], Tensor]


def with_draw(transform: Transform, draw: Draw) -> Change:
    return lambda values: transform(values, draw)


def checked_draw(delta: object, seed: int = 0, case_axis: int | None = 0) -> Draw:
    """A draw whose factor changes something and keeps the weights alive."""
    number = finite("delta", delta)
    if number in (0.0, 1.0):
        raise fail("delta must be a factor other than 0 and 1", f"delta={number}", "Pass for example 3.0.")
    return Draw(number, seed, case_axis)


def scale(values: Tensor, draw: Draw) -> Tensor:
    return draw.delta * values


def add_to_rows(weight: Tensor, draw: Draw) -> Tensor:
    """W + 1 gamma^T: the same gamma for every unit."""
    return weight + draw.vector(weight, weight.shape[1:])


def scale_and_add(weight: Tensor, draw: Draw) -> Tensor:
    """delta W + 1 gamma^T."""
    return draw.delta * weight + draw.vector(weight, weight.shape[1:])


def scale_row(weight: Tensor, draw: Draw) -> Tensor:
    return torch.cat([draw.delta * weight[:1], weight[1:]])


def scale_rows(weight: Tensor, draw: Draw) -> Tensor:
    """Each row by a factor of its own, from delta down to 1; a network may be blind to one row (a dead unit)."""
    powers = torch.linspace(1, 0, weight.shape[0], dtype=torch.float64)
    factors = math.copysign(1, draw.delta) * abs(draw.delta) ** powers
    return weight * factors.to(weight).reshape(-1, *[1] * (weight.dim() - 1))


def shift(x: Tensor, draw: Draw) -> Tensor:
    """X + 1 c^T: one number for each feature; the last axis holds them, in images every axis but the first."""
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
    """Largest difference of outputs relative to the largest of ``unit`` (the old ones), over all output tensors."""
    sizes = [float(u.abs().max()) or 1.0 for u in unit or old]
    return max(float((n - o).abs().max()) / size for n, o, size in zip(new, old, sizes))


class Probe:
    """Outputs of a model for given arguments under changes of its weights, its inputs or its eps."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.model, self.arguments = model, arguments
        tensors = [*model.parameters(), *(a for a in tree_leaves(arguments) if isinstance(a, Tensor))]
        self.devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
        self._check()

    def outputs(
        self,
        weights: Mapping[str, Change] | None = None,
        data: Change | None = None,
        eps_off: bool = False,
    ) -> list[Tensor]:
        """Every floating-point tensor that the model returns."""
        model = self._changed(weights or {}, eps_off)
        found = self._call(model, data)
        if not all(bool(leaf.isfinite().all()) for leaf in found):
            changed = ", ".join(weights or {}) or ("the inputs" if data else "nothing")
            self._raise_nonfinite(self._changed(weights or {}, eps_off), data, f"{changed} transformed")
        return found

    def _changed(self, weights: Mapping[str, Change], eps_off: bool) -> nn.Module:
        model = self._copy()
        named = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, change in weights.items():
                named[name].copy_(change(named[name]))
        if eps_off:
            switch_eps_off(model)
        return model

    def _copy(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            name = type(self.model).__name__
            raise fail(f"{name} must allow copy.deepcopy", f"{error}", "Detach the tensors it holds.") from error

    def _call(self, model: nn.Module, data: Change | None = None) -> list[Tensor]:
        first, *others = tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, self.arguments)
        with torch.random.fork_rng(devices=self.devices), torch.no_grad():
            torch.manual_seed(0)
            answer = model(first if data is None else data(first), *others)
        found = [t for t in tree_leaves(answer) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
        if not found:
            raise fail(f"{type(model).__name__} must return floating-point tensors", describe(answer), "Return logits.")
        return found

    def _check(self) -> None:
        """One pass in which every normalising layer looks at what it is given."""
        model = self._copy()
        with watched_statistics(model):
            found = self._call(model)
        if not all(bool(leaf.isfinite().all()) for leaf in found):
            self._raise_nonfinite(self._copy(), None, "nothing transformed")

    def _raise_nonfinite(self, model: nn.Module, data: Change | None, state: str) -> None:
        """Name the first layer whose output is not finite."""
        culprits: list[str] = []
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(partial(_note_broken, culprits, name))
        self._call(model, data)
        where = f"layer {culprits[0]}" if culprits else type(model).__name__
        raise fail(
            "outputs must be finite to be compared",
            f"NaN or infinity from {where} with {state}",
            "Check the inputs and weights, or pass a delta nearer to 1.",
        )


def _note_broken(culprits: list[str], name: str, module: nn.Module, arguments: Any, output: Any) -> None:
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not all(bool(t.isfinite().all()) for t in leaves):
        culprits.append(f"{name or 'model'} ({type(module).__name__})")


def switch_eps_off(model: nn.Module) -> None:
    """Set every eps that a module holds to ``EPS_OFF``; an eps written into a forward method is out of reach."""
    for module in model.modules():
        if isinstance(module, RecurrentModule):
            module.options = replace(module.options, eps=EPS_OFF)
        elif isinstance(module, nn.RMSNorm) or isinstance(getattr(module, "eps", None), float):
            module.eps = EPS_OFF  # type: ignore[assignment]
