"""Checks of what users pass in; the errors themselves are in ``errors``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import BackendError, InputError, fail, one_of, show

__all__ = [
    "BackendError",
    "InputError",
    "autocast_dtype",
    "boolean",
    "check_kind",
    "describe",
    "epsilon",
    "fail",
    "finite",
    "one_of",
    "positive_int",
    "probability",
    "readable",
    "show",
    "transformed",
]


def describe(value: object) -> str:
    """Return shape, dtype and device of a tensor, type and short repr of anything else."""
    return show(value) if isinstance(value, Tensor) else f"{type(value).__name__} {show(value)}"


def boolean(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be of type bool, got {describe(value)}. Pass True or False.")
    return value


def positive_int(what: str, value: object, *, or_zero: bool = False) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {describe(value)}. Pass a whole number above 0.")
    if value < 0 or (value == 0 and not or_zero):
        rule = "must not be negative" if or_zero else "must be greater than zero"
        raise fail(f"{what} {rule}", f"{what}={value}", "Pass a whole number above 0.")
    return value


def probability(what: str, value: object, *, below_one: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= 1 or (below_one and float(value) == 1):  # type: ignore[arg-type]
        interval = "[0, 1)" if below_one else "[0, 1]"
        raise fail(f"{what} must be a number in {interval}", f"{what}={show(value)}", "Pass 0 to switch it off.")
    return float(value)  # type: ignore[arg-type]


def epsilon(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"eps must be a number, got {describe(value)}. Pass a float such as 1e-5.")
    if not 0 <= value < math.inf:  # comparisons, not isfinite: a compiler may hold eps as a symbol
        raise fail("eps must be finite and not negative", f"eps={value}", "Pass 1e-5, or 0 for the paper's form.")
    return float(value)


def finite(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise fail(f"{what} must be a finite number", f"{what}={show(value)}", "Pass a float.")
    return float(value)


def readable(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` may be looked at now.

    They may not while a compiler or exporter traces, inside ``torch.func`` transforms, during CUDA-graph
    capture, or on the meta device.
    """
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype autocast would use for ``tensor``; None when it is off or leaves the tensor alone (float64)."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or tensor.is_meta:  # autocast knows no meta device
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def check_kind(layer: str, input: object, parameter: Tensor | None, *, half_input: bool) -> Tensor:
    """``input`` if it is a floating-point tensor that fits the layer's parameters in device and dtype.

    ``half_input`` lets a half-precision input meet float32 parameters, as torch's norms do.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{layer} needs a tensor, got {describe(input)}. Convert it with torch.as_tensor.")
    if not input.is_floating_point():
        raise fail(f"{layer} needs a floating-point input", describe(input), "Cast it with .float().")
    if parameter is None:
        return input
    if input.device != parameter.device:
        raise fail(
            f"{layer} needs its input on the device of its parameters, {parameter.device}",
            describe(input),
            "Move the layer or the input with .to(device).",
        )
    if input.dtype == parameter.dtype:
        return input
    mixed = half_input and parameter.dtype == torch.float32 == torch.promote_types(input.dtype, torch.float32)
    if not mixed and autocast_dtype(input) is None:
        raise fail(
            f"{layer} needs an input of the dtype of its parameters, {parameter.dtype}",
            describe(input),
            "Cast one of them with .to(dtype), or use torch.autocast.",
        )
    return input


def transformed(*tensors: Tensor) -> bool:
    """Whether a ``torch.func`` transform is at work, if only on other tensors, or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether a backward pass runs under vmap, as in ``torch.autograd.grad(is_grads_batched=True)``."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads)


def watched(tensor: Tensor) -> bool:
    """Whether more than autograd sees operations on ``tensor``: a subclass, or a mode (fake tensors, counters).

    A kernel that is started by addresses would pass them by, and fake tensors have none.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or type(tensor) not in (Tensor, torch.nn.Parameter)


def traced() -> bool:
    """Whether torch.jit.trace, or an exporter that uses it, records what is computed."""
    return bool(torch._C._get_tracing_state())
