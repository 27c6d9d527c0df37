"""The training loop: resumed equals untouched, two processes equal one, engines agree, failures lose nothing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors.torch import load_file

from lamina.errors import InputError, RunError
from lamina.lab import protocol
from lamina.lab.cli.commands import main
from lamina.lab.data import registry
from lamina.lab.experiment import Job
from lamina.lab.experiments import find, images
from lamina.lab.experiments.convnet.settings import NORMS as CONVNET_NORMS
from lamina.lab.experiments.convnet.settings import ConvnetConfig
from lamina.lab.experiments.mnist.settings import NORMS as MNIST_NORMS
from lamina.lab.experiments.mnist.settings import MnistConfig
from lamina.lab.runs.folder import RunFolder
from lamina.lab.runs.progress import Reporter
from lamina.lab.training import update
from lamina.lab.training.batches import ShuffledBatches
from lamina.lab.training.loop import Interrupted, Settings, train
from lamina.layers import NormalisedLayer
from lamina.optim import Adam
from tests.lab import kills

pytestmark = pytest.mark.usefixtures("small_digits")

SMALL = MnistConfig(hidden=32, epochs=4, batch_size=64, log_every=5, checkpoint_every=9)


def job(experiment="mnist", config=SMALL, seed=0, vary=("norm", "batch_size"), **changes) -> Job:
    return Job(experiment, dataclasses.replace(config, **changes), seed, vary)


def settings(tmp_path, **changes) -> Settings:
    return Settings(**{"root": "embedded", "runs": tmp_path, "device": "cpu", **changes})


def read(tmp_path, wanted: Job, kind: str) -> list[dict]:
    folder = next(tmp_path.glob(f"{wanted.experiment}/*/{wanted.label}"))
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found if line["kind"] == kind]


class Signaller(Reporter):
    """Sends this process a signal when the run reports for the n-th time."""

    def __init__(self, number: int, after: int) -> None:
        super().__init__(Console(quiet=True))
        self.number, self.after = number, after

    def advance(self, *arguments, **named) -> None:
        self.after -= 1
        if self.after == 0:
            os.kill(os.getpid(), self.number)


def test_a_run_moves_on_before_its_first_log_line(tmp_path):
    text = io.StringIO()
    with Reporter(Console(file=text, width=200)) as reporter:
        reporter.PAUSE = 0
        train([job(log_every=10**6)], settings(tmp_path), reporter)
    shown = [int(step) for step in re.findall(r"seed0: (\d+)/\d+ ", text.getvalue())]
    assert shown[:3] == [1, 2, 3]


def test_batch_norm_over_one_case_of_a_share_is_refused(tmp_path, say, monkeypatch):
    wanted, limits = job(norm="batch", batch_size=4), settings(tmp_path)
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    with pytest.raises(InputError, match=r"a batch stays whole .* got 4 cases in 1 parts on 4 processes"):
        train([wanted], limits, say)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("after", [1, 4])
def test_a_signal_saves_and_the_resumed_run_is_the_untouched_one(tmp_path, say, number, code, after):
    wanted, handler = job(norm="batch", bias_correction="kiros", clip=1.0), signal.getsignal(number)
    train([wanted], settings(tmp_path / "whole"), say)
    with pytest.raises(Interrupted) as raised, Signaller(number, after) as signaller:
        train([wanted], settings(tmp_path / "parts"), signaller)
    assert raised.value.exit_code == code
    assert signal.getsignal(number) is handler  # put back
    train([wanted], settings(tmp_path / "parts", resume=True), say)
    for kind in ("log", "eval"):
        assert read(tmp_path / "parts", wanted, kind) == read(tmp_path / "whole", wanted, kind)
        assert read(tmp_path / "whole", wanted, kind)
    assert kills.final_state(tmp_path / "parts", wanted) == kills.final_state(tmp_path / "whole", wanted)


class Killed(BaseException):
    """Stands for SIGKILL at a place of our choice."""


@pytest.mark.parametrize("name", ["extras.json", "summary.json"])
def test_killed_between_the_last_checkpoint_and_the_summary(tmp_path, say, monkeypatch, name):
    config = ConvnetConfig(dataset="mnist", width=2, units=8, epochs=0.5, batch_size=64)
    wanted, write = Job("convnet", config), RunFolder.write_json

    def cut(folder, file, value):
        if file == name:
            raise Killed
        write(folder, file, value)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_json", cut)
        with pytest.raises(Killed):
            train([wanted], settings(tmp_path), say)
    folder = next(tmp_path.glob(f"convnet/*/{wanted.label}"))
    before = (folder / "metrics.jsonl").read_bytes()
    train([wanted], settings(tmp_path, resume=True), say)
    assert (folder / "metrics.jsonl").read_bytes() == before
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["seconds"] > 0
    assert (folder / "extras.json").exists()


@pytest.mark.slow
def test_the_clock_goes_on_where_it_was(tmp_path, say, monkeypatch):
    module, plain = protocol.module_of("mnist"), images.loss

    def slow(model, batch, draws):
        time.sleep(0.01)
        return plain(model, batch, draws)

    wanted = job(log_every=10)
    with monkeypatch.context() as patch:
        patch.setattr(module, "loss", slow)
        for resume in (False, True):
            with pytest.raises(Interrupted), Signaller(signal.SIGTERM, 3) as signaller:
                train([wanted], settings(tmp_path, resume=resume), signaller)
    train([wanted], settings(tmp_path, resume=True), say)
    lines = (kills.folder(tmp_path, wanted) / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[-1] > seconds[1] >= 0.19  # 20 updates of at least 0.01 s before the signal


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12 on fork
def test_ten_kills_lose_nothing(tmp_path):
    if torch.cuda.is_initialized():
        pytest.skip("runs in forks of this process, which has used a GPU: tests/lab/kills.py alone does the same")
    short = dataclasses.replace(kills.JOB, config=dataclasses.replace(kills.JOB.config, epochs=10))
    found = kills.soak(10, tmp_path, seed=1, job=short)
    assert found["kills"] == 10
    assert found["identical"]


def test_a_torn_last_checkpoint_and_metrics_line_are_survived(tmp_path, say):
    wanted = job(norm="layer")
    train([wanted], settings(tmp_path / "whole"), say)
    with pytest.raises(Interrupted), Signaller(signal.SIGTERM, 5) as signaller:
        train([wanted], settings(tmp_path / "torn"), signaller)
    folder = kills.folder(tmp_path / "torn", wanted)
    newest = max((folder / "checkpoints").glob("step-*")) / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "log", "st')
    train([wanted], settings(tmp_path / "torn", resume=True), say)
    for kind in ("log", "eval"):
        assert read(tmp_path / "torn", wanted, kind) == read(tmp_path / "whole", wanted, kind)


def test_finished_runs_are_passed_over_and_never_overwritten(tmp_path, say):
    wanted = job(norm="none", epochs=0.5)
    train([wanted], settings(tmp_path), say)
    before = (kills.folder(tmp_path, wanted) / "metrics.jsonl").read_bytes()
    train([wanted], settings(tmp_path, resume=True), say)
    with pytest.raises(InputError, match="--resume"):
        train([wanted], settings(tmp_path), say)
    assert (kills.folder(tmp_path, wanted) / "metrics.jsonl").read_bytes() == before


def test_other_settings_are_refused_on_resume(tmp_path, say):
    train([job(epochs=0.5)], settings(tmp_path), say)
    with pytest.raises(InputError, match=r"lr.*0\.01"):
        train([job(epochs=0.5, lr=0.01)], settings(tmp_path, resume=True), say)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_parts_are_the_whole_batch(tmp_path, say, accumulate):
    """Layer norm treats cases apart, so only the order of summation differs: float32 rounding over 70 updates."""
    whole, parts = job(), job(accumulate=accumulate)
    train([whole], settings(tmp_path / "whole"), say)
    train([parts], settings(tmp_path / "parts"), say)
    compare_curves(tmp_path / "parts", tmp_path / "whole", whole, 1e-4)


def compare_curves(one: Path, other: Path, wanted: Job, relative: float) -> None:
    pairs = list(zip(read(one, wanted, "log"), read(other, wanted, "log")))
    assert len(pairs) > 5
    for a, b in pairs:
        assert a["step"] == b["step"]
        assert a["loss"] == pytest.approx(b["loss"], rel=relative)
    for a, b in zip(read(one, wanted, "eval"), read(other, wanted, "eval")):
        assert a["test_nll"] == pytest.approx(b["test_nll"], rel=relative)


RUN = "run mnist --hidden 32 --batch-size 64 --device cpu --data embedded --quiet"


def in_two_processes(runs: Path, more: str) -> str:
    """Return what a run in two processes says of its error; nothing where it succeeds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command = [*launcher, "lamina", *RUN.split(), *more.split(), "--runs", str(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_batch_norm_in_two_processes_is_refused_by_name(tmp_path):
    """Each would normalise by the statistics of its own half, so the batch would train another function."""
    pytest.importorskip("mlxtend")
    assert "batch norm's statistics couple its cases" in in_two_processes(tmp_path, "--norm batch")
    assert not list(tmp_path.glob("*/*/*/config.json"))


@pytest.mark.slow
def test_two_processes_give_the_loss_curve_of_one(tmp_path):
    """The same global batch: gradients are means of two halves, so curves agree to float32 rounding (1e-4)."""
    pytest.importorskip("mlxtend")
    wanted = job(clip=0.5, accumulate=2)
    options = "--epochs 1 --log-every 5 --checkpoint-every 9 --clip 0.5 --accumulate 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_read", registry.load)
        assert main([*RUN.split(), *options.split(), "--runs", str(tmp_path / "one")]) == 0
    assert in_two_processes(tmp_path / "two", options) == ""
    compare_curves(tmp_path / "two", tmp_path / "one", wanted, 1e-4)
    folder = kills.folder(tmp_path / "two", wanted)
    assert json.loads((folder / "summary.json").read_text())["processes"] == 2
    before = read(tmp_path / "two", wanted, "log")
    go_back(folder)  # to an update between two log lines
    assert in_two_processes(tmp_path / "two", f"{options} --resume") == ""
    assert [line["loss"] for line in read(tmp_path / "two", wanted, "log")] == pytest.approx(
        [line["loss"] for line in before], rel=1e-6
    )


def go_back(folder: Path) -> None:
    """As if the run had been killed before its last checkpoint."""
    (folder / "summary.json").unlink()
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    last = max((folder / "checkpoints").glob("step-*")).name
    assert int(last.removeprefix("step-")) % SMALL.log_every


def test_batch_must_divide_over_its_parts(tmp_path, say):
    with pytest.raises(InputError, match="divide evenly"):
        train([job(batch_size=10, accumulate=4)], settings(tmp_path), say)


@pytest.mark.parametrize("correction", ["correct", "kiros"])
def test_updates_are_those_of_a_plain_loop(tmp_path, say, correction):
    """Model, cases, step size, gradients: nothing but what the settings say."""
    wanted = job(norm="batch", seed=3, lr=0.02, bias_correction=correction, clip=0.3, epochs=0.4, log_every=1)
    train([wanted], settings(tmp_path), say)
    data, module = images.split(_digits(), SMALL), protocol.module_of("mnist")
    torch.manual_seed(3)
    model = module.build(wanted.config, data)
    optimizer = Adam(model.parameters(), 0.02, bias_correction=correction)
    losses, (x, y) = [], data.splits["train"]
    for step in range(8):
        index = ShuffledBatches(len(x), 64, 3).at(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[index].float() / 255), y[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in read(tmp_path, wanted, "log")] == pytest.approx(losses, rel=1e-4)


def test_side_by_side_changes_nothing(tmp_path, say):
    jobs = [job(norm=norm) for norm in ("layer", "batch", "none")]
    train(jobs, settings(tmp_path / "together", together=3), say)
    train(jobs, settings(tmp_path / "alone"), say)
    for each in jobs:
        assert read(tmp_path / "together", each, "log") == read(tmp_path / "alone", each, "log")
    summary = json.loads((kills.folder(tmp_path / "together", jobs[0]) / "summary.json").read_text())
    assert summary["side_by_side"] == 3


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_was(tmp_path, say):
    wanted = job(norm="none", lr=1e-3)
    with pytest.raises(Interrupted), Signaller(signal.SIGTERM, 3) as signaller:
        train([wanted], settings(tmp_path), signaller)
    folder = kills.folder(tmp_path, wanted)
    before = {path: path.read_bytes() for path in folder.glob("checkpoints/*/*")}
    poisoned = images.loss
    try:
        protocol.module_of("mnist").loss = lambda model, batch, draws: scaled(poisoned(model, batch, draws), math.nan)
        with pytest.raises(RunError, match=r"not finite at update \d+ \(seed 0\).*Lower --lr"):
            train([wanted], settings(tmp_path, resume=True), say)
    finally:
        protocol.module_of("mnist").loss = poisoned
    assert before == {path: path.read_bytes() for path in before}
    train([wanted], settings(tmp_path, resume=True), say)
    assert (folder / "summary.json").exists()


def scaled(loss: protocol.Loss, factor: float) -> protocol.Loss:
    return protocol.Loss(loss.total * factor, loss.weight)


def poison(monkeypatch, norm: str) -> None:
    """From now on the losses of this norm's networks are not finite."""
    module, plain = protocol.module_of("mnist"), images.loss

    def loss(model, batch, draws):
        poisoned = getattr(model[1], "norm", None) == norm
        return scaled(plain(model, batch, draws), math.nan if poisoned else 1.0)

    monkeypatch.setattr(module, "loss", loss)


@pytest.mark.parametrize("together", [1, 3])
def test_a_run_that_diverges_does_not_end_the_others(tmp_path, say, monkeypatch, together):
    jobs = [job(norm=norm, epochs=1) for norm in ("layer", "weight", "batch")]
    poison(monkeypatch, "weight")
    with pytest.raises(RunError, match=r"weight-.*not finite at update 5 ") as raised:
        train(jobs, settings(tmp_path, together=together), say)
    assert "layer-" not in str(raised.value)
    finished = [(kills.folder(tmp_path, each) / "summary.json").exists() for each in jobs]
    assert finished == [True, False, True]


def test_a_signal_saves_the_runs_beside_one_that_diverged(tmp_path, monkeypatch):
    jobs = [job(norm=norm, log_every=6, checkpoint_every=1000, eval_every=9) for norm in ("weight", "layer")]
    plain, calls = images.loss, []

    def loss(model, batch, draws):
        calls.append(model)
        if len(calls) == 15:  # the first run's eighth update: between two log lines
            os.kill(os.getpid(), signal.SIGTERM)
        return scaled(plain(model, batch, draws), math.nan if len(calls) == 15 else 1.0)

    monkeypatch.setattr(protocol.module_of("mnist"), "loss", loss)
    with pytest.raises(Interrupted), Reporter(Console(quiet=True)) as reporter:
        train(jobs, settings(tmp_path, together=2), reporter)
    assert [kills.saved_step(tmp_path, each) for each in jobs] == [0, 8]


def test_half_precision_is_not_silently_another_on_the_cpu(tmp_path, say):
    with pytest.raises(InputError, match="fp16 needs a CUDA device"):
        train([job(precision="fp16")], settings(tmp_path), say)


def test_a_log_line_is_the_mean_since_the_last(tmp_path, say):
    """Also over an interruption between two lines."""
    every, seventh = job(log_every=1, epochs=2), job(log_every=7, epochs=2, checkpoint_every=5)
    train([every], settings(tmp_path / "every"), say)
    train([seventh], settings(tmp_path / "seventh"), say)
    losses = [line["loss"] for line in read(tmp_path / "every", every, "log")]
    lines = read(tmp_path / "seventh", seventh, "log")
    assert [line["step"] for line in lines] == [7, 14, 21, 28, 35, 37]
    for first, line in zip([0, 7, 14, 21, 28, 35], lines):
        part = losses[first : line["step"]]
        assert line["loss"] == pytest.approx(sum(part) / len(part), rel=1e-5)


def test_evaluation_neither_trains_nor_stays_on(tmp_path, say, monkeypatch):
    """Evaluating often changes nothing: running statistics stay, and updates are in training mode."""
    plain, modes = images.measured, []

    def measured(model, *others):
        modes.append((model.training, torch.is_grad_enabled()))
        return plain(model, *others)

    monkeypatch.setattr(images, "measured", measured)
    often, seldom = job(norm="batch", epochs=2, eval_every=0.1), job(norm="batch", epochs=2)
    train([often], settings(tmp_path / "often"), say)
    train([seldom], settings(tmp_path / "seldom"), say)
    assert set(modes) == {(False, False)}
    assert read(tmp_path / "often", often, "log") == read(tmp_path / "seldom", seldom, "log")
    assert kills.final_state(tmp_path / "often", often) == kills.final_state(tmp_path / "seldom", seldom)


def test_evaluations_are_of_the_model_as_it_stands(tmp_path, say):
    """The last line agrees with the last checkpoint, evaluated by hand."""
    wanted = job(norm="batch", epochs=1, seed=3)
    train([wanted], settings(tmp_path), say)
    data, module = images.split(_digits(), SMALL), protocol.module_of("mnist")
    model = module.build(wanted.config, data).eval()
    last = max((kills.folder(tmp_path, wanted) / "checkpoints").glob("step-*"))
    model.load_state_dict(load_file(last / "weights.safetensors"))
    for name in ("train", "valid", "test"):
        x, y = data.splits[name]
        logits = model(x.float() / 255)
        found = read(tmp_path, wanted, "eval")[-1]
        assert found[f"{name}_nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
        assert found[f"{name}_error"] == pytest.approx((logits.argmax(-1) != y).double().mean().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "logs", "evals"),
    [
        ({"epochs": 0.1}, [2], [2]),
        ({"epochs": 1e-9}, [1], [1]),
        ({"epochs": 1, "eval_every": 50, "log_every": 10}, [10, 19], [19]),
        ({"epochs": 0.2, "eval_every": 1e-6, "log_every": 9}, [4], [1, 2, 3, 4]),
        ({"epochs": 9, "batch_size": 5000, "log_every": 9}, [3], [1, 2, 3]),  # a batch of four epochs
        ({"epochs": 0.2, "held_out": 0, "log_every": 9}, [5], [5]),
        ({"epochs": 1.5, "eval_every": 0.5, "log_every": 100}, [28], [10, 19, 28]),
    ],
)
def test_lengths_at_the_edge(tmp_path, say, changes, logs, evals):
    wanted = job(**changes)
    train([wanted], settings(tmp_path), say)
    assert [line["step"] for line in read(tmp_path, wanted, "log")] == logs
    lines = read(tmp_path, wanted, "eval")
    assert [line["step"] for line in lines] == evals
    assert ("valid_nll" in lines[0]) == (changes.get("held_out") != 0)
    assert (kills.folder(tmp_path, wanted) / "best.json").exists() == (changes.get("held_out") != 0)


def test_checkpoints_fall_on_their_updates(tmp_path, say):
    wanted = job(epochs=1, checkpoint_every=7, log_every=100, eval_every=9)
    train([wanted], settings(tmp_path, keep_best=False), say)
    steps = sorted(p.name for p in (kills.folder(tmp_path, wanted) / "checkpoints").glob("step-*"))
    assert steps == ["step-000000014", "step-000000019"]
    assert not (kills.folder(tmp_path, wanted) / "best.json").exists()


@pytest.mark.parametrize("by", ["global", "tensor"])
def test_gradients_are_clipped_as_asked(tmp_path, say, monkeypatch, by):
    seen = []
    monkeypatch.setattr(update, "clip_gradients", lambda held, *how: seen.append((len(held), *how)))
    train([job(epochs=0.05, clip=0.5, clip_by=by, norm="none")], settings(tmp_path / "clip"), say)
    assert seen == [(6, 0.5, by)]
    train([job(epochs=0.05)], settings(tmp_path / "none"), say)
    assert len(seen) == 1


def test_evaluation_is_off_the_clock(tmp_path, say, monkeypatch):
    module = protocol.module_of("mnist")
    original = images.measured

    def slow(*arguments):
        time.sleep(0.5)
        return original(*arguments)

    monkeypatch.setattr(images, "measured", slow)
    monkeypatch.setattr(module, "loss", lambda *arguments: (time.sleep(0.005), images.loss(*arguments))[1])
    monkeypatch.setattr(update.Eager, "begin", lambda *arguments: time.sleep(0.4))  # as capturing takes its time
    wanted = job(epochs=2, log_every=100, checkpoint_every=100)
    began = time.perf_counter()
    train([wanted], settings(tmp_path), say)
    whole = time.perf_counter() - began
    summary = json.loads((kills.folder(tmp_path, wanted) / "summary.json").read_text())
    assert 37 * 0.005 < summary["seconds"] < whole - 1.79  # two evaluations, two beginnings


def test_evaluations_fall_on_their_epochs(tmp_path, say):
    wanted = job(epochs=3, eval_every=0.5, batch_size=100, checkpoint_every=1000)
    train([wanted], settings(tmp_path), say)
    cases = 1297 - 1297 // 10
    expected = [math.ceil(k * 0.5 * cases / 100) for k in range(1, 7)]
    assert [line["step"] for line in read(tmp_path, wanted, "eval")] == expected


def test_best_and_last_two_checkpoints_are_kept(tmp_path, say):
    wanted = job(epochs=6, checkpoint_every=10)
    train([wanted], settings(tmp_path), say)
    folder = kills.folder(tmp_path, wanted)
    steps = sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))
    best = min(read(tmp_path, wanted, "eval"), key=lambda line: line["valid_nll"])["step"]
    assert json.loads((folder / "best.json").read_text())["step"] == best
    assert best in steps
    assert len(set(steps) - {best}) <= 2
    assert steps[-1] == read(tmp_path, wanted, "eval")[-1]["step"]


