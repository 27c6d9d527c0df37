"""The fused recurrence as torch sees it: one function with gradients, from the layer's input to its output.

Eagerly it is an autograd function; under torch.compile a pair of custom operators, which are opaque, know their
output shapes and have gradients. Both make W_x x of all steps (``rows``), centre W_h and walk through the steps
(``launch`` or ``steps``); on a CPU ``cpu`` does all of that. A gradient that is to be differentiated again is taken
through the reference instead.

One function for all of it, because every node, operation and tensor costs the host some 10 us: at short sequences
that would be more than the GPU's own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference import CellWeights, Recurrence, SequenceResult
from . import cpu, launch, passes, replay
from .forms import Extras, Form, Setting, form_of, kept_dtype, setting_of
from .precision import Matrix, Product, as_cudnn_multiplies, formed, matrix_gradient

# The tensors of a call, in the order in which they travel.
NAMES = (
    "input", "h", "c", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "gain_ih", "gain_hh", "gain_sum", "gain_cell",
    "bias_cell",
)  # fmt: skip
EXTRAS = ("lengths", "resets", "keep_h", "keep_c", "drop")
COUNT = len(NAMES)
Tensors = Sequence[Tensor | None]


def run(call: Recurrence, path: str) -> SequenceResult:
    """A recurrence through the kernels; ``kernels.choose`` has made sure that ``path`` serves it."""
    if path == "cell":
        from . import cell

        return cell.run(call)
    turned = _forwards(call)
    valid = _valid(turned)
    tensors, extras = _tensors(turned, valid), _extras(turned)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        names, given = _named(tensors, extras)
        hist, h_n, c_n, *_ = _sequence(given, names, *setting_of(call, path).encode(), path, keep)
        output = hist[1:]
    elif path == "cpu" and not keep:  # an autograd function would cost a short sequence a twentieth of its time
        hist, h_n, c_n = cpu.forward(setting_of(call, path), tensors, extras, False)
        output = hist[1:]
    else:
        output, h_n, c_n = _Sequence.apply(setting_of(call, path), path, keep, *tensors, *extras)  # type: ignore[no-untyped-call]
    if valid is not None:
        output = _zero_unless(valid, output)
    if call.reverse:
        output = reference.reverse_sequences(output, call.lengths)
    return SequenceResult(output, (h_n, c_n)[: len(call.state)], {})


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


def _tensors(call: Recurrence, valid: Tensor | None) -> list[Tensor | None]:
    """The call's tensors in the order of NAMES."""
    x = call.input if valid is None else _zero_unless(valid, call.input)
    w = reference.effective_weights(call)
    where = call.placement
    sites = (where.ih, where.hh, where.sum, where.cell) if call.norm == "layer" else ((),) * 4
    # A gain without a norm to stand behind is not looked at; weight norm has used its own.
    gains = [g if site else None for g, site in zip((w.gain_ih, w.gain_hh, w.gain_sum, w.gain_cell), sites)]
    state = (*call.state, None)[:2]
    found = (x, *state, w.weight_ih, w.weight_hh, w.bias_ih, w.bias_hh, *gains, w.bias_cell)
    return [None if t is None else t.contiguous() for t in found]


def _extras(call: Recurrence) -> list[Tensor | None]:
    """Zoneout as tensors [T, B, H]; a rate is one number, expanded."""
    found: list[Tensor | None] = [call.lengths, call.resets]
    masks = (*call.zoneout[: len(call.state)], None)[:2]
    for mask, hidden in zip(masks, (call.weights.weight_hh.shape[1],) * 2):
        if mask is not None and not isinstance(mask, Tensor):
            dtype = torch.promote_types(call.input.dtype, torch.float32)
            mask = torch.full((), float(mask), dtype=dtype, device=call.input.device)
            mask = mask.expand(*call.input.shape[:2], hidden)
        found.append(mask)
    lengths, resets, keep_h, keep_c = found
    drop = None if call.recurrent_mask is None else call.recurrent_mask.contiguous()
    lengths, resets = (None if t is None else t.contiguous() for t in (lengths, resets))
    return [lengths, resets, keep_h, keep_c, drop]


# What the function does.


def _module(path: str) -> ModuleType:
    """Where ``forward`` and ``backward`` of a path are."""
    if path == "steps":
        from . import steps

        return steps
    return launch


def _input_side(setting: Setting) -> tuple[tuple[int, ...], str]:
    """Which gates of W_x x share statistics, and what is done to it: normed, centred for the norm of the sum, plain."""
    where = setting.where
    if where.sum:
        return where.sum, "centre"
    return (where.ih, "norm") if where.ih else ((form_of(setting).gates,), "plain")


