"""Runs of one experiment as its sheet's claims read them: choose variants, take values over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Bounds = tuple[float, float]  # the value of one seed lies between these
# Settings that change what is written down on the way, not what is learnt: runs that differ in these are the same run.
BOOKKEEPING = ("log_every", "eval_every", "checkpoint_every")


@dataclass(frozen=True)
class Sample:
    """One number from each seed."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1); 0 for a single value, infinite where a value is."""
        if not all(map(math.isfinite, self.values)):
            return math.inf
        return stdev(self.values) if self.n > 1 else 0.0

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.std:.2g} (n={self.n})" if self else "no runs"


@dataclass(frozen=True)
class Measured:
    """One quantity by seed; ``mixed`` where the runs behind it do not share their settings."""

    bounds: Mapping[int, Bounds]
    mixed: bool = False


class Results(Sequence[Mapping[str, Any]]):
    """Runs: each has ``config``, ``seed``, ``finished``, ``extras`` and ``curve`` (lists of equal length by metric)."""

    def __init__(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self.runs = list(runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: Any) -> Any:
        return self.runs[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.runs)

    def select(self, **settings: Any) -> Results:
        """Those runs whose settings are these: ``results.select(norm="layer", batch_size=4)``."""
        return Results([r for r in self.runs if all(r["config"].get(k) == v for k, v in settings.items())])

    def last(self, metric: str) -> Sample:
        """The metric at each run's last evaluation."""
        return Sample(tuple(float(c[-1]) for c in self._curves(metric)))

    def best(self, metric: str) -> Sample:
        """The lowest value each run reached."""
        return Sample(tuple(float(min(c)) for c in self._curves(metric)))

    def steps_to(self, metric: str, target: float) -> Sample:
        """Updates until the metric was at most ``target``; infinite for a run that never got there."""
        return Sample(tuple(steps_to_target(r["curve"], metric, target) for r in self.runs if r["curve"].get(metric)))

    def final(self, metric: str) -> Measured:
        """The metric at the last evaluation, by seed."""
        return self.measured(lambda run: (float(run["curve"][metric][-1]),) * 2 if run["curve"].get(metric) else None)

    def crossing(self, metric: str, target: float) -> Measured:
        """Updates until the metric was at most ``target``, by seed, as far as the evaluations tell."""
        return self.measured(
            lambda run: crossing_bounds(run["curve"], metric, target) if run["curve"].get(metric) else None
        )

    def measured(self, of: Callable[[Mapping[str, Any]], Bounds | None]) -> Measured:
        """What ``of`` finds in each run that has it, by seed."""
        found = [(run, bounds) for run in self.runs if (bounds := of(run)) is not None]
        settings = {
            json.dumps({k: v for k, v in run["config"].items() if k not in BOOKKEEPING}, sort_keys=True)
            for run, _ in found
        }
        return Measured({run["seed"]: bounds for run, bounds in found}, len(settings) > 1)

    def steps_to_best(self, metric: str) -> Sample:
        """The update at which each run's metric was lowest."""
        return Sample(tuple(steps_to_best(r["curve"], metric) for r in self.runs if r["curve"].get(metric)))

    def _curves(self, metric: str) -> list[Sequence[float]]:
        return [r["curve"][metric] for r in self.runs if r["curve"].get(metric)]


def steps_to_target(curve: Mapping[str, Sequence[float]], metric: str, target: float) -> float:
    """The first update at which ``metric`` is at most ``target``; infinity when it never is."""
    reached = (step for step, value in zip(curve["step"], curve[metric]) if value <= target)
    return float(next(reached, math.inf))


def crossing_bounds(curve: Mapping[str, Sequence[float]], metric: str, target: float) -> Bounds:
    """Last evaluation above ``target`` (0 before the first) and first one at most that; infinity when there is none."""
    at = steps_to_target(curve, metric, target)
    return float(max((step for step in curve["step"] if step < at), default=0)), at


def steps_to_best(curve: Mapping[str, Sequence[float]], metric: str) -> float:
    """The update with the lowest ``metric``."""
    return float(min(zip(curve[metric], curve["step"]))[1])
