"""Batch-normalised recurrences on a CPU: the autograd function, and the moments of each site.

The reference computes gradients that will be differentiated again, calls under a dispatch mode, and calls that need
gradients of the population's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import reference
from ..checks import batched, watched
from ..reference import Moments, Recurrence, SequenceResult
from .cpu import batch_layer
from .forms import Setting, setting_of
from .fused import OutputVersion, differentiable_gradients, output_of, valid_of
from .given import COUNT, extras_of, tensors_of, zero_unless

SHARE = 2 / 3  # of a part's cases that still have steps where the next part begins
FEWEST = 8  # steps of a part, and at least 2 cases: one alone has no batch statistics
WORTH = 2**24  # multiplications that another part must save


def run(call: Recurrence) -> SequenceResult:
    """Run a batch-normalised recurrence in the CPU's kernels, without the cases that have ended."""
    if watched(call.input) or watched(call.weights.weight_hh) or _learns_moments(call):
        return reference.evaluate(call)
    forward_call = replace(call.forwards(), population=_each_step(call), first_step=0)
    parts = _parts(forward_call)
    result = _run_part(forward_call) if len(parts) == 1 else _run_parts(forward_call, parts)
    if not call.reverse:
        return result
    return result._replace(output=reference.reverse_sequences(result.output, call.lengths))


def _parts(call: Recurrence) -> list[tuple[int, int, int]]:
    """Return the parts of a sequence: first step, end, and how many of the longest cases take part.

    One kernel call multiplies all of its cases at every step, padding included.
    """
    steps, batch = call.input.shape[:2]
    whole, begin, cases = [(0, steps, batch)], 0, batch
    if call.lengths is None:
        return whole
    parts = []
    for step, alive in enumerate(reference.valid_steps(call.lengths, steps).sum(1).tolist()):
        if step - begin >= FEWEST and max(alive, 2) <= SHARE * cases:
            parts.append((begin, step, cases))
            begin, cases = step, max(alive, 2)
    parts.append((begin, steps, cases))
    saved = steps * batch - sum((end - begin) * cases for begin, end, cases in parts)
    width, inputs = call.weights.weight_ih.shape
    pays = saved * width * (inputs + call.weights.weight_hh.shape[1]) >= WORTH * (len(parts) - 1)
    return parts if pays else whole


def _run_parts(call: Recurrence, parts: list[tuple[int, int, int]]) -> SequenceResult:
    """Run the parts one after another; the cases are sorted by length, longest first."""
    lengths = cast(Tensor, call.lengths)
    order = lengths.argsort(descending=True, stable=True)
    back, state, ended, results = order.argsort(), _cases(call.state, order), [], []
    for (begin, end, cases), (*_, following) in zip(parts, [*parts[1:], (0, 0, 0)]):
        part = _part(replace(call, state=_cases(state, slice(cases))), order[:cases], begin, end)
        results.append(_run_part(part))
        ended.append([s[following:] for s in results[-1].state])
        state = _cases(results[-1].state, slice(following))
    missing = [len(order) - cases for *_, cases in parts]
    outputs = [F.pad(result.output, (0, 0, 0, count)) for result, count in zip(results, missing)]
    final = tuple(torch.cat(states[::-1])[back] for states in zip(*ended))
    return SequenceResult(torch.cat(outputs).index_select(1, back), final, _joined([one.moments for one in results]))


def _part(call: Recurrence, rows: Tensor, begin: int, end: int) -> Recurrence:
    """Return some steps of some cases as a call of its own; the state is that of these cases already."""
    steps = slice(begin, end)
    resets, dropped = call.resets, call.recurrent_mask
    masks = (mask[steps].index_select(1, rows) if isinstance(mask, Tensor) else mask for mask in call.zoneout)
    return replace(
        call,
        input=call.input[steps].index_select(1, rows),
        lengths=(cast(Tensor, call.lengths)[rows] - begin).clamp(0, end - begin),
        resets=None if resets is None else resets[steps].index_select(1, rows),
        zoneout=tuple(masks),
        recurrent_mask=None if dropped is None else dropped[rows],
        reset_state=_cases(call.reset_state, rows),
        population=call.population and {k: Moments(*(m[steps] for m in v)) for k, v in call.population.items()},
    )


