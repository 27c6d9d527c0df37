"""Runs of one experiment as its claims read them: choose variants, take values by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .statistics import BySeed, Series, baseline_levels, crossing

Run = Mapping[str, Any]
# Settings that change what is written down on the way, not what is learnt: runs that differ in these are the same run.
BOOKKEEPING = ("log_every", "eval_every", "eval_updates", "checkpoint_every")


@dataclass(frozen=True)
class Metric:
    """A quantity that an experiment evaluates, and which end of it is the good one."""

    name: str
    label: str
    better: str = "lower"  # or "higher"

    @property
    def higher(self) -> bool:
        return self.better == "higher"

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.higher else value < than

    @property
    def worst(self) -> float:
        return -math.inf if self.higher else math.inf

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.higher else min(values)


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings that change what is learnt."""
    return {key: value for key, value in run["config"].items() if key not in BOOKKEEPING}


class Mixed(Exception):
    """Runs of one variant differ in their settings, so they are not one sample."""


class Results(tuple[Run, ...]):
    """Finished runs; each has ``config``, ``seed``, ``steps``, ``extras`` and ``series`` by metric."""

    def select(self, **settings: Any) -> Results:
        """Return the runs whose settings are these: ``results.select(norm="layer", batch_size=4)``."""
        return Results(r for r in self if all(r["config"].get(k) == v for k, v in settings.items()))

    def by_seed(self, of: Callable[[Run], Any]) -> dict[int, Any]:
        """Return the value of ``of`` for each run, by seed, without runs where it is None."""
        values = {run["seed"]: value for run in self if (value := of(run)) is not None}
        settings = {json.dumps(settings_of(run), sort_keys=True) for run in self if run["seed"] in values}
        if len(settings) > 1:
            raise Mixed("runs of one variant differ in their settings")
        return values

    def series(self, metric: Metric) -> dict[int, Series]:
        """Return updates and values by seed; a value that was not finite is the worst there is."""
        return self.by_seed(lambda run: series_of(run, metric))

    def final(self, metric: Metric) -> BySeed:
        """Return the metric at the last evaluation."""
        return {seed: values[-1] for seed, (_, values) in self.series(metric).items()}

    def best(self, metric: Metric) -> BySeed:
        """Return the best value that each run reached."""
        return {seed: metric.best(values) for seed, (_, values) in self.series(metric).items()}

    def peaks(self, metric: Metric) -> BySeed:
        """Return the updates after which each run was at its best, for the first time."""
        series = self.series(metric).items()
        return {seed: float(updates[values.index(metric.best(values))]) for seed, (updates, values) in series}

    def crossings(self, metric: Metric, level: float) -> BySeed:
        """Return the updates after which each run's best reached the level; infinity where it never did."""
        return {seed: crossing(series, level, metric.higher) for seed, series in self.series(metric).items()}

    def levels(self, metric: Metric) -> dict[float, float]:
        """Return levels by share of these runs' improvement."""
        series = self.series(metric)
        return baseline_levels(series, metric.higher) if series else {1.0: math.nan}

    def steps(self) -> BySeed:
        """Return the updates of each run."""
        return self.by_seed(lambda run: float(run["steps"]))


def series_of(run: Run, metric: Metric) -> Series | None:
    """Return a run's updates and values of a metric, or None where it was never evaluated."""
    series = run["series"].get(metric.name)
    if not series or not series["update"]:
        return None
    return series["update"], [metric.worst if value is None else value for value in series["value"]]
