"""Layer norm with its gradients: the function around ``layer_norm``'s kernels.

A small call costs the host more than the device. So what calls share whose tensors look the same is worked out once
(``Kind``), and no tensor is reshaped: kernels take an address, a number of rows and how far apart they lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from .. import reference
from ..checks import batched

Given = Tensor | None
KINDS = 4096  # that are kept
_known: dict[Any, Kind] = {}  # kinds of calls that were served, by ``_key``


def run(
    x: Tensor, shape: Sequence[int], gain: Given, bias: Given, eps: float, eps_mode: str, activation: str | None,
    residual: Given,
) -> tuple[Tensor, Given]:  # fmt: skip
    """act(LN(x + residual)) over the last axes of ``shape``, and x + residual where there is a residual."""
    gain, bias = (None if t is None else t.contiguous() for t in (gain, bias))
    given = _in_rows(x, len(shape)), None if residual is None else _in_rows(residual, len(shape)), gain, bias
    key = _key(*given, shape, eps, eps_mode, activation)
    kind = _known.get(key) or Kind(given, tuple(shape), eps, eps_mode, activation)
    found = kind(*given)
    if len(_known) >= KINDS:  # shapes that never come back must not pile up
        _known.clear()
    _known[key] = kind
    return found


def again(
    x: Tensor, shape: Sequence[int], gain: Given, bias: Given, eps: float, eps_mode: str, activation: str | None,
    residual: Given,
) -> tuple[Tensor, Given] | None:  # fmt: skip
    """The same for a call whose like came here before; None where all must be looked at."""
    if not isinstance(x, Tensor) or type(eps) is not float or not _ordinary(x):
        return None
    kind = _known.get(_key(x, residual, gain, bias, shape, eps, eps_mode, activation))
    return None if kind is None else kind(x, residual, gain, bias)


def _ordinary(x: Tensor) -> bool:
    """Whether nobody but autograd sees what is computed: no compiler, tracer, mode, transform or autocast."""
    return not (
        torch.compiler.is_compiling()
        or _get_tracing_state()
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or is_functorch_wrapped_tensor(x)
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
    )


def _key(
    x: Tensor, residual: Given, gain: Given, bias: Given, shape: Sequence[int], eps: float, eps_mode: str,
    activation: str | None,
) -> tuple[Any, ...]:  # fmt: skip
    """All that checks, choice and launches depend on, but which gradients are wanted and where numbers lie.

    Written out: a loop over the tensors takes half as long again, and every call comes by.
    """
    return (
        type(x), x.shape, x.stride(), x.dtype, x.get_device(),
        None if residual is None
        else (type(residual), residual.shape, residual.stride(), residual.dtype, residual.get_device()),
        None if gain is None else (type(gain), gain.shape, gain.stride(), gain.dtype, gain.get_device()),
        None if bias is None else (type(bias), bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        tuple(shape), eps, eps_mode, activation,
    )  # fmt: skip


def _in_rows(t: Tensor, axes: int) -> Tensor:
    """With rows that kernels can walk over."""
    return t.contiguous() if _row(t, axes) is None else t


def _row(t: Tensor, axes: int) -> int | None:
    """From one row, of the last ``axes``, to the next; None where it is not the same or a row's numbers lie apart."""
    width = math.prod(t.shape[-axes:])
    inner, outer = ([(n, s) for n, s in zip(t.shape[k], t.stride()[k]) if n != 1] for k in _split(axes))
    if inner != [(n, math.prod(m for m, _ in inner[at + 1 :])) for at, (n, _) in enumerate(inner)]:
        return None
    apart = outer[-1][1] if outer else width
    lengths = [apart * math.prod(m for m, _ in outer[at + 1 :]) for at in range(len(outer))]
    return apart if [s for _, s in outer] == lengths else None


def _split(axes: int) -> tuple[slice, slice]:
    """The last axes and the others."""
    return slice(-axes, None), slice(None, -axes)


