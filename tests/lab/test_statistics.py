"""Crossings, pairs and intervals, against cases worked out by hand."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.lab.statistics import (
    baseline_levels,
    bootstrap,
    crossing,
    differences,
    log_ratios,
    pooled,
    shown,
    t_interval,
)

INF = math.inf


# Crossing a level


@pytest.mark.parametrize(
    ("updates", "values", "level", "higher", "at"),
    [
        ([100, 400], [3.0, 1.0], 2.0, False, 200),  # halfway in value is halfway in log updates
        ([100, 1600], [3.0, 1.0], 2.5, False, 200),  # a quarter of the way: 100 * 16 ** 0.25
        ([100, 400], [3.0, 1.0], 1.0, False, 400),
        ([100, 400], [3.0, 1.0], 3.0, False, 100),  # at the level counts
        ([100, 400], [3.0, 1.0], 5.0, False, 100),  # before the first evaluation nothing is known
        ([100, 400], [3.0, 1.0], 0.9, False, INF),
        ([100, 200, 400], [3.0, 9.0, 1.0], 2.0, False, math.sqrt(200 * 400)),  # the running best stays at 3
        ([100, 200, 400], [3.0, 1.0, 9.0], 2.0, False, math.sqrt(100 * 200)),  # reached is reached
        ([100, 400], [0.1, 0.5], 0.3, True, 200),
        ([100, 400], [0.1, 0.5], 0.6, True, INF),
        ([100, 400], [INF, 1.0], 2.0, False, 400),  # from a value that is not finite nothing is interpolated
        ([100, 400], [-INF, 1.0], 0.5, True, 400),
        ([100, 400], [3.0, 1.0], math.nan, False, INF),
        ([], [], 1.0, False, INF),
    ],
)
def test_the_updates_at_which_the_running_best_crosses_a_level(updates, values, level, higher, at):
    assert crossing((updates, values), level, higher) == pytest.approx(at)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=8), st.floats(0.01, 10))
def test_a_crossing_lies_between_the_evaluations_around_it(values, level):
    updates = [10 * 2**k for k in range(len(values))]
    found = crossing((updates, values), level)
    first = next((k for k, value in enumerate(values) if value <= level), None)
    if first is None:
        assert found == INF
    else:
        assert (updates[first - 1] if first else updates[0]) <= found * (1 + 1e-12)
        assert found <= updates[first] * (1 + 1e-12)


def test_levels_come_from_the_medians_of_the_baseline():
    curves = {0: ([1, 2], [1.0, 0.2]), 1: ([1, 2], [0.8, 0.3]), 2: ([1, 2, 3], [0.9, 0.1, 0.5])}
    levels = baseline_levels(curves)  # first values 0.9, best values 0.2
    assert levels == pytest.approx({0.2: 0.76, 0.4: 0.62, 0.6: 0.48, 0.8: 0.34, 1.0: 0.2})
    rising = {seed: (updates, [1 - value for value in values]) for seed, (updates, values) in curves.items()}
    assert baseline_levels(rising, higher=True) == pytest.approx({s: 1 - level for s, level in levels.items()})


@given(st.lists(st.tuples(st.floats(0.5, 1), st.floats(1e-9, 0.4)), min_size=3, max_size=5))
def test_rounding_does_not_move_the_target_out_of_the_baselines_reach(ends):
    curves = {seed: ([1, 2], list(values)) for seed, values in enumerate(ends)}
    target = baseline_levels(curves)[1.0]
    reached = [crossing(curve, target) < INF for curve in curves.values()]
    assert 2 * sum(reached) >= len(ends)


def test_a_baseline_most_of_whose_runs_diverged_has_no_target():
    levels = baseline_levels({0: ([1], [INF]), 1: ([1], [INF]), 2: ([1], [0.5])})
    assert math.isnan(levels[1.0])


# Intervals


def test_the_t_interval_is_that_of_the_paired_t_test():
    from scipy import stats

    theirs, ours = (4.0, 4.5, 5.0, 2.5), (3.0, 4.0, 3.5, 2.0)
    found = t_interval([a - b for a, b in zip(theirs, ours)])
    expected = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    by_hand = t_interval([1.0, 2.0, 3.0])  # the quantile at 2 degrees of freedom is 4.3027, the deviation 1
    assert (by_hand.estimate, by_hand.high) == pytest.approx((2.0, 2 + 4.3027 / math.sqrt(3)), rel=1e-4)


@pytest.mark.parametrize("n", [3, 5])
def test_the_t_interval_covers_the_truth_as_often_as_it_says(n):
    draw = random.Random(n)
    intervals = [t_interval([draw.gauss(0.3, 1) for _ in range(n)]) for _ in range(2000)]
    assert 0.94 < np.mean([found.low <= 0.3 <= found.high for found in intervals]) < 0.96


def test_the_bootstrap_covers_the_truth_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr("lamina.lab.statistics.RESAMPLES", 400)
    draw = random.Random(1)
    intervals = [bootstrap([float(draw.random() < 0.3) for _ in range(200)]) for _ in range(400)]
    assert 0.92 < np.mean([found.low <= 0.3 <= found.high for found in intervals]) < 0.98
    assert bootstrap([1.0, 2.0, 6.0]) == bootstrap([1.0, 2.0, 6.0])
    assert (intervals[0].n, bootstrap([1.0, 2.0, 6.0]).estimate) == (200, 3.0)


def test_pooling_gives_each_task_the_same_weight():
    found = pooled([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    assert found.estimate == pytest.approx(3.5)  # not 3.875, the mean of all values
    half = 4.3027 * math.sqrt(1 / 3) / 2  # the second group has no spread, so 2 degrees of freedom
    assert (found.low, found.high) == pytest.approx((3.5 - half, 3.5 + half), rel=1e-4)
    assert found.n == 8


def test_the_pooled_interval_covers_the_truth_as_often_as_it_says():
    draw = random.Random(0)
    means = (0.0, 0.4, -0.2)
    covered = 0
    for _ in range(1500):
        found = pooled([[draw.gauss(mean, 0.2 + mean**2) for _ in range(5)] for mean in means])
        covered += found.low <= np.mean(means) <= found.high
    assert 0.94 < covered / 1500 < 0.965


def test_tasks_without_spread_pool_to_a_point():
    found = pooled([[1.0, 1.0], [3.0, 3.0]])
    assert (found.low, found.estimate, found.high) == (2.0, 2.0, 2.0)


# Pairs


def by_seed(*values):
    return dict(enumerate(values))


def test_log_ratios_are_paired_by_seed():
    found = log_ratios({0: 200.0, 1: 100.0, 7: 1.0}, {1: 400.0, 0: 100.0, 8: 1.0})
    assert found.value == pytest.approx({0: math.log(2), 1: -math.log(4)})
    assert found.both_missed == 0
    assert found.interval() is None  # two seeds have no interval


def of_crossings(theirs, ours, budget=1000.0):
    budgets = by_seed(*[budget] * 5)
    return log_ratios(by_seed(*theirs), by_seed(*ours), (budgets, budgets))


def test_a_miss_of_the_baseline_gives_the_median_and_a_lower_bound():
    found = of_crossings((200, 300, 400, 500, INF), (100,) * 5)
    assert found.value[4] == INF
    assert found.nearest[4] == pytest.approx(math.log(5))  # the budget would say 10, the other pairs no more than 5
    assert of_crossings((200, 300, 400, 500, INF), (100, 100, 100, 100, 800)).nearest[4] == pytest.approx(
        math.log(1.25)
    )
    interval = found.interval()
    assert interval.estimate == pytest.approx(math.log(4))
    assert interval.low == pytest.approx(t_interval([math.log(v) for v in (2, 3, 4, 5, 5)]).low)
    assert interval.high == INF


def test_a_miss_of_ours_gives_an_upper_bound():
    interval = of_crossings((200, 300, 400, 500, 100), (100, 100, 100, 100, INF)).interval()
    assert interval.low == -INF
    assert interval.high == pytest.approx(t_interval([math.log(v) for v in (2, 3, 4, 5, 2)]).high)


def test_misses_of_either_side_leave_no_bound():
    interval = of_crossings((200, INF, 400, 500, 100), (100, 100, 100, 100, INF)).interval()
    assert (interval.low, interval.high) == (-INF, INF)


def test_seeds_in_which_both_missed_are_counted_and_say_nothing():
    found = of_crossings((200, 300, 400, 500, INF), (100, 100, 100, 100, INF))
    assert (sorted(found.value), found.both_missed, found.seeds) == ([0, 1, 2, 3], 1, 5)
    assert found.interval().n == 4


@pytest.mark.parametrize(
    ("theirs", "ours", "given"),
    [
        ((200, 300, 400, INF, INF), (100,) * 5, True),  # two of five
        ((200, 300, INF, INF, INF), (100,) * 5, False),
        ((200, 300, 400, INF, INF), (100, 100, 100, 100, INF), True),
        ((200, 300, 400, INF, INF), (100, 100, INF, 100, INF), False),  # one side or both, in three of five
        ((200, 300, INF), (100,) * 3, True),
        ((200, 300, INF), (100, 100, INF), False),  # two pairs are left
        ((200, INF, INF), (100,) * 3, False),
        ((INF,) * 5, (INF,) * 5, False),
    ],
)
def test_more_than_half_missed_gives_no_ratio(theirs, ours, given):
    assert (of_crossings(theirs, ours).interval() is not None) is given


@pytest.mark.parametrize(("n", "misses"), [(3, 1), (5, 2)])
def test_the_bound_with_as_many_misses_as_a_baseline_has_of_its_own_median_holds_as_often_as_it_says(n, misses):
    """The truth is the median of all ratios, those that the budget hides included."""
    draw, held = random.Random(n), 0
    median = NormalDist(0.5, 0.4).inv_cdf(0.5 / (1 - misses / n))
    for _ in range(2000):
        theirs = [1000 * math.exp(draw.gauss(0.5, 0.4)) for _ in range(n - misses)] + [INF] * misses
        found = of_crossings(theirs, [1000] * n, 1e6).interval()
        held += found.low <= median
    assert held / 2000 > 0.965


def test_differences_with_a_diverged_run_take_the_most_extreme_of_the_others():
    found = differences(by_seed(1.0, 2.0, 4.0, INF), by_seed(0.5, 1.0, 1.0, 1.0))
    assert found.value == {0: 0.5, 1: 1.0, 2: 3.0, 3: INF}
    assert found.nearest[3] == 3.0
    assert found.interval().high == INF
    assert differences(by_seed(INF, 1.0), by_seed(INF, 1.0)).both_missed == 1


def test_ratios_of_zeros_and_infinities():
    found = log_ratios(by_seed(0.0, 1.0, INF, 0.0, INF), by_seed(1.0, 0.0, 1.0, 0.0, INF))
    assert found.value == {0: -INF, 1: INF, 2: INF}
    assert found.both_missed == 2


# Numbers in words


@pytest.mark.parametrize(
    ("value", "spread", "sign", "words"),
    [
        (0.0184, 0.00061, "", "0.01840"),
        (1.48812, 0.042, "", "1.488"),
        (12345.0, 7531.0, "", "12,300"),
        (-0.498, 0.07, "+", "-0.498"),
        (0.02, 0.13, "+", "+0.02"),
        (1.49e-6, 1.0e-6, "", "1.5e-06"),
        (1.234567e-3, 1.0e-9, "", "1.2345670e-03"),
        (0.0, 0.0, "+", "0"),
        (1.84, 0.0, "", "1.84"),
        (12345.6, 0.0, "", "12,346"),
        (INF, 1.0, "", "inf"),
    ],
)
def test_a_number_has_two_significant_digits_of_its_spread(value, spread, sign, words):
    assert shown(value, spread, sign) == words
