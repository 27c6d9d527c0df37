"""Layer norm with its gradients: the function around ``layer_norm``'s kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference

Given = Tensor | None


def run(
    x: Tensor, shape: Sequence[int], gain: Given, bias: Given, eps: float, eps_mode: str, activation: str | None,
    residual: Given,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """act(LN(x + residual)) over the last axes of ``shape``, and x + residual where there is a residual."""
    width = torch.Size(shape).numel()
    rows = [None if t is None else _rows(t, width) for t in (x, residual)]
    flat = [None if t is None else t.reshape(-1).contiguous() for t in (gain, bias)]
    named = None if activation == "identity" else activation
    out, total = _Norm.apply(*rows, *flat, eps, eps_mode, named)  # type: ignore[no-untyped-call]
    return out.view(x.shape), None if residual is None else total.view(x.shape)


def _rows(t: Tensor, width: int) -> Tensor:
    """[N, W], the numbers of a row side by side; rows may lie apart."""
    rows = t.reshape(-1, width)
    return rows if rows.stride(1) == 1 or width == 1 else rows.contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Given, gain: Given, bias: Given, eps: float, eps_mode: str,
        activation: str | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        from . import layer_norm

        out, z, statistics = layer_norm.forward(x, residual, gain, bias, eps, eps_mode, activation)
        ctx.save_for_backward(z, gain, bias, statistics)
        ctx.form = eps, eps_mode, activation
        ctx.set_materialize_grads(False)
        return out, None if residual is None else z

    @staticmethod
    def backward(ctx: Any, *grads: Given) -> tuple[Any, ...]:
        from . import layer_norm

        z, gain, bias, statistics = ctx.saved_tensors
        d_out, d_total = (None if g is None else g.contiguous() for g in grads)
        if torch.is_grad_enabled():  # asked for with create_graph: these gradients will be differentiated
            d_z, d_gain, d_bias = _differentiable(z, gain, bias, grads, ctx.form)
        elif d_out is None:
            d_z, d_gain, d_bias = d_total, None, None
        else:
            d_z, d_gain, d_bias = layer_norm.backward(d_out, z, gain, bias, statistics, d_total, *ctx.form)
        return d_z, d_z if ctx.needs_input_grad[1] else None, d_gain, d_bias, None, None, None


def _differentiable(z: Tensor, gain: Given, bias: Given, grads: Sequence[Given], form: tuple[Any, ...]) -> list[Given]:
    """The gradients by the reference's own graph."""
    eps, eps_mode, activation = form
    given = [None if t is None else t.view_as(t).requires_grad_() for t in (z, gain, bias)]
    there = [t for t in given if t is not None]
    out = reference.layer_norm(there[0], z.shape[1:], given[1], given[2], eps, eps_mode, activation=activation)
    pairs = [(o, g) for o, g in zip((out, there[0]), grads) if g is not None]
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], there, [g for _, g in pairs], create_graph=True, allow_unused=True)
    )
    return [None if t is None else next(found) for t in given]
