"""The cells, placements, shapes and random parameters every test draws from."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import torch

import lamina.placements as placements
from lamina import reference
from lamina.options import parameter_shapes
from lamina.reference import CellWeights, Recurrence

CELLS = ("RNN", "LSTM", "GRU")
LAYER = [(cell, "layer", name) for cell, rows in placements.PLACEMENTS.items() for name in rows]
BATCH = [(cell, "batch", name) for cell, _, name in LAYER]
OTHER = [(cell, norm, None) for cell in CELLS for norm in ("weight", None)]
EVERY = LAYER + BATCH + OTHER
IDS = ["-".join(str(part) for part in row) for row in EVERY]

# 1, primes and 2^k +- 1: (T, B, D, H)
SHAPES = [(1, 1, 1, 2), (5, 3, 7, 11), (4, 1, 2, 17), (3, 5, 9, 15)]


def random_weights(cell, norm, placement, inputs, hidden, proj=0, bias=True, dtype=torch.float64, device="cpu"):
    """Weights with gains around 1 and biases around 0, nothing at its start value."""
    where = placements.resolve(cell, norm, placement)
    shapes = parameter_shapes(cell, inputs, hidden, proj, bias, norm, where)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, dtype=dtype, device=device) * 0.5
        tensors[name] = (1 + value if name.startswith("gain") else value).requires_grad_()
    return CellWeights(**tensors)


def random_state(cell, batch, hidden, proj=0, dtype=torch.float64, device="cpu"):
    widths = (proj or hidden, hidden)[: placements.STATES[cell]]
    return tuple(torch.randn(batch, w, dtype=dtype, device=device, requires_grad=True) for w in widths)


def random_call(cell, norm, placement, shape, proj=0, dtype=torch.float64, device="cpu", **more):
    steps, batch, inputs, hidden = shape
    x = torch.randn(steps, batch, inputs, dtype=dtype, device=device, requires_grad=True)
    weights = random_weights(cell, norm, placement, inputs, hidden, proj, dtype=dtype, device=device)
    state = random_state(cell, batch, hidden, proj, dtype, device)
    if more.get("resets") is not None:  # what a reset goes to is not what the sequence begins with
        more.setdefault("reset_state", random_state(cell, batch, hidden, proj, dtype, device))
    return Recurrence(cell, x, state, weights, norm, placements.resolve(cell, norm, placement), **more)


def leaves(call):
    """Every differentiable tensor of a call, by name."""
    found = {"input": call.input} | dict(zip("hc", call.state))
    if call.resets is not None:
        found |= {k: v for k, v in zip(("reset_h", "reset_c"), call.reset_state) if v is not None}
    return found | {k: v for k, v in call.weights._asdict().items() if v is not None}


def gradients(outputs, inputs):
    """Gradients of random projections of all outputs, the same projections on every call."""
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
    return torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, materialize_grads=True)


def cast(call: Recurrence, dtype: torch.dtype, values: torch.dtype) -> Recurrence:
    """A copy of a call in ``dtype``, its numbers rounded to those of ``values``."""

    def leaf(t):
        return None if t is None else t.detach().to(values).to(dtype).requires_grad_(t.requires_grad)

    def mask(t):
        return t.to(torch.promote_types(dtype, torch.float32)) if isinstance(t, torch.Tensor) else t

    return dataclasses.replace(
        call, input=leaf(call.input), state=tuple(map(leaf, call.state)), weights=CellWeights(*map(leaf, call.weights)),
        reset_state=tuple(map(leaf, call.reset_state)), zoneout=tuple(map(mask, call.zoneout)),
        recurrent_mask=mask(call.recurrent_mask),
    )  # fmt: skip


def everything(call: Recurrence, run) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients by name."""
    result = run(call)
    outputs = [result.output, *result.state]
    named = leaves(call)
    grads = gradients(outputs, list(named.values()))
    return dict(zip(("output", "h_n", "c_n"), outputs)) | {f"d {name}": g for name, g in zip(named, grads)}


def assert_same(got, want, bound=1e-12, names=None):
    """Largest difference relative to the size of what is wanted."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        label = names[index] if names else index
        assert a.shape == b.shape, (label, a.shape, b.shape)
        if a.numel() == 0:
            continue
        error = (a - b).abs().max().item() / max(b.abs().max().item(), 1.0)
        assert error <= bound, f"{label}: {error:.3g} > {bound:.3g}"


class _RoundedProduct(torch.autograd.Function):
    """W x of float32 operands rounded to TF32, there and back.

    cuBLAS uses TF32 only for sizes it likes, so switching it on would not give one precision at every size.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(_tf32(x), _tf32(weight))

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        d = _tf32(d)
        return d @ _tf32(weight), d.flatten(0, -2).t() @ _tf32(x).flatten(0, -2)


def _tf32(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@contextmanager
def rounded_products():
    """The reference's float32 products as a matrix unit forms them; other dtypes as ever."""
    exact = reference.product

    def product(x, weight):
        return _RoundedProduct.apply(x, weight) if weight.dtype == torch.float32 else exact(x, weight)

    reference.product = product
    try:
        yield
    finally:
        reference.product = exact


def without(*packages: str) -> str:
    """Code after which a Python process finds none of these packages, as where they are not installed."""
    return f"""
import sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {packages!r} else super().find_spec(name, path, target)
sys.meta_path = [Finder if f is PathFinder else f for f in sys.meta_path]
"""