def test_the_best_is_remembered_over_an_interruption(tmp_path, say, monkeypatch):
    """Validation figures 2, 1 | 1.5, 0.5, 0.7: the fourth is best, and the third is not."""
    figures = iter([2.0, 1.0, 1.5, 0.5, 0.7])
    marked, mark = [], RunFolder.mark_best
    monkeypatch.setattr(images, "measured", lambda *arguments: {"valid_nll": torch.tensor(next(figures))})
    monkeypatch.setattr(RunFolder, "mark_best", lambda *arguments: (marked.append(arguments[2]), mark(*arguments)))
    wanted = job(epochs=5, log_every=1000)
    with pytest.raises(Interrupted), Signaller(signal.SIGTERM, 2) as signaller:
        train([wanted], settings(tmp_path), signaller)
    train([wanted], settings(tmp_path, resume=True), say)
    assert marked == [2.0, 1.0, 0.5]
    best = json.loads((kills.folder(tmp_path, wanted) / "best.json").read_text())
    assert best == {"step": 73, "value": 0.5}


@pytest.mark.parametrize(
    ("norm", "places"),
    [
        ("layer", ["layer", "layer", None]),
        ("batch", ["batch", "batch", "batch"]),
        ("batch_hidden", ["batch", "batch", None]),
        ("weight", ["weight", "weight", "weight"]),
        ("none", [None, None, None]),
    ],
)
def test_norms_of_the_mnist_network(norm, places):
    """Layer norm never on the logits; batch norm unbiased for batches under 128."""
    data, build = images.split(_digits(), SMALL), protocol.module_of("mnist").build
    for size, unbiased, expected in ((4, "small", True), (128, "small", False), (4, "never", False)):
        config = dataclasses.replace(SMALL, norm=norm, batch_size=size, unbiased=unbiased, momentum=0.25)
        layers = [layer for layer in build(config, data) if isinstance(layer, NormalisedLayer)]
        assert [layer.norm for layer in layers] == places
        assert [layer.activation for layer in layers] == ["relu", "relu", None]
        statistics = [layer.statistics for layer in layers if layer.norm == "batch"]
        assert all(each.unbiased is expected and each.momentum == 0.25 for each in statistics)


