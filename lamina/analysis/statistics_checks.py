"""Checks that every norm has something to divide by; errors name the layer.

One-case batches and summed inputs that do not vary have a standard deviation of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..baselines import BatchNorm
from ..checks import describe, fail
from ..layers import Conv2d, NormalisedLayer
from ..recurrent_module import RecurrentModule

NORMALISING = (NormalisedLayer, BatchNorm, _BatchNorm, nn.LayerNorm, RecurrentModule)


def layer_name(module: nn.Module, name: str = "") -> str:
    """Return how an error names a layer: its name in the model, if any, its type, sizes and norm."""
    text = type(module).__name__
    if isinstance(module, NormalisedLayer):
        text += f"({', '.join(map(str, module.weight.shape[1::-1]))}, norm={module.norm!r})"
    return f"layer {name!r}, {text}," if name else f"the layer {text}"


@contextmanager
def checked_statistics(model: nn.Module) -> Iterator[None]:
    """Check the input of every normalising layer that is called within the block."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, NORMALISING)]
    handles = [module.register_forward_pre_hook(partial(_check_call, name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_call(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    check_statistics(name, module, *arguments[:1])


@torch.no_grad()
def check_statistics(name: str, module: nn.Module, x: Any) -> None:
    """Raise where a norm of ``module`` has nothing to divide by for the input ``x``.

    With eps = 0 a single set of equal values is an error; with eps > 0 only sets that are all constant.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return
    if isinstance(module, NormalisedLayer) and module.norm == "weight":
        check_rows(layer_name(module, name), module.weight)
        return
    values, axes, over_cases = _normalised_values(module, x)
    if not axes or not values.numel():
        return
    if over_cases and math.prod(values.shape[axis] for axis in axes) < 2:
        rule = f"batch norm of {layer_name(module, name)} takes its statistics from at least two cases"
        raise fail(rule, describe(x), "Pass a larger batch, or call .eval() to use the running statistics.")
    if not isinstance(module, RecurrentModule):  # W_h h is 0 at every first step, and lamina's cells take 0/0 for 0
        _check_spread(layer_name(module, name), values, axes, over_cases, float(getattr(module, "eps", 0.0)))


def check_rows(layer: str, weight: Tensor) -> None:
    zero_rows = (weight.detach().flatten(1) == 0).all(1).nonzero().flatten().tolist()
    if zero_rows:
        rule = f"{layer} needs rows of weights that are not 0"
        raise fail(rule, f"row {zero_rows[0]} of zeros", "Draw that row again.")


def constant_along(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return a mask of the slices of ``values`` that do not vary along ``axes`` beyond rounding."""
    spread = (values - values.mean(axes, keepdim=True)).abs().amax(axes)
    return spread <= 16 * torch.finfo(values.dtype).eps * values.abs().amax(axes)


def _check_spread(layer: str, values: Tensor, axes: tuple[int, ...], over_cases: bool, eps: float) -> None:
    constant = constant_along(values, axes)
    if constant.any() if eps == 0 else constant.all():
        norm, over, counted = ("batch", "the cases", "units") if over_cases else ("layer", "the units", "cases")
        remedy = "Pass cases that differ." if over_cases else "Drop cases such as x = 0."
        rule = f"the {norm} norm of {layer} needs summed inputs that vary over {over}"
        raise fail(rule, f"{int(constant.sum())} constant {counted}", remedy)


def _normalised_values(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the values that a module normalises, the axes, and whether these count cases; no axes without a norm."""
    norm = getattr(module, "norm", None)
    if isinstance(module, RecurrentModule):
        stored = not module.training and module.options.eval_statistics == "population"
        return _first_step(module, x), (0,) if norm == "batch" and not stored else (), True
    if isinstance(module, NormalisedLayer):
        if norm not in ("layer", "batch") or (module.statistics is not None and not module.statistics.training):
            return x, (), False
        values = weight_products(module, x)
        return values, tuple(d for d in range(values.dim()) if d != (1 if norm == "batch" else 0)), norm == "batch"
    if isinstance(module, nn.LayerNorm):
        return x, tuple(range(-len(module.normalized_shape), 0)), False
    if isinstance(module, (BatchNorm, _BatchNorm)) and (module.training or not module.track_running_stats):
        return x, tuple(d for d in range(x.dim()) if d != 1), True
    return x, (), False


def _first_step(module: RecurrentModule, x: Tensor) -> Tensor:
    """Return the inputs of one step, [B cases, D features]."""
    if x.dim() == 3:
        return x.select(1 if getattr(module, "batch_first", False) else 0, 0)
    return x if module.single_step and x.dim() == 2 else x[:1]


def weight_products(layer: NormalisedLayer, x: Tensor) -> Tensor:
    """Return the summed inputs W x, cases first and units second."""
    weight = layer.weight.detach()
    if isinstance(layer, Conv2d):
        summed: Tensor = layer._conv_forward(x if x.dim() == 4 else x.unsqueeze(0), weight, None)
        return summed
    return F.linear(x, weight).reshape(-1, weight.shape[0])
