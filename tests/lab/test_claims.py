"""Verdicts on comparisons made by hand: one rule of the statistics at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lamina.lab.claims import (
    DIRECTION,
    INCONCLUSIVE,
    NOT_REPRODUCED,
    REPRODUCED,
    Claim,
    Inside,
    Quality,
    Speed,
    SpeedToBest,
    in_words,
    judge,
)
from lamina.lab.results import Metric, Results
from lamina.lab.statistics import Interval, t_interval

INF = math.inf
METRICS = {"loss": Metric("loss", "validation loss"), "recall": Metric("recall", "recall@1", "higher")}
UPDATES = [10 * 2**k for k in range(11)]  # 10 to 10,240: evaluations at equal steps of log updates


def metric(name: str) -> Metric:
    return METRICS[name]


def run(norm: str, seed: int, series: dict[str, Any], **more: Any) -> dict[str, Any]:
    told = {name: one if isinstance(one, dict) else evaluated(one) for name, one in series.items()}
    settings = {"norm": norm, "lr": 0.1, **more.pop("config", {})}
    return {"config": settings, "seed": seed, "finished": True, "steps": UPDATES[-1], "series": told, **more}


def evaluated(values: list[float | None]) -> dict[str, Any]:
    return {"update": UPDATES[: len(values)], "value": values}


def falling(crossing: float, best: float = 0.0) -> dict[str, Any]:
    """Losses that fall by 1 with every doubling of the updates, on a line that meets 0 at ``crossing``, to the best."""
    updates = sorted({*UPDATES, crossing / 2**best})
    return {"update": updates, "value": [max(math.log2(crossing / update), best) for update in updates]}


def runs(norm: str, crossings: list[float], first: int = 0, best: float = 0.0) -> list[dict[str, Any]]:
    return [run(norm, seed, {"loss": falling(at, best)}) for seed, at in enumerate(crossings, start=first)]


SPEED = Claim("speed", "Fewer updates.", "no number", Speed("loss"), {"norm": "ln"}, {"norm": "bn"})
BASELINE = [640.0, 660.0, 620.0, 650.0, 630.0]


def decided(claim: Claim, *parts: list[dict[str, Any]]):
    return judge(claim, Results([one for part in parts for one in part]), metric)


def sped(ratios: list[float]) -> list[dict[str, Any]]:
    """Runs that reach 0 in so many times fewer updates than the baseline's of their seed."""
    return runs("ln", [at / ratio for at, ratio in zip(BASELINE, ratios)])


# The words


@pytest.mark.parametrize(
    ("ratios", "expected", "word", "reason"),
    [
        ([1.8, 2.0, 2.2, 1.9, 2.1], 2.0, REPRODUCED, ""),
        ([1.8, 2.0, 2.2, 1.9, 2.1], None, DIRECTION, ""),
        ([1.8, 2.0, 2.2, 1.9, 2.1], 3.0, DIRECTION, "does not contain the paper's 3x"),
        ([1.8, 0.9, 1.2, 0.8, 1.4], 2.0, INCONCLUSIVE, "the interval contains 1x"),
        ([0.5, 0.6, 0.4, 0.5, 0.6], 2.0, NOT_REPRODUCED, "the interval lies on the other side"),
        ([2.0, 2.0, 2.0, 2.0, 2.0], 2.0, INCONCLUSIVE, "the pairs do not differ"),
    ],
)
def test_the_interval_decides_the_word(ratios, expected, word, reason):
    verdict = decided(dataclasses.replace(SPEED, expected=expected), runs("bn", BASELINE), sped(ratios))
    assert verdict.word == word
    assert reason in verdict.reason
    assert bool(verdict.reason) is bool(reason)
    assert verdict.pairs == pytest.approx({seed: math.log(ratio) for seed, ratio in enumerate(ratios)})
    found = t_interval([math.log(ratio) for ratio in ratios])
    assert dataclasses.astuple(verdict.interval) == pytest.approx(dataclasses.astuple(found))


