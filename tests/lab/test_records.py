"""Run folders in, records out: whole, half-finished, torn, broken, grown. test_report uses the runs made here."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import InputError
from lamina.lab.claims import DIRECTION, INCONCLUSIVE, Claim, Inside, Quality, Speed
from lamina.lab.experiment import Axis, Config, Figure, Number, Panel, Sheet, option
from lamina.lab.reports import records, verdicts
from lamina.lab.results import Metric
from lamina.lab.runs import environment


@dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    norm: str = option("layer", "normalisation", sweep=True)


def _panels(metric: str, label: str, log: bool) -> tuple[Panel, ...]:
    sizes = (128, 4)
    return tuple(Panel(f"Batch size {b}", metric, label, log=log, where={"batch_size": b}) for b in sizes)


def _at(norm: str, size: int = 128) -> dict[str, Any]:
    return {"norm": norm, "batch_size": size}


ERROR = Quality("test_error", unit="points", scale=100)
TOY = Sheet(
    name="toy",
    title="Permutation-invariant digits",
    section="6.6",
    about="A 784-1000-1000-10 network on digits without their geometry, at two batch sizes.",
    config=ToyConfig,
    module="toy",
    axes=(
        Axis("norm", {"layer": "layer norm", "batch": "batch norm", "none": "no norm"}, "batch"),
        Axis("batch_size", {128: "batch size 128", 4: "batch size 4"}, 128),
    ),
    scales={},
    datasets=("digits",),
    figures=(
        Figure("nll", "Training loss.", _panels("train_nll", "train NLL", True)),
        Figure("error", "Test error.", _panels("test_error", "test error", False)),
        Figure(
            "border",
            "How often units are on.",
            (Panel("Border", "active", "share on", "distance", "d", kind="profile"),),
        ),
    ),
    numbers=(
        Number("test_error", "test error, %", scale=100.0, paper={"layer norm, batch size 128": "1.1"}),
        Number("train_nll", "best train NLL", at="best"),
        Number("train_nll", "updates to train NLL 0.1", target=0.1),
    ),
    claims=(
        Claim("lower", "Layer norm ends lower than batch norm.", "figure 6", ERROR, _at("layer"), _at("batch")),
        Claim("beside", "At 4 too.", "Not claimed", ERROR, _at("layer", 4), _at("batch", 4), claimed=False),
        Claim("never", "Batch norm beats all.", "nowhere", ERROR, _at("batch"), _at("layer"), doubt="By construction."),
        Claim("faster", "Layer norm is faster than none.", "6.6", Speed("train_nll"), _at("layer"), _at("none")),
    ),
    headline=Metric("test_error", "test error"),
)

DATA = {
    "name": "digits",
    "kind": "real",
    "label": "Digits (real: 60,000 + 10,000)",
    "sizes": {"train": 60000, "test": 10000},
    "sha256": {"train-images": "ab" * 32},
}
ENVIRONMENT = {
    "lamina": "0.1.0",
    "commit": "c0ffee" * 6 + "c0ff",
    "dirty": False,
    "versions": {"python": "3.11.9", "torch": "2.13.0"},
    "machine": {"cpu": "A CPU", "cores": 2, "gpu": None, "system": "Linux x86_64"},
    "created": "2026-01-02T03:04:05+00:00",
}
LEVEL = {"layer": 1.0, "batch": 1.6, "none": 2.4}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": TOY}, raising=False)
    return TOY


def metric_lines(norm: str, batch_size: int, seed: int, points: int) -> list[dict[str, Any]]:
    """Evaluations of a run that learns; each seed a little different, all by arithmetic, so they never change."""
    worse = LEVEL.get(norm, 3.0) * (1.5 if (norm, batch_size) == ("batch", 4) else 1.0)
    lines: list[dict[str, Any]] = []
    for k in range(1, points + 1):
        noise = 1 + 0.06 * ((seed * 7 + k * 3) % 11 - 5) / 5
        where = {"step": 430 * k, "epoch": float(k), "seconds": 0.5 * k + 0.01 * seed, "seed": seed}
        lines.append({"kind": "log", **where, "loss": worse / k})
        scores = {"train_nll": noise * 0.4 * worse / k**1.5, "test_error": noise * 0.01 * worse * (1 + 4 / k)}
        lines.append({"kind": "eval", **where, **scores})
    return lines


def write_run(
    root: Path,
    norm="layer",
    batch_size=128,
    seeds=(0,),
    points=12,
    finished=True,
    data=None,
    name=None,
    scale="",
    made=None,
    **settings,
) -> Path:
    """One run folder as the training loop leaves it."""
    config = {**dataclasses.asdict(ToyConfig(norm=norm, batch_size=batch_size)), **settings}
    label = name or f"{norm}-batch_size{batch_size}-seed{seeds[0]}"
    used = data or DATA
    folder = root / "toy" / f"{used['name']}-{used['kind']}{scale and '-' + scale}" / label
    folder.mkdir(parents=True)
    header = {"schema": 2, "experiment": "toy", "config": config, "seeds": list(seeds), "data": used, "scale": scale}
    header |= {
        "environment": {**ENVIRONMENT, **(made or {})},
        "command": f"/opt/bin/lamina run toy --norm {norm} --runs={root}",
    }
    (folder / "config.json").write_text(json.dumps(header))
    lines = [line for seed in seeds for line in metric_lines(norm, batch_size, seed, points)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        summary = {"finished": True, "steps": 430 * points, "seconds": 12.3456789, "side_by_side": len(seeds)}
        (folder / "summary.json").write_text(json.dumps({**summary, "engine": "eager"}))
        extras = {
            str(s): {"distance": [0, 1, 2], "active": [0.1 * LEVEL.get(norm, 3.0), 0.3, 0.5 + s / 100]} for s in seeds
        }
        (folder / "extras.json").write_text(json.dumps(extras))
    return folder


def only(found: list[records.Record]) -> records.Record:
    assert len(found) == 1
    return found[0]


def collected(root: Path) -> tuple[records.Record, list[str]]:
    notes: list[str] = []
    return only(records.collect([root], notes)), notes


@pytest.mark.usefixtures("toy")
class TestCollect:
    def test_one_run(self, tmp_path):
        write_run(tmp_path)
        record, notes = collected(tmp_path)
        run = only(record["runs"])
        assert notes == []
        assert (record["schema"], record["kind"], record["experiment"]) == (2, "experiment", "toy")
        assert record["data"] == DATA
        assert run["environment"] == ENVIRONMENT
        assert run["command"] == f"lamina run toy --norm layer --runs={tmp_path.name}"  # no path of the machine
        assert (run["seed"], run["finished"], run["steps"], run["seconds"]) == (0, True, 12 * 430, 12.3457)
        updates = [430 * k for k in range(1, 13)]
        assert run["series"]["epoch"] == {"update": updates, "value": [float(k) for k in range(1, 13)]}
        assert set(run["series"]) == {"epoch", "seconds", "train_nll", "test_error"}  # no line of training loss
        assert run["extras"]["distance"] == [0, 1, 2]

    def test_floats_have_six_digits(self, tmp_path):
        write_run(tmp_path)
        run = only(collected(tmp_path)[0]["runs"])
        exact = [line["train_nll"] for line in metric_lines("layer", 128, 0, 12) if line["kind"] == "eval"]
        assert run["series"]["train_nll"]["value"] == [float(f"{value:.6g}") for value in exact]

    def test_each_metric_has_its_own_updates(self, tmp_path):
        folder = write_run(tmp_path, points=6)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if k != "test_error" or line["step"] % 1290 == 0} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        series = only(collected(tmp_path)[0]["runs"])["series"]
        assert series["test_error"]["update"] == [1290, 2580]
        assert len(series["train_nll"]["update"]) == len(series["train_nll"]["value"]) == 6

    def test_a_folder_with_several_seeds_is_a_row_for_each(self, tmp_path):
        write_run(tmp_path, seeds=(0, 1, 2))
        runs = collected(tmp_path)[0]["runs"]
        assert [run["seed"] for run in runs] == [0, 1, 2]
        assert all(run["side_by_side"] == 3 for run in runs)
        assert len({tuple(run["series"]["train_nll"]["value"]) for run in runs}) == 3
        assert [run["extras"]["active"][2] for run in runs] == [0.5, 0.51, 0.52]

    def test_a_half_finished_run_is_kept_and_not_counted(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, seeds=(1,), points=5, finished=False)
        record, _ = collected(tmp_path)
        half = record["runs"][1]
        assert (half["finished"], half["steps"], half["seconds"]) == (False, 5 * 430, 2.51)
        assert {entry["n"] for entry in record["summary"]} == {1}

    @pytest.mark.parametrize("tail", ['{"kind": "eval", "step": 99', '{"kind": "ev\xff', "7\n", "\x00\x00"])
    def test_a_torn_tail_is_read_as_far_as_it_goes(self, tmp_path, tail):
        folder = write_run(tmp_path, finished=False)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(tail.encode("latin-1"))
        record, notes = collected(tmp_path)
        assert len(only(record["runs"])["series"]["epoch"]["update"]) == 12
        assert "line 25" in only(notes)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"schema": 2, "experi', "not valid JSON"),
            ('{"schema": 1}', "not the header of a run with schema 2: train it anew"),
            ("[]", "schema 2"),
            ('{"schema": 2, "experiment": "toy"}', "no 'config'"),
            ('{"schema": 2, "experiment": "toy", "config": 3, "seeds": [0], "data": {}}', "config must be a dict"),
            (
                '{"schema": 2, "experiment": "toy", "config": {}, "seeds": [0], "data": {"name": 1, "kind": 2}}',
                "data.name",
            ),
        ],
    )
    def test_a_broken_folder_is_noted_and_left_out(self, tmp_path, text, reason):
        write_run(tmp_path)
        broken = tmp_path / "toy" / "broken"
        broken.mkdir()
        (broken / "config.json").write_text(text)
        record, notes = collected(tmp_path)
        assert len(record["runs"]) == 1
        assert reason in only(notes)
        assert f"{tmp_path.name}/toy/broken: left out" in only(notes)
        assert str(tmp_path) not in only(notes)

    def test_notes_are_printed_when_nobody_takes_them(self, tmp_path, capsys):
        (tmp_path / "config.json").write_text("{")
        assert records.collect([tmp_path]) == []
        assert "left out" in capsys.readouterr().err

    def test_a_torn_summary_means_not_finished(self, tmp_path):
        folder = write_run(tmp_path)
        (folder / "summary.json").write_text('{"finished": tr')
        record, notes = collected(tmp_path)
        assert only(record["runs"])["finished"] is False
        assert "summary.json" in only(notes)

    @pytest.mark.parametrize("lost", [1, 9, 24])
    def test_a_finished_run_whose_metrics_were_cut_is_damaged(self, tmp_path, lost):
        """Its last value is from the middle of training: it counts in nothing."""
        write_run(tmp_path)
        folder = write_run(tmp_path, seeds=(1,))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:-lost]))
        record, notes = collected(tmp_path)
        assert [run["seed"] for run in record["runs"]] == [0]
        assert {entry["n"] for entry in record["summary"]} == {1}
        last = f"{430 * ((24 - lost) // 2):,}"
        assert "layer-batch_size128-seed1: seed 1 is damaged and left out" in only(notes)
        assert f"finished at update 5,160, but its last evaluation is at {last}." in only(notes)

    def test_values_that_are_not_finite_are_null(self, tmp_path):
        folder = write_run(tmp_path, points=2)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines[-1] = re.sub(r'"test_error": [^,}]*', '"test_error": NaN', lines[-1])
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        record, _ = collected(tmp_path)
        assert only(record["runs"])["series"]["test_error"]["value"][-1] is None
        entry = next(e for e in record["summary"] if e["metric"] == "test_error")
        assert (entry["values"], entry["n"], entry["mean"]) == ([None], 1, None)

    @pytest.mark.parametrize("settings", [{}, {"log_every": 7}], ids=["same", "bookkeeping"])
    @pytest.mark.parametrize("longer_first", [True, False])
    def test_of_two_folders_of_one_run_the_longer_wins(self, tmp_path, settings, longer_first):
        names = ("a", "b") if longer_first else ("b", "a")
        write_run(tmp_path, points=5, finished=False, name=names[0])
        write_run(tmp_path, points=3, finished=False, name=names[1], **settings)
        record, notes = collected(tmp_path)
        assert only(record["runs"])["steps"] == 5 * 430
        assert f"digits-real/{names[1]}" in only(notes).partition("too")[0]

    def test_a_finished_run_wins_over_a_longer_one(self, tmp_path):
        write_run(tmp_path, points=5, finished=False, name="a")
        write_run(tmp_path, points=3, name="b")
        record, _ = collected(tmp_path)
        assert only(record["runs"])["finished"] is True

    def test_other_data_is_another_record(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, data={**DATA, "kind": "embedded"})
        write_run(tmp_path, data={**DATA, "name": "other"})
        assert [records.name(r) for r in records.collect([tmp_path])] == [
            "toy-digits-embedded",
            "toy-digits",
            "toy-other",
        ]

    def test_another_scale_is_another_record(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, scale="laptop")
        write_run(tmp_path, scale="smoke", data={**DATA, "kind": "embedded"})
        names = {records.name(record) for record in records.collect([tmp_path])}
        assert names == {"toy-digits", "toy-digits-laptop", "toy-digits-embedded-smoke"}

    def test_runs_that_read_different_files_say_so(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, seeds=(1,), data={**DATA, "sha256": {"train-images": "00"}})
        record, _ = collected(tmp_path)
        assert "sha256" in only(record["notes"])

    def test_runs_inside_a_run_are_old(self, tmp_path):
        folder = write_run(tmp_path)
        write_run(folder / "old-1", seeds=(5,))
        write_run(folder / "copy", seeds=(7,))
        (tmp_path / "toy" / "digits-real" / "begun").mkdir()
        write_run(tmp_path / "toy" / "digits-real" / "begun" / "old-2", seeds=(6,))
        assert [run["seed"] for run in collected(tmp_path)[0]["runs"]] == [0]

    def test_a_resumed_run_counts_each_step_once(self, tmp_path):
        folder = write_run(tmp_path)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "eval", "step": 430, "epoch": 1.0, "seed": 0, "train_nll": 9.0}) + "\n")
        series = only(collected(tmp_path)[0]["runs"])["series"]
        assert series["train_nll"]["update"] == [430 * k for k in range(1, 13)]
        assert series["train_nll"]["value"][0] == 9.0
        assert series["test_error"]["update"][0] == 430  # which the later line does not have

    def test_a_file_is_not_a_folder(self, tmp_path):
        with pytest.raises(InputError, match="folder"):
            records.collect([tmp_path / "absent"])

    def test_each_row_keeps_its_own_environment(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, seeds=(1,), made={"commit": "other"})
        write_run(tmp_path, seeds=(2,), made={"created": "later"})
        record = collected(tmp_path)[0]
        assert [run["environment"]["commit"] for run in record["runs"]] == [
            *[ENVIRONMENT["commit"], "other"],
            ENVIRONMENT["commit"],
        ]
        assert [env["commit"] for env in records.environments(record)] == [ENVIRONMENT["commit"], "other"]
        assert len(records.commands(record)) == 1


def recorded(folder: Path, **run: Any) -> records.Record:
    write_run(folder, **run)
    return collected(folder)[0]


@pytest.mark.usefixtures("toy")
class TestGrowing:
    def test_runs_made_later_are_added_each_with_its_own_origin(self, tmp_path):
        old = recorded(tmp_path / "a")
        new = recorded(tmp_path / "b", seeds=(1,), made={"commit": "later"})
        grown = records.joined([old, new], notes := [])
        assert notes == []
        assert [(run["seed"], run["environment"]["commit"]) for run in grown["runs"]] == [
            (0, ENVIRONMENT["commit"]),
            (1, "later"),
        ]
        assert {entry["n"] for entry in grown["summary"]} == {2}

    def test_the_same_run_again_gives_way_only_to_the_more_complete_one(self, tmp_path):
        half = recorded(tmp_path / "a", points=5, finished=False)
        whole = recorded(tmp_path / "b", made={"commit": "later"})
        again = recorded(tmp_path / "c", made={"commit": "latest"})
        grown = records.joined([half, whole, again], notes := [])
        assert only(grown["runs"])["environment"]["commit"] == "later"
        assert len(notes) == 2
        assert "seed 0 is in toy-digits (source 3) too" in notes[1]

    def test_the_same_rows_again_change_nothing(self, tmp_path):
        new = recorded(tmp_path, seeds=(0, 1))
        old = records.load(records.save(new, tmp_path))
        assert records.joined([old, new], notes := []) == new
        assert notes == []

    def test_other_settings_are_refused(self, tmp_path):
        old = recorded(tmp_path / "a")
        with pytest.raises(
            InputError, match=r"settings, got lr 0.1 in place of 0.001 for layer norm, .*--out"
        ) as error:
            records.joined([old, recorded(tmp_path / "b", seeds=(1,), lr=0.1)], [])
        assert "\n" not in str(error.value)

    def test_what_is_written_on_the_way_may_differ(self, tmp_path):
        new = recorded(tmp_path / "b", seeds=(1,), log_every=7)
        assert len(records.joined([recorded(tmp_path / "a"), new], [])["runs"]) == 2

    def test_a_variant_that_is_new_may_have_its_own_settings(self, tmp_path):
        new = recorded(tmp_path / "b", norm="batch", lr=0.1)
        assert len(records.joined([recorded(tmp_path / "a"), new], [])["runs"]) == 2

    def test_other_data_are_refused(self, tmp_path):
        new = recorded(tmp_path / "b", seeds=(1,), data={**DATA, "sha256": {"train-images": "00"}})
        with pytest.raises(InputError, match=r"must have its data, got files with other SHA-256"):
            records.joined([recorded(tmp_path / "a"), new], [])

    def test_a_run_may_end_at_an_epoch_that_all_reached(self, tmp_path):
        write_run(tmp_path, points=12)
        write_run(tmp_path, seeds=(1,), points=5, finished=False)
        record = records.cut(collected(tmp_path)[0], 4)
        assert [run["finished"] for run in record["runs"]] == [True, True]
        assert [run["steps"] for run in record["runs"]] == [4 * 430, 4 * 430]
        assert {len(run["series"]["test_error"]["value"]) for run in record["runs"]} == {4}
        stopped = "1 of 2 were stopped after it, before their last epoch."
        assert record["notes"] == [f"Every run is drawn and judged up to epoch 4. {stopped}"]
        assert not records.cut(collected(tmp_path)[0], 6)["runs"][1]["finished"]


@pytest.mark.usefixtures("toy")
class TestSummary:
    def test_numbers_are_those_of_the_statistics_module(self, tmp_path):
        for seed in range(5):
            write_run(tmp_path, seeds=(seed,))
        record, _ = collected(tmp_path)
        last = [run["series"]["test_error"]["value"][-1] for run in record["runs"]]
        best = [min(run["series"]["train_nll"]["value"]) for run in record["runs"]]
        for entry, values in zip(record["summary"], (last, best)):
            assert entry["variant"] == {"norm": "layer", "batch_size": 128}
            assert entry["values"] == values
            assert entry["mean"] == pytest.approx(statistics.fmean(values), rel=1e-5)
            assert entry["std"] == pytest.approx(statistics.stdev(values), rel=1e-5)

    def test_updates_to_a_target(self, tmp_path):
        write_run(tmp_path, points=12)
        write_run(tmp_path, seeds=(1,), points=1)
        entry = collected(tmp_path)[0]["summary"][2]
        assert entry["at"] == "updates to 0.1"
        # 0.15396 at 860 and 0.0758 at 1,290: interpolated in log updates
        share = (entry["values"][0] / 860, 1290 / 860)
        nll = only([r for r in collected(tmp_path)[0]["runs"] if r["seed"] == 0])["series"]["train_nll"]["value"]
        assert math.log(share[0]) / math.log(share[1]) == pytest.approx((nll[1] - 0.1) / (nll[1] - nll[2]), rel=1e-4)
        assert entry["values"][1] is None
        assert entry["mean"] is None

    def test_variants_stand_in_the_order_of_the_sheet(self, tmp_path):
        for norm in ("zebra", "none", "batch", "layer"):
            for size in (128, 4):
                write_run(tmp_path, norm, size)
        record, _ = collected(tmp_path)
        order = [(run["config"]["norm"], run["config"]["batch_size"]) for run in record["runs"]]
        assert order == [(norm, size) for norm in ("layer", "batch", "none", "zebra") for size in (128, 4)]

    def test_runs_that_differ_in_another_setting_are_no_sample(self, tmp_path):
        write_run(tmp_path)
        write_run(tmp_path, seeds=(1,), lr=0.1)
        groups = verdicts.variants(collected(tmp_path)[0], TOY)
        assert [settings.get("lr") for settings, _ in groups] == [0.001, 0.1]

    def test_a_setting_that_goes_with_the_variant_does_not_split_it(self, tmp_path):
        write_run(tmp_path, batch_size=128, epochs=60.0)
        write_run(tmp_path, batch_size=4, epochs=5.0)
        assert verdicts.mixed_settings(collected(tmp_path)[0], TOY) == []

    def test_claims_are_judged_on_finished_runs(self, tmp_path):
        for seed in range(3):
            write_run(tmp_path, "layer", seeds=(seed,))
            write_run(tmp_path, "batch", seeds=(seed,), finished=seed > 0)
        assert collected(tmp_path)[0]["claims"][0]["word"] == INCONCLUSIVE
        write_run(tmp_path, "batch", seeds=(3,))
        write_run(tmp_path, "layer", seeds=(3,))
        claim = collected(tmp_path)[0]["claims"][0]
        assert (claim["word"], claim["indicative"], claim["interval"]["n"]) == (DIRECTION, True, 3)
        assert sorted(claim["pairs"]) == [1, 2, 3]

    def test_a_claim_is_kept_with_all_that_a_reader_should_see(self, tmp_path):
        for seed in range(5):
            write_run(tmp_path, "layer", seeds=(seed,))
        for seed in range(10):
            write_run(tmp_path, "none", seeds=(seed,))
        claim = collected(tmp_path)[0]["claims"][3]
        wanted = (
            "name text paper claimed doubt word measured reason interval pairs nearest placebo placebo_share levels"
        )
        assert set(claim) == {*wanted.split(), "indicative"}
        assert set(claim["interval"]) == set(claim["placebo"]) == {"estimate", "low", "high", "n"}
        assert [share for share, _, _ in claim["levels"]] == [0.2, 0.4, 0.6, 0.8, 1.0]
        assert claim["interval"]["high"] == math.inf  # two runs without a norm miss their own median
        path = records.save(collected(tmp_path)[0], tmp_path)
        kept = records.load(path)["claims"][3]
        assert kept["interval"]["high"] == "inf"
        assert {int(seed): float(value) for seed, value in kept["pairs"].items()} == claim["pairs"]

    def judged(self, tmp_path, monkeypatch, measure):
        claim = dataclasses.replace(TOY.claims[0], measure=measure)
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {"toy": dataclasses.replace(TOY, claims=(claim,))})
        for norm in ("layer", "batch"):
            write_run(tmp_path, norm, seeds=(0, 1, 2))
        return only(collected(tmp_path)[0]["claims"])

    def test_a_judge_that_fails_leaves_its_claim_open(self, tmp_path, monkeypatch):
        verdict = self.judged(tmp_path, monkeypatch, Inside(lambda run: 1 / 0))
        assert (verdict["word"], verdict["reason"]) == (INCONCLUSIVE, "could not be judged")
        assert "ZeroDivisionError" in verdict["measured"]

    def test_a_judge_that_lacks_a_package_names_it(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.special", None)
        verdict = self.judged(tmp_path, monkeypatch, ERROR)
        assert (verdict["word"], verdict["reason"]) == (INCONCLUSIVE, "could not be judged")
        assert verdict["measured"].startswith("scipy is not installed. Run `pip install scipy`")

    def test_an_unknown_experiment_keeps_its_runs(self, tmp_path, monkeypatch):
        monkeypatch.setattr("lamina.lab.experiments.SHEETS", {})
        write_run(tmp_path)
        record, _ = collected(tmp_path)
        assert (len(record["runs"]), record["summary"], record["claims"]) == (1, [], [])


@pytest.mark.usefixtures("toy")
class TestFiles:
    def test_what_is_saved_is_loaded(self, tmp_path):
        write_run(tmp_path / "runs", seeds=(0, 1))
        record, _ = collected(tmp_path / "runs")
        path = records.save(record, tmp_path / "results")
        assert path.name == "toy-digits.json"
        assert records.load(path) == record
        assert [file.name for file in path.parent.iterdir()] == ["toy-digits.json"]  # no temporary file stays

    def test_a_list_is_a_line(self, tmp_path):
        write_run(tmp_path / "runs")
        path = records.save(collected(tmp_path / "runs")[0], tmp_path)
        lines = [line for line in path.read_text().splitlines() if '"update": [' in line]
        assert len(lines) == 4
        assert all(line.rstrip(",").endswith("]") and line.count(",") >= 11 for line in lines)

    def test_keys_are_sorted(self, tmp_path):
        write_run(tmp_path / "runs")
        path = records.save(collected(tmp_path / "runs")[0], tmp_path)
        top = re.findall(r'^ "(\w+)":', path.read_text(), flags=re.MULTILINE)
        assert top == sorted(top)
        assert len(top) == 9

    def test_a_failed_write_leaves_the_old_file(self, tmp_path):
        (tmp_path / "file").write_text("old")
        with pytest.raises(UnicodeEncodeError):
            records.write(tmp_path / "file", "\ud800")
        assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]

    @pytest.mark.parametrize("kind", ["soak", "bench"])
    def test_other_kinds_are_kept(self, tmp_path, kind):
        record = {"schema": 2, "kind": kind, "name": "h200", "anything": [1, {"a": None}]}
        path = records.save(record, tmp_path)
        assert path.name == f"{kind}-h200.json"
        assert records.load(path) == record

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "not valid JSON"),
            ("[]", "schema 2"),
            ('{"schema": 1, "kind": "experiment"}', "'schema': 1"),
            ('{"schema": 2}', "'kind': None"),
            ('{"schema": 2, "kind": "experiment"}', "no 'experiment'"),
            ('{"schema": 2, "kind": "experiment", "experiment": 1, "data": {"name": "", "kind": ""}}', "must be a str"),
            (
                '{"schema": 2, "kind": "experiment", "experiment": "toy", "data": {"name": "a", "kind": "real"}, '
                '"runs": [{"config": {}, "seed": 0, "finished": true, "series": {"a": {"update": [1], "value": []}}}]}',
                "length",
            ),
        ],
    )
    def test_what_is_no_record_is_refused_in_one_line(self, tmp_path, text, said):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InputError, match=re.escape(said)) as error:
            records.load(tmp_path / "x.json")
        assert "\n" not in str(error.value)
        assert "x.json" in str(error.value)

    def test_an_absent_file_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="readable"):
            records.load(tmp_path / "x.json")

    @pytest.mark.parametrize("hostile", ["../../etc", "a/b", "", "..", "a b<c>"])
    def test_names_are_safe_file_names(self, hostile):
        record = {"kind": "experiment", "experiment": hostile, "data": {"name": hostile, "kind": "embedded"}}
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", records.name(record))


class TestEnvironment:
    def test_what_it_holds(self):
        env = records.environment()
        assert set(env) == {"lamina", "commit", "dirty", "versions", "machine", "created"}
        assert set(env["machine"]) == {"cpu", "cores", "gpu", "system"}
        assert {"python", "torch", "numpy"} <= set(env["versions"])
        assert datetime.fromisoformat(env["created"]).utcoffset().total_seconds() == 0
        json.dumps(env, allow_nan=False)

    def test_nothing_private(self):
        text = json.dumps(records.environment())
        assert str(Path.home()) not in text
        assert socket.gethostname() not in text
        assert str(Path(records.__file__).parents[1]) not in text

    def test_the_commit_is_that_of_the_checkout(self, tmp_path, monkeypatch):
        package = tmp_path / "lamina"
        package.mkdir()
        (package / "__init__.py").write_text("")
        monkeypatch.setattr(environment, "PACKAGE", package)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        monkeypatch.delenv("LAMINA_COMMIT", raising=False)
        for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
            monkeypatch.setenv(name, "nobody")
        assert (records.environment()["commit"], records.environment()["dirty"]) == (None, None)
        _git(tmp_path, "init", "-q")
        _git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
        assert records.environment()["commit"] is None  # a checkout, but not of the package
        _git(tmp_path, "add", "lamina")
        _git(tmp_path, "commit", "-q", "-m", "second")
        assert re.fullmatch("[0-9a-f]{40}", records.environment()["commit"])
        assert records.environment()["dirty"] is False
        (tmp_path / "elsewhere").write_text("")
        assert records.environment()["dirty"] is False
        (package / "__init__.py").write_text("changed")
        assert records.environment()["dirty"] is True

    def test_without_git(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("LAMINA_COMMIT", raising=False)
        assert records.environment()["commit"] is None

    def test_no_torch_is_imported(self):
        look = "print(*(name in sys.modules for name in ('torch', 'matplotlib')))"
        code = (
            f"import sys, lamina.lab.reports.records as records, lamina.lab.reports.page; records.environment(); {look}"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "False"]


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)
