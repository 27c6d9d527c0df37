"""The fused recurrence as torch sees it: an operator with gradients, and what is done around the kernels.

Eagerly it is an autograd function; under torch.compile a pair of custom operators, which are opaque, know their
output shapes and have gradients. Both end in ``launch`` or ``steps``. A gradient that is to be differentiated again
is taken through the reference instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from ..reference import CellWeights, Recurrence, SequenceResult, SiteNorms
from . import launch
from .forms import Extras, Form, form_of
from .precision import as_cudnn_multiplies

# The tensors of a call, in the order in which they travel.
NAMES = ("x", "weight", "h", "c", "gain", "bias", "gain_cell", "bias_cell")
EXTRAS = ("lengths", "resets", "keep_h", "keep_c", "drop")
Tensors = Sequence[Tensor | None]


def run(call: Recurrence, path: str) -> SequenceResult:
    """A recurrence through the kernels; ``kernels.choose`` has made sure that ``path`` serves it."""
    turned = _forwards(call)
    valid = _valid(turned)
    x = turned.input if valid is None else _zero_unless(valid, turned.input)
    form = form_of(call)
    tensors, extras = _prepared(turned, form, x)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        hist, c_n, *_ = _sequence(*_named(tensors, extras), form.encode(), path, keep)
    else:
        hist, c_n = _Sequence.apply(form, path, keep, *tensors, *extras)  # type: ignore[no-untyped-call]
    output = hist[1:] if valid is None else _zero_unless(valid, hist[1:])
    if call.reverse:
        output = reference.reverse_sequences(output, call.lengths)
    state = (hist[-1], c_n)[: len(call.state)]
    return SequenceResult(output, tuple(s.to(call.input.dtype) for s in state), {})


def _forwards(call: Recurrence) -> Recurrence:
    """The same recurrence with time running forwards."""
    if not call.reverse:
        return call
    resets = None if call.resets is None else reference.reverse_resets(call.resets, call.lengths)
    return replace(call, input=reference.reverse_sequences(call.input, call.lengths), resets=resets)


def _valid(call: Recurrence) -> Tensor | None:
    """[T, B, 1]: where a case still has steps."""
    if call.lengths is None:
        return None
    steps = torch.arange(call.input.shape[0], device=call.input.device).unsqueeze(1)
    return (steps < call.lengths.unsqueeze(0)).unsqueeze(-1)


def _zero_unless(valid: Tensor, x: Tensor) -> Tensor:
    return torch.where(valid, x, torch.zeros((), dtype=x.dtype, device=x.device))  # padding may hold NaN


def _prepared(call: Recurrence, form: Form, x: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What the kernels take: W_x x of all steps, the recurrent matrix, parameters in any dtype, and the extras."""
    w, hidden = reference.effective_weights(call), call.weights.weight_hh.shape[1]
    gain = {"hh": w.gain_hh, "sum": w.gain_sum}.get(form.site)
    tensors = [
        _inputs(call, form, w, x), w.weight_hh, call.state[0], call.state[1] if len(call.state) > 1 else None,
        _gain(gain, bool(form.site), form.gates * hidden, x), _inner_bias(form, w),
        _gain(w.gain_cell, form.cell_norm, hidden, x), w.bias_cell,
    ]  # fmt: skip
    tensors = [None if t is None else t.contiguous() for t in tensors]
    drop = None if call.recurrent_mask is None else call.recurrent_mask.contiguous()
    resets = None if call.resets is None else call.resets.contiguous()
    return tensors, [call.lengths, resets, *_masks(call), drop]


def _inputs(call: Recurrence, form: Form, w: CellWeights, x: Tensor) -> Tensor:
    """W_x x for all steps: normed and with its bias, or centred where the norm stands on the sum."""
    from .rows import prepare

    summed = _product(x, w.weight_ih)
    if form.site == "sum":
        return prepare(summed, None, None, call.placement.sum, "centre", call.eps, call.eps_mode)
    bias = w.bias_ih if form.cell == "GRU" else _added(w.bias_ih, w.bias_hh)
    groups = call.placement.ih
    mode = "norm" if groups else "plain"
    gain = w.gain_ih if groups else None
    return prepare(summed, gain, bias, groups or (form.gates,), mode, call.eps, call.eps_mode)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """W x in the precision of nn.LSTM's, there and back."""
    if x.dtype != torch.float32 or x.device.type != "cuda" or torch.compiler.is_compiling():
        return F.linear(x, weight)
    return _Product.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]