@pytest.mark.parametrize(("against", "word"), [(1, REPRODUCED), (2, DIRECTION)])
def test_four_of_five_pairs_must_agree(against, word):
    """Of ten pairs two may be against; the interval of the others' large ratios excludes 1 with three as well."""
    ends = [0.9] * (against + 1) + [20.0] * (9 - against)
    made = [run(norm, seed, {"loss": [v]}) for seed, end in enumerate(ends) for norm, v in (("bn", end), ("ln", 1.0))]
    claim = Claim("q", "t", "p", Quality("loss", ratio=True), {"norm": "ln"}, {"norm": "bn"}, expected=8.0)
    verdict = decided(claim, made)
    assert verdict.interval.low > 0
    assert verdict.word == word
    assert verdict.reason == ("" if word == REPRODUCED else "only 7 of 10 pairs agree")


def test_three_pairs_are_indicative_and_five_are_not():
    three = [one for one in sped([1.8, 2.0, 2.2, 1.9, 2.1]) if one["seed"] < 3]
    assert decided(SPEED, runs("bn", BASELINE), three).indicative
    assert not decided(SPEED, runs("bn", BASELINE), sped([1.8, 2.0, 2.2, 1.9, 2.1])).indicative


def test_two_pairs_decide_nothing():
    two = [one for one in sped([1.8, 2.0, 2.2, 1.9, 2.1]) if one["seed"] < 2]
    verdict = decided(SPEED, runs("bn", BASELINE), two)
    assert (verdict.word, verdict.measured, verdict.interval) == (INCONCLUSIVE, "not measured", None)
    assert verdict.reason == "fewer than 3 seeds of both sides"


def test_seeds_pair_runs_of_the_same_seed_alone():
    shifted = [{**one, "seed": one["seed"] + 2} for one in sped([2.0] * 5)]
    verdict = decided(SPEED, runs("bn", BASELINE), shifted)
    assert sorted(verdict.pairs) == [2, 3, 4]


@pytest.mark.parametrize(("margin", "word"), [(math.log(1.5), DIRECTION), (math.log(2.0), INCONCLUSIVE)])
def test_a_margin_is_what_the_interval_must_exceed(margin, word):
    made = sped([1.8, 2.0, 2.2, 1.9, 2.1])
    verdict = decided(dataclasses.replace(SPEED, margin=margin), runs("bn", BASELINE), made)
    assert verdict.word == word
    assert decided(dataclasses.replace(SPEED, margin=math.log(3)), runs("bn", BASELINE), made).word == NOT_REPRODUCED


def test_a_negative_margin_allows_so_much_worse():
    claim = Claim("q", "t", "p", Quality("loss"), {"norm": "ln"}, {"norm": "bn"}, margin=-0.3)
    ends = {"bn": (1.0, 1.1, 1.2), "ln": (1.1, 1.22, 1.29)}  # 0.1 worse
    made = [run(norm, seed, {"loss": [end]}) for norm, values in ends.items() for seed, end in enumerate(values)]
    assert decided(claim, made).word == DIRECTION
    assert decided(dataclasses.replace(claim, margin=0.0), made).word == NOT_REPRODUCED


def test_speed_to_the_best_value_compares_where_each_run_was_best_for_the_first_time():
    def rising(norm, seed, best):
        values = [min(update, best) - (update > 8 * best) for update in UPDATES]  # flat, and lower at the end
        return run(norm, seed, {"recall": values})

    claim = dataclasses.replace(SPEED, measure=SpeedToBest("recall"), expected=2.0)
    ends = {"bn": (80, 160, 320, 160, 320), "ln": (40, 80, 160, 80, 80)}
    verdict = decided(
        claim, [rising(norm, seed, best) for norm, those in ends.items() for seed, best in enumerate(those)]
    )
    assert verdict.pairs == pytest.approx({seed: math.log(2 + 2 * (seed == 4)) for seed in range(5)})
    assert (verdict.word, verdict.measured.split(" (")[0]) == (REPRODUCED, "2.3x as fast")
    assert verdict.placebo is None
    further = [rising("bn", 5 + seed, best) for seed, best in enumerate((160, 80, 320, 320, 320))]
    ours_and_theirs = [rising(norm, seed, best) for norm, those in ends.items() for seed, best in enumerate(those)]
    placebo = decided(claim, [*ours_and_theirs, *further]).placebo
    assert placebo.estimate == pytest.approx(-math.log(2) / 5)