class Kind:
    """Calls whose tensors look the same, with all that they share."""

    def __init__(
        self, given: Sequence[Given], shape: tuple[int, ...], eps: float, eps_mode: str, activation: str | None
    ) -> None:
        x, width = given[0], math.prod(shape)
        if x is None:
            raise TypeError("a layer norm needs an input, got None.")
        eps = float(eps)  # kernels are compiled for one kind of number, and 0 is 0.0 where kinds are told apart
        self.form = shape, eps, eps_mode, None if activation == "identity" else activation
        rows = [0 if t is None else _row(t, len(shape)) for t in given[:2]]
        dtypes = tuple(None if t is None else t.dtype for t in given)
        count = x.numel() // width
        self._look = _kernels().Look(count, width, *rows, dtypes, x.device, eps, eps_mode == "std", self.form[3])
        self._forward = _kernels().forward_launch(self._look)
        self._backward: dict[tuple[bool, ...], _Backward] = {}

    def __call__(self, x: Tensor, residual: Given, gain: Given, bias: Given) -> tuple[Tensor, Given]:
        """The result, and x + residual where there is a residual."""
        if torch.is_grad_enabled():
            found: tuple[Tensor, Given] = _apply(self, x, residual, gain, bias)
            return found
        out, total, _ = self.forward(x, residual, gain, bias)
        return out, None if residual is None else total

    def forward(self, x: Tensor, residual: Given, gain: Given, bias: Given) -> tuple[Tensor, Tensor, Tensor]:
        """The result, x + residual or x itself, and the statistics [2, N]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        total = out if residual is None else torch.empty_like(out)
        statistics = torch.empty(2, self._look.count, dtype=torch.float32, device=self._look.device)
        self._forward((x, residual, gain, bias, out, total, statistics))
        return out, x if residual is None else total, statistics

    def backward(self, kept: Sequence[Tensor], d_out: Tensor, d_total: Given, gain: bool, bias: bool) -> Any:
        """The gradients of x + residual, and of gain and bias where they are wanted, in their dtypes."""
        which = gain, bias, d_total is not None
        found = self._backward.get(which)
        if found is None:
            found = self._backward[which] = _Backward(self._look, *which)
        return found(kept, d_out, d_total)


class _Backward:
    """Backward passes of one kind of call in which the same gradients arrive and are wanted."""

    def __init__(self, look: Any, gain: bool, bias: bool, d_total: bool) -> None:
        self._gain, self._bias = gain, bias
        # Behind it there is nothing but an activation that a bias could change.
        self._bias_counts = look.dtypes[3] is not None and (bias or look.activation is not None)
        self._sums = _kernels().sums_launch(look, self._bias_counts)
        self._rows = _kernels().backward_launch(look, self._bias_counts, d_total)
        programs = self._rows.grid[0]
        self._added_up = _kernels().added_up_launch(look, programs, gain, bias) if gain or bias else None
        self._shares = 2 if self._bias_counts else int(look.dtypes[2] is not None), programs, look.width

    def __call__(self, kept: Sequence[Any], d_out: Tensor, d_total: Given) -> tuple[Tensor, Given, Given]:
        z, gain, bias, statistics = kept
        read: tuple[Given, ...] = d_out, z, gain, bias if self._bias_counts else None, statistics
        if self._sums is not None:
            read = *read, torch.empty_like(statistics)
            self._sums(read)
        d_z = torch.empty_like(d_out)
        shares = torch.empty(*self._shares, dtype=torch.float32, device=d_out.device)
        self._rows((*read, d_total, d_z, shares))
        d_gain = torch.empty_like(gain) if self._gain else None
        d_bias = torch.empty_like(bias) if self._bias else None
        if self._added_up is not None:
            self._added_up((shares, d_gain, d_bias))
        return d_z, d_gain, d_bias


@cache
def _kernels() -> Any:
    from . import layer_norm  # needs Triton

    return layer_norm


class _Norm(torch.autograd.Function):
    """The result, and x + residual where there is a residual."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, x: Tensor, residual: Given, gain: Given, bias: Given) -> tuple[Tensor, Given]:
        out, z, statistics = kind.forward(x, residual, gain, bias)
        ctx.kind = kind
        ctx.save_for_backward(z, gain, bias, statistics)
        ctx.set_materialize_grads(False)
        return out, None if residual is None else z

    @staticmethod
    def backward(ctx: Any, d_out: Given, d_total: Given) -> tuple[Given, ...]:
        kept, (_, x, residual, gain, bias) = ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled() or batched((d_out, d_total)):
            d_z, d_gain, d_bias = _differentiable(kept[:3], (d_out, d_total), ctx.kind.form)
        elif d_out is None:
            d_z, d_gain, d_bias = d_total, None, None
        else:
            total = d_total if d_total is None or d_total.is_contiguous() else d_total.contiguous()
            d_out = d_out if d_out.is_contiguous() else d_out.contiguous()
            d_z, d_gain, d_bias = ctx.kind.backward(kept, d_out, total, gain, bias)
        return None, d_z if x else None, d_z if residual else None, d_gain, d_bias


# Past torch's look at each argument for remnants of torch.func, which costs 4 us: ``choose`` sends those elsewhere.
_apply: Any = super(torch.autograd.Function, _Norm).apply


def _differentiable(kept: Sequence[Given], grads: Sequence[Given], form: tuple[Any, ...]) -> list[Given]:
    """The gradients by the reference's own graph."""
    shape, eps, eps_mode, activation = form
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [None if t is None else t.view_as(t).requires_grad_() for t in kept]
        there = [t for t in given if t is not None]
        out = reference.layer_norm(there[0], shape, given[1], given[2], eps, eps_mode, activation=activation)
    pairs = [(o, g) for o, g in zip((out, there[0]), grads) if g is not None]
    ends, arriving = [o for o, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(ends, there, arriving, create_graph=again, allow_unused=True))
    return [None if t is None else next(found) for t in given]
