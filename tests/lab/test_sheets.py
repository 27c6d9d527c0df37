"""The sheets: settings that refuse nonsense, claims judged on runs made by hand, names that experiments really use."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lamina.errors import InputError
from lamina.lab.experiment import MIN_SEEDS
from lamina.lab.experiments import SHEETS, Job, Results, Sample, find, steps_to_best, steps_to_target
from lamina.lab.experiments.convnet.settings import LAYERS, TARGETS
from lamina.lab.reports import verdicts
from lamina.lab.runs.progress import Reporter

FIELDS = [pytest.param(s, f, id=f"{s.name}-{f.name}") for s in SHEETS.values() for f in dataclasses.fields(s.config)]


# Settings


@pytest.mark.parametrize(("sheet", "item"), FIELDS)
def test_every_setting_has_help_and_refuses_nonsense(sheet, item):
    assert len(item.metadata["help"]) > 5
    kind = type(item.default)
    wrong = {
        str: ["no such name", "", None, 3],
        int: ["7", None, 2.5, True, -1],
        float: ["x", None, math.nan, math.inf, -1.0],
    }
    for value in wrong[kind]:
        with pytest.raises(InputError, match=rf"^--{item.name.replace('_', '-')} must be .*, got "):
            sheet.config(**{item.name: value})
    assert getattr(sheet.config(), item.name) == item.default


@pytest.mark.parametrize(("sheet", "item"), FIELDS)
def test_bounds_are_where_the_settings_say(sheet, item):
    above, least = item.metadata["above"], item.metadata["least"]
    kind = type(item.default)
    if above is not None:
        with pytest.raises(InputError, match=f"above {above:g}"):
            sheet.config(**{item.name: kind(above)})
        sheet.config(**{item.name: kind(above) + kind(1) / 2})
    elif least is not None:
        with pytest.raises(InputError, match=f"at least {least:g}"):
            sheet.config(**{item.name: kind(least - 1)})
        sheet.config(**{item.name: kind(least)})
    for choice in item.metadata["choices"]:
        assert getattr(sheet.config(**{item.name: choice}), item.name) == choice


def test_a_whole_number_may_stand_for_a_float():
    assert find("mnist").config(lr=1).lr == 1
    with pytest.raises(InputError, match="--lr must be above 0, got 0"):
        find("mnist").config(lr=0)


def test_an_unknown_experiment_gets_the_nearest_suggested():
    with pytest.raises(InputError, match="Did you mean 'convnet'"):
        find("convnt")


@pytest.mark.parametrize("sheet", SHEETS.values(), ids=list(SHEETS))
def test_a_sheet_agrees_with_its_settings(sheet):
    fields = {f.name: f for f in dataclasses.fields(sheet.config)}
    assert set(sheet.vary) <= set(fields)
    assert tuple(sheet.norms) == fields["norm"].metadata["choices"]
    assert sheet.datasets == fields["dataset"].metadata["choices"]
    assert all(fields[name].metadata["sweep"] for name in sheet.vary)
    for name, values in sheet.small_sweep.items():
        for value in values:
            sheet.config(**{**sheet.small, name: value})
    assert len({claim.name for claim in sheet.claims}) == len(sheet.claims)
    assert len({figure.name for figure in sheet.figures}) == len(sheet.figures)


def test_labels_name_what_varies():
    config = find("mnist").config(norm="batch", batch_size=4, lr=3e-4)
    assert Job("mnist", config, (2,), ("norm", "batch_size", "lr")).label == "batch-batch_size4-lr0.0003-seed2"
    assert Job("mnist", config, (0, 1, 2)).label == "batch-seeds0-2"


# Runs made by hand


def run(norm, seed=0, batch_size=128, dataset="cifar10", extras=None, step=None, **metrics):
    curves = {name: values if isinstance(values, list) else [values] for name, values in metrics.items()}
    length = max(map(len, curves.values()), default=1)
    curve = {"step": step or [10 * (k + 1) for k in range(length)], **curves}
    config = {"norm": norm, "batch_size": batch_size, "dataset": dataset}
    return {"config": config, "seed": seed, "finished": True, "curve": curve, "extras": extras or {}}


def seeds(norm, n=MIN_SEEDS, **named):
    return [run(norm, seed, **named) for seed in range(n)]


def judged(experiment, claim, runs):
    return next(c for c in find(experiment).claims if c.name == claim).judge(Results(runs))


def crossing(norm, metric, target, at, n=MIN_SEEDS, every=10, last=1000, **named):
    """Runs that reach ``target`` at about update ``at``, a little later with each seed; never where it is None."""
    steps = list(range(every, last + 1, every))
    ends = [math.inf if at is None else at + every * seed for seed in range(n)]
    curves = [[target if step >= end else 1.0 for step in steps] for end in ends]
    return [run(norm, seed, step=steps, **{metric: curve}, **named) for seed, curve in enumerate(curves)]


def ending(norm, metric, value, n=MIN_SEEDS, spread=0.01, **named):
    """Runs that end at about ``value``; the seeds do not move in step with those of another norm."""
    shifts = {"layer": (0, 1, -1), "batch": (1, 0, -1)}.get(norm, (-1, 0, 1))
    ends = [value * (1 + spread * shifts[seed % 3]) for seed in range(n)]
    return [run(norm, seed, **{metric: [0.9, end]}, **named) for seed, end in enumerate(ends)]


SPEED = [  # updates at which LN and its rivals get there, the verdict, and its reason or words in what was measured
    ((200, 500, 600), True, "BN on all layers 510, BN on hidden layers 610"),
    ((500, 200, 800), False, "BN on all layers -300 updates"),
    ((500, 800, 200), False, "BN on hidden layers -300 updates"),
    ((200, 200, 500), None, "tie at the evaluation grid"),
    ((200, 210, 500), None, "interval contains 0"),
    ((200, None, 500), True, "BN on all layers not reached in 3 of 3 seeds"),
    ((None, 200, 200), False, "LN not reached in 3 of 3 seeds"),
    ((None, None, None), None, "no run reached the target"),
]


@pytest.mark.parametrize(("at", "held", "words"), SPEED)
def test_mnist_claims_on_speed(at, held, words):
    norms = ("layer", "batch", "batch_hidden")
    runs = [r for norm, when in zip(norms, at) for r in crossing(norm, "train_nll", 0.01, when, batch_size=128)]
    other = [r for norm in norms for r in crossing(norm, "train_nll", 0.01, 10, batch_size=4)]
    verdict = judged("mnist", "faster-128-either", runs + other)  # runs of the other batch size must not decide
    assert verdict.held is held
    assert words in (verdict.reason if held is None else verdict.measured)


def test_the_papers_claim_on_speed_leaves_the_other_placement_out():
    runs = [r for n, at in (("layer", 500), ("batch", 800)) for r in crossing(n, "train_nll", 0.01, at)]
    assert judged("mnist", "faster-128", runs).held is True


def test_an_evaluation_a_long_way_off_decides_nothing():
    """All first evaluations after the target: the order of the crossings before them is not known."""
    norms = {"layer": 430, "none": 430, "batch": 430}
    runs = [r for n, at in norms.items() for r in crossing(n, "test_error", 0.03, at, every=430, last=4300,
                                                           dataset="mnist")]  # fmt: skip
    verdict = judged("convnet", "bn-over-ln", runs)
    assert (verdict.held, verdict.reason) == (None, "tie at the evaluation grid")
    coarse = crossing("batch", "test_error", 0.03, 430, every=430, last=8600, dataset="mnist")
    coarse += crossing("layer", "test_error", 0.03, 860, every=430, last=8600, dataset="mnist")
    verdict = judged("convnet", "bn-over-ln", coarse)  # one evaluation apart in every seed
    assert (verdict.held, verdict.reason) == (None, "interval contains 0")


FINAL = [
    ((0.1, 0.3, 0.4), True, "LN 0.1"),
    ((0.1, 0.08, 0.4), False, "BN on all layers 0.08"),
    ((0.1, 0.4, 0.08), False, "BN on hidden layers 0.08"),
    ((0.1, 0.1, 0.4), None, "interval contains 0"),
    ((math.inf, 0.2, 0.2), None, "a value is not finite"),
]
FAR_BELOW = [((0.1, 0.3, 0.3), True, "LN 0.1"), ((0.1, 0.15, 0.3), False, "on all layers 0.15")]
FAR_BELOW += [((0.1, 0.2, 0.3), None, "interval contains 0")]
CASES = [("lower-128", 128, *case) for case in FINAL] + [("better-4", 4, *case) for case in FAR_BELOW]


@pytest.mark.parametrize(("claim", "size", "ends", "held", "words"), CASES)
def test_mnist_claims_on_the_final_training_loss(claim, size, ends, held, words):
    norms = ("layer", "batch", "batch_hidden")
    runs = [r for norm, end in zip(norms, ends) for r in ending(norm, "train_nll", end, batch_size=size)]
    verdict = judged("mnist", claim, runs)
    assert verdict.held is held
    assert words in (verdict.reason if held is None else verdict.measured)


@pytest.mark.parametrize(
    ("claim", "norm", "at_128", "at_4", "held", "words"),
    [
        ("robust-ln", "layer", 0.0150, 0.0160, True, "1.50% at 128, 1.60% at 4, +0.10 points"),
        ("robust-ln", "layer", 0.0200, 0.0150, True, "-0.50 points"),  # better with small batches is no fault
        ("robust-ln", "layer", 0.0150, 0.0200, False, "+0.50 points"),
        ("robust-ln", "layer", 0.0150, 0.0180, None, "interval contains 0.3 points"),
        ("degrades-bn", "batch", 0.015, 0.02, True, "1.50% at 128, 2.00% at 4"),
        ("degrades-bn", "batch", 0.02, 0.015, False, "1.50% at 4"),
        ("degrades-bn", "batch", 0.02, math.inf, None, "a value is not finite"),
    ],
)
def test_mnist_claims_on_the_batch_size(claim, norm, at_128, at_4, held, words):
    runs = ending(norm, "test_error", at_128, spread=0.01) + ending(norm, "test_error", at_4, spread=0.02, batch_size=4)
    verdict = judged("mnist", claim, runs)
    assert verdict.held is held
    assert words in (verdict.reason if held is None else verdict.measured)


def test_runs_of_other_settings_are_no_sample():
    runs = ending("batch", "test_error", 0.015) + ending("batch", "test_error", 0.02, spread=0.02, batch_size=4)
    runs[0]["config"]["lr"] = 0.5
    verdict = judged("mnist", "degrades-bn", runs)
    assert (verdict.held, verdict.reason) == (None, "runs of one variant differ in their settings")


def test_the_interval_is_that_of_the_paired_t_test():
    from scipy import stats

    from lamina.lab.claims import difference
    from lamina.lab.results import Measured

    ours, theirs = (3.0, 4.0, 3.5, 2.0), (4.0, 4.5, 5.0, 2.5)
    found = difference(*(Measured({seed: (v, v) for seed, v in enumerate(side)}) for side in (ours, theirs)))
    expected = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(expected))


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 2), st.floats(0, 1)), min_size=3, max_size=6))
def test_the_interval_covers_those_of_all_values_within_the_bounds(drawn):
    from lamina.lab.claims import difference
    from lamina.lab.results import Measured

    ours = Measured({seed: (low, low + width) for seed, (low, width, _) in enumerate(drawn)})
    exact = Measured({seed: (low + width * at,) * 2 for seed, (low, width, at) in enumerate(drawn)})
    zero = Measured(dict.fromkeys(range(len(drawn)), (0.0, 0.0)))
    wide, narrow = difference(ours, zero), difference(exact, zero)
    if not math.isnan(narrow.low):
        assert wide.low <= narrow.low + 1e-9
        assert wide.high >= narrow.high - 1e-9


def bounded(*bounds):
    from lamina.lab.results import Measured

    return Measured(dict(enumerate(bounds)))


def test_what_is_known_from_one_side_only_is_told_so():
    from lamina.lab.claims import difference

    reached, never = bounded((150, 160), (150, 160), (160, 170)), bounded(*[(185, math.inf)] * 3)
    assert difference(reached, never).text(digits=",.0f").startswith("at least +27 (95 %")
    assert difference(never, reached).text(digits=",.0f").startswith("at most -27 (95 %")
    once = bounded((150, 160), (150, 160), (185, math.inf))
    found = difference(once, never)  # the last pair says nothing, and is no tie of two evaluations
    assert (found.above().held, found.above().reason) == (None, "in some seed neither reached the target")
    assert found.text() == "not known (95 % interval no bound to no bound, n = 3)"


@pytest.mark.parametrize("gap", [0.0, 0.001])
def test_differences_without_spread_decide_nothing(gap):
    from lamina.lab.claims import difference

    values = (0.018, 0.020, 0.016)
    found = difference(bounded(*((v, v) for v in values)), bounded(*((v + gap,) * 2 for v in values)))
    assert gap or found.below(0.003, "0.3 points").reason == "no spread over seeds"
    assert math.isnan(found.low) or found.low < found.high


MNIST_NEEDS = {
    "faster-128": {("layer", 128), ("batch", 128)},
    "faster-128-either": {("layer", 128), ("batch", 128), ("batch_hidden", 128)},
    "lower-128": {("layer", 128), ("batch", 128), ("batch_hidden", 128)},
    "better-4": {("layer", 4), ("batch", 4), ("batch_hidden", 4)},
    "robust-ln": {("layer", 128), ("layer", 4)},
    "degrades-bn": {("batch", 128), ("batch", 4)},
}


def mnist_runs(counts):
    made = [r for (norm, size), n in counts.items() for r in seeds(norm, n, batch_size=size, train_nll=0.001)]
    return [{**r, "curve": {**r["curve"], "test_error": [0.1]}} for r in made]


def test_the_readmes_first_run_is_enough_for_every_claim():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    norms, sizes, n = re.search(r"run mnist --small --norm (\S+) --batch-size (\S+) --seeds (\d+)", readme).groups()
    assert int(n) >= MIN_SEEDS
    covered = {(norm, int(size)) for norm in norms.split(",") for size in sizes.split(",")}
    assert set().union(*MNIST_NEEDS.values()) <= covered


@pytest.mark.parametrize("claim", [c.name for c in find("mnist").claims])
def test_mnist_claims_wait_for_enough_seeds_of_each_variant(claim):
    needs = MNIST_NEEDS[claim]
    assert judged("mnist", claim, []).reason == "fewer than 3 seeds"
    assert judged("mnist", claim, mnist_runs(dict.fromkeys(needs, MIN_SEEDS))).reason != "fewer than 3 seeds"
    for norm, size in needs:
        verdict = judged("mnist", claim, mnist_runs({**dict.fromkeys(needs, 5), (norm, size): MIN_SEEDS - 1}))
        assert (verdict.held, verdict.reason) == (None, "fewer than 3 seeds")
        assert verdict.measured == f"needs 3 seeds of {norm.replace('_', ' ')} at {size}"


ORDERS = {"ln-over-none": ("layer", "none"), "bn-over-ln": ("batch", "layer"),
          "channel-over-none": ("layer_channel", "none")}  # fmt: skip


def two_targets(norm, dataset, easy, hard):
    """Runs that reach the data set's two targets at about these updates; never where it is None."""
    first, second = (crossing(norm, "test_error", t, at, dataset=dataset)
                     for t, at in zip(TARGETS[dataset], (easy, hard)))  # fmt: skip
    for a, b in zip(first, second):
        a["curve"]["test_error"] = [min(pair) for pair in zip(a["curve"]["test_error"], b["curve"]["test_error"])]
    return first