@pytest.mark.parametrize(("spread", "word"), [(0.5, DIRECTION), (20.0, INCONCLUSIVE)])
def test_a_lead_must_hold_for_other_test_cases_too(spread, word):
    """Every seed leads by about 1 in the mean; whether few of 100 cases make up the lead, only the cases tell."""

    def one(norm, seed, lead):
        items = [lead + 0.01 * seed * (norm == "ln") + spread * (-1) ** case * (norm == "ln") for case in range(100)]
        return run(norm, seed, {"recall": [sum(items) / 100]}, extras={"items": items})

    measure = Quality("recall", unit="points", items=lambda run: run["extras"]["items"])
    claim = dataclasses.replace(SPEED, measure=measure)
    verdict = decided(claim, [one(norm, seed, lead) for norm, lead in (("bn", 0.0), ("ln", 1.0)) for seed in range(3)])
    assert verdict.word == word
    assert verdict.items.estimate == pytest.approx(1.01)
    assert verdict.items.n == 100
    half = 1.96 * spread / 10
    assert (verdict.items.low, verdict.items.high) == pytest.approx((1.01 - half, 1.01 + half), abs=0.15 * half)
    assert "; bootstrap over 100 test cases: +" in verdict.measured or word == INCONCLUSIVE


def test_runs_without_items_have_no_bootstrap():
    claim = dataclasses.replace(SPEED, measure=Quality("recall", items=lambda run: run.get("items")))
    made = [
        run(norm, seed, {"recall": [end + seed**2 / 9]})
        for norm, end in (("bn", 0.0), ("ln", 3.0))
        for seed in range(3)
    ]
    assert decided(claim, made).items is None


# The target


def test_the_target_is_the_median_of_the_baselines_best_values_and_ours_has_no_say():
    baseline = [run("bn", seed, {"loss": falling(640, best)}) for seed, best in enumerate((0.5, 1.0, 2.0, 0.5, 3.0))]
    ours = runs("ln", [320.0, 330.0, 310.0, 340.0, 300.0], best=-5)
    verdict = decided(SPEED, baseline, ours)
    at = [math.log((640 / 2) / (crossing / 2)) for crossing in (320.0, 330.0, 340.0)]  # at loss 1
    assert verdict.pairs == pytest.approx({0: at[0], 1: at[1], 2: INF, 3: at[2], 4: INF})
    assert verdict.word == DIRECTION
    assert "some runs missed the target" in verdict.measured
    assert verdict.interval.high == INF


def test_a_run_that_misses_in_most_seeds_gives_no_ratio():
    verdict = decided(SPEED, runs("bn", BASELINE), runs("ln", BASELINE, best=0.5))
    assert (verdict.word, verdict.reason) == (INCONCLUSIVE, "the target was missed in 5 of 5 pairs")
    assert set(verdict.pairs.values()) == {-INF}


def test_seeds_in_which_neither_side_got_there_are_told():
    baseline = runs("bn", BASELINE[:4]) + runs("bn", BASELINE[4:], first=4, best=0.5)
    ours = sped([1.8, 2.0, 2.2, 1.9, 2.1])[:4] + runs("ln", [300.0], first=4, best=0.5)
    verdict = decided(SPEED, baseline, ours)
    assert verdict.interval.n == 4
    assert verdict.measured.endswith("in 1 more seeds neither side reached the target")


def test_a_metric_that_was_not_recorded_is_no_miss():
    verdict = decided(dataclasses.replace(SPEED, measure=Speed("recall")), runs("bn", BASELINE), sped([2.0] * 5))
    assert (verdict.word, verdict.reason) == (INCONCLUSIVE, "these runs did not measure it")


def test_higher_may_be_better():
    claim = dataclasses.replace(SPEED, measure=Speed("recall"))
    turned = [
        run(one["config"]["norm"], one["seed"], {"recall": {**loss, "value": [-value for value in loss["value"]]}})
        for one in (*runs("bn", BASELINE), *sped([1.8, 2.0, 2.2, 1.9, 2.1]))
        for loss in one["series"].values()
    ]
    assert decided(claim, turned).pairs == pytest.approx(
        decided(SPEED, runs("bn", BASELINE), sped([1.8, 2.0, 2.2, 1.9, 2.1])).pairs
    )


# Placebo and levels


def further(*crossings: float) -> list[dict[str, Any]]:
    return runs("bn", list(crossings), first=5)


