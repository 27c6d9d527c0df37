"""The paper's claims as comparisons of two variants, paired by seed, and the verdict on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .results import Metric, Mixed, Results, Run
from .statistics import HEADLINE_SEEDS, MIN_SEEDS, BySeed, Interval, Pairs, bootstrap, differences, log_ratios, shown

WORDS = ("reproduced", "direction reproduced", "inconclusive", "not reproduced")
REPRODUCED, DIRECTION, INCONCLUSIVE, NOT_REPRODUCED = WORDS
AGREEING = 0.8  # share of the pairs that must agree with the paper's direction: 4 of 5

Settings = Mapping[str, Any]
FindMetric = Callable[[str], Metric]
Levels = tuple[tuple[float, Interval | None, Interval | None], ...]  # share; ours and the placebo's


class Measure:
    """A comparison by seed, whose values are above 0 where ours is better, and how the report prints an effect."""

    ratio, unit, scale = False, "", 1.0
    items: Callable[[Run], Sequence[float] | None] | None = None

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        """Return the comparison by seed."""
        raise NotImplementedError

    def value(self, effect: float, spread: float = 0.0) -> str:
        """Return an effect as the report prints it, with two digits of its spread."""
        if self.ratio:
            return times(effect)
        return f"{shown(self.scale * effect, self.scale * spread, '+')}{self.unit and ' ' + self.unit}"

    def words(self, interval: Interval) -> str:
        """Return an interval as the report prints it."""
        return in_words(self, interval)


@dataclass(frozen=True)
class Speed(Measure):
    """Updates until the running best reaches the median of the baseline's best values; the baseline's over ours."""

    metric: str
    ratio = True

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        shared = Results(run for run in baseline if run["seed"] in {own["seed"] for own in ours})
        return self.at_level(baseline, ours, metric, shared.levels(metric(self.metric))[1.0])

    def at_level(self, baseline: Results, ours: Results, metric: FindMetric, level: float) -> Pairs:
        """Return the log ratios of the updates to one level."""
        theirs, own = (side.crossings(metric(self.metric), level) for side in (baseline, ours))
        return log_ratios(theirs, own, (baseline.steps(), ours.steps()))

    def words(self, interval: Interval) -> str:
        return in_words(self, interval, after=" as fast")


@dataclass(frozen=True)
class SpeedToBest(Measure):
    """Updates until a metric is at its best for the first time; the baseline's over ours."""

    metric: str
    ratio = True

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        return log_ratios(baseline.peaks(metric(self.metric)), ours.peaks(metric(self.metric)))

    def words(self, interval: Interval) -> str:
        return in_words(self, interval, after=" as fast")


@dataclass(frozen=True)
class Quality(Measure):
    """A metric at the end of training ("last") or at its best, as a difference or as a ratio.

    items: values of a run whose mean is the metric, one for each test case, higher is better: whether a difference may
    be the luck of these cases.
    """

    metric: str
    at: str = "last"
    ratio: bool = False
    unit: str = ""
    scale: float = 1.0
    items: Callable[[Run], Sequence[float] | None] | None = None

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        measured = metric(self.metric)
        theirs, own = (side.best(measured) if self.at == "best" else side.final(measured) for side in (baseline, ours))
        if measured.higher:  # a run that diverged is worth minus infinity, in a ratio 0
            least = 0.0 if self.ratio else -math.inf
            theirs, own = ({seed: max(value, least) for seed, value in side.items()} for side in (own, theirs))
        return (log_ratios if self.ratio else differences)(theirs, own)

    def words(self, interval: Interval) -> str:
        return in_words(self, interval, "ratio " if self.ratio else "lead ")


@dataclass(frozen=True)
class Inside(Measure):
    """Two quantities of the same run: the second less the first."""

    of: Callable[[Run], tuple[float, float] | None]
    unit: str = ""

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        both = ours.by_seed(self.of)
        return differences({s: b for s, (_, b) in both.items()}, {s: a for s, (a, _) in both.items()})


def times(effect: float) -> str:
    """Return a log ratio as ``1.84x``."""
    ratio = math.exp(min(effect, 700.0))
    return f"{ratio:,.0f}x" if ratio >= 1000 else f"{ratio:.3g}x"