@pytest.mark.parametrize("dataset", TARGETS)
@pytest.mark.parametrize("claim", ORDERS)
@pytest.mark.parametrize(
    ("ours", "theirs", "held", "reason"),
    [
        ((100, 300), (300, 600), True, ""),
        ((300, 600), (100, 300), False, ""),
        ((100, 600), (300, 300), False, ""),  # the second target goes the other way
        ((100, 300), (100, 600), None, "tie at the evaluation grid"),
        ((100, 300), (300, None), True, ""),  # the other never gets there
        ((100, None), (300, None), True, ""),  # a target nobody reached says nothing
        ((100, None), (300, 300), False, ""),
        ((None, None), (None, None), None, "no run reached the target"),
    ],
)
def test_convnet_orders(dataset, claim, ours, theirs, held, reason):
    runs = [r for n, at in zip(ORDERS[claim], (ours, theirs)) for r in two_targets(n, dataset, *at)]
    runs += seeds("batch" if claim != "bn-over-ln" else "none", dataset=dataset, test_error=[0.5])
    verdict = judged("convnet", claim, runs)
    assert (verdict.held, verdict.reason) == (held, reason)
    if None not in ours:
        easy = max(TARGETS[dataset])
        assert f"updates to {100 * (1 - easy):.0f}% accuracy" in verdict.measured
        assert f"{find('convnet').norms[ORDERS[claim][0]]} {ours[0] + 10}" in verdict.measured
    else:
        assert "not reached in 3 of 3 seeds" in verdict.measured


