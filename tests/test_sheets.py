"""The sheets: settings that refuse nonsense, claims judged on runs made by hand, names that experiments really use."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lamina import verdicts
from lamina.errors import InputError
from lamina.progress import Reporter
from lamina.sheets import SHEETS, Job, Results, Sample, find, steps_to_best, steps_to_target
from lamina.sheets.base import MIN_SEEDS, too_few
from lamina.sheets.convnet import LAYERS, TARGETS

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


FAST, SLOW, NEVER = [0.5, 0.01, 0.001], [0.5, 0.011, 0.01], [0.5, 0.4, 0.3]  # train NLL: at 20, at 30, never at 0.01
MNIST = {  # claim: [(what each variant's curves are, held, words in what was measured)]
    "faster-128": [
        ({"layer": FAST, "batch": SLOW}, True, "LN 20, BN on all layers 30"),
        ({"layer": SLOW, "batch": SLOW}, True, "LN 30"),  # at least as fast
        ({"layer": SLOW, "batch": FAST}, False, "LN 30, BN on all layers 20"),
        ({"layer": FAST, "batch": NEVER}, True, "not reached by every seed"),
        ({"layer": NEVER, "batch": SLOW}, False, "LN not reached"),
        ({"layer": NEVER, "batch": NEVER}, None, "LN not reached"),  # nobody got there: nothing to compare
        ({"layer": [math.inf] * 3, "batch": SLOW}, False, "LN not reached"),
    ],
    "faster-128-either": [
        ({"layer": FAST, "batch": SLOW, "batch_hidden": SLOW}, True, "LN 20; BN on all layers 30, on hidden layers 30"),
        ({"layer": FAST, "batch": NEVER, "batch_hidden": FAST}, True, "LN 20"),
        ({"layer": SLOW, "batch": SLOW, "batch_hidden": FAST}, False, "on hidden layers 20"),
        ({"layer": SLOW, "batch": FAST, "batch_hidden": SLOW}, False, "on all layers 20"),
        ({"layer": NEVER, "batch": NEVER, "batch_hidden": NEVER}, None, "LN not reached"),
        ({"layer": NEVER, "batch": NEVER, "batch_hidden": SLOW}, False, "LN not reached"),
    ],
    "lower-128": [
        ({"layer": 0.1, "batch": 0.1, "batch_hidden": 0.2}, True, "LN 0.1 ± 0 (n=3)"),
        ({"layer": 0.1, "batch": 0.09, "batch_hidden": 0.2}, False, "on all layers 0.09"),
        ({"layer": 0.1, "batch": 0.2, "batch_hidden": 0.09}, False, "on hidden layers 0.09"),
        ({"layer": [0.01, 0.3], "batch": [0.9, 0.2], "batch_hidden": [0.9, 0.4]}, False, "LN 0.3"),  # the last counts
        ({"layer": math.inf, "batch": 0.2, "batch_hidden": 0.2}, False, "LN inf"),
        ({"layer": 0.1, "batch": math.inf, "batch_hidden": 0.2}, True, "on all layers inf"),
    ],
}
BETTER_4 = [
    ({"layer": 0.1, "batch": 0.2, "batch_hidden": 0.21}, True, "LN 0.1"),
    ({"layer": 0.1, "batch": 0.19, "batch_hidden": 0.3}, False, "on all layers 0.19"),
    ({"layer": 0.1, "batch": 0.3, "batch_hidden": 0.19}, False, "on hidden layers 0.19"),
    ({"layer": math.inf, "batch": 0.2, "batch_hidden": 0.2}, False, "LN inf"),
]
CASES = [pytest.param(n, 128, *case, id=f"{n}-{k}") for n, cases in MNIST.items() for k, case in enumerate(cases)]
CASES += [pytest.param("better-4", 4, *case, id=f"better-4-{k}") for k, case in enumerate(BETTER_4)]


@pytest.mark.parametrize(("claim", "size", "curves", "held", "words"), CASES)
def test_mnist_claims_on_training_loss(claim, size, curves, held, words):
    runs = [r for norm, curve in curves.items() for r in seeds(norm, batch_size=size, train_nll=curve)]
    other = [r for norm in curves for r in seeds(norm, batch_size=132 - size, train_nll=[1e-9, 1e-9, 1e-9])]
    verdict = judged("mnist", claim, runs + other)  # runs of the other batch size must not decide
    assert verdict.held is held
    assert words in verdict.measured


@pytest.mark.parametrize(
    ("claim", "norm", "at_128", "at_4", "held", "words"),
    [
        ("robust-ln", "layer", 0.0150, 0.0179, True, "1.50% at 128, 1.79% at 4, +0.29 points"),
        ("robust-ln", "layer", 0.0179, 0.0150, True, "-0.29 points"),
        ("robust-ln", "layer", 0.0150, 0.0182, False, "+0.32 points"),
        ("robust-ln", "layer", 0.0182, 0.0150, False, "-0.32 points"),
        ("robust-ln", "layer", 0.0150, math.inf, False, "inf% at 4"),
        ("degrades-bn", "batch", 0.015, 0.02, True, "1.50% at 128, 2.00% at 4"),
        ("degrades-bn", "batch", 0.02, 0.02, False, "2.00% at 128"),
        ("degrades-bn", "batch", 0.02, 0.015, False, "1.50% at 4"),
        ("degrades-bn", "batch", 0.02, math.inf, True, "inf% at 4"),
    ],
)
def test_mnist_claims_on_the_batch_size(claim, norm, at_128, at_4, held, words):
    runs = seeds(norm, test_error=[0.9, at_128]) + seeds(norm, batch_size=4, test_error=[0.9, at_4])
    verdict = judged("mnist", claim, runs)
    assert verdict.held is held
    assert words in verdict.measured


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


@pytest.mark.parametrize("claim", [c.name for c in find("mnist").claims])
def test_mnist_claims_wait_for_enough_seeds_of_each_variant(claim):
    needs = MNIST_NEEDS[claim]
    assert judged("mnist", claim, []).held is None
    assert judged("mnist", claim, mnist_runs(dict.fromkeys(needs, MIN_SEEDS))).held is not None
    for norm, size in needs:
        verdict = judged("mnist", claim, mnist_runs({**dict.fromkeys(needs, 5), (norm, size): MIN_SEEDS - 1}))
        assert verdict.held is None
        assert verdict.measured == f"needs 3 seeds of {norm.replace('_', ' ')} at {size}"


def errors_at(dataset, first, second):
    """Test errors that pass the data set's two targets at these evaluations (10 updates each), of four."""
    hard, easy = min(TARGETS[dataset]), max(TARGETS[dataset])
    return [hard if k >= second else easy if k >= first else 0.9 for k in range(1, 5)]