@pytest.mark.parametrize(
    ("norm", "shape"), [("layer", (4, 8, 8)), ("layer_channel", (4,)), ("batch", (4,)), ("none", None)]
)
def test_gains_of_the_convnet(norm, shape):
    config = ConvnetConfig(dataset="mnist", width=4, units=16, norm=norm)
    data = images.split(_digits(), config)
    model = protocol.module_of("convnet").build(config, data)
    gain = model.conv1.gain
    assert (None if gain is None else tuple(gain.shape)) == shape
    assert model.logits.norm is None
    assert model(data.splits["test"][0][:3].float()).shape == (3, 10)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_other_precisions_run(tmp_path, say, precision):
    wanted = job(precision=precision, epochs=1)
    train([wanted], settings(tmp_path), say)
    assert read(tmp_path, wanted, "eval")[-1]["test_nll"] < 2.3


@pytest.mark.parametrize("norm", list(CONVNET_NORMS))
def test_convnet_runs_and_measures_its_border(tmp_path, say, norm):
    config = ConvnetConfig(dataset="mnist", width=4, units=16, epochs=1, batch_size=64, lr=3e-3)
    wanted = Job("convnet", dataclasses.replace(config, norm=norm))
    train([wanted], settings(tmp_path), say)
    folder = next(tmp_path.glob(f"convnet/mnist-embedded/{wanted.label}"))
    extras = json.loads((folder / "extras.json").read_text())["0"]
    assert extras["conv1_distance"] == [0, 1, 2, 3]
    assert extras["conv4_distance"] == [0, 1]
    assert all(0 <= value <= 1 for value in extras["conv1_active"])
    assert read(tmp_path, wanted, "eval")[-1]["train_nll"] < 2.4