def test_convnet_targets_are_those_of_the_specification():
    """Accuracies of 60% and 70% on CIFAR-10."""
    assert TARGETS["cifar10"] == (0.40, 0.30)
    assert set(TARGETS) == set(find("convnet").datasets)
    assert all(0 < hard < easy < 1 for easy, hard in TARGETS.values())


@pytest.mark.parametrize(
    ("batch", "layer", "none", "held"),
    [
        (0.2, 0.25, 0.3, True),
        (0.2, 0.35, 0.3, False),
        (0.3, 0.25, 0.2, False),
        (0.25, 0.25, 0.3, None),
        (0.2, 0.25, math.inf, None),
    ],
)
def test_convnet_final_order(batch, layer, none, held):
    values = {"batch": batch, "layer": layer, "none": none}
    runs = [r for norm, v in values.items() for r in ending(norm, "test_error", v)]
    verdict = judged("convnet", "final-order", runs)
    assert verdict.held is held
    assert f"BN {100 * batch:.2f}%" in verdict.measured


def profiles(edge, inside):
    return {f"{layer}_active": [edge, 0.9, inside] for layer in LAYERS}


@pytest.mark.parametrize(
    ("extras", "held"),
    [
        (profiles(0.2, 0.4), True),
        (profiles(0.4, 0.4), None),
        (profiles(0.4, 0.2), False),
        ({**profiles(0.2, 0.4), "conv3_active": [0.5, 0.9, 0.4]}, False),  # every layer
    ],
)
def test_convnet_border(extras, held):
    runs = [
        run("layer", seed, extras={k: [v[0], v[1], v[2] + 0.01 * (seed - 1)] for k, v in extras.items()})
        for seed in range(3)
    ]
    runs += seeds("batch", extras=profiles(0.0, 1.0), test_error=0.3)
    verdict = judged("convnet", "border", runs)
    assert verdict.held is held
    assert f"conv1 {extras['conv1_active'][0]:.2f} against {extras['conv1_active'][-1]:.2f}" in verdict.measured


