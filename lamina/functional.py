"""Differentiable functions that check their input, choose a backend and run it.

The signatures are those of ``lamina.reference`` plus ``backend``. ``explain`` reports which backend a layer or a
call would use, and why.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import notices, opaque, reference
from .checks import autocast_dtype, describe, epsilon, fail, one_of, transformed, watched
from .kernels import Choice, Request, choose, fused, is_torchs_norm, norm
from .placements import GATES, resolve
from .recurrence_checks import check_recurrence
from .reference import ACTIVATIONS, EPS_MODES, CellWeights, LSTMState, Masks, Moments, Recurrence, SequenceResult


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, eps_mode: str = "var",
    *, activation: str | None = None, residual: Tensor | None = None, backend: str = "auto",
) -> Any:  # fmt: skip
    """Return gain (z - mu)/sigma + bias over the last axes (Eq. 3), then apply the named activation.

    With a ``residual``, z is input + residual, and the result is the pair (output, z), as pre-norm residual blocks
    need.
    """
    if backend == "auto" and activation is None and residual is None:
        quick = quick_layer_norm(input, normalized_shape, weight, bias, eps, eps_mode)
        if quick is not None:
            return quick
    if backend == "triton":
        cached = norm.again(input, normalized_shape, weight, bias, eps, eps_mode, activation, residual)
        if cached is not None:
            return cached[0] if residual is None else cached
    shape = tuple(normalized_shape)
    _check_layer_norm(input, shape, weight, bias, eps, eps_mode)
    _check_epilogue(input, activation, residual)
    chosen = choose(norm_request(input, shape, eps, eps_mode, weight, residual), backend).backend
    if chosen == "triton":
        out, total = norm.run(input, shape, weight, bias, eps, eps_mode, activation, residual)
        return out if residual is None else (out, total)
    if chosen == "reference":
        return reference.layer_norm(
            input, shape, weight, bias, eps, eps_mode, activation=activation, residual=residual
        )  # fmt: skip
    z = input if residual is None else input + residual
    out = _torch_layer_norm(z, shape, weight, bias, eps)
    out = out if activation is None else ACTIVATIONS[activation](out)
    return out if residual is None else (out, z)


def quick_layer_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, eps_mode: str
) -> Tensor | None:
    """Call torch's layer norm directly if it would be chosen anyway; return None if the full checks are needed.

    The checks and the choice of a backend take 3 us of host time, as long as a small layer norm itself.
    """
    if type(input) is not Tensor or type(eps) is not float or torch.compiler.is_compiling():
        return None
    if not eps < math.inf or not is_torchs_norm(eps, eps_mode):
        return None
    dtype = input.dtype
    if (weight is not None and weight.dtype is not dtype) or (bias is not None and bias.dtype is not dtype):
        return None
    try:
        return F.layer_norm(input, shape, weight, bias, eps)
    except (RuntimeError, TypeError):  # the full checks raise a better error
        return None


def norm_request(
    input: Tensor, shape: Sequence[int], eps: float, eps_mode: str, weight: Tensor | None = None,
    residual: Tensor | None = None,
) -> Request:  # fmt: skip
    """Return the properties of a layer norm that determine its backend."""
    width = math.prod(shape)
    others = [t for t in (weight, residual) if t is not None]
    return Request(
        "layer_norm", input.device, input.dtype, eps, eps_mode, hidden=width, batch=input.numel() // max(width, 1),
        transformed=transformed(input, *others), autocast=autocast_dtype(input) is not None,
    )  # fmt: skip


def _check_epilogue(input: Tensor, activation: str | None, residual: Tensor | None) -> None:
    if activation is not None:
        one_of("activation", activation, ACTIVATIONS)
    if residual is not None and (residual.shape, residual.dtype) != (input.shape, input.dtype):
        rule = f"layer_norm needs a residual of the shape and dtype of its input, {describe(input)}"
        raise fail(rule, describe(residual), "Reshape or cast it.")


def _torch_layer_norm(
    input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Run torch's kernel; on CUDA it needs one dtype, so a half-precision input is cast to that of the parameters."""
    if weight is None or weight.dtype == input.dtype or autocast_dtype(input) is not None:
        return F.layer_norm(input, shape, weight, bias, eps)
    return F.layer_norm(input.to(weight.dtype), shape, weight, bias, eps).to(input.dtype)