def in_words(measure: Measure, interval: Interval, before: str = "", after: str = "") -> str:
    """Return ``1.84x as fast (1.52x to 2.23x, n = 5)``; the median and a bound where some run missed the level."""
    half = (interval.high - interval.low) / 2
    spread = half if math.isfinite(half) else 0.0
    low, high = (measure.value(end, spread).split()[0] for end in (interval.low, interval.high))
    middle = f"{before}{measure.value(interval.estimate, spread)}{after}"
    if math.isfinite(half):
        return f"{middle} ({low} to {high}, n = {interval.n})"
    known = [(words, end) for words, end in ((f"at least {low}", interval.low), (f"at most {high}", interval.high))]
    bound = next((words for words, end in known if math.isfinite(end)), "no bound")
    text = f"{middle} (median; {bound}" if math.isfinite(interval.estimate) else f"{bound}{after} ("
    return f"{text}, n = {interval.n}, some runs missed the target)".replace("(, ", "(")


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and the comparison that tests it.

    ours, baseline: settings that choose the runs of either side. expected: the paper's ratio, where it prints one.
    margin: how much better ours must be (below 0: how much worse it may be), as a log ratio or a difference.
    final: metric that must not end worse than the baseline's, or a faster start does not count. claimed: False for a
    comparison that the paper does not make. doubt: why the claim may not reproduce, shown where it did not.
    """

    name: str
    text: str
    paper: str
    measure: Measure
    ours: Settings
    baseline: Settings
    expected: float | None = None
    margin: float = 0.0
    final: str = ""
    claimed: bool = True
    doubt: str = ""


@dataclass(frozen=True)
class Verdict:
    """The word, the interval that it rests on, and what else a reader should see. Values above 0 favour the claim.

    nearest: what pairs with a miss are worth at least. placebo: the baseline against its own runs with other seeds, at
    ``placebo_share`` of the baseline's improvement. levels: intervals by such a share, of the claim and of the placebo.
    items: mean difference over seeds and test cases, with the interval of a bootstrap over the cases.
    """

    word: str
    measured: str
    reason: str = ""
    interval: Interval | None = None
    pairs: BySeed = field(default_factory=dict)
    nearest: BySeed = field(default_factory=dict)
    placebo: Interval | None = None
    placebo_share: float = 1.0
    levels: Levels = ()
    items: Interval | None = None

    @property
    def indicative(self) -> bool:
        """Return whether the verdict rests on fewer seeds than a headline needs."""
        return self.interval is not None and self.interval.n < HEADLINE_SEEDS


def judge(claim: Claim, results: Results, metric: FindMetric) -> Verdict:
    """Return the verdict on a claim from the runs of an experiment."""
    baseline, ours = results.select(**claim.baseline), results.select(**claim.ours)
    try:
        pairs = claim.measure.pairs(baseline, ours, metric)
        worse = _ends_worse(claim, baseline, ours, metric)
        levels = _at_levels(claim, baseline, ours, metric)
        share, placebo = _placebo(claim.measure, levels, *_placebo_runs(baseline, ours), metric)
        items = _by_items(claim.measure, baseline, ours)
    except Mixed as mixed:
        return Verdict(INCONCLUSIVE, "not measured", str(mixed))
    interval = pairs.interval()
    word, reason = _word(claim, pairs, interval, worse, placebo)
    if items and word in (REPRODUCED, DIRECTION) and items.low <= claim.margin:
        word, reason = INCONCLUSIVE, "with other test cases the difference may vanish"
    reason = reason or (interval is None and _why_no_interval(pairs, baseline, ours)) or ""
    measured = claim.measure.words(interval) if interval else "not measured"
    if interval and pairs.both_missed:
        measured += f"; in {pairs.both_missed} more seeds neither side reached the target"
    if items:
        low, high = (claim.measure.value(end, items.high - items.low) for end in (items.low, items.high))
        measured += f"; bootstrap over {items.n:,} test cases: {low} to {high}"
    return Verdict(word, measured, reason, interval, pairs.value, pairs.nearest, placebo, share, levels, items)


def _word(
    claim: Claim, pairs: Pairs, interval: Interval | None, worse: str, placebo: Interval | None
) -> tuple[str, str]:
    """Return the verdict's word, and the reason where the interval alone does not tell it."""
    value = claim.measure.value
    if worse:
        return NOT_REPRODUCED, worse
    if interval is None:
        return INCONCLUSIVE, ""
    if placebo is not None and not placebo.low <= 0 <= placebo.high:
        return INCONCLUSIVE, f"the placebo's interval does not contain {value(0.0)}: {claim.measure.words(placebo)}"
    if math.isclose(interval.low, interval.high, abs_tol=1e-9):
        return INCONCLUSIVE, "the pairs do not differ, so their interval says nothing"
    if interval.high < claim.margin:
        return NOT_REPRODUCED, "the interval lies on the other side"
    if interval.low <= claim.margin:
        return INCONCLUSIVE, f"the interval contains {value(claim.margin)}"
    return _reproduced(claim, pairs, interval)


