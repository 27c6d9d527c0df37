"""The protocol of experiments, point by point, with the toy: random numbers by seed and update, lengths in updates or
epochs, metrics that are better the higher they are, axes, later seeds, evaluations of checkpoints, coupled batches,
artefacts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lamina.errors import InputError
from lamina.lab.cli import jobs as plan
from lamina.lab.cli import workers
from lamina.lab.cli.commands import main
from lamina.lab.experiment import Every, Job
from lamina.lab.experiments import SHEETS
from lamina.lab.options import Settings
from lamina.lab.training import draws
from lamina.lab.training.batches import BucketedBatches, SampledBatches, ShuffledBatches, generator, length_in_updates
from lamina.lab.training.draws import draws_of_evaluation, draws_of_update
from lamina.lab.training.evaluate import evaluate
from lamina.lab.training.loop import train
from tests.lab import kills, toy

pytestmark = pytest.mark.usefixtures("toy_sheet")
CPU = torch.device("cpu")


def job(seed: int = 0, **changes) -> Job:
    return Job("toy", toy.ToyConfig(**changes), seed, ("objective",))


def settings(runs: Path, **changes) -> Settings:
    return Settings(**{"runs": runs, "device": "cpu", **changes})


def series(runs: Path, wanted: Job, metric: str) -> dict[int, float]:
    return {line["step"]: line[metric] for line in kills.lines(runs, wanted) if metric in line}


# Random numbers follow from seed and update


SEVERAL = [job(0), job(1), job(0, objective="halves"), job(0, updates=33, batch_size=6)]
SEVERAL[3] = dataclasses.replace(SEVERAL[3], vary=("objective", "batch_size"))


def in_turn(runs, say):
    train(SEVERAL, settings(runs), say)


def side_by_side(runs, say):
    train(SEVERAL, settings(runs, together=4), say)


def in_another_order(runs, say):
    train(SEVERAL[::-1], settings(runs, together=3), say)


@pytest.mark.parametrize("way", [in_turn, side_by_side, in_another_order])
def test_a_run_has_the_same_numbers_whatever_runs_beside_it(tmp_path, say, way):
    for each in SEVERAL:
        train([each], settings(tmp_path / "alone"), say)
    way(tmp_path / "with others", say)
    for each in SEVERAL:
        found = kills.lines(tmp_path / "with others", each)
        assert found == kills.lines(tmp_path / "alone", each)
        assert len(found) > 4
    different = {series(tmp_path / "alone", each, "loss")[10] for each in SEVERAL}
    assert len(different) == len(SEVERAL)


def test_worker_processes_give_the_same_numbers_and_take_run_after_run(tmp_path, say, monkeypatch):
    started = []
    start = workers.Pool._started
    monkeypatch.setattr(workers.Pool, "_started", lambda pool: started.append(pool) or start(pool))
    how = Settings(runs=str(tmp_path / "workers"), device="cpu", jobs=2, quiet=True)
    assert workers.carry_out(SEVERAL, how, lambda job: job.label) == 0
    train(SEVERAL, settings(tmp_path / "here"), say)
    for each in SEVERAL:
        assert kills.lines(tmp_path / "workers", each) == kills.lines(tmp_path / "here", each)
    assert len(started) == 2


@pytest.mark.parametrize("parts", [2, 3])
def test_a_batch_in_parts_draws_the_same_noise(tmp_path, say, parts):
    """Ragged cases weigh by their letters, and the last batch of an epoch is cut unevenly."""
    whole, cut = job(batch_size=12), job(batch_size=12, accumulate=parts)
    train([whole], settings(tmp_path / "whole"), say)
    train([cut], settings(tmp_path / "cut"), say)
    losses = [series(tmp_path / name, each, "loss") for name, each in (("cut", cut), ("whole", whole))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    silent = job(batch_size=12, noise=1e-9)
    train([silent], settings(tmp_path / "silent"), say)
    assert series(tmp_path / "silent", silent, "loss") != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_two_processes_draw_the_same_noise(tmp_path, say):
    wanted = job(batch_size=12)
    train([wanted], settings(tmp_path / "one"), say)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    words = f"-m tests.lab.toy run toy --batch-size 12 --device cpu --quiet --runs {tmp_path / 'two'}"
    done = subprocess.run([*launcher, *words.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    two = dataclasses.replace(wanted, vary=("objective", "batch_size"))
    assert series(tmp_path / "two", two, "loss") == pytest.approx(series(tmp_path / "one", wanted, "loss"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12 on fork
def test_a_sampled_loss_resumes_bit_for_bit_after_kill_9(tmp_path):
    if torch.cuda.is_initialized():
        pytest.skip("runs in forks of this process, which has used a GPU: tests/lab/kills.py alone does the same")
    found = kills.soak(5, tmp_path, seed=2, job=job(updates=300, eval_updates=13))
    assert found["identical"]
    assert found["kills"] == 5


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 9), st.integers(0, 2**40))
def test_parts_draw_rows_of_what_the_whole_draws(cases, parts, seed, step):
    def drawn(first, count):
        found = draws_of_update(seed, step, CPU, first, count, cases)
        return [found.normal(3), found.uniform(), found.integers(10, 2), torch.rand(1, generator=found.once())]

    whole = drawn(0, cases)
    bounds = [0, *torch.arange(cases).tensor_split(min(parts, cases))]
    first = 0
    for part in bounds[1:]:
        rows = drawn(first, len(part))
        assert all(torch.equal(a, b[first : first + len(part)]) for a, b in zip(rows[:3], whole[:3]))
        assert torch.equal(rows[3], whole[3])
        first += len(part)


def test_no_two_purposes_share_a_seed():
    """The order of cases, an update's noise, dropout and evaluations: each has numbers of its own."""
    seeds = set()
    for seed in range(3):
        for step in range(3):
            seeds.add(generator(seed, step).initial_seed())
            seeds.add(generator(seed, -1 - step).initial_seed())
            seeds |= {draws_of_update(seed, step, CPU, 0, 4, 4).once().initial_seed(), torch.initial_seed()}
            draws_of_update(seed, step, CPU, 2, 2, 4)
            seeds.add(torch.initial_seed())
            for name in ("retrieval", "held out"):
                seeds.add(draws_of_evaluation(seed, step, name, CPU).once().initial_seed())
                seeds.add(torch.initial_seed())
    assert len(seeds) == 3 * 3 * 9