def _cases(states: tuple[Tensor | None, ...], rows: Tensor | slice) -> tuple[Tensor | None, ...]:
    return tuple(None if state is None else state[rows] for state in states)


def _joined(moments: list[dict[str, Moments]]) -> dict[str, Moments]:
    """Return the moments of all steps from those of the parts."""
    return {site: Moments(*map(torch.cat, zip(*(part[site] for part in moments)))) for site in moments[0]}


def _run_part(call: Recurrence) -> SequenceResult:
    """Run a recurrence forwards in one kernel call for each pass."""
    valid = valid_of(call)
    tensors, extras = tensors_of(call, valid), extras_of(call)
    setting, population = setting_of(call, "cpu"), cast("dict[str, Moments] | None", call.population)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        moments: dict[str, Moments] = {}
        arguments = setting, population, moments, *tensors, *extras
        output, h_n, c_n = _Sequence.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        job = batch_layer.BatchCall(setting, tensors, extras, population, False)
        (hist, h_n, c_n), moments = batch_layer.forward(job, tensors, False)
        output, _ = output_of(hist[1:])
    output = output if valid is None else zero_unless(valid, output)
    return SequenceResult(output, (h_n, c_n)[: len(call.state)], moments)


def _learns_moments(call: Recurrence) -> bool:
    """Return whether a caller of ``functional`` wants gradients of the population's moments."""
    moments = [moment for pair in (call.population or {}).values() for moment in pair]
    return torch.is_grad_enabled() and any(moment.requires_grad for moment in moments)


def _each_step(call: Recurrence) -> dict[str, Moments] | None:
    """Return the population's moments of each step of a call, indexed from 0."""
    if call.population is None:
        return None
    steps, moments = call.input.shape[0], {}
    for site in call.placement.sites():
        # As in the reference, several steps of W_x x are always the first ones.
        begin = 0 if site == "ih" and steps > 1 else call.first_step
        moments[site] = Moments(*(_rows(moment, begin, steps) for moment in call.population[site]))
    return moments


def _rows(stored: Tensor, begin: int, steps: int) -> Tensor:
    """Return the stored rows of some steps; steps past the last stored one take its row."""
    count = stored.shape[0]
    if begin + steps <= count:
        return stored[begin : begin + steps]
    return stored[torch.arange(begin, begin + steps).clamp(max=count - 1)]


class _Sequence(torch.autograd.Function):
    """Autograd function of the outputs [T, B, H], the final h and the final c; fills ``moments`` with the batch's."""

    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        population: Mapping[str, Moments] | None,
        moments: dict[str, Moments],
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.setting, ctx.population = setting, population
        tensors, extras = inputs[:COUNT], inputs[COUNT:]
        ctx.call = batch_layer.BatchCall(setting, tensors, extras, population, True)
        (hist, h_n, c_n, *saved), batch_moments = batch_layer.forward(ctx.call, tensors, True)
        moments.update(batch_moments)
        output, shared = output_of(hist[1:])
        ctx.version = OutputVersion(output) if shared else None
        ctx.save_for_backward(*inputs, hist, *saved)
        if setting.cell != "LSTM":
            ctx.mark_non_differentiable(c_n)
        ctx.set_materialize_grads(False)
        return output, h_n, c_n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        all_saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        tensors, extras, saved = all_saved[:COUNT], all_saved[COUNT:-4], all_saved[-4:]
        grads = grads if ctx.setting.cell == "LSTM" else (*grads[:2], None)
        if torch.is_grad_enabled() or batched(grads):  # with create_graph the gradients will be differentiated
            gradients = differentiable_gradients(
                ctx.setting, tensors, extras, grads, needed[:COUNT], population=ctx.population
            )
        else:
            call = ctx.call.copy()
            if ctx.version is not None and ctx.version.changed():  # the output was changed in place: recompute
                call = batch_layer.BatchCall(ctx.setting, tensors, extras, ctx.population, True)
                (hist, _, _, *others), _ = batch_layer.forward(call, tensors, True)
                saved = [hist, *others]
            gradients = batch_layer.backward(call, tensors, saved, grads, needed)
        return None, None, None, *gradients, *(None for _ in extras)
