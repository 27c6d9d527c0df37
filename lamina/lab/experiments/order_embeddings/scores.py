"""Scores of captions against images, lower is better, and the ranking loss over all negatives in a batch.

order: sum_k max(0, s_k - v_k)^2, the penalty of a caption s that is not below its image v. cosine: minus the cosine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....errors import one_of

KINDS = ("order", "cosine")
# Numbers in one temporary. On a CPU it stays in the L2 cache: loss and gradients of 128 x 128 pairs of 1,024 units take
# 11 ms a core, against 275 ms where autograd keeps all differences (and 4 ms in a loop that numba compiles).
ON_CPU, ON_GPU = 2**18, 2**26


def scores(captions: Tensor, images: Tensor, kind: str) -> Tensor:
    """Return [captions, images]; both are rows of the joint space."""
    one_of("a score", kind, KINDS)
    if kind == "cosine":
        return -captions @ images.T
    return _Penalties.apply(captions, images)  # type: ignore[no-any-return, no-untyped-call]


def ranking_loss(scores: Tensor, margin: float) -> Tensor:
    """Return the hinges of all wrong captions and all wrong images, summed; pair i of the batch belongs together."""
    own = scores.diagonal()
    hinges = (margin - scores + own).clamp(min=0) + (margin - scores + own.unsqueeze(1)).clamp(min=0)
    return hinges.sum() - hinges.diagonal().sum()


class _Penalties(torch.autograd.Function):
    """Order violations with their gradients by hand: autograd would keep several [captions, images, units]."""

    @staticmethod
    def forward(ctx: Any, captions: Tensor, images: Tensor) -> Tensor:
        ctx.save_for_backward(captions, images)
        out = captions.new_empty(len(captions), len(images))
        for rows, columns in _blocks(captions, images):
            out[rows, columns] = _excess(captions[rows], images[columns]).square_().sum(2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        captions, images = ctx.saved_tensors
        d_captions, d_images = torch.zeros_like(captions), torch.zeros_like(images)
        for rows, columns in _blocks(captions, images):
            slopes = _excess(captions[rows], images[columns]).mul_(2 * upstream[rows, columns].unsqueeze(2))
            d_captions[rows] += slopes.sum(1)
            d_images[columns] -= slopes.sum(0)
        return d_captions, d_images


def _excess(captions: Tensor, images: Tensor) -> Tensor:
    return (captions.unsqueeze(1) - images).clamp_(min=0)


def _blocks(captions: Tensor, images: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of pairs whose differences fit in one temporary."""
    numbers = ON_CPU if captions.device.type == "cpu" else ON_GPU
    wide = max(1, min(numbers // max(1, captions.shape[1]), len(images)))
    high = max(1, numbers // (wide * max(1, captions.shape[1])))
    for row in range(0, len(captions), high):
        for column in range(0, len(images), wide):
            yield slice(row, row + high), slice(column, column + wide)
