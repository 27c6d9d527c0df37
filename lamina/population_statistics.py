"""Exact population statistics of batch-normalised models: pooling over a pass, and the base class of the modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .checks import fail
from .reference import Moments, statistics_dtype

Keeper = TypeVar("Keeper", bound="StatisticsModule")


class Pool:
    """Mean and variance of all merged batches, one row per time step (a single row without time steps).

    Two sets a, b with n = n_a + n_b and d = mean_b - mean_a merge exactly (Chan, Golub, LeVeque 1979):
    mean = mean_a + d n_b/n and M2 = M2_a + M2_b + d^2 n_a n_b/n, M2 being the sum of squared deviations.
    Averaging the variances of the batches would ignore the variance of their means.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.count = torch.zeros(0, 1, dtype=torch.float64, device=device)  # [T, 1]
        self.mean = torch.zeros(0, width, dtype=torch.float64, device=device)  # [T, F]
        self.squares = torch.zeros_like(self.mean)  # [T, F]
        self.batches = torch.zeros(0, dtype=torch.int64, device=device)  # [T]

    def merge(self, moments: Moments, counts: Tensor, first: int = 0) -> None:
        """Merge moments [T, F] of ``counts`` [T] cases each into the rows from ``first`` on."""
        last = first + moments.mean.shape[0]
        for name in ("count", "mean", "squares", "batches"):
            setattr(self, name, padded(getattr(self, name), last, 0))
        new = counts.to(torch.float64).reshape(-1, 1)
        seen = new > 0
        mean, var = (torch.where(seen, m.to(torch.float64), 0.0) for m in moments)  # moments of 0 cases may be NaN
        fraction = new / (self.count[first:last] + new).clamp(min=1)
        delta = mean - self.mean[first:last]
        self.squares[first:last] += var * new + delta.square() * self.count[first:last] * fraction
        self.mean[first:last] += delta * fraction
        self.count[first:last] += new
        self.batches[first:last] += seen.squeeze(1)

    def moments(self) -> Moments:
        """Return pooled mean and variance (divided by n: the pass is the population); (0, 1) in rows without cases."""
        var = torch.where(self.count > 0, self.squares / self.count.clamp(min=1), 1.0)
        return Moments(self.mean, var)


def padded(rows: Tensor, length: int, fill: float) -> Tensor:
    """Return ``rows`` extended to at least ``length`` rows, with new rows filled with ``fill``."""
    missing = length - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])


class StatisticsModule(nn.Module):
    """Base class of modules whose buffers are population statistics that ``population_statistics`` can set."""

    _pools: dict[str, Pool] | None = None

    @property
    def collecting(self) -> bool:
        """True during a pass of ``population_statistics``, which normalises by the minibatch in either mode."""
        return self._pools is not None

    def _collect(self, on: bool) -> None:
        self._pools = {} if on else None

    def _pool(self, name: str, width: int, device: torch.device) -> Pool:
        if self._pools is None:
            raise RuntimeError("The module is not collecting statistics. Run it inside population_statistics.")
        return self._pools.setdefault(name, Pool(width, device))

    def _adopt(self) -> bool:
        """Store the pooled statistics; return False if the pass never reached this module."""
        raise NotImplementedError

    def _apply(self: Keeper, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Keeper:
        """Keep statistics in float32 under ``.half()`` and ``.bfloat16()``, where a moving average would stall."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(new.device, statistics_dtype(old.dtype))
        return self


def population_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[Any, Any], object] | None = None,
) -> int:
    """Set the population statistics of every ``BatchNorm`` and ``StepStatistics`` in ``model`` by one exact pass.

    mu and sigma^2 are those of all cases of the pass together (merged by count in float64), not an average over
    batches. During the pass the model is in evaluation mode, which disables random noise, and each batch norm
    normalises by the minibatch. The layers above therefore see inputs normalised by the minibatch's statistics, not
    by the population's; large batches make the difference small.

    batches: inputs of the model; of a tuple or list the first entry, as data loaders yield (input, target).
    forward: ``forward(model, batch)``, called in place of ``model(input)``.

    Returns the number of modules that received statistics. If the pass fails or is empty, the statistics stay
    unchanged; the modes are restored in any case.
    """
    keepers = [m for m in model.modules() if isinstance(m, StatisticsModule)]
    with _collecting(model, keepers), torch.no_grad(), _uncompiled():
        if not _run_over(model, batches, forward):
            raise fail("population_statistics needs at least one batch", "an empty iterable", "Pass the training data.")
        return sum(keeper._adopt() for keeper in keepers)


def _run_over(model: nn.Module, batches: Iterable[Any], forward: Callable[[Any, Any], object] | None) -> int:
    number = 0
    for number, batch in enumerate(batches, 1):  # noqa: B007
        if forward is not None:
            forward(model, batch)
        else:
            model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    return number


@contextmanager
def _collecting(model: nn.Module, keepers: list[StatisticsModule]) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        for keeper in keepers:
            keeper._collect(True)
        yield
    finally:
        for keeper in keepers:
            keeper._collect(False)
        for module, mode in modes:
            module.training = mode


def _uncompiled() -> AbstractContextManager[object]:
    """Run compiled models eagerly, because pools grow in the pass; avoid the import of torch's slow compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