class _Product(torch.autograd.Function):
    """F.linear whose three products follow cuDNN's TF32 switch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with as_cudnn_multiplies(x.dtype):
            return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with as_cudnn_multiplies(x.dtype):
            d_x = d @ weight if ctx.needs_input_grad[0] else None
            return d_x, d.flatten(0, 1).t() @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None


def _inner_bias(form: Form, w: CellWeights) -> Tensor | None:
    """The biases that cannot be added to W_x x beforehand: GRU's recurrent one, and all where the sum is normed."""
    if form.site == "sum":
        return _added(w.bias_ih, w.bias_hh)
    return w.bias_hh if form.cell == "GRU" else None


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _gain(gain: Tensor | None, wanted: bool, width: int, like: Tensor) -> Tensor | None:
    if wanted and gain is None:
        return torch.ones(width, dtype=torch.float32, device=like.device)
    return gain if wanted else None


def _centred(weight: Tensor, groups: tuple[int, ...]) -> Tensor:
    """Rows less the mean of their normalised group, so that W h has mean 0.

    No gradient is centred in turn: that of the product has mean 0 over the group, so W's has it too.
    """
    if not groups:
        return weight
    parts = torch.split(weight, [g * weight.shape[1] for g in groups])
    centred = [(p - p.mean(0, dtype=torch.float32)).to(weight.dtype) for p in parts]
    return centred[0] if len(centred) == 1 else torch.cat(centred)


def _masks(call: Recurrence) -> tuple[Tensor | None, Tensor | None]:
    """Zoneout as tensors [T, B, H]; a rate is one number, expanded."""
    found: list[Tensor | None] = []
    for mask, state in zip(call.zoneout, call.state):
        if mask is not None and not isinstance(mask, Tensor):
            mask = torch.full((), float(mask), device=call.input.device).expand(call.input.shape[0], *state.shape)
        found.append(mask)
    return found[0], found[1] if len(found) > 1 else None


# The operator


def _module(path: str) -> ModuleType:
    """Where ``forward`` and ``backward`` of a path are."""
    if path == "steps":
        from . import steps

        return steps
    return launch


def _forward(form: Form, path: str, tensors: Tensors, extras: Tensors, keep: bool) -> list[Tensor]:
    """hist and the final c, then what backward needs: the centred matrix and what the path keeps."""
    x, weight, *others = tensors
    where = form.placement()
    matrix = _centred(_present([weight])[0], where.hh or where.sum)
    kept = _module(path).forward(form, x, matrix, *others, Extras(*extras), keep)
    c_n = kept[1][-1].clone() if tensors[3] is not None else kept[1].new_empty(0)
    return [kept[0], c_n, matrix, *kept[1:]]


def _backward(form: Form, path: str, tensors: Tensors, extras: Tensors, kept: Sequence[Tensor], d_hist: Tensor,
              d_c: Tensor | None) -> list[Tensor | None]:  # fmt: skip
    """Gradients in the order and the dtypes of ``tensors``."""
    x, _, h, _, *parameters = tensors
    hist, matrix, *rest = kept
    found = _module(path).backward(
        form, x, matrix, h, *parameters, Extras(*extras), (hist, *rest), d_hist.contiguous(), d_c
    )
    return [None if t is None else found[name].to(t.dtype) for name, t in zip(NAMES, tensors)]


class _Sequence(torch.autograd.Function):
    """hist [T+1, B, H] and the final c."""

    @staticmethod
    def forward(ctx: Any, form: Form, path: str, keep: bool, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        tensors, extras = given[: len(NAMES)], given[len(NAMES) :]
        hist, c_n, *kept = _forward(form, path, tensors, extras, keep)
        ctx.form, ctx.path = form, path
        ctx.save_for_backward(*given, hist, *kept)
        if tensors[3] is None:
            ctx.mark_non_differentiable(c_n)
        ctx.set_materialize_grads(False)
        return hist, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        tensors, extras, kept = saved[: len(NAMES)], saved[len(NAMES) : len(NAMES) + 5], saved[len(NAMES) + 5 :]
        d_hist = torch.zeros_like(kept[0]) if grads[0] is None else grads[0]
        d_c = grads[1] if tensors[3] is not None else None
        if torch.is_grad_enabled():  # asked for with create_graph: these gradients will be differentiated
            found = _differentiable_gradients(ctx.form, tensors, extras, d_hist, d_c, ctx.needs_input_grad[3:])
        else:
            found = _backward(ctx.form, ctx.path, tensors, extras, kept, d_hist, d_c)
        return None, None, None, *found, *(None for _ in extras)


def _differentiable_gradients(
    form: Form, tensors: Tensors, extras: Tensors, d_hist: Tensor, d_c: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by the reference's own graph, which can be differentiated again."""
    # Views end gradients here, though one tensor may have been made from another.
    tensors = [t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needed)]
    hist, c_n = _reference(form, tensors, Extras(*extras))
    outputs, grads = [hist], [d_hist]
    if d_c is not None:
        outputs, grads = [hist, c_n], [d_hist, d_c]
    wanted = [t for t, need in zip(tensors, needed) if need and t is not None]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need and t is not None else None for t, need in zip(tensors, needed)]


