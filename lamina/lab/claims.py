"""The paper's claims as comparisons of two variants, paired by seed, and the verdict on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .results import Metric, Mixed, Results, Run
from .statistics import (
    HEADLINE_SEEDS,
    MIN_SEEDS,
    BySeed,
    Interval,
    Pairs,
    baseline_levels,
    crossing,
    differences,
    log_ratios,
)

WORDS = ("reproduced", "direction reproduced", "inconclusive", "not reproduced")
REPRODUCED, DIRECTION, INCONCLUSIVE, NOT_REPRODUCED = WORDS
AGREEING = 0.8  # share of the pairs that must agree with the paper's direction: 4 of 5
MIXED_RUNS = "runs of one variant differ in their settings"

Settings = Mapping[str, Any]
FindMetric = Callable[[str], Metric]


class Measure(Protocol):
    """What a claim compares, as pairs whose values are above 0 where ours is better."""

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        """Return the comparison by seed."""

    def value(self, effect: float) -> str:
        """Return an effect as the report prints it."""

    def words(self, found: Interval) -> str:
        """Return an interval as the report prints it."""


@dataclass(frozen=True)
class Speed:
    """Updates until the running best reaches the median of the baseline's best values; the baseline's over ours."""

    metric: str

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        shared = [run for run in baseline if run["seed"] in {ours_run["seed"] for ours_run in ours}]
        return self.at_level(baseline, ours, metric, self.levels(Results(shared), metric)[1.0])

    def levels(self, baseline: Results, metric: FindMetric) -> dict[float, float]:
        """Return levels by share of the baseline's improvement."""
        measured = metric(self.metric)
        series = baseline.series(measured)
        return baseline_levels(series, measured.higher) if series else {1.0: math.nan}

    def at_level(self, baseline: Results, ours: Results, metric: FindMetric, level: float) -> Pairs:
        """Return the log ratios of the updates to one level."""
        measured = metric(self.metric)
        theirs, own = (
            {seed: crossing(series, level, measured.higher) for seed, series in side.series(measured).items()}
            for side in (baseline, ours)
        )
        return log_ratios(theirs, own, (baseline.steps(), ours.steps()))

    def value(self, effect: float) -> str:
        return f"{math.exp(effect):.3g}x"

    def words(self, found: Interval) -> str:
        return in_words(self, found, "fewer updates")


@dataclass(frozen=True)
class Quality:
    """A metric at the end of training ("last") or at its best, as a difference or as a ratio."""

    metric: str
    at: str = "last"
    ratio: bool = False
    unit: str = ""
    scale: float = 1.0

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        measured = metric(self.metric)
        theirs, own = (side.best(measured) if self.at == "best" else side.final(measured) for side in (baseline, ours))
        found = log_ratios(theirs, own) if self.ratio else differences(theirs, own)
        return negated(found) if measured.higher else found

    def value(self, effect: float) -> str:
        if self.ratio:
            return f"{math.exp(effect):.3g}x"
        return f"{self.scale * effect:+.2g}{self.unit and ' ' + self.unit}"

    def words(self, found: Interval) -> str:
        return in_words(self, found, "lower" if self.ratio else "ahead")


@dataclass(frozen=True)
class Inside:
    """Two quantities of the same run: the second less the first."""

    of: Callable[[Run], tuple[float, float] | None]
    unit: str = ""

    def pairs(self, baseline: Results, ours: Results, metric: FindMetric) -> Pairs:
        found = ours.by_seed(self.of)
        return differences({s: b for s, (_, b) in found.items()}, {s: a for s, (a, _) in found.items()})

    def value(self, effect: float) -> str:
        return f"{effect:+.2g}{self.unit and ' ' + self.unit}"

    def words(self, found: Interval) -> str:
        return in_words(self, found, "")


