"""Batches of sentence triples: middle sentences of one length, and a strict limit on the length of all three."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....errors import fail
from ...data.text import Ragged
from ...training.batches import Batches, generator, shuffled

LENGTHS = 5  # last number of the seed of an epoch's order of lengths; ``draws`` has those before


class Triples(NamedTuple):
    """Words of a batch, padded with 0 to the longest of each side, and lengths with the end mark.

    The middle sentence is encoded; the other two are decoded.
    """

    middle: Tensor  # [B, T]
    middle_lengths: Tensor
    before: Tensor
    before_lengths: Tensor
    after: Tensor
    after_lengths: Tensor


def words_in(sentences: Ragged) -> Tensor:
    """Return the number of words of each sentence, without its end mark."""
    return sentences.offsets.diff() - 1


def usable(lengths: Tensor, limit: int) -> Tensor:
    """Return the numbers of the middle sentences of triples whose three lengths are all below the limit."""
    short = lengths < limit
    return (short[:-2] & short[1:-1] & short[2:]).nonzero().squeeze(1) + 1


def taken(sentences: Ragged, middles: Tensor) -> Triples:
    """Return the triples around sentences."""
    return Triples(*sentences.padded(middles), *sentences.padded(middles - 1), *sentences.padded(middles + 1))


class EqualLengths(Batches):
    """Epochs of batches whose middle sentences have one length, as the authors' code makes them.

    Sentences are shuffled and grouped by length, ``batch_size`` at a time, and the groups of different lengths come in
    turn, in a random order of lengths. Then triples that break the limit leave their group: a batch has at most
    ``batch_size`` triples, often fewer. Groups that become empty are no update, so epochs differ a little in length;
    where a length of training is in epochs, each counts as long as the first.
    """

    def __init__(self, lengths: Tensor, limit: int, batch_size: int, seed: int) -> None:
        self.lengths = lengths.cpu()
        middles = usable(self.lengths, limit)
        if not len(middles):
            rule = "training needs three sentences in a row that are shorter than --longest"
            raise fail(rule, f"none below {limit} words", "Pass a larger --longest, or bring other text.")
        self.fits = torch.zeros(len(self.lengths), dtype=torch.bool)
        self.fits[middles] = True
        self.middles = (self.lengths[1:-1] < limit).nonzero().squeeze(1) + 1  # the others never leave a triple
        super().__init__(len(middles), batch_size, seed)
        self._plans: list[int] = []  # updates of the epochs so far
        self._epoch, self._batches = -1, tuple[Tensor, ...]()
        self._plan(0)

    def updates(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self._plans[0] * (1 - 1e-12)))

    def epoch(self, step: int) -> float:
        return step / self._plans[0]

    def at(self, step: int) -> Tensor:
        epoch = 0
        while step >= self._updates_of(epoch):
            step -= self._updates_of(epoch)
            epoch += 1
        self._plan(epoch)
        return self._batches[step]

    def _updates_of(self, epoch: int) -> int:
        if epoch == len(self._plans):
            self._plan(epoch)
        return self._plans[epoch]

    def _plan(self, epoch: int) -> None:
        """Make the batches of an epoch, unless they are at hand."""
        if epoch == self._epoch:
            return
        self._epoch, self._batches = epoch, self._batches_of(epoch)
        if epoch == len(self._plans):
            self._plans.append(len(self._batches))

    def _batches_of(self, epoch: int) -> tuple[Tensor, ...]:
        middles = self.middles[shuffled(len(self.middles), self.seed, epoch)]
        lengths = self.lengths[middles]
        by_length = lengths.argsort(stable=True)
        middles, lengths = middles[by_length], lengths[by_length]
        counts = torch.bincount(lengths)
        ranks = torch.arange(len(middles)) - (counts.cumsum(0) - counts)[lengths]
        turns = torch.randperm(len(counts), generator=generator(self.seed, epoch, LENGTHS))
        groups = ranks // self.batch_size * len(counts) + turns[lengths]
        kept = self.fits[middles]
        groups, middles = groups[kept], middles[kept]
        sizes = torch.bincount(groups)
        return torch.split(middles[groups.argsort(stable=True)], sizes[sizes > 0].tolist())
