"""Checks of user arguments; the error types are in ``errors``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import BackendError as BackendError  # the errors and their helpers are imported from here too
from .errors import InputError as InputError
from .errors import fail as fail
from .errors import one_of as one_of
from .errors import show as show


def describe(value: object) -> str:
    """Return shape, dtype and device of a tensor, or type and short repr of another value."""
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
    """Return whether the values of ``tensor`` can be read now.

    They cannot while a compiler or exporter traces, inside ``torch.func`` transforms, during CUDA-graph
    capture, or on the meta device.
    """
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype autocast would use for ``tensor``; None when autocast is off or skips the tensor (float64)."""
    device_type = tensor.device.type
    if tensor.dtype == torch.float64 or tensor.is_meta:  # autocast does not support the meta device
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def check_kind(layer: str, input: object, parameter: Tensor | None, *, half_input: bool) -> Tensor:
    """Return ``input``; raise unless it is a floating-point tensor on the device and of the dtype of the parameters.

    ``half_input`` accepts a half-precision input with float32 parameters, as torch's norms do.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{layer} needs a tensor, got {describe(input)}. Convert it with torch.as_tensor.")
    if not input.is_floating_point():
        raise fail(f"{layer} needs a floating-point input", describe(input), "Cast it with .float().")
    if parameter is None:
        return input
    if input.device != parameter.device:
        rule = f"{layer} needs its input on the device of its parameters, {parameter.device}"
        raise fail(rule, describe(input), "Move the layer or the input with .to(device).")
    if input.dtype == parameter.dtype:
        return input
    mixed = half_input and parameter.dtype == torch.float32 == torch.promote_types(input.dtype, torch.float32)
    if not mixed and autocast_dtype(input) is None:
        rule = f"{layer} needs an input of the dtype of its parameters, {parameter.dtype}"
        raise fail(rule, describe(input), "Cast one of them with .to(dtype), or use torch.autocast.")
    return input


def transformed(*tensors: Tensor) -> bool:
    """Return whether a ``torch.func`` transform (even of other tensors) or forward-mode differentiation is active."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def batched(grads: Sequence[Tensor | None]) -> bool:
    """Return whether a backward pass runs under vmap, as in ``torch.autograd.grad(is_grads_batched=True)``."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads)


def watched(tensor: Tensor) -> bool:
    """Return whether a tensor subclass or a dispatch mode (fake tensors, counters) intercepts operations on ``tensor``.

    A kernel launched on raw addresses would bypass them, and fake tensors have no address.
    """
    return torch._C._len_torch_dispatch_stack() > 0 or type(tensor) not in (Tensor, torch.nn.Parameter)


def traced() -> bool:
    """Return whether torch.jit.trace, or an exporter that uses it, is recording."""
    return bool(torch._C._get_tracing_state())
