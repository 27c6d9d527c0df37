"""Tuning: the lowest validation figure wins, test cases and runs that went astray have no say."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from lamina.errors import InputError
from lamina.lab.experiments import find
from lamina.lab.reports import records, tuning
from lamina.lab.results import Metric

RESULTS = Path(__file__).parents[2] / "results"
COMMITTED = sorted(RESULTS.glob("tuning-*.json"))
DATA = {"name": "mnist", "kind": "real", "label": "MNIST", "sizes": {"train": 9, "test": 9}, "sha256": {}}


def write_run(root, valid, test=(0.5,), seed=0, finished=True, experiment="mnist", data=DATA, **settings):
    """A run folder whose evaluations were these; NaN is written as null, as runs do."""
    config = find(experiment).config(**settings)
    folder = root / experiment / f"{len(list(root.glob('*/*')))}-{config.norm}-{config.lr:g}-{seed}"
    folder.mkdir(parents=True)
    header = {"schema": 2, "experiment": experiment, "config": dataclasses.asdict(config), "seeds": [seed],
              "data": data, "environment": {}, "command": "lamina run mnist"}  # fmt: skip
    tests = [*test, *[test[-1]] * len(valid)]
    lines = [
        {"kind": "eval", "step": 10 * (k + 1), "seed": seed, "valid_nll": v if math.isfinite(v) else None,
         "test_nll": tests[k], "test_error": tests[k], "train_nll": tests[k]}
        for k, v in enumerate(valid)
    ]  # fmt: skip
    (folder / "config.json").write_text(json.dumps(header))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "summary.json").write_text(json.dumps({"finished": True, "steps": 10 * len(valid), "seconds": 1.0}))


def chosen(root) -> list[dict]:
    (record,) = tuning.choose([root])
    return record["chosen"]


def test_the_lowest_validation_figure_wins_whatever_the_test_says(tmp_path):
    write_run(tmp_path, [0.9, 0.20], test=[0.01], lr=1e-2)
    write_run(tmp_path, [0.9, 0.10], test=[0.99], lr=1e-3)
    write_run(tmp_path, [0.9, 0.30], test=[0.02], lr=1e-4)
    (record,) = tuning.choose([tmp_path])
    assert record["chosen"] == [{"norm": "layer", "batch_size": 128, "lr": 1e-3}]
    assert (record["kind"], record["experiment"], record["searched"]) == ("tuning", "mnist", ["lr"])
    assert record["metric"] == "lowest valid_nll"
    assert record["data"]["name"] == "mnist"
    assert {row["setting"]["lr"]: row["mean"] for row in record["rows"]} == {1e-2: 0.2, 1e-3: 0.1, 1e-4: 0.3}


def test_a_run_counts_with_its_lowest_evaluation(tmp_path):
    write_run(tmp_path, [0.9, 0.05, 0.50], lr=1e-2)
    write_run(tmp_path, [0.9, 0.20, 0.10], lr=1e-3)
    assert chosen(tmp_path)[0]["lr"] == 1e-2


def test_seeds_count_with_their_mean(tmp_path):
    for seed, (high, low) in enumerate([(0.1, 0.3), (0.7, 0.4)]):
        write_run(tmp_path, [high], seed=seed, lr=1e-2)
        write_run(tmp_path, [low], seed=seed, lr=1e-3)
    (record,) = tuning.choose([tmp_path])
    assert record["chosen"][0]["lr"] == 1e-3
    rows = {row["setting"]["lr"]: row for row in record["rows"]}
    assert rows[1e-2]["values"] == [0.1, 0.7]
    assert rows[1e-2]["n"] == 2
    assert rows[1e-3]["mean"] == pytest.approx(0.35)


ASTRAY = {
    "from the start": {"valid": [math.nan, math.nan]},
    "after a fine evaluation": {"valid": [0.01, math.nan]},
    "and ended": {"valid": [0.01], "finished": False},
    "never evaluated": {"valid": []},
}


@pytest.mark.parametrize("how", ASTRAY)
def test_a_seed_that_diverged_rules_its_setting_out(tmp_path, how):
    write_run(tmp_path, [0.01, 0.01], seed=0, lr=1e-2)
    write_run(tmp_path, seed=1, lr=1e-2, **ASTRAY[how])
    for seed in (0, 1):
        write_run(tmp_path, [0.5, 0.4], seed=seed, lr=1e-3)
    (record,) = tuning.choose([tmp_path])
    assert record["chosen"] == [{"norm": "layer", "batch_size": 128, "lr": 1e-3}]
    lost = next(row for row in record["rows"] if row["setting"]["lr"] == 1e-2)
    assert lost["mean"] is None
    assert lost["values"] == [0.01, None]


def test_a_variant_none_of_whose_settings_served_is_not_chosen_for(tmp_path):
    write_run(tmp_path, [math.nan], norm="none", lr=1e-2)
    write_run(tmp_path, [0.5], norm="layer", lr=1e-2)
    (record,) = tuning.choose([tmp_path])
    assert [c["norm"] for c in record["chosen"]] == ["layer"]
    with pytest.raises(InputError, match=r"covers every variant.*'none'.*Tune that variant"):
        tuning.apply(record, "mnist", find("mnist").config(norm="none"))


def test_each_variant_gets_its_own(tmp_path):
    figures = {("layer", 128): (0.3, 0.1), ("layer", 4): (0.1, 0.3), ("batch", 128): (0.2, 0.4), ("batch", 4): (4, 2)}
    for (norm, size), values in figures.items():
        for lr, value in zip((1e-3, 1e-2), values):
            write_run(tmp_path, [value], norm=norm, batch_size=size, lr=lr)
    best = {(c["norm"], c["batch_size"]): c["lr"] for c in chosen(tmp_path)}
    assert best == {("layer", 128): 1e-2, ("layer", 4): 1e-3, ("batch", 128): 1e-3, ("batch", 4): 1e-2}


def test_what_was_searched_is_found_out(tmp_path):
    """Settings that differ, less those that tell variants apart and those of length and book-keeping."""
    write_run(tmp_path, [0.2], norm="layer", lr=1e-3, momentum=0.1, epochs=2, log_every=7, eval_every=0.5)
    write_run(tmp_path, [0.1], norm="batch", lr=1e-3, momentum=0.01, epochs=3, checkpoint_every=5)
    (record,) = tuning.choose([tmp_path])
    assert record["searched"] == ["momentum"]
    assert {c["norm"]: c["momentum"] for c in record["chosen"]} == {"layer": 0.1, "batch": 0.01}
    assert [row["epochs"] for row in record["rows"]] == [3, 2]


def test_settings_that_are_words_have_columns_like_numbers(tmp_path):
    for norm, precision in (("layer", "float32"), ("batch", "bf16")):
        write_run(tmp_path, [0.2], norm=norm, lr=1e-3, precision=precision)
    (record,) = tuning.choose([tmp_path])
    _, columns, _ = tuning.table(record)
    assert columns == ["Variant", "precision bf16", "precision float32"]


def test_data_sets_and_experiments_are_apart(tmp_path):
    fashion = {**DATA, "name": "fashion_mnist"}
    write_run(tmp_path, [0.2], lr=1e-3)
    write_run(tmp_path, [0.1], lr=1e-2, data=fashion, dataset="fashion_mnist")
    write_run(tmp_path, [0.1], experiment="convnet", lr=1e-4, data=fashion, dataset="fashion_mnist")
    found = {(r["experiment"], r["data"]["name"]): r["chosen"][0]["lr"] for r in tuning.choose([tmp_path])}
    assert found == {("mnist", "mnist"): 1e-3, ("mnist", "fashion_mnist"): 1e-2, ("convnet", "fashion_mnist"): 1e-4}


def test_a_headline_may_be_better_the_higher_it_is(tmp_path, monkeypatch):
    higher = dataclasses.replace(find("mnist"), headline=Metric("valid_nll", "recall", "higher"))
    monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"mnist": higher})
    write_run(tmp_path, [0.2, 0.6, 0.1], lr=1e-2)
    write_run(tmp_path, [0.5], lr=1e-3)
    (record,) = tuning.choose([tmp_path])
    assert (record["chosen"][0]["lr"], record["metric"]) == (1e-2, "highest valid_nll")


def test_no_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match="tuning reads run folders"):
        tuning.choose([tmp_path])


# Training with what was chosen


def record_of(searched=("lr",), experiment="mnist", data="mnist", **more):
    chosen = [{"norm": "layer", "batch_size": 128, "lr": 0.02}, {"norm": "layer", "batch_size": 4, "lr": 0.03}]
    return {"kind": "tuning", "experiment": experiment, "data": {"name": data}, "searched": list(searched),
            "chosen": chosen, **more}  # fmt: skip


@pytest.mark.parametrize(("size", "lr"), [(128, 0.02), (4, 0.03)])
def test_apply_sets_what_was_searched_and_nothing_else(size, lr):
    config = find("mnist").config(norm="layer", batch_size=size, hidden=7, epochs=3)
    assert tuning.apply(record_of(), "mnist", config, ("hidden",)) == dataclasses.replace(config, lr=lr)


@pytest.mark.parametrize(
    ("record", "given", "words"),
    [
        (record_of(), ("lr",), "--lr as well"),
        (record_of(), ("hidden", "lr"), "--lr as well"),
        (record_of(experiment="convnet"), (), "tuning record of mnist.*'convnet'"),
        (record_of(kind="experiment"), (), "tuning record of mnist.*'experiment'"),
        (record_of(data="fashion_mnist"), (), "same data set.*fashion_mnist for mnist"),
    ],
)
def test_apply_refuses(record, given, words):
    with pytest.raises(InputError, match=words):
        tuning.apply(record, "mnist", find("mnist").config(), given)


@pytest.mark.parametrize("changes", [{"norm": "batch"}, {"batch_size": 64}])
def test_a_variant_that_was_not_tuned_is_refused(changes):
    with pytest.raises(InputError, match=f"none for .*{next(iter(changes.values()))}"):
        tuning.apply(record_of(), "mnist", find("mnist").config(**changes))


def test_from_runs_to_a_file_to_a_config(tmp_path):
    write_run(tmp_path / "runs", [0.2], lr=1e-2)
    write_run(tmp_path / "runs", [0.1], lr=3e-3)
    (record,) = tuning.choose([tmp_path / "runs"])
    path = records.save(record, tmp_path)
    assert tuning.apply(records.load(path), "mnist", find("mnist").config()).lr == 3e-3


# The searches that are committed


def test_every_data_set_of_the_results_was_searched():
    assert {p.stem for p in COMMITTED} >= {
        "tuning-mnist_mnist", "tuning-convnet_cifar10", "tuning-convnet_fashion_mnist"
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_searches_serve_every_variant(path):
    record = records.load(path)
    sheet = find(record["experiment"])
    assert record["data"]["kind"] == "real"
    higher = sheet.headline.better == "higher"
    assert record["metric"] == f"{'highest' if higher else 'lowest'} {sheet.headline.name}"
    dataset = record["data"]["name"]
    searched = {tuple(row["variant"].items()) for row in record["rows"]}
    assert {dict(variant)["norm"] for variant in searched} >= {c.ours["norm"] for c in sheet.claims}
    for variant in map(dict, searched):
        config = tuning.apply(record, sheet.name, sheet.config(**variant, dataset=dataset))
        rows = [row for row in record["rows"] if row["variant"] == variant]
        assert len(rows) >= 3  # a search
        best = (max if higher else min)((row for row in rows if row["mean"] is not None), key=lambda row: row["mean"])
        assert {k: getattr(config, k) for k in record["searched"]} == best["setting"]