def _check_layer_norm(
    input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float, eps_mode: str
) -> None:
    epsilon(eps)
    one_of("eps_mode", eps_mode, EPS_MODES)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        rule = f"layer_norm over {list(shape)} needs an input that ends in those axes"
        raise fail(rule, describe(input), "Pass the input's last axes as normalized_shape, or reshape the input.")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and tuple(parameter.shape) != shape:
            rule = f"layer_norm {name} must have shape {list(shape)}"
            raise fail(rule, describe(parameter), f"Pass a {name} of the normalised shape.")


def rnn(
    input: Tensor, state: Tensor, weights: CellWeights,
    *, nonlinearity: str = "tanh", norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5,
    eps_mode: str = "var", lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False,
    zoneout: Masks = (None,), recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: Tensor | None = None, recompute: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a layer-normalised RNN (Eq. 4) over input [T, B, D] from state [B, H]; return outputs and h_n."""
    one_of("nonlinearity", nonlinearity, ("tanh", "relu"))
    call = Recurrence(
        "RNN", input, (state,), weights, norm, resolve("RNN", norm, placement), eps, eps_mode, nonlinearity,
        lengths, resets, reverse, zoneout, recurrent_mask, population, recompute=recompute,
        reset_state=(reset_state,),
    )  # fmt: skip
    result = run(call, backend)
    return result.output, result.state[0]


def lstm(
    input: Tensor, state: LSTMState, weights: CellWeights,
    *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
    lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False, zoneout: Masks = (None, None),
    recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: LSTMState | None = None, recompute: bool = False, backend: str = "auto",
) -> tuple[Tensor, LSTMState]:  # fmt: skip
    """Run a layer-normalised LSTM over input [T, B, D] from (h [B, P], c [B, H]); return outputs and (h_n, c_n)."""
    call = Recurrence(
        "LSTM", input, tuple(state), weights, norm, resolve("LSTM", norm, placement), eps, eps_mode, "tanh",
        lengths, resets, reverse, zoneout, recurrent_mask, population, recompute=recompute,
        reset_state=reset_state or (None, None),
    )  # fmt: skip
    result = run(call, backend)
    return result.output, (result.state[0], result.state[1])


def gru(
    input: Tensor, state: Tensor, weights: CellWeights,
    *, norm: str | None = "layer", placement: str | None = None, eps: float = 1e-5, eps_mode: str = "var",
    lengths: Tensor | None = None, resets: Tensor | None = None, reverse: bool = False, zoneout: Masks = (None,),
    recurrent_mask: Tensor | None = None, population: Mapping[str, Moments] | None = None,
    reset_state: Tensor | None = None, recompute: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a layer-normalised GRU over input [T, B, D] from state [B, H]; return outputs and h_n."""
    call = Recurrence(
        "GRU", input, (state,), weights, norm, resolve("GRU", norm, placement), eps, eps_mode, "tanh",
        lengths, resets, reverse, zoneout, recurrent_mask, population, recompute=recompute,
        reset_state=(reset_state,),
    )  # fmt: skip
    result = run(call, backend)
    return result.output, result.state[0]


def run(
    call: Recurrence, backend: str = "auto", *, single_step: bool = False, lengths_known: bool = False
) -> SequenceResult:
    """Check a recurrence, choose its backend and run it; the entry point of layers and cells (``single_step``)."""
    check_recurrence(call, lengths_known)
    call = _under_autocast(call)
    return _run_as(call, choose(_request(call, single_step), backend))


def run_directions(calls: Sequence[Recurrence], backend: str = "auto") -> list[SequenceResult]:
    """Run the directions of a layer: in shared launches if the kernels support it, else one after the other.

    As in ``run_stack``, the layer has already checked the values of the lengths.
    """
    if len(calls) == 1:
        return [run(calls[0], backend, lengths_known=True)]
    for call in calls:
        check_recurrence(call, lengths_known=True)
    calls = [_under_autocast(call) for call in calls]
    choice = choose(_request(calls[0], False, len(calls)), backend)
    if choice.sides == len(calls):
        return fused.run_together(calls, choice.path)
    return [_run_as(call, choice) for call in calls]


def stacks(first: Recurrence, layers: int, backend: str = "auto") -> bool:
    """Return whether a stack of layers that begins with ``first`` can run in one call (``run_stack``)."""
    if torch.compiler.is_compiling() or watched(first.input) or watched(first.weights.weight_hh):
        return False
    check_recurrence(first)  # report input errors before backend errors
    return choose(_request(_under_autocast(first), False, 1, layers), backend).sides > 1


def run_stack(calls: Sequence[Recurrence], masks: Sequence[Tensor | None]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Run a stack of layers, each on the output below times its mask; return the last output and all final states.

    Only the shapes of the inputs above the first layer are used.
    """
    for call in calls:
        check_recurrence(call, lengths_known=True)
    return fused.run_stack([_under_autocast(calls[0]), *map(_upper_under_autocast, calls[1:])], masks)


def _upper_under_autocast(call: Recurrence) -> Recurrence:
    """Cast an upper layer for autocast, except its placeholder input, whose full cast would allocate memory."""
    cast = _under_autocast(replace(call, input=call.input[:1, :1]))
    return replace(cast, input=cast.input.expand(call.input.shape))


def _run_as(call: Recurrence, choice: Choice) -> SequenceResult:
    if choice.backend in ("triton", "numba"):
        if choice.ragged_eager and not (call.lengths is None and call.resets is None):
            from .kernels import passes

            with passes.ragged_eager():
                return fused.run(call, choice.path)
        return fused.run(call, choice.path)
    if choice.missing:
        notices.warn(choice.missing)
    return opaque.run(call) if choice.opaque else reference.evaluate(call)


def _request(call: Recurrence, single_step: bool, directions: int = 1, layers: int = 1) -> Request:
    return Request(
        "recurrence", call.input.device, call.input.dtype, call.eps, call.eps_mode,
        call.cell, call.norm, call.placement.name, single_step,
        call.weights.weight_hh.shape[0] // GATES[call.cell], call.input.shape[1],
        call.weights.weight_hr is not None, transformed(call.input, call.weights.weight_hh), call.nonlinearity,
        recompute=call.recompute, directions=directions, layers=layers,
    )  # fmt: skip


def _under_autocast(call: Recurrence) -> Recurrence:
    """Cast input and matrices for autocast, which has no effect inside an opaque operator.

    Weight norm is applied before the cast, in the precision of the parameters.
    """
    dtype = autocast_dtype(call.input)
    if dtype is None:
        return call
    w = reference.effective_weights(call)
    if call.norm == "weight":
        w = w._replace(gain_ih=None, gain_hh=None, gain_hr=None)
    projection = None if w.weight_hr is None else w.weight_hr.to(dtype)
    w = w._replace(weight_ih=w.weight_ih.to(dtype), weight_hh=w.weight_hh.to(dtype), weight_hr=projection)
    norm = None if call.norm == "weight" else call.norm
    return replace(call, input=call.input.to(dtype), weights=w, norm=norm)


def explain(target: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Return the backend that would run a layer or a functional call, and the reason.

    Call ``explain(layer)``, ``explain(layer, x)`` or ``explain(lamina.functional.lstm, x, state, weights, ...)``.
    Nothing is computed. The result has ``backend`` and ``reason`` and prints as one line.
    """
    if isinstance(target, nn.Module):
        return _explain_module(target, *args)
    cells = {rnn: "RNN", lstm: "LSTM", gru: "GRU"}
    if target is not layer_norm and target not in cells:
        rule = "explain takes a lamina layer or a function of lamina.functional"
        raise fail(rule, describe(target), "Pass one of those.")
    bound = inspect.signature(target).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    x, eps, mode, backend = (arguments[name] for name in ("input", "eps", "eps_mode", "backend"))
    if target is layer_norm:
        shape, weight, residual = (arguments[name] for name in ("normalized_shape", "weight", "residual"))
        return choose(norm_request(x, tuple(shape), eps, mode, weight, residual), backend)
    cell, norm, weights = cells[target], arguments["norm"], arguments["weights"]
    where, nonlinearity = resolve(cell, norm, arguments["placement"]), arguments.get("nonlinearity", "tanh")
    recompute = arguments["recompute"]
    call = Recurrence(cell, x, (), weights, norm, where, eps, mode, nonlinearity, recompute=recompute)
    return choose(replace(_request(call, False), dtype=autocast_dtype(x) or x.dtype), backend)


def _explain_module(layer: nn.Module, *args: Any) -> Choice:
    if not type(layer).__module__.startswith(f"{__package__}.") and not hasattr(layer, "backend_request"):
        remedy = "Convert the model with lamina.convert, or pass one of its lamina layers."
        raise fail("explain takes a layer of lamina", f"{type(layer).__module__}.{type(layer).__name__}", remedy)
    describe_request = getattr(layer, "backend_request", None)
    request: Request | None = None if describe_request is None else describe_request(*args)
    if request is None:
        return Choice("torch", "plain torch operations, nothing to choose between")
    return choose(request, str(layer.backend))
