"""Losses of words under a large softmax, formed in chunks of rows: no logits are kept for the backward pass.

Gradients come in the same pass as the loss. Both are exact; ``sampled_loss`` is an estimate, and an option by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....errors import fail

# Logits in memory at once: 2**20 take 4 MB
ON_CPU, ON_GPU = 2**20, 2**26


def chunked_loss(states: Tensor, weight: Tensor, bias: Tensor, words: Tensor, floor: float = 0.0) -> Tensor:
    """Return -sum_n log(P(word n) + floor), with P = softmax(weight h_n + bias).

    Arithmetic is float32 or float64, under autocast too. A second backward pass is refused: gradients are not kept.

    Args:
        states: h_n, [N, units].
        weight: [words, units].
        bias: [words].
        words: ids, [N].
        floor: added to each probability, as in the authors' code.
    """
    return _ChunkedLoss.apply(states, weight, bias, words, floor)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def word_losses(states: Tensor, weight: Tensor, bias: Tensor, words: Tensor) -> Tensor:
    """Return -log P(word n), [N]; without gradients."""
    losses = torch.empty_like(words, dtype=weight.dtype)
    for rows in _chunks(states, weight):
        losses[rows] = F.cross_entropy(F.linear(states[rows], weight, bias), words[rows], reduction="none")
    return losses


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients of one chunk of logits after another."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor, words: Tensor, floor: float) -> Tensor:
        ctx.dtype, h = states.dtype, states.to(weight.dtype)
        d_states, d_weight, d_bias = torch.empty_like(h), torch.zeros_like(weight), torch.zeros_like(bias)
        ctx.gradients = d_states, d_weight, d_bias
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            for rows in _chunks(h, weight):
                loss, slopes = _loss_and_slopes(torch.addmm(bias, h[rows], weight.T), words[rows], floor)
                total += loss
                torch.mm(slopes, weight, out=d_states[rows])
                d_weight.addmm_(slopes.T, h[rows])
                d_bias += slopes.sum(0)
        return total.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        if ctx.gradients is None:
            raise fail("a chunked loss is differentiated once", "a second backward pass", "Form the loss again.")
        (d_states, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        for gradient in (d_states, d_weight, d_bias):  # in place: another matrix of all words would double the memory
            gradient.mul_(upstream)
        return d_states.to(ctx.dtype), d_weight, d_bias, None, None


def _loss_and_slopes(logits: Tensor, words: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk and its gradient in the logits, which takes their place in memory.

    d/dz -log(P + floor) = P / (P + floor) (softmax(z) - onehot)
    """
    own = words.unsqueeze(1)
    logits.sub_(logits.amax(1, keepdim=True))
    log_chances = logits.gather(1, own)
    totals = logits.exp_().sum(1, keepdim=True)
    log_chances -= totals.log()
    losses = -log_chances if floor == 0 else -log_chances.logaddexp(log_chances.new_tensor(floor).log())
    shares = (log_chances + losses).exp()  # P / (P + floor)
    slopes = logits.mul_(shares / totals).scatter_add_(1, own, -shares)
    return losses.sum(dtype=torch.float64), slopes


def _chunks(states: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield rows whose logits fit in one chunk."""
    numbers = ON_CPU if states.device.type == "cpu" else ON_GPU
    high = max(1, numbers // len(weight))
    for row in range(0, len(states), high):
        yield slice(row, row + high)


def sampled_loss(
    states: Tensor, weight: Tensor, bias: Tensor, words: Tensor, samples: Tensor, log_chances: Tensor
) -> Tensor:
    """Return an estimate of -sum_n log P(word n), by importance sampling (Bengio and Senecal 2003).

    The sum over all other words is estimated without bias from the same samples for every n; its logarithm is not.

    samples: ids, [S], drawn with replacement. log_chances: of being drawn, [words].
    """
    own = (states * weight[words]).sum(1, keepdim=True) + bias[words].unsqueeze(1)
    shift = bias[samples] - log_chances[samples] - math.log(len(samples))
    others = (states @ weight[samples].T + shift).masked_fill(samples == words.unsqueeze(1), -torch.inf)
    return (torch.cat([own, others], 1).logsumexp(1, keepdim=True) - own).sum()