@pytest.mark.parametrize("claim", [c.name for c in find("convnet").claims])
def test_convnet_claims_wait_for_enough_seeds_of_each_variant(claim):
    needs = {**ORDERS, "final-order": ("batch", "layer", "none"), "border": ("layer",)}[claim]
    assert judged("convnet", claim, []).held is None
    for norm in needs:
        counts = {**dict.fromkeys(needs, 5), norm: MIN_SEEDS - 1}
        made = [r for n, k in counts.items() for r in seeds(n, k, test_error=0.3, extras=profiles(0.2, 0.4))]
        verdict = judged("convnet", claim, made)
        assert (verdict.held, verdict.reason) == (None, "fewer than 3 seeds")
        assert verdict.measured == f"needs 3 seeds of {norm.replace('_', ' ')}"


def test_unfinished_runs_and_null_values_do_not_pass_for_results():
    """As records hand runs to judges: only finished ones, and what was not finite is infinitely bad."""
    whole = seeds("batch", test_error=[0.5, None])
    made = verdicts.results([*whole, {**run("batch", 9, test_error=0.0), "finished": False}])
    assert len(made) == MIN_SEEDS
    assert made.last("test_error").values == (math.inf,) * 3
    assert made.best("test_error").values == (0.5,) * 3


# Steps to a target, steps to the best


