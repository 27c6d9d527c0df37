"""Paired comparisons of few seeds: crossings of a level, log ratios, t intervals, and what a missed level allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

MIN_SEEDS = 3  # below this no interval is given
HEADLINE_SEEDS = 5  # below this a verdict is "indicative"
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the baseline's improvement: levels at which ratios are drawn as a curve

Series = tuple[Sequence[float], Sequence[float]]  # updates, values
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval. An end is infinite where nothing bounds it."""

    estimate: float
    low: float
    high: float
    n: int


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean with Student's t interval; two values at least."""
    mean, n = fmean(values), len(values)
    half = t_quantile(n - 1) * stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(degrees, 0.975))


def pooled(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of the groups' means, with equal weights, and its stratified interval (Welch-Satterthwaite)."""
    shares = [stdev(group) ** 2 / len(group) for group in groups]
    weights = [share**2 / (len(group) - 1) for share, group in zip(shares, groups)]
    mean = fmean(fmean(group) for group in groups)
    degrees = sum(shares) ** 2 / sum(weights) if sum(weights) else math.inf
    half = t_quantile(degrees) * math.sqrt(sum(shares)) / len(groups)
    return Interval(mean, mean - half, mean + half, sum(map(len, groups)))


# Crossing a level


def crossing(series: Series, level: float, higher: bool = False) -> float:
    """Return the updates after which the running best is at or beyond the level; infinity where it never is.

    Between two evaluations the running best is taken to be linear in the logarithm of the updates.
    """
    sign = -1.0 if higher else 1.0
    before_update, before = 0.0, math.inf
    for update, value in zip(*series):
        if sign * value <= sign * level:
            return _between(before_update, before, float(update), sign * value, sign * level)
        if sign * value < before:
            before = sign * value
        before_update = float(update)
    return math.inf


def _between(first: float, above: float, last: float, below: float, level: float) -> float:
    if first <= 0 or not math.isfinite(above) or not math.isfinite(below):
        return last
    share = (above - level) / (above - below)
    return math.exp(math.log(first) + share * math.log(last / first))


def baseline_levels(baseline: Mapping[int, Series], higher: bool = False) -> dict[float, float]:
    """Return levels by share of the baseline's improvement; the whole of it ends at its median best value."""
    best = max if higher else min
    start = median(values[0] for _, values in baseline.values())
    target = median(best(values) for _, values in baseline.values())
    return {share: start + share * (target - start) for share in SHARES}


# Pairs


@dataclass(frozen=True)
class Pairs:
    """Log ratios or differences by seed, above the point of no effect where ours is the better one.

    value: infinite where one side missed the level. nearest: the same with the end of the budget in place of a miss,
    which is what such a pair is worth at least. Seeds in which both sides missed say nothing and are only counted.
    """

    value: BySeed
    nearest: BySeed
    both_missed: int = 0

    @property
    def misses(self) -> int:
        return sum(not math.isfinite(value) for value in self.value.values())

    def interval(self) -> Interval | None:
        """Return the t interval; with misses the median and a bound; None where pairs are too few, or most missed."""
        n, misses = len(self.value), self.misses
        if n < MIN_SEEDS or misses > n / 2 or self.both_missed > (n + self.both_missed) / 2:
            return None
        found = t_interval(list(self.nearest.values()))
        if not misses:
            return found
        gained = any(value == math.inf for value in self.value.values())
        lost = any(value == -math.inf for value in self.value.values())
        low, high = -math.inf if lost else found.low, math.inf if gained else found.high
        return Interval(median(self.value.values()), low, high, n)


def log_ratios(theirs: BySeed, ours: BySeed, budgets: tuple[BySeed, BySeed] | None = None) -> Pairs:
    """Return ln(theirs / ours) by seed; ``budgets`` replace infinite values (a level never reached)."""
    seeds = sorted(theirs.keys() & ours.keys())
    told = [seed for seed in seeds if math.isfinite(theirs[seed]) or math.isfinite(ours[seed])]
    value = {seed: _log_ratio(theirs[seed], ours[seed]) for seed in told}
    if budgets is None:
        return Pairs(value, value, len(seeds) - len(told))
    nearest = {seed: _log_ratio(*(_reached(side, end, seed) for side, end in zip((theirs, ours), budgets))) for seed in told}
    return Pairs(value, nearest, len(seeds) - len(told))


def _reached(side: BySeed, budget: BySeed, seed: int) -> float:
    return side[seed] if math.isfinite(side[seed]) else budget[seed]


def _log_ratio(theirs: float, ours: float) -> float:
    if math.isinf(theirs) or ours == 0:
        return math.inf
    return -math.inf if math.isinf(ours) or theirs == 0 else math.log(theirs / ours)


def differences(theirs: BySeed, ours: BySeed) -> Pairs:
    """Return theirs - ours by seed; a value that is not finite is the worst there is."""
    value = {seed: theirs[seed] - ours[seed] for seed in sorted(theirs.keys() & ours.keys())}
    told = {seed: found for seed, found in value.items() if not math.isnan(found)}
    return Pairs(told, told, len(value) - len(told))
