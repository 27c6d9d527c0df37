"""Norms with nothing to divide by: one-case batches and summed inputs that do not vary, told by the layer's name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ..baselines import BatchNorm
from ..checks import describe, fail
from ..layers import Conv2d, NormalisedLayer
from ..recurrent_module import RecurrentModule

WATCHED = (NormalisedLayer, BatchNorm, _BatchNorm, nn.LayerNorm, RecurrentModule)


def described(module: nn.Module) -> str:
    """A layer's kind and, where it has a norm of ours, its sizes and norm."""
    kind = type(module).__name__
    if not isinstance(module, NormalisedLayer):
        return kind
    sizes = ", ".join(map(str, module.weight.shape[1::-1]))
    return f"{kind}({sizes}, norm={module.norm!r})"


def title(name: str, module: nn.Module) -> str:
    """How an error names a layer; ``name`` as in named_modules."""
    return f"layer {name!r}, {described(module)}," if name else f"the layer {described(module)}"


@contextmanager
def watched_statistics(model: nn.Module) -> Iterator[None]:
    """Check the input of every normalising layer that is called meanwhile."""

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(lambda layer, inputs: check_statistics(name, layer, *inputs[:1]))

    handles = [watch(name, module) for name, module in model.named_modules() if isinstance(module, WATCHED)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def check_statistics(name: str, module: nn.Module, x: Any) -> None:
    """Raise where a norm of ``module`` has nothing to divide by for this input.

    Values that do not vary are an error anywhere with eps = 0, and with eps > 0 where none vary at all.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return
    if isinstance(module, NormalisedLayer) and module.norm == "weight":
        _check_weight(title(name, module), module)
        return
    values, dims, batch = _normalised_values(module, x)
    if not dims or not values.numel():
        return
    if batch and math.prod(values.shape[d] for d in dims) < 2:
        rule = f"batch norm of {title(name, module)} takes its statistics from at least two cases"
        raise fail(rule, describe(x), "Pass a larger batch, or call .eval() to use the running statistics.")
    if not isinstance(module, RecurrentModule):  # W_h h is 0 at every first step, and lamina's cells take 0/0 for 0
        _check_spread(title(name, module), values, dims, batch, float(getattr(module, "eps", 0.0)))


def _check_weight(called: str, layer: NormalisedLayer) -> None:
    zero = int((layer.weight.flatten(1) == 0).all(1).sum())
    if zero:
        rule = f"the weight norm of {called} needs weights that are not 0"
        raise fail(rule, f"{zero} rows of zeros", "Draw those rows again.")


def _check_spread(called: str, values: Tensor, dims: tuple[int, ...], batch: bool, eps: float) -> None:
    spread = (values - values.mean(dims, keepdim=True)).abs().amax(dims)
    constant = spread <= 16 * torch.finfo(values.dtype).eps * values.abs().amax(dims)
    if constant.any() if eps == 0 else constant.all():
        over, what = ("the cases", "units") if batch else ("the units", "cases")
        remedy = "Pass cases that differ." if batch else "Drop cases such as x = 0."
        rule = f"the {'batch' if batch else 'layer'} norm of {called} needs summed inputs that vary over {over}"
        raise fail(rule, f"{int(constant.sum())} constant {what}", remedy)


def _normalised_values(module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """What a module normalises, over which axes, and whether these are cases; no axes where it does not."""
    kind = getattr(module, "norm", None)
    if isinstance(module, RecurrentModule):
        stored = not module.training and module.options.eval_statistics == "population"
        return _recurrent_cases(module, x), (0,) if kind == "batch" and not stored else (), True
    if isinstance(module, NormalisedLayer):
        if kind not in ("layer", "batch") or (module.statistics is not None and not module.statistics.training):
            return x, (), False
        values = products(module, x)
        return values, tuple(d for d in range(values.dim()) if d != (1 if kind == "batch" else 0)), kind == "batch"
    if isinstance(module, nn.LayerNorm):
        return x, tuple(range(-len(module.normalized_shape), 0)), False
    if isinstance(module, (BatchNorm, _BatchNorm)) and (module.training or not module.track_running_stats):
        return x, tuple(d for d in range(x.dim()) if d != 1), True
    return x, (), False


def _recurrent_cases(module: RecurrentModule, x: Tensor) -> Tensor:
    """The inputs of one step, [B, D]."""
    if x.dim() == 3:
        return x.select(1 if getattr(module, "batch_first", False) else 0, 0)
    return x if module.single_step and x.dim() == 2 else x[:1]


def products(layer: NormalisedLayer, x: Tensor) -> Tensor:
    """a = W x, cases first and units second."""
    weight = layer.weight.detach()
    if isinstance(layer, Conv2d):
        summed: Tensor = layer._conv_forward(x if x.dim() == 4 else x.unsqueeze(0), weight, None)
        return summed
    return F.linear(x, weight).reshape(-1, weight.shape[0])
