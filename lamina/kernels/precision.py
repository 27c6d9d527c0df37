"""float32 products: in TF32 where nn.LSTM would take it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import interpreted


def tf32_wanted() -> bool:
    """float32 products follow the switch that nn.LSTM follows."""
    return str(getattr(torch.backends.cudnn, "rnn").fp32_precision) == "tf32"  # noqa: B009  (mypy knows no such name)


def precision(dtype: torch.dtype) -> str:
    """How Triton multiplies: three TF32 products where float32 shall be kept."""
    if interpreted():
        return "ieee"
    return "tf32x3" if dtype == torch.float32 and not tf32_wanted() else "tf32"


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