CURVES = st.lists(st.floats(0, 1) | st.just(math.inf), min_size=1, max_size=20)


@given(CURVES, st.floats(0, 1))
def test_steps_to_a_target_is_the_first_at_or_below_it(values, target):
    curve = {"step": [7 * (k + 1) for k in range(len(values))], "m": values}
    found = steps_to_target(curve, "m", target)
    reached = [s for s, v in zip(curve["step"], values) if v <= target]
    assert found == (reached[0] if reached else math.inf)


@given(CURVES)
def test_steps_to_the_best_is_the_first_of_the_lowest(values):
    curve = {"step": [7 * (k + 1) for k in range(len(values))], "m": values}
    at = curve["step"].index(steps_to_best(curve, "m"))
    assert values[at] == min(values)
    assert all(v > values[at] for v in values[:at])


@given(CURVES)
def test_the_lowest_value_is_reached_when_it_is_best(values):
    curve = {"step": list(range(1, len(values) + 1)), "m": values}
    if math.isfinite(min(values)):
        assert steps_to_target(curve, "m", min(values)) == steps_to_best(curve, "m")


def test_results_read_runs_that_have_the_metric():
    made = Results([run("layer", 0, a=[3.0, 1.0, 2.0]), run("layer", 1, a=[4.0, 5.0]), run("layer", 2, b=[0.0])])
    assert made.last("a").values == (2.0, 5.0)
    assert made.best("a").values == (1.0, 4.0)
    assert made.steps_to("a", 1.0).values == (20.0, math.inf)
    assert made.steps_to_best("a").values == (20.0, 10.0)
    assert len(made.select(norm="layer", batch_size=128)) == 3
    assert not len(made.select(norm="layer", batch_size=4))
    assert not made.select(nothing=1).last("a")