@pytest.mark.parametrize("statistics", ["exact", "running"])
def test_batch_norm_of_the_convnet_is_evaluated_with_the_statistics_asked_for(statistics):
    config = ConvnetConfig(dataset="mnist", width=4, units=16, norm="batch", statistics=statistics)
    data, module = images.split(_digits(), config), protocol.module_of("convnet")
    model = module.build(config, data).eval()
    (evaluation,) = module.evaluations(config)
    evaluation.run(model, data, config, None, None)
    pixels, _ = images.batch(data, torch.arange(len(data.splits["train"][0])))
    summed = model.conv1._conv_forward(pixels.unsqueeze(1), model.conv1.weight, None)
    kept = model.conv1.statistics
    expected = summed.mean((0, 2, 3)) if statistics == "exact" else torch.zeros(4)
    torch.testing.assert_close(kept.running_mean, expected)
    assert not model.training


def test_border_statistics_by_hand():
    """A 4x4 picture: 12 positions at distance 0, 4 at distance 1."""
    module = protocol.module_of("convnet")
    rings = module._distance(4, 4)
    assert rings.tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    layer = module.Conv2d(1, 1, 1, norm=None)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    x = torch.where(rings == 1, 3.0, -1.0).reshape(1, 1, 4, 4)
    found = module._border("c", layer, x)
    assert found["c_active"] == [0.0, 1.0]
    mean, deviation = x.mean(), x.std()
    assert found["c_mean"] == pytest.approx([((-1 - mean) / deviation).item(), ((3 - mean) / deviation).item()])
    assert found["c_var"] == [0.0, 0.0]