def _reproduced(claim: Claim, pairs: Pairs, interval: Interval) -> tuple[str, str]:
    """Return whether more than the direction is reproduced, for an interval that excludes no effect."""
    if claim.expected is None:
        return DIRECTION, ""
    if not interval.low <= math.log(claim.expected) <= interval.high:
        return DIRECTION, f"the interval does not contain the paper's {claim.expected:g}x"
    agreeing = sum(value > claim.margin for value in pairs.value.values())
    if agreeing < AGREEING * len(pairs.value):
        return DIRECTION, f"only {agreeing} of {len(pairs.value)} pairs agree"
    return REPRODUCED, ""


def _why_no_interval(pairs: Pairs, baseline: Results, ours: Results) -> str:
    seeds = {run["seed"] for run in baseline} & {run["seed"] for run in ours}
    if len(seeds) < MIN_SEEDS:
        return f"fewer than {MIN_SEEDS} seeds of both sides"
    if not pairs.seeds:
        return "these runs did not measure it"
    if pairs.both_missed == pairs.seeds:
        return "no run of either side reached the target"
    return f"the target was missed in {pairs.misses} of {pairs.seeds} pairs"


def _ends_worse(claim: Claim, baseline: Results, ours: Results, metric: FindMetric) -> str:
    """Return why a faster start does not count; empty where the end is no worse, or cannot be told."""
    if not claim.final:
        return ""
    interval = Quality(claim.final, "best").pairs(baseline, ours, metric).interval()
    return f"its best {metric(claim.final).label} is worse" if interval is not None and interval.high < 0 else ""


def _by_items(measure: Measure, baseline: Results, ours: Results) -> Interval | None:
    """Return the mean difference of the test cases over the seeds of both sides; None where runs hold no items."""
    if measure.items is None:
        return None
    theirs, own = baseline.by_seed(measure.items), ours.by_seed(measure.items)
    pairs = [zip(own[seed], theirs[seed], strict=True) for seed in sorted(theirs.keys() & own.keys())]
    differences = [fmean(a - b for a, b in case) for case in zip(*pairs)]
    return bootstrap(differences) if differences else None


def _at_levels(claim: Claim, baseline: Results, ours: Results, metric: FindMetric) -> Levels:
    """Return the ratios of a claim on speed, and of its placebo, by share of the baseline's improvement."""
    measure, (shared, further) = claim.measure, _placebo_runs(baseline, ours)
    if not isinstance(measure, Speed) or not len(shared):
        return ()
    rivals = ours, further
    return tuple(
        (share, *(measure.at_level(shared, rival, metric, level).interval() for rival in rivals))  # type: ignore[misc]
        for share, level in shared.levels(metric(measure.metric)).items()
    )


def _placebo(
    measure: Measure, levels: Levels, shared: Results, further: Results, metric: FindMetric
) -> tuple[float, Interval | None]:
    """Return the placebo at the highest level at which it has an interval: half of its runs miss the very target."""
    if isinstance(measure, SpeedToBest):
        return 1.0, measure.pairs(shared, further, metric).interval()
    bounded = [
        (share, interval) for share, _, interval in levels if interval and math.isfinite(interval.high - interval.low)
    ]
    return bounded[-1] if bounded else (1.0, None)


def _placebo_runs(baseline: Results, ours: Results) -> tuple[Results, Results]:
    """Return the baseline's runs of the comparison, and its further runs in order, under the same seeds."""
    compared = {run["seed"] for run in ours}
    shared, further = (Results(r for r in baseline if (r["seed"] in compared) is known) for known in (True, False))
    seeds, runs = sorted(run["seed"] for run in shared), sorted(further, key=lambda run: run["seed"])
    return shared, Results({**run, "seed": seed} for run, seed in zip(runs, seeds))
