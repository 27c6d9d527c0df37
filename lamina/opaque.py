"""Recurrence as one opaque operator for compilers and exporters.

``torch.compile`` and ``torch.export`` would otherwise unroll every step into their graph (minutes of compilation at
T = 1000, and a new graph for each T). The operator's backward recomputes the reference with autograd enabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .placements import GATES, PLACEMENTS, PLAIN, STATES, Placement
from .reference import CellWeights, Moments, Recurrence, SequenceResult, evaluate, statistics_dtype

# The operator takes its tensors as one flat list; the comma-separated `names` identify them.
_STATES = ("reset_h", "reset_c")
_DIFFERENTIABLE = ("input", "h", "c", *_STATES, *CellWeights._fields)


def run(call: Recurrence) -> SequenceResult:
    """Run ``reference.evaluate`` through the opaque operator."""
    names, tensors = _flatten(call)
    rates = [0.0 if z is None or isinstance(z, Tensor) else float(z) for z in call.zoneout]
    flat = _recurrence(
        tensors, ",".join(names), call.cell, call.norm or "none", call.placement.name,
        call.eps, call.eps_mode, call.nonlinearity, call.reverse, rates, call.first_step,
    )  # fmt: skip
    return _result(flat, call)


def _flatten(call: Recurrence) -> tuple[list[str], list[Tensor]]:
    named: list[tuple[str, Tensor | None]] = [("input", call.input)]
    named += list(zip("hc", call.state))
    named += list(zip(_STATES, call.reset_state))
    named += list(call.weights._asdict().items())
    named += [("lengths", call.lengths), ("resets", call.resets), ("recurrent_mask", call.recurrent_mask)]
    named += [(f"zoneout{k}", z if isinstance(z, Tensor) else None) for k, z in enumerate(call.zoneout)]
    for site, moments in (call.population or {}).items():
        named += [(f"mean:{site}", moments.mean), (f"var:{site}", moments.var)]
    present = [(name, tensor) for name, tensor in named if tensor is not None]
    return [name for name, _ in present], [tensor for _, tensor in present]


def _rebuild(
    tensors: Sequence[Tensor], names: str, cell: str, norm: str, placement: str,
    eps: float, eps_mode: str, nonlinearity: str, reverse: bool, rates: Sequence[float], first_step: int,
) -> Recurrence:  # fmt: skip
    by_name = dict(zip(names.split(","), tensors))
    sites = [name.removeprefix("mean:") for name in by_name if name.startswith("mean:")]
    population = {site: Moments(by_name[f"mean:{site}"], by_name[f"var:{site}"]) for site in sites}
    where: Placement = PLAIN if placement == "none" else PLACEMENTS[cell][placement]
    return Recurrence(
        cell, by_name["input"], tuple(by_name.get(s) for s in "hc"[: STATES[cell]]),
        CellWeights(**{f: by_name[f] for f in CellWeights._fields if f in by_name}),
        None if norm == "none" else norm, where, eps, eps_mode, nonlinearity,
        by_name.get("lengths"), by_name.get("resets"), reverse,
        tuple(by_name.get(f"zoneout{k}", rate or None) for k, rate in enumerate(rates)),
        by_name.get("recurrent_mask"), population or None, first_step,
        reset_state=tuple(by_name.get(s) for s in _STATES[: STATES[cell]]),
    )  # fmt: skip


def _moment_sites(call: Recurrence) -> tuple[str, ...]:
    return call.placement.sites() if call.norm == "batch" and call.population is None else ()


def _result(flat: Sequence[Tensor], call: Recurrence) -> SequenceResult:
    last = 1 + STATES[call.cell]
    pairs = zip(flat[last::2], flat[last + 1 :: 2])
    moments = {site: Moments(mean, var) for site, (mean, var) in zip(_moment_sites(call), pairs)}
    return SequenceResult(flat[0], tuple(flat[1:last]), moments)


def _outputs(call: Recurrence) -> list[Tensor]:
    result = evaluate(call)
    moments = [m for site in _moment_sites(call) for m in result.moments[site]]
    return [result.output, *result.state, *moments]


@torch.library.custom_op("lamina::recurrence", mutates_args=())
def _recurrence(
    tensors: Sequence[Tensor], names: str, cell: str, norm: str, placement: str,
    eps: float, eps_mode: str, nonlinearity: str, reverse: bool, rates: Sequence[float], first_step: int,
) -> list[Tensor]:  # fmt: skip
    call = _rebuild(tensors, names, cell, norm, placement, eps, eps_mode, nonlinearity, reverse, rates, first_step)
    return [t.contiguous().clone() for t in _outputs(call)]


@_recurrence.register_fake
def _(*arguments: Any) -> list[Tensor]:
    call = _rebuild(*arguments)
    x, gates = call.input, GATES[call.cell]
    outputs = [x.new_empty((x.shape[0], *call.state_shapes()[0]))]
    outputs += [x.new_empty(shape) for shape in call.state_shapes()]
    for site in _moment_sites(call):
        width = call.weights.weight_ih.shape[0] // (gates if site == "cell" else 1)
        outputs += [x.new_empty((x.shape[0], width), dtype=statistics_dtype(x.dtype)) for _ in range(2)]
    return outputs


@torch.library.custom_op("lamina::recurrence_backward", mutates_args=())
def _recurrence_backward(
    grads: Sequence[Tensor], tensors: Sequence[Tensor], names: str, cell: str, norm: str, placement: str,
    eps: float, eps_mode: str, nonlinearity: str, reverse: bool, rates: Sequence[float], first_step: int,
) -> list[Tensor]:  # fmt: skip
    # Custom ops run below the autograd dispatch key, which must be re-enabled for the recomputation.
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        differentiable = [name in _DIFFERENTIABLE for name in names.split(",")]
        leaves = [t.detach().requires_grad_(d) for t, d in zip(tensors, differentiable)]
        call = _rebuild(leaves, names, cell, norm, placement, eps, eps_mode, nonlinearity, reverse, rates, first_step)
        outputs = _outputs(call)[: len(grads)]
        inputs = [leaf for leaf, d in zip(leaves, differentiable) if d]
        input_grads = torch.autograd.grad(outputs, inputs, list(grads), allow_unused=True, materialize_grads=True)
    return [g.contiguous().clone() for g in input_grads]


@_recurrence_backward.register_fake
def _(grads: Sequence[Tensor], tensors: Sequence[Tensor], names: str, *rest: object) -> list[Tensor]:
    differentiable = [name in _DIFFERENTIABLE for name in names.split(",")]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t, d in zip(tensors, differentiable) if d]


def _setup_context(ctx: object, inputs: tuple[object, ...], output: object) -> None:
    tensors, *rest = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[attr-defined,misc]
    ctx.rest = rest  # type: ignore[attr-defined]


def _backward(ctx: object, grads: Sequence[Tensor]) -> tuple[object, ...]:
    rest = ctx.rest  # type: ignore[attr-defined]
    names, cell = rest[0].split(","), rest[1]
    used = [g.contiguous() for g in grads[: 1 + STATES[cell]]]
    input_grads = iter(_recurrence_backward(used, list(ctx.saved_tensors), *rest))  # type: ignore[attr-defined]
    return [next(input_grads) if name in _DIFFERENTIABLE else None for name in names], *(None for _ in rest)


_recurrence.register_autograd(_backward, setup_context=_setup_context)
