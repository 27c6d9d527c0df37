"""Paired comparisons of few seeds: crossings of a level, log ratios, t intervals, and what a missed level allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

MIN_SEEDS = 3  # below this no interval is given
HEADLINE_SEEDS = 5  # below this a verdict is "indicative"
RESAMPLES = 2000  # of a bootstrap
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
    if not sum(shares):
        return Interval(mean, mean, mean, sum(map(len, groups)))
    half = t_quantile(sum(shares) ** 2 / sum(weights)) * math.sqrt(sum(shares)) / len(groups)
    return Interval(mean, mean - half, mean + half, sum(map(len, groups)))


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the mean with the percentile interval of its bootstrap: for hundreds of values, not for a few seeds."""
    import numpy as np

    rng, sample = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    means = [sample[rng.integers(len(sample), size=len(sample))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(fmean(values), float(low), float(high), len(values))


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
    target = target if math.isfinite(target) else math.nan  # most of them diverged: a level that nothing reaches
    # From the target backwards: at share 1 the level is the target itself, which rounding must not move out of reach.
    return {share: target + (1 - share) * (start - target) if share < 1 else target for share in SHARES}


# Pairs


@dataclass(frozen=True)
class Pairs:
    """Log ratios or differences by seed, above the point of no effect where ours is the better one.

    value: infinite where one side missed the level, or diverged. nearest: the same with what such a pair is worth at
    least, by the end of the budget; but no more than the most extreme of the other pairs, or a longer budget would make
    the interval wider. both_missed: seeds in which neither side got there; they say nothing and are only counted.
    """

    value: BySeed
    nearest: BySeed
    both_missed: int = 0

    @property
    def seeds(self) -> int:
        return len(self.value) + self.both_missed

    @property
    def misses(self) -> int:
        """Return the number of seeds in which a side missed."""
        return self.both_missed + sum(not math.isfinite(value) for value in self.value.values())

    def interval(self) -> Interval | None:
        """Return the t interval; with misses the median and a bound; None where pairs are too few, or most missed.

        A bound is an end of the t interval over the nearest values: the true mean lies beyond theirs.
        """
        if len(self.value) < MIN_SEEDS or 2 * self.misses > self.seeds:
            return None
        interval, values = t_interval(list(self.nearest.values())), list(self.value.values())
        if all(map(math.isfinite, values)):
            return interval
        low = -math.inf if -math.inf in values else interval.low
        high = math.inf if math.inf in values else interval.high
        return Interval(median(values), low, high, len(values))


def log_ratios(theirs: BySeed, ours: BySeed, budgets: tuple[BySeed, BySeed] | None = None) -> Pairs:
    """Return ln(theirs / ours) by seed; ``budgets`` stand in for infinite values (a level never reached)."""
    value = {seed: _log_ratio(theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())}
    sides = [*zip((theirs, ours), budgets or (theirs, ours))]
    at_least = {s: [side[s] if math.isfinite(side[s]) else budget[s] for side, budget in sides] for s in value}
    return _pairs(value, {seed: _log_ratio(*pair) for seed, pair in at_least.items()})


def _log_ratio(theirs: float, ours: float) -> float:
    """Return the logarithm of a ratio of values from 0 to infinity; NaN where both are the one or the other."""
    if theirs in (0, math.inf) or ours in (0, math.inf):
        return math.nan if theirs == ours else math.inf if theirs > ours else -math.inf
    return math.log(theirs / ours)


def differences(theirs: BySeed, ours: BySeed) -> Pairs:
    """Return theirs - ours by seed; a value that is not finite is the worst there is."""
    value = {seed: theirs[seed] - ours[seed] for seed in sorted(theirs.keys() & ours.keys())}
    return _pairs(value, value)


def _pairs(value: BySeed, at_least: BySeed) -> Pairs:
    known = {seed: effect for seed, effect in value.items() if not math.isnan(effect)}
    finite = [effect for effect in known.values() if math.isfinite(effect)] or [0.0]
    nearest = dict(known)
    for seed in (seed for seed, effect in known.items() if math.isinf(effect)):
        nearest[seed] = min(at_least[seed], max(finite)) if known[seed] > 0 else max(at_least[seed], min(finite))
    return Pairs(known, nearest, len(value) - len(known))


# Numbers in words


def shown(value: float, spread: float = 0.0, sign: str = "") -> str:
    """Return a number with two significant digits of its spread: ``1.488`` for 1.48812 and 0.042."""
    if not 0 < spread < math.inf or not math.isfinite(value):
        return f"{value:{sign},.0f}" if 1000 <= abs(value) < math.inf else f"{value:{sign if value else ''}.4g}"
    digits = 1 - math.floor(math.log10(spread))
    if digits > 6:
        return f"{value:{sign}.{max(1, digits + math.floor(math.log10(abs(value) or spread)))}e}"
    return f"{round(value, digits):{sign},.{max(digits, 0)}f}"
