"""Batch-normalised recurrences on a CPU: the autograd function, and the moments of each site.

The reference computes gradients that will be differentiated again, calls under a dispatch mode, and calls that need
gradients of the population's moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..checks import batched, watched
from ..reference import Moments, Recurrence, SequenceResult
from .cpu import batch_layer
from .forms import Setting, setting_of
from .fused import OutputVersion, differentiable_gradients, output_of, valid_of
from .given import COUNT, extras_of, tensors_of, zero_unless


def run(call: Recurrence) -> SequenceResult:
    """Run a batch-normalised recurrence in the CPU's kernels."""
    if watched(call.input) or watched(call.weights.weight_hh) or _learns_moments(call):
        return reference.evaluate(call)
    forward_call = call.forwards()
    valid = valid_of(forward_call)
    tensors, extras = tensors_of(forward_call, valid), extras_of(forward_call)
    setting, population = setting_of(call, "cpu"), _each_step(call)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        moments: dict[str, Moments] = {}
        arguments = setting, population, moments, *tensors, *extras
        output, h_n, c_n = _Sequence.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        job = batch_layer.BatchCall(setting, tensors, extras, population, False)
        (hist, h_n, c_n), moments = batch_layer.forward(job, tensors, False)
        output, _ = output_of(hist[1:])
    output = output if valid is None else zero_unless(valid, output)
    output = reference.reverse_sequences(output, call.lengths) if call.reverse else output
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