def _present(tensors: Tensors) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _reference(form: Form, tensors: Tensors, extras: Extras) -> tuple[Tensor, Tensor]:
    """What the kernels compute, by ``lamina.reference``: the whole walk of states, and the final c."""
    c, gain, bias, gain_cell, bias_cell = tensors[3:]
    x, weight, h = _present(tensors[:3])
    w = CellWeights(
        weight, weight, None, bias, gain_hh=gain if form.site == "hh" else None,
        gain_sum=gain if form.site == "sum" else None, gain_cell=gain_cell, bias_cell=bias_cell,
    )  # fmt: skip
    state = (h,) if c is None else (h, c)
    call = Recurrence(
        form.cell if form.cell != "DREAMER" else "GRU", x, state, w, "layer", form.placement(), form.eps,
        "std" if form.std else "var", "relu" if form.relu else "tanh", extras.lengths, extras.resets, False,
        (extras.keep_h, extras.keep_c), extras.drop,
    )  # fmt: skip
    norms = SiteNorms("layer", call.placement, w, form.eps, call.eps_mode)
    step = reference._step_function(call, w, norms)
    outputs, final = reference._unroll(step, x, call, None)
    hist = torch.cat([h.float().unsqueeze(0), outputs])
    if extras.lengths is None:
        return hist.to(weight.dtype), final[-1]
    # A case that has ended keeps its state: gather instead of stopping, so that every step has one shape.
    last = torch.arange(hist.shape[0], device=x.device).unsqueeze(1).minimum(extras.lengths.unsqueeze(0))
    hist = hist.gather(0, last.unsqueeze(-1).expand_as(hist))
    if c is None:
        return hist.to(weight.dtype), final[-1]
    stopped = reference._unroll(step, x, call, _valid(replace(call, input=x)))[1]
    return hist.to(weight.dtype), stopped[1]


# Operators take tensors, not None: what is there travels as one list, and its names beside it.


def _named(tensors: Tensors, extras: Tensors) -> tuple[list[Tensor], str]:
    pairs = [(n, t) for n, t in zip((*NAMES, *EXTRAS), (*tensors, *extras)) if t is not None]
    return [t for _, t in pairs], ",".join(n for n, _ in pairs)


def _parted(given: Sequence[Tensor], names: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    by_name = dict(zip(names.split(","), given))
    return [by_name.get(n) for n in NAMES], [by_name.get(n) for n in EXTRAS]


@torch.library.custom_op("lamina::sequence", mutates_args=())
def _sequence(given: Sequence[Tensor], names: str, form: str, path: str, keep: bool) -> list[Tensor]:
    hist, c_n, matrix, *kept = _forward(Form.decode(form), path, *_parted(given, names), keep)
    return [hist, c_n, matrix.clone(), *kept]  # an operator's output may not be its input


@_sequence.register_fake
def _(given: Sequence[Tensor], names: str, form: str, path: str, keep: bool) -> list[Tensor]:
    tensors, _ = _parted(given, names)
    x, weight = _present(tensors[:2])
    shapes = _module(path).shapes(Form.decode(form), x, weight, keep)
    c = (x.shape[1], weight.shape[1]) if tensors[3] is not None else (0,)
    made = [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return [made[0], x.new_empty(c, dtype=torch.float32), torch.empty_like(weight), *made[1:]]


@torch.library.custom_op("lamina::sequence_backward", mutates_args=())
def _sequence_backward(
    given: Sequence[Tensor], kept: Sequence[Tensor], d_hist: Tensor, d_c: Tensor | None, names: str, form: str,
    path: str,
) -> list[Tensor]:  # fmt: skip
    tensors, extras = _parted(given, names)
    found = _backward(Form.decode(form), path, tensors, extras, kept, d_hist, d_c)
    return [g.clone(memory_format=torch.contiguous_format) for g in found if g is not None]


@_sequence_backward.register_fake
def _(given: Sequence[Tensor], kept: Sequence[Tensor], d_hist: Tensor, d_c: Tensor | None, names: str,
      *rest: Any) -> list[Tensor]:  # fmt: skip
    wanted = [t for t in _parted(given, names)[0] if t is not None]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given, ctx.names, ctx.form, ctx.path, _ = inputs
    ctx.count = len(given)
    ctx.save_for_backward(*given, output[0], *output[2:])
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given, kept = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])
    d_hist = torch.zeros_like(kept[0]) if grads[0] is None else grads[0]
    d_c = grads[1] if "c" in ctx.names.split(",") else None
    found = _sequence_backward(given, kept, d_hist, d_c, ctx.names, ctx.form, ctx.path)
    return [*found, *[None] * (ctx.count - len(found))], None, None, None, None


_sequence.register_autograd(_operator_gradients, setup_context=_keep_for_backward)
