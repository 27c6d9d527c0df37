"""One step of a recurrence with its gradients on a GPU: two products of the library's and one kernel, each way.

Nothing is looked up on the host and nothing waits for it, so that loops of such steps can be captured as CUDA graphs.
Of a step only its inputs and the two products are kept. A gradient that is to be differentiated again is taken through
the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..reference import Recurrence, SequenceResult
from . import fused
from .forms import Form, Setting, form_of, power, setting_of
from .given import COUNT, Given, extras_of, tensors_of, there
from .plans import processors
from .precision import as_cudnn_multiplies
from .start import start

_AS_IT_IS = nullcontext()


def run(call: Recurrence) -> SequenceResult:
    """One step of a recurrence, of an input [1, B, D]."""
    tensors, extras = tensors_of(call, None), extras_of(call)
    masks = [None if m is None else m[0] for m in extras[2:4]]
    found = step(setting_of(call, "cell"), there(tensors[0])[0], *tensors[1:], *masks, extras[4])
    return SequenceResult(found[0].unsqueeze(0), found, {})


def step(setting: Setting, *given: Given) -> tuple[Tensor, ...]:
    """The new state: of x [B, D], the rest of given.NAMES, both keep masks [B, H] and the dropout mask."""
    if not torch.is_grad_enabled():
        h, c, *_ = _forward(form_of(setting), given)
    else:
        h, c = _apply(setting, *given)
    return (h,) if c is None else (h, c)


class _Cell(torch.autograd.Function):
    """The new h and, for the LSTM, the new c."""

    @staticmethod
    def forward(ctx: Any, setting: Setting, *given: Given) -> tuple[Tensor, Given]:
        h_new, c_new, *kept = _forward(form_of(setting), given)
        ctx.setting = setting
        ctx.save_for_backward(*given, *kept)
        ctx.set_materialize_grads(False)
        return h_new, c_new

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Any, ...]:
        *given, from_x, from_h, seen = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # asked for with create_graph: these gradients will be differentiated
            return None, *_differentiable(ctx.setting, given, grads, needed)
        found = _gradients(form_of(ctx.setting), given, from_x, from_h, seen, grads, needed)
        in_kind = [d if d is None or t is None or d.dtype is t.dtype else d.to(t.dtype) for d, t in zip(found, given)]
        return None, *in_kind, None, None, None


# Past torch's look at each argument for remnants of torch.func, which costs 4 us: ``choose`` sends those elsewhere.
_apply: Any = super(torch.autograd.Function, _Cell).apply


def _forward(form: Form, given: Sequence[Given]) -> tuple[Tensor, Given, Tensor, Given, Given]:
    """The new h and c, then for backward both products and the h that was multiplied."""
    x, h, _, weight_ih, weight_hh = given[:5]
    if x is None or weight_ih is None or weight_hh is None:
        raise TypeError("a step needs its input and its matrices, got None.")
    drop, dtype = given[-1], x.dtype
    seen = h if h is None or drop is None else h * drop
    if seen is not None and seen.dtype is not dtype:
        seen = seen.to(dtype)
    with as_cudnn_multiplies(dtype) if dtype is torch.float32 else _AS_IT_IS:
        from_x = linear(x, weight_ih)
        from_h = None if seen is None else linear(seen, weight_hh)
    shape = (x.shape[0], weight_hh.shape[1])
    h_new = x.new_empty(shape) if seen is None else torch.empty_like(seen)
    c_new = torch.empty_like(h_new) if form.cell == "LSTM" else None
    arguments = _arguments(form, given, from_x, from_h)
    arguments["h_new"], arguments["c_new"] = h_new, c_new
    start(_kernels().forward_kernel, shape[:1], arguments, _options(shape[1]))
    return h_new, c_new, from_x, from_h, seen


@cache
def _kernels() -> Any:
    from . import cell_kernels  # needs Triton

    return cell_kernels


def _arguments(form: Form, given: Sequence[Given], from_x: Tensor, from_h: Given) -> dict[str, Any]:
    """What both kernels take."""
    _, h, c, _, _, bias_x, bias_h, gain_x, gain_hh, gain_sum, gain_cell, bias_cell, keep_h, keep_c, _ = given
    return {
        **_constants(form, from_x.shape[1] // form.gates, _is_rate(keep_h), _is_rate(keep_c)),
        "from_x": from_x, "from_h": from_h, "gain_x": gain_x, "gain_h": gain_hh if form.site == "hh" else gain_sum,
        "bias_x": bias_x, "bias_h": bias_h, "gain_cell": gain_cell, "bias_cell": bias_cell, "h": h,
        "c": c if form.cell == "LSTM" else None, "keep_h": _mask(keep_h), "keep_c": _mask(keep_c),
    }  # fmt: skip


def _mask(mask: Given) -> Given:
    """One number expanded as that number, others with their numbers side by side."""
    return mask if mask is None else mask[0, 0] if _is_rate(mask) else mask.contiguous()


def _is_rate(mask: Given) -> bool:
    """Whether a mask is one number, expanded."""
    return mask is not None and not any(mask.stride())


@cache
def _constants(form: Form, hidden: int, rate_h: bool, rate_c: bool) -> dict[str, Any]:
    rates = {"RATE_H": rate_h, "RATE_C": rate_c}
    return {**form.constants(), **rates, "eps": form.eps, "H": hidden, "BLOCK": power(hidden)}


@cache
def _options(hidden: int) -> dict[str, Any]:
    return {"num_warps": max(1, min(16, power(hidden) // 128))}


def _gradients(
    form: Form, given: list[Given], from_x: Tensor, from_h: Given, seen: Given, grads: tuple[Given, ...],
    needed: tuple[bool, ...],
) -> list[Given]:  # fmt: skip
    """Of the input, the state and the parameters, in the order in which they came."""
    x, h, _, weight_ih, weight_hh = given[:5]
    x, weight_ih, weight_hh = there(x), there(weight_ih), there(weight_hh)
    (batch, width), hidden, drop = from_x.shape, weight_hh.shape[1], given[-1]
    alike = (form.cell in ("LSTM", "RNN") and form.site != "hh") or form.site == "sum"
    d_from_x = torch.empty_like(from_x)
    d_from_h = d_from_x if alike else torch.empty_like(from_x)
    past = x.new_empty(batch, hidden) if form.cell in ("GRU", "DREAMER") or given[12] is not None else None
    d_c = x.new_empty(batch, hidden) if form.cell == "LSTM" else None
    programs = min(batch, 2 * processors(x.device))
    small = any(needed[5:12])
    shares = x.new_zeros(programs, 4 * width + 2 * hidden, dtype=torch.float32) if small else None
    arriving = {name: None if g is None else g.contiguous() for name, g in zip(("d_h", "d_c"), (*grads, None))}
    arguments = {
        **_arguments(form, given, from_x, from_h), **arriving, "d_from_x": d_from_x,
        "d_from_h": None if alike else d_from_h, "d_h_old": past, "d_c_old": d_c, "shares": shares, "B": batch,
    }  # fmt: skip
    start(_kernels().backward_kernel, (programs,), arguments, _options(hidden))
    with as_cudnn_multiplies(x.dtype):
        found: list[Given] = [
            torch.mm(d_from_x, weight_ih) if needed[0] else None,
            _to_state(d_from_h, weight_hh, past, drop) if needed[1] and h is not None else None,
            d_c if needed[2] else None,
            torch.mm(d_from_x.t(), x) if needed[3] else None,
            torch.mm(d_from_h.t(), seen) if needed[4] and seen is not None else None,
        ]
    return found + (_of_parameters(form, shares, width, hidden, given) if shares is not None else [None] * 7)


def _to_state(d_from_h: Tensor, weight: Tensor, past: Given, drop: Given) -> Tensor:
    """What reaches the old h, through the product and past it."""
    if drop is None:
        return torch.mm(d_from_h, weight) if past is None else torch.addmm(past, d_from_h, weight)
    found = (torch.mm(d_from_h, weight) * drop).to(weight.dtype)
    return found if past is None else found + past


def _of_parameters(form: Form, shares: Tensor, width: int, hidden: int, given: list[Given]) -> list[Given]:
    """Of bias_ih, bias_hh, gain_ih, gain_hh, gain_sum, gain_cell and bias_cell."""
    total = shares.sum(0)
    bias_x, gain_x, bias_h, gain, bias_cell, gain_cell = torch.split(total, [width] * 4 + [hidden] * 2)
    found = (bias_x, bias_h if form.cell == "GRU" else bias_x, gain_x, gain, gain, gain_cell, bias_cell)
    return [None if t is None else d for d, t in zip(found, given[5:12])]


def _differentiable(setting: Setting, given: list[Given], grads: tuple[Given, ...], needed: tuple[bool, ...]) -> Any:
    """The gradients by the reference's own graph."""
    x, *others = given[:COUNT]
    keeps = [None if k is None else k.unsqueeze(0) for k in given[12:14]]
    tensors = [there(x).unsqueeze(0), *others]
    arriving = (None, *grads)[: 3 if setting.cell == "LSTM" else 2]
    found = fused.differentiable_gradients(setting, tensors, [None, None, *keeps, given[14]], arriving, needed)
    first = None if found[0] is None else found[0][0]
    return first, *found[1:], None, None, None