def test_every_norm_starts_from_the_same_weights():
    data = images.split(_digits(), SMALL)
    models = {}
    for norm in MNIST_NORMS:
        torch.manual_seed(1)
        models[norm] = protocol.module_of("mnist").build(dataclasses.replace(SMALL, norm=norm), data)
    assert all(torch.equal(m[k].weight, models["layer"][k].weight) for m in models.values() for k in (1, 2, 3))
    x = torch.randn(5, 8, 8)
    torch.testing.assert_close(models["none"](x), models["weight"](x))


def _digits():
    return images._read("mnist", "embedded")


def test_validation_cases_are_the_first_and_never_trained_on():
    dataset = _digits()
    splits = images.split(dataset, SMALL).splits
    held = len(splits["valid"][0])
    assert held == 1297 // 10
    assert torch.equal(splits["valid"][0], torch.from_numpy(dataset.arrays["train_x"][:held]))
    assert torch.equal(splits["train"][0], torch.from_numpy(dataset.arrays["train_x"][held:]))


class Place:
    """An accelerator as the choice of an engine sees it."""

    def __init__(self, kind: str, processes: int = 1) -> None:
        self.device, self.num_processes = torch.device(kind), processes


@pytest.mark.parametrize(
    ("asked", "kind", "processes", "changes", "sheet", "chosen"),
    [
        ("auto", "cpu", 1, {}, {}, "eager"),
        ("auto", "cuda", 1, {}, {}, "graph"),
        ("auto", "cuda", 2, {}, {}, "eager"),
        ("auto", "cuda", 1, {"precision": "fp16"}, {}, "eager"),
        ("auto", "cuda", 1, {}, {"fixed_shapes": False}, "eager"),
        ("auto", "cuda", 1, {}, {"sampled": True}, "eager"),
        ("eager", "cuda", 1, {}, {}, "eager"),
        ("graph", "cuda", 1, {}, {}, "graph"),
        ("graph", "cpu", 1, {}, {}, None),
        ("graph", "cuda", 1, {}, {"sampled": True}, None),
        ("grph", "cuda", 1, {}, {}, None),
    ],
)
def test_engine_choice(asked, kind, processes, changes, sheet, chosen):
    config = dataclasses.replace(SMALL, **changes)
    arguments = (asked, Place(kind, processes), config, dataclasses.replace(find("mnist"), **sheet))
    if chosen is None:
        with pytest.raises(InputError):
            update.choose(*arguments)
    else:
        name, reason = update.choose(*arguments)
        assert name == chosen
        assert reason


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["layer", "batch", "weight"])
def test_a_captured_update_follows_the_eager_one(tmp_path, say, norm):
    torch.use_deterministic_algorithms(False)
    wanted = job(norm=norm, epochs=2, clip=5.0)
    for each in ("eager", "graph"):
        train([wanted], settings(tmp_path / each, device="cuda", engine=each), say)
    compare_curves(tmp_path / "graph", tmp_path / "eager", wanted, 1e-3)


