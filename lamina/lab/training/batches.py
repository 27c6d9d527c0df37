"""Cases of each update: they depend on seed and update only, so resuming needs no saved state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...errors import fail
from ..experiment import Every


class Batches:
    """Batches of one run; subclasses choose the cases. ``cases`` is the number of cases in an epoch."""

    def __init__(self, cases: int, batch_size: int, seed: int) -> None:
        if cases < 1:
            received = f"{cases} cases in batches of {batch_size}"
            raise fail("training needs at least one batch of cases", received, "Use another data set.")
        self.cases, self.batch_size, self.seed = cases, batch_size, seed

    def updates(self, epochs: float) -> int:
        """Return the number of updates in so many epochs, rounded up."""
        wanted = epochs * self.cases / self.batch_size
        if wanted > 2**53:
            raise fail("a run has at most 2**53 updates", f"{epochs:g} epochs", "Use fewer.")
        return max(1, math.ceil(wanted * (1 - 1e-12)))  # 3 * 0.1 epochs is 0.3, not a little more

    def epoch(self, step: int) -> float:
        """Return the epochs seen after ``step`` updates."""
        return step * self.batch_size / self.cases

    def at(self, step: int) -> Tensor:
        """Return the cases of update ``step``, [batch]."""
        raise NotImplementedError

    def stretch(self, step: int, count: int) -> Tensor:
        """Return the cases of ``count`` updates from ``step`` on, [count, batch]."""
        return torch.stack([self.at(number) for number in range(step, step + count)])


def length_in_updates(batches: Batches, length: Every) -> int:
    """Return a length of training in updates."""
    return length.updates or batches.updates(length.epochs)


class ShuffledBatches(Batches):
    """Epoch after epoch of shuffled cases, cut into batches of one size.

    A batch may span two epochs: every case comes once an epoch and every batch is full, so shapes never change (a
    captured graph needs that). With ``drop_last`` an epoch ends with its last full batch.
    """

    def __init__(self, cases: int, batch_size: int, seed: int, drop_last: bool = False) -> None:
        super().__init__(cases // batch_size * batch_size if drop_last else cases, batch_size, seed)
        self.shuffled_cases = cases

    def at(self, step: int) -> Tensor:
        return self.stretch(step, 1)[0]

    def stretch(self, step: int, count: int) -> Tensor:
        first, last = step * self.batch_size, (step + count) * self.batch_size
        epochs = range(first // self.cases, -(-last // self.cases))
        row = torch.cat([self._stretch(epoch, first, last) for epoch in epochs])
        return row.reshape(count, self.batch_size)

    def _stretch(self, epoch: int, first: int, last: int) -> Tensor:
        """Return the part of one epoch that lies between two positions in the endless row of epochs."""
        start = epoch * self.cases
        order = shuffled(self.shuffled_cases, self.seed, epoch)
        return order[max(first - start, 0) : min(last - start, self.cases)]


class SampledBatches(Batches):
    """Cases drawn with replacement."""

    def at(self, step: int) -> Tensor:
        return torch.randint(self.cases, (self.batch_size,), generator=generator(self.seed, step))


class BucketedBatches(Batches):
    """Batches of cases with like lengths: each epoch is shuffled, sorted by length in buckets, and its batches mixed.

    bucket: batches that are sorted together; the more, the less padding. The last batch of an epoch may be smaller,
    unless ``drop_last``.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, bucket: int = 32, drop_last: bool = False
    ) -> None:
        self.lengths, self.bucket = torch.as_tensor(lengths), bucket
        count = len(self.lengths) / batch_size
        self.updates_an_epoch = math.floor(count) if drop_last else math.ceil(count)
        super().__init__(self.updates_an_epoch * batch_size, batch_size, seed)

    def at(self, step: int) -> Tensor:
        epoch, number = divmod(step, self.updates_an_epoch)
        place = int(shuffled(self.updates_an_epoch, self.seed, -1 - epoch)[number])
        return self._in_buckets(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def _in_buckets(self, epoch: int) -> Tensor:
        if getattr(self, "_epoch", None) != epoch:
            order = shuffled(len(self.lengths), self.seed, epoch)[: self.cases]
            parts: tuple[Tensor, ...] = torch.split(order, self.bucket * self.batch_size)
            self._order = torch.cat([part[self.lengths[part].argsort(stable=True)] for part in parts])
            self._epoch = epoch
        return self._order


@lru_cache(maxsize=64)
def shuffled(cases: int, seed: int, epoch: int) -> Tensor:
    """Return the order of one epoch; a negative number gives an order that no epoch has."""
    return torch.randperm(cases, generator=generator(seed, epoch))


def generator(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a random generator that depends on the numbers alone."""
    return torch.Generator(device).manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """Mix whole numbers into one seed. Negative numbers give seeds of their own; zeros at the end change nothing."""
    words = [word for number in numbers for word in ((number,) if number >= 0 else (-1 - number, 2**31))]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
