"""Random numbers of an update: they depend on seed and update only, not on how the batch is cut into parts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import InputError, fail
from .batches import generator, mixed

# Last number of a seed, one for each purpose. The order of cases has none; 0 would give the same seed as none.
UPDATE, PART, EVALUATION, TORCH = 1, 2, 3, 4


@dataclass
class Draws:
    """Draw numbers for the whole batch and return those of this part of it.

    Parts draw the same numbers as the whole where they draw in the same shapes: pad to a length of the whole batch.
    first, cases: position and number of the part's cases; of: number of cases in the whole batch.
    """

    source: torch.Generator | None
    first: int = 0
    cases: int = 1
    of: int = 1

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers, [cases, *shape]."""
        return self._part(torch.randn(self.of, *shape, generator=self.once(), device=self.once().device))

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers from [0, 1), [cases, *shape]."""
        return self._part(torch.rand(self.of, *shape, generator=self.once(), device=self.once().device))

    def integers(self, end: int, *shape: int) -> Tensor:
        """Return whole numbers from [0, end), [cases, *shape]."""
        size = (self.of, *shape)
        return self._part(torch.randint(end, size, generator=self.once(), device=self.once().device))

    def once(self) -> torch.Generator:
        """Return the generator itself, for a draw that all cases share."""
        if self.source is None:
            raise undeclared()
        return self.source

    def of_cases(self, cases: int) -> Draws:
        """Return draws for so many cases from the same generator: an evaluation chooses its own batches."""
        return replace(self, first=0, cases=cases, of=cases)

    def _part(self, numbers: Tensor) -> Tensor:
        return numbers[self.first : self.first + self.cases]


def undeclared() -> InputError:
    """Return the error of a loss that draws although its sheet does not say so: it would not resume bit for bit."""
    remedy = "Set it in the experiment's settings, where SHEET is."
    return fail("an experiment whose loss draws random numbers has sampled=True", "sampled=False", remedy)


@contextmanager
def declared() -> Iterator[None]:
    """Raise if the updates inside draw from torch's own generators, as dropout does."""
    started: Callable[[], bool] = torch.cuda.is_initialized
    states = [torch.default_generator.get_state, *([torch.cuda.get_rng_state] if started() else [])]
    before = [state() for state in states]
    yield
    if not all(torch.equal(state(), then) for state, then in zip(states, before)):
        raise undeclared()


def draws_of_update(seed: int, step: int, device: torch.device, first: int, cases: int, of: int) -> Draws:
    """Return one part's draws of an update, and seed torch's own generators, which dropout draws from."""
    _seed_torch(mixed(seed, step, first, cases, PART))
    return Draws(generator(seed, step, UPDATE, device=device), first, cases, of)


def draws_of_evaluation(seed: int, step: int, name: str, device: torch.device) -> Draws:
    """Return the draws of an evaluation, or of one part of it, and seed torch's own generators for it."""
    number = zlib.crc32(name.encode())
    _seed_torch(mixed(seed, step, number, TORCH))
    return Draws(generator(seed, step, number, EVALUATION, device=device))


def _seed_torch(seed: int) -> None:
    """Seed the generators in use: ``torch.manual_seed`` would also queue a call for GPUs that nobody uses."""
    torch.default_generator.manual_seed(seed)
    started: Callable[[], bool] = torch.cuda.is_initialized
    if started():
        torch.cuda.manual_seed_all(seed)
