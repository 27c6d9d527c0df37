"""Which cases an update sees: a function of seed and update number alone, so a run resumes anywhere, on any number of
processes, with nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...errors import fail


class Batches:
    """Epoch after epoch of shuffled cases, cut into batches of one size; a batch may span two epochs.

    Every case comes once an epoch and every batch is full, so shapes never change (a captured graph needs that).
    """

    def __init__(self, cases: int, batch_size: int, seeds: Sequence[int]) -> None:
        if cases < 1:
            raise fail("training needs at least one case", f"{cases} cases", "Use another data set.")
        self.cases, self.batch_size, self.seeds = cases, batch_size, tuple(seeds)

    def updates(self, epochs: float) -> int:
        """The number of updates in so many epochs, rounded up."""
        wanted = epochs * self.cases / self.batch_size
        if wanted > 2**53:
            raise fail("a run has at most 2**53 updates", f"{epochs:g} epochs", "Use fewer.")
        return max(1, math.ceil(wanted * (1 - 1e-12)))  # 3 * 0.1 epochs is 0.3, not a little more

    def epoch(self, step: int) -> float:
        """Epochs seen after ``step`` updates."""
        return step * self.batch_size / self.cases

    def indices(self, step: int, count: int = 1) -> Tensor:
        """The cases of ``count`` updates from number ``step`` on, [count, seeds, batch_size]."""
        first, last = step * self.batch_size, (step + count) * self.batch_size
        rows = [self._stretch(seed, first, last) for seed in self.seeds]
        return torch.stack([row.reshape(count, self.batch_size) for row in rows], dim=1)

    def _stretch(self, seed: int, first: int, last: int) -> Tensor:
        """Positions ``first`` to ``last`` of the endless row of shuffled epochs."""
        epochs = range(first // self.cases, -(-last // self.cases))
        row = torch.cat([shuffled(self.cases, seed, epoch) for epoch in epochs])
        start = first - epochs[0] * self.cases
        return row[start : start + last - first]


@lru_cache(maxsize=64)
def shuffled(cases: int, seed: int, epoch: int) -> Tensor:
    """The order of one epoch."""
    mixed = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    return torch.randperm(cases, generator=torch.Generator().manual_seed(int(mixed >> 1)))