def _outer_biases(form: Form, bias_ih: Tensor | None, bias_hh: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What is added to W_x x beforehand: GRU's recurrent bias cannot be, nor any where the sum is normed."""
    if form.site == "sum":
        return None, None
    return bias_ih, None if form.cell == "GRU" else bias_hh


def _inner_bias(form: Form, bias_ih: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
    """The biases that are added after the recurrent product and its norm."""
    if form.site != "sum":
        return bias_hh if form.cell == "GRU" else None
    return bias_hh if bias_ih is None else bias_ih if bias_hh is None else bias_ih + bias_hh


def _inner(form: Form, tensors: Tensors) -> list[Tensor | None]:
    """gain, bias, gain_cell and bias_cell, as the steps use them; a norm without a gain has a gain of 1."""
    _, _, _, _, matrix, bias_ih, bias_hh, _, gain_hh, gain_sum, gain_cell, bias_cell = tensors
    gain = gain_hh if form.site == "hh" else gain_sum
    rows, hidden = _there(matrix).shape
    gain = _or_ones(gain, rows, matrix) if form.site else None
    gain_cell = _or_ones(gain_cell, hidden, matrix) if form.cell_norm else None
    return [gain, _inner_bias(form, bias_ih, bias_hh), gain_cell, bias_cell]


def _or_ones(gain: Tensor | None, width: int, like: Tensor | None) -> Tensor:
    return torch.ones(width, dtype=torch.float32, device=_there(like).device) if gain is None else gain


def _there(tensor: Tensor | None) -> Tensor:
    """A tensor that every call has."""
    if tensor is None:
        raise TypeError("a recurrence needs its input and its matrices, got None.")
    return tensor


def _forward(setting: Setting, path: str, tensors: Tensors, extras: Tensors, keep: bool) -> list[Tensor]:
    """hist, the final h and c, then what backward needs: W_x x, its statistics, x, W_h and its bound, the path's own.

    W_h is centred where its product is normed, and scaled float16 where it has a bound.
    """
    if path == "cpu":
        return cpu.forward(setting, tensors, extras, keep)
    from . import rows

    form, (groups, mode) = form_of(setting), _input_side(setting)
    x, h, c, weight_ih, weight_hh, bias_ih, bias_hh, gain_ih = tensors[:8]
    x, weight_ih = _there(x), _there(weight_ih)
    with as_cudnn_multiplies(x.dtype):
        summed = torch.nn.functional.linear(x, weight_ih)
    biases = _outer_biases(form, bias_ih, bias_hh)
    prepared, statistics = rows.forward(summed, gain_ih, *biases, groups, mode, setting.eps, setting.eps_mode)
    normed = setting.where.groups(form.site) if form.site else ()
    matrix = rows.matrix(_there(weight_hh), normed, setting.factors == "half")
    extra = Extras(*extras)
    hist, h_n, c_n, *kept = _module(path).forward(form, prepared, matrix, h, c, *_inner(form, tensors), extra, keep)
    most = statistics.new_empty(0) if matrix.most is None else matrix.most
    return [hist, h_n, c_n, summed, statistics, prepared, matrix.values, most, *kept]


def _backward(
    setting: Setting, path: str, tensors: Tensors, extras: Tensors, kept: Sequence[Tensor], grads: Tensors,
    needed: Sequence[bool],
) -> list[Tensor | Product | None]:  # fmt: skip
    """Gradients in the order and the dtypes of ``tensors``; ``grads`` are those of output, h_n and c_n.

    Those of large matrices as products that are still to be formed.
    """
    if path == "cpu":
        return [*cpu.backward(setting, tensors, extras, kept, grads, needed)]
    from . import rows

    form, (groups, mode) = form_of(setting), _input_side(setting)
    x, h, _, weight_ih, _, bias_ih, bias_hh, gain_ih = tensors[:8]
    x, weight_ih = _there(x), _there(weight_ih)
    hist, summed, statistics, prepared, values, most, *rest = kept
    matrix = Matrix(values, hist.dtype, most if most.numel() else None)
    arriving = [None if g is None else g.contiguous() for g in grads]
    found = _module(path).backward(
        form, prepared, matrix, h, *_inner(form, tensors), Extras(*extras), (hist, *rest), *arriving,
        train_matrix=needed[4],
    )  # fmt: skip
    outer = [b for b in _outer_biases(form, bias_ih, bias_hh) if b is not None]
    d_summed, small = rows.backward(
        found["x"], summed, gain_ih, statistics, groups, mode, setting.eps, setting.eps_mode, bool(outer)
    )
    with as_cudnn_multiplies(x.dtype):
        d_input = torch.matmul(d_summed, weight_ih) if needed[0] else None
    d_weight = matrix_gradient(d_summed, x) if needed[3] else None
    before = small[-1] if outer else None
    after = found.get("bias")
    sides = (after, after) if form.site == "sum" else (before, after if form.cell == "GRU" else before)
    given = {
        "input": d_input, "weight_ih": d_weight, "weight_hh": found.get("weight"), "h": found["h"], "c": found.get("c"),
        "bias_ih": sides[0], "bias_hh": sides[1], "gain_ih": small[0] if gain_ih is not None else None,
        "gain_hh": found.get("gain"), "gain_sum": found.get("gain"), "gain_cell": found.get("gain_cell"),
        "bias_cell": found.get("bias_cell"),
    }  # fmt: skip
    return _in_kind(given, tensors)


def _in_kind(given: dict[str, Tensor | Product | None], tensors: Tensors) -> list[Tensor | Product | None]:
    """Gradients in the dtypes of their tensors; one that two tensors share is cast once."""
    cast: dict[tuple[int, torch.dtype], Tensor] = {}
    found: list[Tensor | Product | None] = []
    for name, tensor in zip(NAMES, tensors):
        gradient = given[name]
        if tensor is None or gradient is None or gradient.dtype == tensor.dtype:
            found.append(None if tensor is None else gradient)
            continue
        key = (id(gradient), tensor.dtype)
        if key not in cast:
            cast[key] = _there(formed(gradient)).to(tensor.dtype)
        found.append(cast[key])
    return found


class _Sequence(torch.autograd.Function):
    """Outputs [T, B, H], the final h and the final c."""

    @staticmethod
    def forward(ctx: Any, setting: Setting, path: str, keep: bool, *given: Tensor | None) -> tuple[Tensor, ...]:
        tensors, extras = given[:COUNT], given[COUNT:]
        ctx.setting, ctx.path, ctx.lease, ctx.call = setting, path, None, None
        kept: list[Tensor] = []
        if path == "cpu":
            ctx.call = cpu.prepared(setting, tensors, extras)
        else:
            ctx.lease = passes.lease(setting, path, keep, tensors, extras, _forward)
        if ctx.lease is not None:
            output, h_n, c_n = ctx.lease.space.walk(tensors)
        elif ctx.call is not None:
            hist, h_n, c_n, *kept = cpu.forward(setting, tensors, extras, keep, ctx.call)
            output, kept = hist[1:], [hist, *kept]
        else:
            hist, h_n, c_n, *kept = _forward(setting, path, tensors, extras, keep)
            output, kept = hist[1:], [hist, *kept]
        if keep:
            ctx.save_for_backward(*given, *kept)
        else:
            ctx.lease = None  # what was asked for has been copied out
        if setting.cell != "LSTM":
            ctx.mark_non_differentiable(c_n)
        ctx.set_materialize_grads(False)
        return output, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        last = COUNT + len(EXTRAS)
        tensors, extras, kept = saved[:COUNT], saved[COUNT:last], saved[last:]
        if ctx.setting.cell != "LSTM":
            grads = (*grads[:2], None)
        if torch.is_grad_enabled():  # asked for with create_graph: these gradients will be differentiated
            found = _differentiable_gradients(ctx.setting, tensors, extras, grads, needed)
        elif ctx.lease is not None:
            found = ctx.lease.space.walk_back(tensors, grads, needed[:COUNT], _backward)
        elif ctx.call is not None:
            found = cpu.backward(ctx.setting, tensors, extras, kept, grads, needed, ctx.call)
        else:
            found = list(map(formed, _backward(ctx.setting, ctx.path, tensors, extras, kept, grads, needed)))
        return None, None, None, *found, *(None for _ in extras)


def _differentiable_gradients(
    setting: Setting, tensors: Tensors, extras: Tensors, grads: Tensors, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients by the reference's own graph, which can be differentiated again."""
    # Views end gradients here, though one tensor may have been made from another.
    tensors = [t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needed)]
    result = reference.evaluate(_again(setting, tensors, extras))
    pairs = [(o, g) for o, g in zip((result.output, *result.state), grads) if g is not None]
    wanted = [t for t, need in zip(tensors, needed) if need and t is not None]
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [next(found) if need and t is not None else None for t, need in zip(tensors, needed)]


def _again(setting: Setting, tensors: Tensors, extras: Tensors) -> Recurrence:
    """The call that a setting and its tensors were made from, forwards in time."""
    by_name, (lengths, resets, keep_h, keep_c, drop) = dict(zip(NAMES, tensors)), extras
    state = (by_name["h"], by_name["c"])[: 2 if setting.cell == "LSTM" else 1]
    weights: dict[str, Any] = {name: by_name[name] for name in NAMES[3:]}
    norm = None if setting.norm == "none" else setting.norm
    return Recurrence(
        setting.cell, _there(by_name["input"]), state, CellWeights(**weights), norm, setting.where, setting.eps,
        setting.eps_mode, setting.nonlinearity, lengths, resets, False, (keep_h, keep_c), drop,
    )  # fmt: skip


# Operators take tensors, not None: what is there travels as one list, and its names beside it.


def _named(tensors: Tensors, extras: Tensors) -> tuple[str, list[Tensor]]:
    pairs = [(n, t) for n, t in zip((*NAMES, *EXTRAS), (*tensors, *extras)) if t is not None]
    return ",".join(n for n, _ in pairs), [t for _, t in pairs]


def _parted(given: Sequence[Tensor], names: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    by_name = dict(zip(names.split(","), given))
    return [by_name.get(n) for n in NAMES], [by_name.get(n) for n in EXTRAS]


@torch.library.custom_op("lamina::sequence", mutates_args=())
def _sequence(given: Sequence[Tensor], names: str, setting: str, eps: float, path: str, keep: bool) -> list[Tensor]:
    with replay.off():  # compilers that make graphs of their own would not like what is kept between calls
        found = _forward(Setting.decode(setting, eps), path, *_parted(given, names), keep)
    seen = {id(t) for t in given}
    # An operator's output may be neither its input nor another output.
    return [t.clone() if id(t) in seen or seen.add(id(t)) else t for t in found]  # type: ignore[func-returns-value]


@_sequence.register_fake
def _(given: Sequence[Tensor], names: str, setting: str, eps: float, path: str, keep: bool) -> list[Tensor]:
    from . import rows

    asked = Setting.decode(setting, eps)
    groups, mode = _input_side(asked)
    tensors, _ = _parted(given, names)
    x, weight_ih, weight_hh = (_there(tensors[at]) for at in (0, 3, 4))
    if path == "cpu":
        return [x.new_empty(shape) for shape in cpu.shapes(asked, x, weight_hh, keep)]
    summed = x.new_empty((*x.shape[:2], weight_ih.shape[0]))
    prepared = torch.empty_like(summed, dtype=kept_dtype(summed.dtype, weight_hh.shape[1]))
    statistics = x.new_empty(rows.statistics_shape(summed, groups, mode), dtype=torch.float32)
    shapes = _module(path).shapes(form_of(asked), prepared, weight_hh.dtype, keep)
    made = [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    half = asked.factors == "half"
    values = torch.empty_like(weight_hh, dtype=torch.float16 if half else None)
    most = statistics.new_empty(1 if half else 0)
    return [*made[:3], summed, statistics, prepared, values, most, *made[3:]]


@torch.library.custom_op("lamina::sequence_backward", mutates_args=())
def _sequence_backward(
    given: Sequence[Tensor], kept: Sequence[Tensor], grads: Sequence[Tensor], names: str, setting: str, eps: float,
    path: str,
) -> list[Tensor]:  # fmt: skip
    tensors, extras = _parted(given, names)
    asked = Setting.decode(setting, eps)
    arriving = (*grads, None)[:3] if asked.cell != "LSTM" else grads
    with replay.off():
        found = list(map(formed, _backward(asked, path, tensors, extras, kept, arriving, [True] * COUNT)))
    # One gradient may serve two tensors, and an operator's outputs may not be one another's.
    return [g.clone(memory_format=torch.contiguous_format) for g in found if g is not None]


@_sequence_backward.register_fake
def _(given: Sequence[Tensor], kept: Sequence[Tensor], grads: Sequence[Tensor], names: str, *rest: Any) -> list[Tensor]:
    wanted = [t for t in _parted(given, names)[0] if t is not None]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given, ctx.names, ctx.setting, ctx.eps, ctx.path, _ = inputs
    ctx.count = len(given)
    ctx.save_for_backward(*given, output[0], *output[3:])
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    given, kept = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])
    lstm = Setting.decode(ctx.setting, ctx.eps).cell == "LSTM"
    like = (kept[0], kept[0][0], kept[0][0])[: 3 if lstm else 2]
    d_hist, *others = (torch.zeros_like(t) if g is None else g for g, t in zip(grads, like))
    arriving = [d_hist[1:].contiguous(), *others]
    found = _sequence_backward(given, kept, arriving, ctx.names, ctx.setting, ctx.eps, ctx.path)
    return [*found, *[None] * (ctx.count - len(found))], None, None, None, None, None


_sequence.register_autograd(_operator_gradients, setup_context=_keep_for_backward)