def test_the_placebo_compares_the_baseline_with_its_own_further_seeds():
    made = runs("bn", BASELINE), further(600, 700, 640, 610, 690), sped([1.8, 2.0, 2.2, 1.9, 2.1])
    verdict = decided(SPEED, *made)
    by_hand = [math.log(a / b) for a, b in zip(BASELINE, (600, 700, 640, 610, 690))]
    assert dataclasses.astuple(verdict.placebo) == pytest.approx(dataclasses.astuple(t_interval(by_hand)))
    assert verdict.placebo_share == 1.0
    assert verdict.placebo.low < 0 < verdict.placebo.high
    assert verdict.word == DIRECTION
    assert sorted(verdict.pairs) == [0, 1, 2, 3, 4]  # the further seeds are in no pair


def test_a_placebo_that_excludes_no_effect_leaves_the_claim_open():
    made = runs("bn", BASELINE), further(300, 330, 310, 325, 315), sped([1.8, 2.0, 2.2, 1.9, 2.1])
    verdict = decided(SPEED, *made)
    assert verdict.word == INCONCLUSIVE
    assert verdict.reason.startswith("the placebo's interval does not contain 1x: 2.0")


def test_the_placebo_is_taken_at_the_highest_level_at_which_it_has_an_interval():
    """Half of a baseline's runs miss its own median: there the placebo has no bound."""
    shared, more = (
        [run("bn", first + k, {"loss": falling(at, best)}) for k, (at, best) in enumerate(zip(BASELINE, bests))]
        for first, bests in ((0, (0.0, 0.2, 0.1, 0.3, 0.4)), (5, (0.4, 0.3, 0.1, 0.2, 0.0)))
    )
    verdict = decided(SPEED, shared, more, sped([1.8, 2.0, 2.2, 1.9, 2.1]))
    assert verdict.placebo_share == 0.8
    assert verdict.placebo.low <= 0 <= verdict.placebo.high
    assert verdict.levels[-1][2] is None


def test_levels_are_drawn_from_a_fifth_of_the_improvement_to_all_of_it():
    ratios = [1.8, 2.0, 2.2, 1.9, 2.1]
    verdict = decided(SPEED, runs("bn", BASELINE), sped(ratios))
    assert [share for share, _, _ in verdict.levels] == [0.2, 0.4, 0.6, 0.8, 1.0]
    for _, found, placebo in verdict.levels[1:]:  # before the first evaluation there is no ratio to find
        assert found.estimate == pytest.approx(sum(map(math.log, ratios)) / 5)
        assert placebo is None
    assert verdict.levels[-1][1] == verdict.interval


# Final quality


def with_end(made: list[dict[str, Any]], ends: list[float]) -> list[dict[str, Any]]:
    return [
        {**one, "series": {**one["series"], "recall": {"update": [10, 20], "value": [end, 0.0]}}}
        for one, end in zip(made, ends)
    ]


@pytest.mark.parametrize(("shift", "word"), [(-0.2, NOT_REPRODUCED), (0.2, DIRECTION), (0.0, DIRECTION)])
def test_a_faster_start_does_not_count_where_the_best_is_worse(shift, word):
    claim = dataclasses.replace(SPEED, final="recall")
    ends = [0.50, 0.52, 0.54, 0.51, 0.53]
    jitter = [0.01, -0.01, 0.02, 0.0, -0.02]
    ours = with_end(sped([1.8, 2.0, 2.2, 1.9, 2.1]), [end + shift + j for end, j in zip(ends, jitter)])
    verdict = decided(claim, with_end(runs("bn", BASELINE), ends), ours)
    assert verdict.word == word
    assert verdict.reason == ("its best recall@1 is worse" if word == NOT_REPRODUCED else "")


def test_a_variant_that_never_gets_there_and_ends_worse_is_not_reproduced():
    claim = dataclasses.replace(SPEED, final="loss")
    ours = [run("ln", seed, {"loss": falling(300, 0.5 + seed / 100)}) for seed in range(5)]
    verdict = decided(claim, runs("bn", BASELINE), ours)
    assert (verdict.word, verdict.reason) == (NOT_REPRODUCED, "its best validation loss is worse")


# Qualities, and quantities of one run

ENDS = {"bn": (0.30, 0.32, 0.34), "ln": (0.20, 0.21, 0.25)}


def ending(name: str, ends: dict[str, tuple[float | None, ...]]) -> list[dict[str, Any]]:
    return [run(n, seed, {name: [9.0, v]}) for n, values in ends.items() for seed, v in enumerate(values)]


