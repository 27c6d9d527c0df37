"""The fused recurrence as torch sees it: one function with gradients, from the layer's input to its output.

Eagerly it is an autograd function; under torch.compile, or where a mode watches, a pair of custom operators, which are
opaque, know their output shapes and have gradients. What both do is ``walk``'s, or ``recompute``'s where little is to
be kept. A gradient that is to be differentiated again is taken through the reference instead.

One function for all of it, because every node, operation and tensor costs the host some 10 us: at short sequences
that would be more than the GPU's own time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import notices, reference
from ..checks import batched, watched
from ..reference import CellWeights, Moments, Recurrence, SequenceResult
from . import CPU_DTYPES, NO_NUMBA, interpreted, missing_numba, missing_triton, passes, recompute, replay, walk
from .cpu import layer as cpu
from .forms import Setting, form_of, kept_dtype, setting_of, statistics_shape
from .given import COUNT, EXTRAS, NAMES, STEP, Tensors, extras_of, tensors_of, there, zero_unless
from .precision import formed, formed_at_once


def run(call: Recurrence, path: str) -> SequenceResult:
    """A recurrence through the kernels; ``kernels.choose`` has made sure that ``path`` serves it."""
    if path == "cell":
        from . import cell

        return cell.run(call)
    if call.norm == "batch":
        from . import batch_normed

        return batch_normed.run(call)
    turned = call.forwards()
    valid = None if path == "cpu" else valid_of(turned)  # a CPU's kernels read no padding and write zeros there
    tensors, extras = tensors_of(turned, valid), extras_of(turned)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling() or watched(call.input) or watched(call.weights.weight_hh):
        names, given = _named(tensors, extras)
        hist, h_n, c_n, *_ = _sequence(given, names, *setting_of(call, path).encode(), path, train)
        output = hist[1:]
    elif path == "cpu" and not train:  # an autograd function would cost a short sequence a twentieth of its time
        hist, h_n, c_n = cpu.forward(setting_of(call, path), tensors, extras, walk.NOTHING)
        output, _ = output_of(hist[1:])
    else:
        keep = walk.NOTHING if not train else walk.STATES if call.recompute else walk.ALL
        output, h_n, c_n = _Sequence.apply(setting_of(call, path), path, keep, *tensors, *extras)  # type: ignore[no-untyped-call]
    if valid is not None:
        output = zero_unless(valid, output)
    if call.reverse:
        output = reference.reverse_sequences(output, call.lengths)
    return SequenceResult(output, (h_n, c_n)[: len(call.state)], {})


def run_together(calls: Sequence[Recurrence], path: str) -> list[SequenceResult]:
    """Recurrences that differ in their numbers only, such as the directions of a layer, in common launches."""
    first = calls[0]
    if watched(first.input) or watched(first.weights.weight_hh) or not _alike(calls):
        return [run(call, path) for call in calls]
    turned = [call.forwards() for call in calls]
    valid = valid_of(turned[0])
    tensors = [t for call in turned for t in tensors_of(call, valid)]
    extras = [t for call in turned for t in extras_of(call)]
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep = walk.ALL if train else walk.NOTHING
    found = _Sequence.apply(setting_of(first, path), path, keep, *tensors, *extras)  # type: ignore[no-untyped-call]
    results = []
    for call, output, *state in zip(calls, *(t.unbind() for t in found)):
        output = output if valid is None else zero_unless(valid, output)
        output = reference.reverse_sequences(output, call.lengths) if call.reverse else output
        results.append(SequenceResult(output, tuple(state[: len(call.state)]), {}))
    return results


def run_stack(calls: Sequence[Recurrence], masks: Sequence[Tensor | None]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Layers one above another: the output of the uppermost and the final states of all.

    The inputs of all calls but the first are not looked at: they are outputs of the layers below, times their mask.
    """
    calls = [call.forwards() for call in calls]
    first = calls[0]
    valid = valid_of(first)
    tensors = tensors_of(first, valid)
    for call, mask in zip(calls[1:], masks, strict=True):
        little = replace(call, input=call.input[:1, :1])  # nothing of its size is made
        tensors += [None if mask is None else mask.contiguous(), *tensors_of(little, None)[1:]]
    extras = [t for call in calls for t in extras_of(call)]
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    keep = walk.ALL if train else walk.NOTHING
    found = _Sequence.apply(setting_of(first, "stack"), "stack", keep, *tensors, *extras)  # type: ignore[no-untyped-call]
    output, *states = found if first.cell == "LSTM" else found[:2]
    output = output if valid is None else zero_unless(valid, output)
    return output, [*zip(*(state.unbind() for state in states))]