def test_samples():
    sample = Sample((1.0, 2.0, 6.0))
    assert (sample.n, sample.mean, sample.std) == (3, 3.0, pytest.approx(math.sqrt(7)))
    assert str(sample) == "3 ± 2.6 (n=3)"
    assert (Sample((1.0, math.inf)).std, Sample((4.0,)).std) == (math.inf, 0.0)
    assert math.isnan(Sample(()).mean)
    assert str(Sample(())) == "no runs"


# Names


def test_a_sheet_describes_the_networks_that_ran():
    configs = [dataclasses.asdict(find("mnist").config(hidden=n)) for n in (256, 1000, 256)]
    assert "two hidden layers of 256 units" in find("mnist").described(configs[:1])
    assert "of 256 or 1000 units" in find("mnist").described(configs)
    small = find("convnet").config(width=8, units=64, statistics="running")
    told = find("convnet").described([dataclasses.asdict(small)])
    assert "of 8 channels" in told
    assert "64 units" in told
    assert "with running statistics" in told


@pytest.fixture(scope="module")
def produced(tmp_path_factory) -> dict[str, tuple[set[str], set[str]]]:
    """What one tiny run of each experiment writes: metrics of its evaluations, lists of its extras."""
    from lamina.lab.training.loop import Settings, train

    runs = tmp_path_factory.mktemp("runs")
    found = {}
    for sheet in SHEETS.values():
        tiny = {"mnist": {"hidden": 8}, "convnet": {"width": 2, "units": 8}}[sheet.name]
        job = Job(sheet.name, sheet.config(**{**sheet.small, **tiny, "epochs": 0.05}), (0,), sheet.vary)
        with Reporter(Console(quiet=True)) as say:
            train([job], Settings(root="embedded", runs=runs, device="cpu"), say)
        folder = next(runs.glob(f"{sheet.name}/*/{job.label}"))
        found[sheet.name] = names_in(folder)
    return found


def names_in(folder: Path) -> tuple[set[str], set[str]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = set().union(*(line for line in lines if line["kind"] == "eval"))
    extras = folder / "extras.json"
    return metrics, set(json.loads(extras.read_text())["0"]) if extras.exists() else set()


@pytest.mark.parametrize("sheet", SHEETS.values(), ids=list(SHEETS))
def test_figures_and_tables_show_what_runs_write(sheet, produced):
    metrics, extras = produced[sheet.name]
    settings = {f.name for f in dataclasses.fields(sheet.config)}
    assert sheet.headline in metrics
    assert not sheet.headline.startswith("test_")  # test cases choose nothing
    for number in sheet.numbers:
        assert number.metric in metrics
        assert number.at in ("last", "best")
    for panel in (panel for figure in sheet.figures for panel in figure.panels):
        assert {panel.x, panel.y} <= (extras if panel.kind == "profile" else metrics), panel.title
        assert set(panel.where) <= settings