def quality(name: str, **more: Any) -> Claim:
    return Claim("q", "Better.", "no number", Quality(name, **more), {"norm": "ln"}, {"norm": "bn"})


def test_a_quality_is_a_difference_or_a_ratio_above_0_where_ours_is_better():
    assert decided(quality("loss"), ending("loss", ENDS)).pairs == pytest.approx({0: 0.10, 1: 0.11, 2: 0.09})
    assert decided(quality("recall"), ending("recall", ENDS)).pairs == pytest.approx({0: -0.10, 1: -0.11, 2: -0.09})
    ratios = {seed: math.log(b / a) for seed, (b, a) in enumerate(zip(*ENDS.values()))}
    assert decided(quality("loss", ratio=True), ending("loss", ENDS)).pairs == pytest.approx(ratios)
    turned = {seed: -value for seed, value in ratios.items()}
    assert decided(quality("recall", ratio=True), ending("recall", ENDS)).pairs == pytest.approx(turned)
    assert decided(quality("recall", at="best"), ending("recall", ENDS)).pairs == {0: 0.0, 1: 0.0, 2: 0.0}


@pytest.mark.parametrize("name", ["loss", "recall"])
@pytest.mark.parametrize("ratio", [False, True])
def test_a_run_that_diverged_has_the_worst_value_there_is(name, ratio):
    made = ending(name, {"bn": (0.30, 0.32, None, None), "ln": (0.20, None, 0.25, None)})
    verdict = decided(quality(name, ratio=ratio), made)
    assert (verdict.pairs[1], verdict.pairs[2]) == (-INF, INF)
    assert sorted(verdict.pairs) == [0, 1, 2]  # both diverged in seed 3


def test_two_quantities_of_one_run_are_compared_within_it():
    claim = Claim("i", "t", "p", Inside(lambda one: one["extras"].get("pair")), {"norm": "ln"}, {"norm": "ln"})
    pairs = [(1.0, 1.5), (1.0, 1.4), (2.0, 2.6)]
    made = [run("ln", seed, {}, extras={"pair": pair}) for seed, pair in enumerate(pairs)]
    assert decided(claim, made, [run("ln", 9, {}, extras={})]).pairs == pytest.approx({0: 0.5, 1: 0.4, 2: 0.6})


def test_runs_of_one_variant_with_other_settings_are_no_sample():
    made = runs("bn", BASELINE)
    made[2]["config"]["lr"] = 0.5
    verdict = decided(SPEED, made, sped([2.0] * 5))
    assert (verdict.word, verdict.reason) == (INCONCLUSIVE, "runs of one variant differ in their settings")
    made[2]["config"] = {**made[0]["config"], "eval_every": 7}  # changes nothing that is learnt
    assert decided(SPEED, made, sped([1.8, 2.0, 2.2, 1.9, 2.1])).word == DIRECTION


# Words


@pytest.mark.parametrize(
    ("measure", "interval", "words"),
    [
        (Speed("loss"), (math.log(2), math.log(1.5), math.log(2.5)), "2x as fast (1.5x to 2.5x, n = 5)"),
        (Speed("loss"), (math.log(2), math.log(1.5), INF), "2x as fast (median; at least 1.5x, n = 5, some runs"),
        (Speed("loss"), (INF, math.log(1.5), INF), "at least 1.5x as fast (n = 5, some runs missed the target)"),
        (Speed("loss"), (-INF, -INF, math.log(0.5)), "at most 0.5x as fast (n = 5, some runs"),
        (Speed("loss"), (math.log(2), -INF, INF), "2x as fast (median; no bound, n = 5"),
        (Quality("loss", unit="points", scale=100), (0.005, 0.0043, 0.0057), "lead +0.500 points (+0.430 to +0.570"),
        (Quality("loss", ratio=True), (math.log(1835), math.log(1096), math.log(3070)), "ratio 1,835x (1,096x to 3,0"),
        (Inside(lambda one: None), (-0.041, -0.054, -0.027), "-0.041 (-0.054 to -0.027, n = 5)"),
    ],
)
def test_an_interval_in_words(measure, interval, words):
    assert measure.words(Interval(*interval, 5)).startswith(words)
    assert in_words(measure, Interval(0.0, -0.1, 0.1, 3)).endswith("n = 3)")