@pytest.mark.parametrize("hidden", [False, True])
def test_random_numbers_that_the_sheet_does_not_declare_are_refused(tmp_path, say, monkeypatch, hidden):
    """Drawn from draws, or from torch's own generator as dropout does: such a run would not resume bit for bit."""
    monkeypatch.setitem(SHEETS, "toy", dataclasses.replace(toy.SHEET, sampled=False))
    if hidden:
        monkeypatch.setattr(draws.Draws, "normal", lambda draws, *shape: torch.nn.functional.dropout(torch.ones(shape)))
    with pytest.raises(InputError, match="sampled=True"):
        train([job()], settings(tmp_path), say)


# Batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=90), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_length_buckets_show_every_case_once_an_epoch(lengths, size, bucket, drop_last):
    if drop_last and len(lengths) < size:
        with pytest.raises(InputError, match="at least one batch"):
            BucketedBatches(lengths, size, 0, bucket, drop_last)
        return
    batches = BucketedBatches(lengths, size, 0, bucket, drop_last)
    count = batches.updates(1)
    for epoch in (0, 1):
        seen = [batches.at(step) for step in range(epoch * count, (epoch + 1) * count)]
        shown = torch.cat(seen).tolist()
        assert len(set(shown)) == len(shown) == (len(lengths) // size * size if drop_last else len(lengths))
        assert sum(len(each) != size for each in seen) <= (0 if drop_last else 1)
    assert batches.epoch(2 * count) == 2
    alone = BucketedBatches(lengths, size, 0, bucket, drop_last)
    assert torch.equal(alone.at(2 * count - 1), seen[-1])  # needs nothing that came before


def test_length_buckets_hold_like_lengths_in_a_mixed_order():
    lengths = torch.randint(1, 100, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    batches, shuffled = BucketedBatches(lengths, 8, 0, bucket=16), ShuffledBatches(640, 8, 0)

    def padding(which):
        rows = [torch.tensor(lengths)[which.at(step)] for step in range(80)]
        return sum(float((row.max() - row).sum()) for row in rows), [float(row.float().mean()) for row in rows]

    (ours, means), (plain, _) = padding(batches), padding(shuffled)
    assert ours < plain / 5
    assert means != sorted(means)
    assert batches.at(0).tolist() != batches.at(80).tolist()


def test_dropping_the_last_batch_drops_cases_of_any_length():
    dropped = set()
    for seed in range(30):
        batches = BucketedBatches(list(range(10)), 4, seed, drop_last=True)
        dropped |= set(range(10)) - set(torch.cat([batches.at(0), batches.at(1)]).tolist())
    assert dropped == set(range(10))


def test_shuffled_batches_may_end_an_epoch_with_its_last_full_batch():
    batches = ShuffledBatches(10, 4, 0, drop_last=True)
    assert (batches.updates(1), batches.epoch(2)) == (2, 1)
    assert len(set(batches.stretch(0, 2).flatten().tolist())) == 8
    assert torch.equal(batches.stretch(1, 3)[1], batches.at(2))


def test_sampling_with_replacement_follows_from_seed_and_update():
    batches = SampledBatches(7, 1000, 3)
    assert torch.equal(batches.at(5), SampledBatches(7, 1000, 3).at(5))
    assert not torch.equal(batches.at(5), batches.at(6))
    assert sorted(set(batches.at(0).tolist())) == list(range(7))
    assert torch.equal(batches.stretch(4, 2)[1], batches.at(5))


# Lengths in updates or epochs


@pytest.mark.parametrize(
    ("changes", "total", "recall", "valid"),
    [
        ({}, 60, [30, 60], [10, 20, 30, 40, 50, 60]),
        ({"updates": 47}, 47, [30, 47], [10, 20, 30, 40, 47]),
        ({"updates": 0, "epochs": 2.5}, 25, [25], [10, 20, 25]),
        ({"updates": 0, "epochs": 3, "eval_updates": 0, "eval_every": 1.5}, 30, [15, 30], [10, 20, 30]),
        ({"updates": 21, "eval_updates": 0, "eval_every": 0.25}, 21, [3, 5, 8, 10, 13, 15, 18, 20, 21], [10, 20, 21]),
    ],
)
def test_lengths_and_intervals_are_in_updates_or_epochs(tmp_path, say, changes, total, recall, valid):
    """Each metric has its own interval, and both are measured at the end. An epoch has ten updates."""
    wanted = job(**changes)
    train([wanted], settings(tmp_path), say)
    assert list(series(tmp_path, wanted, "recall")) == recall
    assert list(series(tmp_path, wanted, "valid_loss")) == valid
    summary = json.loads((kills.folder(tmp_path, wanted) / "summary.json").read_text())
    assert summary["steps"] == total


@pytest.mark.parametrize("given", [{}, {"updates": 1, "epochs": 1.0}, {"updates": -1}, {"epochs": -0.5}])
def test_a_length_is_in_one_of_them_above_zero(given):
    with pytest.raises(InputError, match="in updates or in epochs"):
        Every(**given)


def test_lengths_become_updates():
    batches = ShuffledBatches(100, 8, 0)
    assert length_in_updates(batches, Every(epochs=2)) == 25
    assert length_in_updates(batches, Every(updates=7)) == 7


# Direction of a metric


@pytest.mark.parametrize(("better", "best"), [("higher", 2), ("lower", 1)])
def test_the_best_checkpoint_obeys_the_direction_of_the_headline(tmp_path, say, monkeypatch, better, best):
    values = {10: 0.25, 20: 0.125, 30: 0.5, 40: float("nan"), 50: 0.375}
    steps = iter(values)
    monkeypatch.setattr(toy, "recall", lambda *given: {"recall": torch.tensor(values[next(steps)])})
    sheet = dataclasses.replace(toy.SHEET, headline=dataclasses.replace(toy.SHEET.headline, better=better))
    monkeypatch.setitem(SHEETS, "toy", sheet)
    wanted = job(updates=50, eval_updates=10)
    train([wanted], settings(tmp_path), say)
    step = list(values)[best]
    assert json.loads((kills.folder(tmp_path, wanted) / "best.json").read_text()) == {
        "step": step,
        "value": values[step],
    }
    assert (kills.folder(tmp_path, wanted) / "checkpoints" / f"step-{step:09}").is_dir()


def test_a_resumed_run_remembers_the_best_of_a_metric_that_is_better_the_higher(tmp_path, say, monkeypatch):
    values = iter([0.5, 0.25, 0.25])
    monkeypatch.setattr(toy, "recall", lambda *given: {"recall": torch.tensor(next(values))})
    wanted = job(updates=30, eval_updates=10)
    plain, calls = toy.loss, []

    def cut(model, *others):
        calls.extend([model] if model.training else [])
        if len(calls) == 26:  # after the checkpoint at update 25
            raise KeyboardInterrupt
        return plain(model, *others)

    monkeypatch.setattr(toy, "loss", cut)
    with pytest.raises(KeyboardInterrupt):
        train([wanted], settings(tmp_path), say)
    train([wanted], settings(tmp_path, resume=True), say)
    assert json.loads((kills.folder(tmp_path, wanted) / "best.json").read_text()) == {"step": 10, "value": 0.5}


# Axes


def test_variants_are_axes_and_nothing_asks_for_a_norm(capsys, tmp_path):
    jobs = plan.jobs_of_scale(toy.SHEET, "smoke")
    assert [each.label for each in jobs] == ["next-seed0", "halves-seed0", "next-seed1", "halves-seed1"]
    assert (
        main(["run", "toy", "--updates", "3", "--objective", "halves", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    )
    out, _ = capsys.readouterr()
    assert "fitting halves" in out
    assert (tmp_path / "toy" / "lines-embedded" / "halves-seed0" / "summary.json").exists()


# Runs of the same settings that are made later


def test_later_seeds_stand_beside_earlier_ones_each_with_its_commit_and_machine(tmp_path, capsys):
    words = ["run", "toy", "--updates", "3", "--device", "cpu", "--jobs", "1", "--quiet", "--runs", str(tmp_path)]
    assert main([*words, "--seeds", "2"]) == 0
    assert main([*words, "--seeds", "1", "--first-seed", "2"]) == 0
    headers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("toy/lines-embedded/*/config.json"))]
    assert [header["seeds"] for header in headers] == [[0], [1], [2]]
    assert all(header["config"] == headers[0]["config"] for header in headers)
    for header in headers:
        assert header["environment"]["commit"]
        assert header["environment"]["machine"]["cpu"]
        assert header["environment"]["versions"]["torch"]
    capsys.readouterr()
    assert main([*words, "--resume", "--units", "5"]) == 2
    assert "config.units 12 stored and 5 now" in capsys.readouterr().err


# Evaluations of checkpoints


class Stopped(Exception):
    """Stands for Ctrl-C."""


def test_a_long_evaluation_goes_on_where_it_stopped_with_the_same_numbers(tmp_path, say, monkeypatch, capsys):
    wanted = job(updates=30)
    train([wanted], settings(tmp_path), say)
    folder = kills.folder(tmp_path, wanted)
    whole = evaluate(folder, settings(tmp_path), say)
    assert set(whole) == {"update", "line_loss"}
    parts = json.loads((folder / "evaluation-lines.json").read_text())["parts"]
    assert len(set(parts.values())) == 4
    (folder / "evaluation-lines.json").unlink()
    plain, calls = toy.loss, []

    def cut(*given):
        calls.append(given)
        if len(calls) == 3:
            raise Stopped
        return plain(*given)

    monkeypatch.setattr(toy, "loss", cut)
    with pytest.raises(Stopped):
        evaluate(folder, settings(tmp_path), say)
    assert main(["evaluate", str(folder), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert len(calls) == 3 + 2  # two parts were kept
    assert err.splitlines()[-4:] == [f"lines: line {number} done" for number in range(4)]
    assert f"{whole['line_loss']:.5g}" in out
    assert json.loads((folder / "evaluation-lines.json").read_text())["parts"] == parts
    assert json.loads((folder / "evaluated.json").read_text()) == whole


def test_an_evaluation_is_of_the_best_checkpoint(tmp_path, say, monkeypatch):
    values = iter([0.5, 0.25, 0.25])
    monkeypatch.setattr(toy, "recall", lambda *given: {"recall": torch.tensor(next(values))})
    wanted = job(updates=30, eval_updates=10)
    train([wanted], settings(tmp_path), say)
    assert evaluate(kills.folder(tmp_path, wanted), settings(tmp_path), say)["update"] == 10


def test_an_evaluation_refuses_other_data_than_the_training(tmp_path, say):
    wanted = job(updates=2)
    train([wanted], settings(tmp_path), say)
    with pytest.raises(InputError, match=r"\(embedded\) then and .*\(real\) now"):
        evaluate(kills.folder(tmp_path, wanted), settings(tmp_path, root=str(toy.TEXT.parent)), say)


# Coupled batches and artefacts


def test_a_coupled_loss_is_never_cut_into_parts(tmp_path, capsys, monkeypatch):
    words = ["run", "toy", "--objective", "halves", "--device", "cpu", "--runs", str(tmp_path)]
    assert main([*words, "--accumulate", "2"]) == 2
    assert "in-batch negatives couple its cases" in capsys.readouterr().err
    assert main([*words, "--batch-size", "1"]) == 2
    assert "in-batch negatives need at least two cases" in capsys.readouterr().err
    with pytest.raises(InputError, match="8 cases in 1 parts on 2 processes"):
        plan_for_two_processes(monkeypatch, tmp_path)
    assert not list(tmp_path.iterdir())


def plan_for_two_processes(monkeypatch, runs):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    train([job(objective="halves")], settings(runs), None)


def test_a_picture_is_written_with_the_finished_run(tmp_path, say):
    wanted = job(updates=5)
    train([wanted], settings(tmp_path), say)
    with Image.open(kills.folder(tmp_path, wanted) / "artefacts" / "fits.png") as picture:
        assert picture.size == (toy.HELD_OUT, toy.HELD_OUT)
        assert picture.getextrema()[1] > 200