def in_words(measure: Measure, found: Interval, what: str) -> str:
    """Return ``1.84x fewer updates (1.52x to 2.23x, n = 5)``, or the bound where some run missed the level."""
    low, middle, high = (measure.value(value) for value in (found.low, found.estimate, found.high))
    bounded = math.isfinite(found.low), math.isfinite(found.high)
    tail = f"{what and ' ' + what} ({low} to {high}, n = {found.n})"
    if bounded == (True, True):
        return middle + tail
    missed = f"{what and ' ' + what} (n = {found.n}; some runs missed the target)"
    return {(True, False): f"at least {low}", (False, True): f"at most {high}"}.get(bounded, "any number of") + missed


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

    placebo: the baseline against its own runs with other seeds. levels: intervals by share of the baseline's
    improvement, of the claim and of the placebo.
    """

    word: str
    measured: str
    reason: str = ""
    interval: Interval | None = None
    pairs: BySeed = field(default_factory=dict)
    placebo: Interval | None = None
    levels: tuple[tuple[float, Interval | None, Interval | None], ...] = ()

    @property
    def indicative(self) -> bool:
        """Whether fewer seeds stand behind it than a headline needs."""
        return self.interval is not None and self.interval.n < HEADLINE_SEEDS


def judge(claim: Claim, results: Results, metric: FindMetric) -> Verdict:
    """Return the verdict on a claim from the runs of an experiment."""
    baseline, ours = results.select(**claim.baseline), results.select(**claim.ours)
    try:
        pairs = claim.measure.pairs(baseline, ours, metric)
        worse = _ends_worse(claim, baseline, ours, metric)
        verdict = _decided(claim, pairs, worse)
        return replace(verdict, **_besides(claim, baseline, ours, metric))
    except Mixed:
        return Verdict(INCONCLUSIVE, "not measured", MIXED_RUNS)


def _decided(claim: Claim, pairs: Pairs, worse: str) -> Verdict:
    found = pairs.interval()
    if found is None:
        return Verdict(INCONCLUSIVE, "not measured", _why_no_interval(pairs), pairs=pairs.value)
    measured = claim.measure.words(found)
    word, reason = _word(claim, pairs, found, worse)
    return Verdict(word, measured, reason, found, pairs.value)


def _why_no_interval(pairs: Pairs) -> str:
    if not pairs.value and pairs.both_missed:
        return "no run of either side reached the target"
    if len(pairs.value) + pairs.both_missed < MIN_SEEDS:
        return f"fewer than {MIN_SEEDS} seeds of both sides"
    return "the target was missed in more than half of the pairs"


def _word(claim: Claim, pairs: Pairs, found: Interval, worse: str) -> tuple[str, str]:
    """Return the verdict's word, and the reason where the interval alone does not tell it."""
    if found.high < claim.margin:
        return NOT_REPRODUCED, "the interval lies on the other side"
    if found.low <= claim.margin:
        return INCONCLUSIVE, f"the interval contains {claim.measure.value(claim.margin)}"
    if worse:
        return NOT_REPRODUCED, worse
    agreeing = sum(value > claim.margin for value in pairs.value.values()) / len(pairs.value)
    if claim.expected is None or agreeing < AGREEING:
        return DIRECTION, ""
    if found.low <= math.log(claim.expected) <= found.high:
        return REPRODUCED, ""
    return DIRECTION, f"the interval does not contain the paper's {claim.expected:g}x"


def _ends_worse(claim: Claim, baseline: Results, ours: Results, metric: FindMetric) -> str:
    """Return why a faster start does not count; empty where the end is no worse, or cannot be told."""
    if not claim.final:
        return ""
    quality = Quality(claim.final, "best")
    found = quality.pairs(baseline, ours, metric).interval()
    worse = found is not None and found.high < 0
    return f"its best {metric(claim.final).label} is worse" if worse else ""


def _besides(claim: Claim, baseline: Results, ours: Results, metric: FindMetric) -> dict[str, Any]:
    """Return the placebo, and the ratios at other levels, of a claim on speed."""
    measure, seeds = claim.measure, {run["seed"] for run in ours}
    shared, further = (Results([r for r in baseline if (r["seed"] in seeds) is known]) for known in (True, False))
    if not isinstance(measure, Speed) or not len(shared):
        return {}
    placebo = _renumbered(further, shared)
    levels = []
    for share, level in measure.levels(shared, metric).items():
        rivals = (ours, placebo)
        found = [measure.at_level(shared, rival, metric, level).interval() if len(rival) else None for rival in rivals]
        levels.append((share, *found))
    return {"placebo": levels[-1][2], "levels": tuple(levels)}


def _renumbered(further: Results, shared: Results) -> Results:
    """Return the placebo's runs, in order of their seeds, under the seeds that the comparison has."""
    seeds = sorted(run["seed"] for run in shared)
    runs = sorted(further, key=lambda run: run["seed"])
    return Results([{**run, "seed": seed} for run, seed in zip(runs, seeds)])


def negated(pairs: Pairs) -> Pairs:
    """Return the pairs of a metric that is better the higher it is."""
    turned = ({seed: -value for seed, value in side.items()} for side in (pairs.value, pairs.nearest))
    return Pairs(*turned, pairs.both_missed)