@pytest.mark.gpu
def test_a_captured_run_resumes(tmp_path, say):
    torch.use_deterministic_algorithms(False)
    wanted = job(norm="batch")
    train([wanted], settings(tmp_path / "whole", device="cuda", engine="graph"), say)
    with pytest.raises(Interrupted), Signaller(signal.SIGTERM, 3) as signaller:
        train([wanted], settings(tmp_path / "parts", device="cuda", engine="graph"), signaller)
    train([wanted], settings(tmp_path / "parts", device="cuda", engine="graph", resume=True), say)
    compare_curves(tmp_path / "parts", tmp_path / "whole", wanted, 1e-3)


@pytest.mark.gpu
def test_captured_runs_side_by_side(tmp_path, say):
    torch.use_deterministic_algorithms(False)
    jobs = [job(norm=norm, epochs=2) for norm in ("layer", "batch", "none")]
    train(jobs, settings(tmp_path / "together", device="cuda", engine="graph", together=3), say)
    train(jobs, settings(tmp_path / "alone", device="cuda", engine="graph", together=1), say)
    for each in jobs:
        compare_curves(tmp_path / "together", tmp_path / "alone", each, 1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 129, 500])
def test_evaluation_in_parts_is_the_whole(chunk):
    data = images.split(_digits(), SMALL)
    splits = {name: tuple(t[:129] for t in split) for name, split in data.splits.items()}
    model = protocol.module_of("mnist").build(SMALL, data).eval()
    pixels, labels = images.picked(splits["test"], torch.arange(129))
    logits = model(pixels)
    found = images.measured(model, dataclasses.replace(data, splits=splits), ("train", "valid", "test"), chunk)
    assert found["test_nll"].item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["test_error"].item() == pytest.approx((logits.argmax(1) != labels).float().mean().item(), rel=1e-6)
    assert set(found) == {f"{split}_{what}" for split in splits for what in ("nll", "error")}


def test_training_off_the_main_thread(tmp_path, say):
    wanted = job(epochs=0.2)
    thread = threading.Thread(target=train, args=([wanted], settings(tmp_path), say))
    thread.start()
    thread.join(60)
    assert (kills.folder(tmp_path, wanted) / "summary.json").exists()


def test_folders_are_let_go(tmp_path, say):
    """After a failure a second attempt in the same process finds no lock in its way."""
    wanted = job(epochs=0.2)
    with ExitStack(), pytest.raises(InputError):
        train([wanted, job(batch_size=10, accumulate=4)], settings(tmp_path, together=2), say)
    train([wanted], settings(tmp_path, restart=True), say)