def _alike(calls: Sequence[Recurrence]) -> bool:
    """Whether calls have the same tensors, of the same shapes but for the inputs' widths."""

    def kinds(call: Recurrence) -> list[Any]:
        tensors = [*call.state, *call.reset_state, *call.weights[1:], call.lengths, call.resets, *call.zoneout]
        tensors.append(call.recurrent_mask)
        known = [(t.shape, t.dtype) if isinstance(t, Tensor) else t is None for t in tensors]
        return [setting_of(call), call.input.shape[:2], *known]

    return all(kinds(call) == kinds(calls[0]) for call in calls[1:])


def cpu_step_of(setting: Setting, tensors: Tensors) -> Callable[..., tuple[Tensor, ...]]:
    """The step on a CPU of cells with tensors like these."""
    from .cpu import cell as cpu_cell

    return cpu_cell.Step(setting, tensors) if cpu_cell.serves(tensors) else partial(cpu_step, setting)


def cpu_step(setting: Setting, x: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
    """The new state after one step on a CPU: of x [B, D] and what ``cell.step`` takes."""
    tensors = [x.unsqueeze(0), *given[: STEP - 1], *[None] * (COUNT - STEP)]
    extras: Tensors = [None] * len(EXTRAS)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        _, h, c = _Sequence.apply(setting, "cpu", walk.ALL, *tensors, *extras)  # type: ignore[no-untyped-call]
    else:
        _, h, c = cpu.forward(setting, tensors, extras, walk.NOTHING)
    return (h, c) if setting.cell == "LSTM" else (h,)


def valid_of(call: Recurrence) -> Tensor | None:
    """[T, B, 1]: where a case still has steps."""
    return None if call.lengths is None else reference.valid_steps(call.lengths, call.input.shape[0]).unsqueeze(-1)


EACH = COUNT + len(EXTRAS)  # tensors of one recurrence
COPIED = 2**12  # numbers of a CPU's output up to which a copy takes the host no longer than sharing memory


class _Sequence(torch.autograd.Function):
    """Outputs [T, B, H], the final h and the final c; of several recurrences with an axis before.

    It is given the tensors of all of them, then the extras of all of them.
    """

    @staticmethod
    def forward(ctx: Any, setting: Setting, path: str, keep: str, *given: Tensor | None) -> tuple[Tensor, ...]:
        sides = len(given) // EACH
        tensors, extras = given[: COUNT * sides], given[COUNT * sides :]
        ctx.setting, ctx.path, ctx.keep, ctx.lease, ctx.call = setting, path, keep, None, None
        ctx.sides, ctx.version, walker = sides, None, _walker(path, sides)
        kept: list[Tensor] = []
        if path == "cpu" and keep != walk.STATES:
            ctx.call = cpu.prepared(setting, tensors, extras)
        elif keep != walk.STATES:
            ctx.lease = passes.lease(setting, path, keep, tensors, extras, walker)
        if ctx.lease is not None:
            output, h_n, c_n = ctx.lease.space.walk(tensors, extras)
        else:
            hist, h_n, c_n, *kept = _states(ctx, tensors, extras, ctx.call)
            output, shared = output_of(walker.output(hist))
            ctx.version = OutputVersion(output) if shared and keep != walk.NOTHING else None
            kept = [hist, *kept]
        if keep != walk.NOTHING:
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
        count, last = COUNT * ctx.sides, EACH * ctx.sides
        tensors, extras, kept = saved[:count], saved[count:last], saved[last:]
        if ctx.setting.cell != "LSTM":
            grads = (*grads[:2], None)
        plain = torch.is_grad_enabled() or batched(grads)  # with create_graph the gradients will be differentiated
        if ctx.version is not None and ctx.version.changed() and not plain:
            hist, _, _, *others = _states(ctx, tensors, extras, ctx.call and ctx.call.copy())
            kept = [hist, *others]
        if plain:
            found = differentiable_gradients(ctx.setting, tensors, extras, grads, needed[:count], ctx.path)
        elif ctx.lease is not None:
            found = ctx.lease.space.walk_back(tensors, grads, needed[:count])
        elif ctx.keep == walk.STATES:
            found = recompute.backward(ctx.setting, ctx.path, tensors, extras, kept, grads, needed)
        elif ctx.call is not None:
            found = cpu.backward(ctx.setting, tensors, extras, kept, grads, needed, ctx.call)
        else:
            back = _walker(ctx.path, ctx.sides).backward
            with formed_at_once():
                found = back(ctx.setting, ctx.path, tensors, extras, kept, grads, needed[:count])
        return None, None, None, *found, *(None for _ in extras)


def _states(ctx: Any, tensors: Tensors, extras: Tensors, call: cpu.Call | None) -> list[Tensor]:
    """Run the kernels forward: all states, the final h and c, and what backward needs besides."""
    if ctx.keep == walk.STATES:
        return recompute.forward(ctx.setting, ctx.path, tensors, extras)
    if call is not None:
        return cpu.forward(ctx.setting, tensors, extras, ctx.keep, call)
    found: list[Tensor] = _walker(ctx.path, ctx.sides).forward(ctx.setting, ctx.path, tensors, extras, ctx.keep)
    return found


def output_of(view: Tensor) -> tuple[Tensor, bool]:
    """Return an output that may change in place, not a view to autograd, and whether it shares the states' memory."""
    if view.numel() <= COPIED and not view.is_cuda:
        return view.clone(), False
    shape, stride = view.shape, view.stride()
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), shape, stride), True


