"""How matrices are multiplied: in their dtype, and float32 as nn.LSTM does, in TF32 unless that is switched off.

TF32 is 11 digits of each factor and float32 sums. float16 has the same 11 digits in half the memory, but a smaller
range. So where TF32 is allowed, the recurrent matrix, h and the gradients travel as float16 times a power of two: one
for the matrix, one for each row of the others. A factor keeps all digits down to 2^-28 of the largest in its row, and
float32 sums are what they were: errors are TF32's, memory and time are float16's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import interpreted
from .switch import Switch

_SWITCH: Any = getattr(torch.backends.cudnn, "rnn")  # noqa: B009  (mypy knows no such name; found once, not a step)


def tf32_wanted() -> bool:
    """float32 products follow the switch that nn.LSTM follows."""
    return str(_SWITCH.fp32_precision) == "tf32"


def precision(dtype: torch.dtype) -> str:
    """How Triton multiplies: three TF32 products where float32 shall be kept."""
    if interpreted():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 and not tf32_wanted() else "tf32"


HALF_WHEN_INTERPRETED = False  # for tests


@dataclass(frozen=True)
class Matrix:
    """The recurrent matrix as products take it, for a model of some dtype."""

    values: Tensor  # [G*H, H]
    dtype: torch.dtype  # the model's
    most: Tensor | None = None  # [1] float32, where values are scaled float16: formulas.fitting(most) has the scale


def halves(dtype: torch.dtype, nonlinearity: str) -> bool:
    """Whether the factors of recurrent products are scaled float16; the h of ReLU has no bound to scale by."""
    if interpreted() and not HALF_WHEN_INTERPRETED:
        return False
    return dtype == torch.float32 and nonlinearity != "relu" and tf32_wanted()


def reach(matrix: Matrix, states: Sequence[Tensor | None], drop: Tensor | None) -> Tensor | None:
    """A bound of each row's h as products see it, [B], where factors are scaled and the bound may not be 1.

    No h is larger than 1 or the given ``states``, the first h and that after a reset: every cell's new h is at most 1,
    or lies between such an h and the old one.
    """
    given = [h for h in states if h is not None]
    if matrix.most is None or (not given and drop is None):
        return None
    bound = torch.ones(1, device=matrix.values.device)
    for h in given:
        bound = torch.maximum(bound, torch.linalg.vector_norm(h, torch.inf, -1, dtype=torch.float32))
    if drop is not None:
        bound = bound * torch.linalg.vector_norm(drop, torch.inf, -1, dtype=torch.float32)
    return bound.contiguous()


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b of matrices or of batches of them, in their dtype; of float16 in float32 where ``out`` is."""
    product: Any = torch.mm if a.dim() == 2 else torch.bmm
    if out is None or out.dtype == a.dtype:
        return product(a, b, out=out)  # type: ignore[no-any-return]
    if a.is_cuda:
        return product(a, b, out_dtype=out.dtype, out=out)  # type: ignore[no-any-return]
    return product(a.to(out.dtype), b.to(out.dtype), out=out)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Product:
    """A product that is still to be formed.

    The gradient of a large matrix is left so: a captured pass would form it in memory of its own and copy it out.
    """

    left: Tensor
    right: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def value(self) -> Tensor:
        with as_cudnn_multiplies(self.dtype):
            return torch.mm(self.left, self.right)

    def add_to(self, total: Tensor) -> None:
        with as_cudnn_multiplies(self.dtype):
            total.addmm_(self.left, self.right)


LATE = 16 * 2**20  # numbers of a product that is worth another launch, and factors that stay until then
# No product is left for later in this thread: for a pass that nobody captures, whose factors had better go.
formed_at_once = Switch()


def matrix_gradient(d: Tensor, x: Tensor) -> Tensor | Product:
    """d' x of all steps and cases, [T, B, .] each; a large one as a product that is still to be formed."""
    found = Product(d.flatten(0, 1).t(), x.flatten(0, 1))
    return found if left_for_later(d.shape[2] * x.shape[2]) else found.value()


def left_for_later(numbers: int) -> bool:
    """Whether a product of so many numbers is."""
    return numbers >= LATE and not formed_at_once


def formed(gradient: Tensor | Product | None) -> Tensor | None:
    return gradient.value() if isinstance(gradient, Product) else gradient


@contextmanager
def as_cudnn_multiplies(dtype: torch.dtype) -> Iterator[None]:
    """torch.mm in float32 follows the switch that nn.LSTM follows.

    ``fp32_precision`` and not ``allow_tf32``: setting the old switch also overwrites float32_matmul_precision, which
    could not be put back as it was.
    """
    matmul: Any = torch.backends.cuda.matmul
    if dtype != torch.float32:
        yield
        return
    before, wanted = matmul.fp32_precision, tf32_wanted()
    if (before == "tf32") == wanted:
        yield
        return
    matmul.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