ORDERS = {"ln-over-none": ("layer", "none"), "bn-over-ln": ("batch", "layer"),
          "channel-over-none": ("layer_channel", "none")}  # fmt: skip


@pytest.mark.parametrize("dataset", TARGETS)
@pytest.mark.parametrize("claim", ORDERS)
@pytest.mark.parametrize(
    ("ours", "theirs", "held"),
    [
        ((1, 2), (2, 3), True),
        ((1, 3), (2, 3), False),  # as fast is not faster
        ((1, 3), (2, 2), False),  # the second target goes the other way
        ((2, 3), (1, 2), False),
        ((1, 2), (2, 9), True),  # the other never gets there
        ((1, 9), (2, 9), True),  # a target nobody reached says nothing
        ((2, 9), (1, 9), False),
        ((1, 9), (2, 3), False),
        ((9, 9), (9, 9), None),
        ((9, 9), (1, 2), False),
    ],
)
def test_convnet_orders(dataset, claim, ours, theirs, held):
    pairs = zip(ORDERS[claim], (ours, theirs))
    runs = [r for n, at in pairs for r in seeds(n, dataset=dataset, test_error=errors_at(dataset, *at))]
    runs += seeds("batch" if claim != "bn-over-ln" else "none", dataset=dataset, test_error=[0.5])
    verdict = judged("convnet", claim, runs)
    assert verdict.held is held
    if 9 not in ours:
        easy = max(TARGETS[dataset])
        assert f"updates to {100 * (1 - easy):.0f}% accuracy" in verdict.measured
        assert f"{find('convnet').norms[ORDERS[claim][0]]} {10 * ours[0]}" in verdict.measured
    else:
        assert "not reached by every seed" in verdict.measured


def test_convnet_targets_are_those_of_the_specification():
    """Accuracies of 60% and 70% on CIFAR-10."""
    assert TARGETS["cifar10"] == (0.40, 0.30)
    assert set(TARGETS) == set(find("convnet").datasets)
    assert all(0 < hard < easy < 1 for easy, hard in TARGETS.values())


@pytest.mark.parametrize(
    ("batch", "layer", "none", "held"),
    [
        (0.2, 0.25, 0.3, True),
        (0.25, 0.25, 0.3, False),
        (0.2, 0.3, 0.3, False),
        (0.3, 0.25, 0.2, False),
        (0.2, 0.35, 0.3, False),
        (0.2, 0.25, math.inf, True),
        (math.inf, 0.25, 0.3, False),
    ],
)
def test_convnet_final_order(batch, layer, none, held):
    values = {"batch": batch, "layer": layer, "none": none}
    runs = [r for norm, v in values.items() for r in seeds(norm, test_error=[0.1, v])]
    verdict = judged("convnet", "final-order", runs)
    assert verdict.held is held
    assert f"BN {100 * batch:.2f} ±" in verdict.measured


def profiles(edge, inside):
    return {f"{layer}_active": [edge, 0.9, inside] for layer in LAYERS}


@pytest.mark.parametrize(
    ("extras", "held"),
    [
        (profiles(0.2, 0.4), True),
        (profiles(0.4, 0.4), False),
        (profiles(0.4, 0.2), False),
        ({**profiles(0.2, 0.4), "conv3_active": [0.5, 0.9, 0.4]}, False),  # every layer
    ],
)
def test_convnet_border(extras, held):
    runs = seeds("layer", extras=extras, test_error=0.3) + seeds("batch", extras=profiles(0.0, 1.0), test_error=0.3)
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
        assert verdict.held is None
        assert verdict.measured == f"needs 3 seeds of {norm.replace('_', ' ')}"
    made = [r for n in needs for r in seeds(n, test_error=0.3, extras=profiles(0.2, 0.4))]
    assert judged("convnet", claim, made).held is not None


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
    assert too_few(a_b=sample, c=sample) is None
    assert too_few(a_b=Sample((1.0,)), c=sample).measured == "needs 3 seeds of a b"


# Names


@pytest.fixture(scope="module")
def produced(tmp_path_factory) -> dict[str, tuple[set[str], set[str]]]:
    """What one tiny run of each experiment writes: metrics of its evaluations, lists of its extras."""
    from lamina.train import Settings, train

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