class OutputVersion:
    """Detects in-place changes of an output, whose memory backward reads, without keeping that memory alive.

    The detached tensor shares the output's version counter; its data are replaced by an empty tensor.
    """

    def __init__(self, output: Tensor) -> None:
        self._counter = output.detach()
        self._counter.data = _empty(output.dtype, output.device)
        self._first = output._version

    def changed(self) -> bool:
        return self._counter._version != self._first


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def _walker(path: str, count: int) -> ModuleType:
    """Where ``forward`` and ``backward`` of one recurrence are, or of several beside or above one another."""
    if count == 1:
        return walk
    from . import sides, wavefront  # need Triton

    return wavefront if path == "stack" else sides


def differentiable_gradients(
    setting: Setting,
    tensors: Tensors,
    extras: Tensors,
    grads: Tensors,
    needed: Sequence[bool],
    path: str = "",
    population: Mapping[str, Moments] | None = None,
) -> list[Tensor | None]:
    """The gradients by the reference's own graph, which can be differentiated again and serves batches of them."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views end gradients here, though one tensor may have been made from another.
        tensors = [t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needed)]
        outputs = _outputs_again(setting, tensors, extras, path, population)
    pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None and o is not None]
    wanted = [t for t, need in zip(tensors, needed) if need and t is not None]
    ends, arriving = [o for o, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(ends, wanted, arriving, create_graph=again, allow_unused=True))
    return [next(found) if need and t is not None else None for t, need in zip(tensors, needed)]


def _outputs_again(
    setting: Setting, tensors: Tensors, extras: Tensors, path: str, population: Mapping[str, Moments] | None
) -> Sequence[Tensor | None]:
    """Output, final h and c by the reference: of one recurrence, of several, or of layers one above another."""
    if len(tensors) == COUNT:
        result = reference.evaluate(replace(recurrence_of(setting, tensors, extras), population=population))
        return result.output, *result.state
    results: list[SequenceResult] = []
    for own, others in zip(_by(tensors, COUNT), _by(extras, len(EXTRAS))):
        if path == "stack" and results:  # what stands for the input is a mask of it
            below = results[-1].output
            own = [below if own[0] is None else (below * own[0]).to(below.dtype), *own[1:]]
        results.append(reference.evaluate(recurrence_of(setting, own, others)))
    states = [torch.stack(kind) for kind in zip(*(result.state for result in results))]
    return results[-1].output if path == "stack" else torch.stack([r.output for r in results]), *states


def _by(given: Tensors, size: int) -> list[list[Tensor | None]]:
    return [list(given[at : at + size]) for at in range(0, len(given), size)]


def recurrence_of(setting: Setting, tensors: Tensors, extras: Tensors) -> Recurrence:
    """The call that a setting and its tensors were made from, forwards in time."""
    by_name, (lengths, resets, keep_h, keep_c, drop) = dict(zip(NAMES, tensors)), extras
    count = 2 if setting.cell == "LSTM" else 1
    state, anew = ((by_name[h], by_name[c])[:count] for h, c in (("h", "c"), NAMES[STEP:]))
    weights: dict[str, Any] = {name: by_name[name] for name in NAMES[3:STEP]}
    norm, x = None if setting.norm == "none" else setting.norm, there(by_name["input"])
    if lengths is not None:
        x = zero_unless(reference.valid_steps(lengths, x.shape[0]).unsqueeze(-1), x)
    return Recurrence(
        setting.cell, x, state, CellWeights(**weights), norm, setting.where, setting.eps,
        setting.eps_mode, setting.nonlinearity, lengths, resets, False, (keep_h, keep_c), drop, reset_state=anew,
    )  # fmt: skip


# Operators take tensors, not None: what is there travels as one list, and its names beside it.


def _named(tensors: Tensors, extras: Tensors) -> tuple[str, list[Tensor]]:
    pairs = [(n, t) for n, t in zip((*NAMES, *EXTRAS), (*tensors, *extras)) if t is not None]
    return ",".join(n for n, _ in pairs), [t for _, t in pairs]


def _parted(given: Sequence[Tensor], names: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    by_name = dict(zip(names.split(","), given))
    return [by_name.get(n) for n in NAMES], [by_name.get(n) for n in EXTRAS]


def _serves(path: str, x: Tensor) -> bool:
    """Whether a path's kernels run here: a saved program may come from another machine."""
    if path == "cpu":
        return x.device.type == "cpu" and x.dtype in CPU_DTYPES and not missing_numba()
    return (x.is_cuda or interpreted()) and not missing_triton()


