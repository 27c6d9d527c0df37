"""Random numbers of an update: a function of seed and update alone, in however many parts the batch is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .batches import generator, mixed

EVALUATION = 2**32 - 1  # in place of a part's number: an evaluation draws other numbers than the update after it


@dataclass
class Draws:
    """Draw numbers for the whole batch and return those of this part of it.

    first, cases: the part's cases; of: those of the whole batch.
    """

    source: torch.Generator
    first: int
    cases: int
    of: int

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers, [cases, *shape]."""
        return self._part(torch.randn(self.of, *shape, generator=self.source, device=self.source.device))

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers from [0, 1), [cases, *shape]."""
        return self._part(torch.rand(self.of, *shape, generator=self.source, device=self.source.device))

    def integers(self, end: int, *shape: int) -> Tensor:
        """Return whole numbers from [0, end), [cases, *shape]."""
        size = (self.of, *shape)
        return self._part(torch.randint(end, size, generator=self.source, device=self.source.device))

    def once(self) -> torch.Generator:
        """Return the generator itself, for a draw that all cases share."""
        return self.source

    def _part(self, numbers: Tensor) -> Tensor:
        return numbers[self.first : self.first + self.cases]


def draws_of_update(seed: int, step: int, device: torch.device, part: int = 0, parts: int = 1, cases: int = 1) -> Draws:
    """Return one part's draws of an update, and seed torch's own generators, which dropout draws from."""
    _seed_torch(mixed(seed, step, part, parts))
    share = cases // parts
    return Draws(generator(seed, step, 0, device=device), part * share, share, cases)


def draws_of_evaluation(seed: int, step: int, number: int, device: torch.device) -> Draws:
    """Return the draws of one evaluation at an update, and seed torch's own generators for it."""
    _seed_torch(mixed(seed, step, EVALUATION, number))
    return Draws(generator(seed, step, EVALUATION, number, device=device), 0, 1, 1)


def _seed_torch(seed: int) -> None:
    """Seed the generators in use: ``torch.manual_seed`` would also queue a call for GPUs that nobody uses."""
    torch.default_generator.manual_seed(seed)
    started: Callable[[], bool] = torch.cuda.is_initialized
    if started():
        torch.cuda.manual_seed_all(seed)