def _by_reference(setting: Setting, path: str, tensors: Tensors, extras: Tensors, keep: str) -> list[Tensor]:
    """``walk.forward`` by the reference, with empty tensors as what backward is left."""
    if path == "cpu" and missing_numba() == NO_NUMBA:
        notices.warn("numba")
    x, first, weight_hh = there(tensors[0]), tensors[1], there(tensors[4])
    result = reference.evaluate(recurrence_of(setting, tensors, extras))
    h_n, c_n = (*result.state, x.new_empty(0))[:2]
    first = h_n.new_zeros(h_n.shape) if first is None else first
    shapes = cpu.shapes(setting, x, weight_hh, keep in walk.WHOLE)[3:] if path == "cpu" else []
    return [torch.cat([first.unsqueeze(0), result.output]), h_n, c_n, *(x.new_empty(shape) for shape in shapes)]


def _gradients_by_reference(setting: Setting, tensors: Tensors, extras: Tensors, grads: Tensors) -> list[Tensor | None]:
    """``walk.backward`` by the reference."""
    # A custom operator runs below autograd: recording has to be let in again.
    autograd = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with autograd, torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        found = differentiable_gradients(setting, leaves, extras, grads, [True] * COUNT)
    return [None if t is None else torch.zeros_like(t) if g is None else g.detach() for g, t in zip(found, tensors)]


@torch.library.custom_op("lamina::sequence", mutates_args=())
def _sequence(given: Sequence[Tensor], names: str, setting: str, eps: float, path: str, keep: bool) -> list[Tensor]:
    with replay.off():  # compilers that make graphs of their own would not like what is kept between calls
        asked, forward = Setting.decode(setting, eps), walk.forward if _serves(path, given[0]) else _by_reference
        found = forward(asked, path, *_parted(given, names), walk.ALL if keep else walk.NOTHING)
    seen = {id(t) for t in given}
    # An operator's output may be neither its input nor another output.
    return [t.clone() if id(t) in seen or seen.add(id(t)) else t for t in found]  # type: ignore[func-returns-value]


@_sequence.register_fake
def _(given: Sequence[Tensor], names: str, setting: str, eps: float, path: str, keep: bool) -> list[Tensor]:
    asked = Setting.decode(setting, eps)
    groups, mode = walk.input_side(asked)
    tensors, _ = _parted(given, names)
    x, weight_ih, weight_hh = (there(tensors[at]) for at in (0, 3, 4))
    if path == "cpu":
        return [x.new_empty(shape) for shape in cpu.shapes(asked, x, weight_hh, keep)]
    summed = x.new_empty((*x.shape[:2], weight_ih.shape[0]))
    prepared = torch.empty_like(summed, dtype=kept_dtype(summed.dtype, weight_hh.shape[1]))
    statistics = x.new_empty(statistics_shape(summed, groups, mode), dtype=torch.float32)
    shapes = walk.module(path).shapes(form_of(asked), prepared, weight_hh.dtype, keep)
    made = [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    half = asked.factors == "half"
    values = torch.empty_like(weight_hh, dtype=torch.float16 if half else None)
    most = statistics.new_empty(1 if half else 0)
    kept = walk.kept_sides(asked, summed, prepared, walk.ALL if keep else walk.NOTHING, path)
    return [*made[:3], kept[0], statistics, kept[1], values, most, *made[3:]]


@torch.library.custom_op("lamina::sequence_backward", mutates_args=())
def _sequence_backward(
    given: Sequence[Tensor], kept: Sequence[Tensor], grads: Sequence[Tensor], names: str, setting: str, eps: float,
    path: str,
) -> list[Tensor]:  # fmt: skip
    tensors, extras = _parted(given, names)
    asked = Setting.decode(setting, eps)
    arriving = (*grads, None)[:3] if asked.cell != "LSTM" else grads
    if _serves(path, given[0]):
        with replay.off():
            found = list(map(formed, walk.backward(asked, path, tensors, extras, kept, arriving, [True] * COUNT)))
    else:
        found = _gradients_by_reference(asked, tensors, extras, arriving)
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
    saved = list(ctx.saved_tensors)  # once: torch.utils.checkpoint lets each tensor be unpacked a single time
    given, kept = saved[: ctx.count], saved[ctx.count :]
    lstm = Setting.decode(ctx.setting, ctx.eps).cell == "LSTM"
    like = (kept[0], kept[0][0], kept[0][0])[: 3 if lstm else 2]
    d_hist, *others = (torch.zeros_like(t) if g is None else g for g, t in zip(grads, like))
    arriving = [d_hist[1:].contiguous(), *others]
    found = _sequence_backward(given, kept, arriving, ctx.names, ctx.setting, ctx.eps, ctx.path)
    return [*found, *[None] * (ctx.count - len(found))], None, None, None, None, None


_sequence.register_autograd(_operator_gradients, setup_context=_keep_for_backward)
