"""Run folders: one process at a time, whole checkpoints or none, and a run that survives kills and full disks."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lamina.errors import InputError, RunError
from lamina.lab.runs import checkpoints
from lamina.lab.runs.checkpoints import Damaged
from lamina.lab.runs.folder import RunFolder, status

DATA = {"name": "mnist", "kind": "real", "label": "MNIST", "sizes": {"train": 6}, "sha256": {"images": "ab"}}
HEADER = {
    "schema": 1,
    "experiment": "mnist",
    "config": {"norm": "layer", "lr": 0.001, "batch_size": 128},
    "seeds": [0],
    "data": DATA,
    "environment": {"lamina": "0.1.0"},
    "command": "lamina run mnist",
}


def fork(action) -> int:
    """Run the action in a child; its exit code is 0 when it returns. The child never comes back to pytest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 about threads that other tests left
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_forked(action) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork(action), 0)[1])


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def line(step: int, **values) -> dict:
    return {"kind": "log", "step": step, "epoch": step / 10, "seconds": 0.1, "seed": 0, **values}


def weights_of(step: int, size: int = 8) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(size, dtype=torch.float32) + step}


def optimizer_of(step: int) -> dict:
    state = {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((4,), step / 3)}}
    return {"state": state, "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "params": [0]}]}


def save(folder: RunFolder, step: int, **options) -> Path:
    return folder.save(step, weights_of(step), optimizer_of(step), {"drawn": step}, **options)


def saved_steps(path: Path) -> list[int]:
    return [step for step, _ in checkpoints.listed(path / "checkpoints")]


def contents(path: Path) -> dict[str, bytes]:
    """Every file but TensorBoard's, which a thread writes when it likes."""
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith("events.")]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def assert_same(a, b) -> None:
    """Equal in value, type, dtype, shape and every bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)] if a.numel() else [a, b]
        assert torch.equal(*raw)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(tmp_path / "run") as opened:
        opened.start(HEADER, resume=False)
        yield opened


# Checkpoints hold everything, bit for bit


def odd_weights() -> dict[str, torch.Tensor]:
    base = torch.randn(4, 6)
    return {
        "plain": base,
        "tied": base,
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "count": torch.tensor(2**40),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 3),
        "not_finite": torch.tensor([math.nan, math.inf, -0.0]),
        "parameter": nn.Parameter(torch.randn(2)),
    }


def test_weights_of_every_kind_come_back(folder):
    weights = odd_weights()
    folder.save(1, weights, {}, {})
    expected = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    loaded = folder.load().weights
    assert sorted(loaded) == sorted(expected)
    for name, tensor in expected.items():
        assert_same(loaded[name], tensor)
        loaded[name].add_(1) if tensor.numel() and tensor.dtype != torch.bool else None  # own, writable memory


def test_weights_are_those_at_the_time_of_the_save(folder):
    weight = torch.zeros(3)
    folder.save(1, {"w": weight}, {}, {})
    weight.add_(1)
    assert torch.equal(folder.load().weights["w"], torch.zeros(3))


def model_and(make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, make(model.parameters())


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "plain_sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "groups": lambda p: torch.optim.Adam([{"params": [q], "lr": 0.1 * (i + 1)} for i, q in enumerate(p)]),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_a_restored_optimizer_goes_on_bit_for_bit(folder, make):
    model, optimizer = model_and(make)
    update(model, optimizer)
    folder.save(1, model.state_dict(), optimizer.state_dict(), {})
    expected = optimizer.state_dict()
    found = folder.load()
    assert_same(found.optimizer, expected)
    twin, its_optimizer = model_and(make)
    twin.load_state_dict(found.weights)
    its_optimizer.load_state_dict(found.optimizer)
    for pair in ((model, optimizer), (twin, its_optimizer)):
        torch.manual_seed(1)
        update(*pair)
    assert_same(twin.state_dict(), model.state_dict())
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_state_comes_back_exactly(folder):
    state = {
        "float": 0.1 + 0.2,
        "inf": math.inf,
        "nan": math.nan,
        "none": None,
        "flags": [True, 1, "text", "ü"],
        "tuple": (1, (2, [3])),
        "numbered": {0: {"a": 1}, 1: {}},
        "$tuple": {"$tensor": "not one"},
        "big": 2**80,
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    folder.save(1, {}, {}, state)
    assert_same(folder.load().state, state)


@pytest.mark.parametrize(
    "bad", [Path("x"), random.Random, lambda: 1, (i for i in ())], ids=["object", "class", "lambda", "generator"]
)
def test_state_that_would_run_code_when_read_is_refused(folder, bad):
    save(folder, 1)
    before = contents(folder.path)
    for optimizer, state, place in (({}, {"x": bad}, "the run's state"), ({"x": bad}, {}, "the optimiser's state")):
        with pytest.raises(InputError, match=f"a checkpoint holds numbers.* in {place}") as caught:
            folder.save(2, {}, optimizer, state)
        assert "\n" not in str(caught.value)
    assert contents(folder.path) == before


@pytest.mark.parametrize("bad", [3, torch.ones(2, 2).to_sparse(), torch.ones(1, device="meta")])
def test_weights_that_cannot_be_stored_are_refused(folder, bad):
    with pytest.raises(InputError, match=r"dense tensors, got .* for 'w'"):
        folder.save(1, {"w": bad}, {}, {})
    assert folder.load() is None


@pytest.mark.gpu
def test_a_cuda_run_is_read_on_the_cpu_and_goes_on_on_cuda(folder):
    parameter = nn.Parameter(torch.randn(5, device="cuda"))
    optimizer = torch.optim.Adam([parameter], lr=0.1, capturable=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder.save(1, {"w": parameter}, optimizer.state_dict(), {})
    found = folder.load()
    assert_same(found.weights["w"], parameter.detach().cpu())
    assert not found.optimizer["state"][0]["exp_avg"].is_cuda
    twin = torch.optim.Adam([nn.Parameter(found.weights["w"].cuda())], lr=0.1, capturable=True)
    twin.load_state_dict(found.optimizer)
    assert_same(twin.state_dict()["state"], optimizer.state_dict()["state"])


# Which checkpoint is loaded, which are kept


def test_a_new_folder_has_no_checkpoint(folder):
    assert folder.load() is None
    assert folder.best() is None
    assert folder.metrics() == []


def test_the_newest_is_loaded(folder):
    for step in (1, 2, 10):
        path = save(folder, step)
    assert path == folder.path / "checkpoints" / "step-000000010"
    found = folder.load()
    assert (found.step, found.state) == (10, {"drawn": 10})
    assert_same(found.weights, weights_of(10))
    assert folder.notes == []


def test_the_last_two_and_the_best_are_kept(folder):
    for step in range(1, 5):
        save(folder, step)
        if step == 2:
            folder.mark_best(2, 0.5)
    assert saved_steps(folder.path) == [2, 3, 4]
    assert folder.best() == (2, 0.5)
    save(folder, 5, best=0.25)
    assert folder.best() == (5, 0.25)
    assert saved_steps(folder.path) == [4, 5]


def test_the_checkpoint_just_saved_is_never_pruned(folder):
    for step in (10, 11, 5):
        save(folder, step)
    assert 5 in saved_steps(folder.path)


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 1)
    folder.save(1, weights_of(7), {}, {})
    assert_same(folder.load().weights, weights_of(7))
    assert os.listdir(folder.path / "checkpoints") == ["step-000000001"]


@pytest.mark.parametrize(("step", "value", "rule"), [(9, 0.1, "have a checkpoint"), (1, math.nan, "be finite")])
def test_best_needs_a_checkpoint_and_a_number(folder, step, value, rule):
    save(folder, 1)
    with pytest.raises(InputError, match=rule):
        folder.mark_best(step, value)
    assert folder.best() is None


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoints, "discard", refuse)
    for step in (1, 2, 3):
        save(folder, step)
    assert folder.load().step == 3
    assert any("could not be deleted" in note for note in folder.notes)


@pytest.mark.parametrize("step_that_survives", ["old", "new"])
def test_a_replacement_cut_short_is_settled_on_open(tmp_path, step_that_survives):
    with RunFolder.open(tmp_path) as folder:
        path = save(folder, 1)
    aside = path.with_name(f".old-{path.name}")
    path.rename(aside)
    if step_that_survives == "new":
        with RunFolder.open(tmp_path / "other") as other:
            save(other, 1).rename(path)
    with RunFolder.open(tmp_path) as folder:
        assert folder.load().step == 1
        assert not aside.exists()


def test_left_overs_are_cleared_on_open(tmp_path):
    with RunFolder.open(tmp_path) as folder:
        save(folder, 1)
    (tmp_path / "checkpoints" / ".tmp-99").mkdir()
    (tmp_path / "checkpoints" / ".tmp-99" / "weights.safetensors").write_bytes(b"torn")
    (tmp_path / ".tmp-99-config.json").write_bytes(b"torn")
    with RunFolder.open(tmp_path):
        pass
    assert not list(tmp_path.rglob(".tmp*"))
    assert saved_steps(tmp_path) == [1]


# Damage is seen


@functools.cache
def sound_checkpoint() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place, RunFolder.open(place) as folder:
        return contents(save(folder, 3))


FILES = ("weights.safetensors", "optimizer.pt", "state.pt", "MANIFEST.json")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_seen_wherever_it_is(tmp_path, name):
    """Every 11th byte of each file, one bit of it, the bit changing with the position."""
    path = tmp_path / "step-000000003"
    path.mkdir()
    for file, data in sound_checkpoint().items():
        (path / file).write_bytes(data)
    assert checkpoints.read(path).step == 3
    data = sound_checkpoint()[name]
    for position in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        (path / name).write_bytes(damaged)
        with pytest.raises(Damaged, match=name):
            checkpoints.read(path)


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(0, 255), st.sampled_from(["set", "insert", "drop"]))
@settings(max_examples=50)
def test_any_changed_byte_is_seen(name, position, value, change):
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "step-000000003"
        path.mkdir()
        for file, data in sound_checkpoint().items():
            (path / file).write_bytes(data)
        data = bytearray(sound_checkpoint()[name])
        at = position % len(data)
        data[at : at + (change != "insert")] = b"" if change == "drop" else bytes([value])
        (path / name).write_bytes(data)
        if bytes(data) == sound_checkpoint()[name]:
            assert checkpoints.read(path).step == 3
        else:
            with pytest.raises(Damaged, match=name):
                checkpoints.read(path)


DAMAGE = {
    "missing": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "short": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "long": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "zeroed": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "folder": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(folder, name, damage):
    save(folder, 1)
    damage(save(folder, 2) / name)
    found = folder.load()
    assert found.step == 1
    assert_same(found.weights, weights_of(1))
    assert len(folder.notes) == 1
    assert "step-000000002" in folder.notes[0]
    assert name in folder.notes[0]


def test_a_renamed_checkpoint_is_not_believed(folder):
    save(folder, 1)
    save(folder, 2).rename(folder.path / "checkpoints" / "step-000000099")
    assert folder.load().step == 1


def test_a_checkpoint_of_another_version_ends_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(checkpoints, "SCHEMA", 1)
    save(folder, 1)
    monkeypatch.undo()
    with pytest.raises(
        InputError, match=r"step-000000001: it was written by another version of lamina.*--restart"
    ) as e:
        folder.load()
    assert "\n" not in str(e.value)


def test_when_none_is_whole_each_is_named_and_nothing_is_touched(folder):
    for step in (1, 2):
        (save(folder, step) / "state.pt").write_text("{}")
    folder.log([line(1, loss=1.0)])
    folder._resuming = True
    before = contents(folder.path)
    with pytest.raises(InputError, match=r"step-000000002: state\.pt has 2 bytes.*step-000000001: .*--restart"):
        folder.load()
    assert contents(folder.path) == before


# Metrics


def test_metrics_are_lines_of_strict_json(folder):
    folder.log([line(1, loss=math.nan, other=-math.inf), line(1, loss=np.float32(0.5), vector=torch.ones(2))])
    folder.log([])
    text = (folder.path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Inf" not in text
    first, second = folder.metrics()
    assert (first["loss"], first["other"]) == (None, None)
    assert (second["loss"], second["vector"]) == (0.5, [1.0, 1.0])


def test_lines_go_out_in_one_write(folder, monkeypatch):
    folder.log([line(1)])
    sizes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: sizes.append(len(data)) or write(file, data))
    folder.log([line(2), line(3)])
    assert len(sizes) == 1
    assert [item["step"] for item in folder.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("tail", ['{"kind": "log", "st', '{"kind": "log", "step": 3}', "\0\0\0\0\n", "[1]\n"])
def test_a_torn_last_line_is_ignored_and_not_built_upon(tmp_path, tail):
    with RunFolder.open(tmp_path) as folder:
        folder.log([line(1), line(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    with RunFolder.open(tmp_path) as folder:
        assert [item["step"] for item in folder.metrics()] == [1, 2]
        if not tail.endswith("\n"):
            folder.log([line(3)])
            assert [item["step"] for item in folder.metrics()] == [1, 2, 3]


def test_a_torn_line_in_the_middle_is_an_error_with_its_number(folder):
    folder.log([line(1), line(2), line(3)])
    path = folder.path / "metrics.jsonl"
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([first, second[:9], third, ""]))
    with pytest.raises(InputError, match="line 2 damaged"):
        folder.metrics()


def events(path: Path) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(path)).Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_has_the_metrics(folder):
    folder.log([line(1, loss=0.5), line(2, loss=math.nan), {**line(3), "kind": "eval", "test_error": 0.25}])
    folder.close()
    assert events(folder.path) == {"loss": [(1, 0.5)], "test_error": [(3, 0.25)]}


def test_without_tensorboard_a_run_goes_on_and_says_so_once(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for step in (1, 2):
        folder.log([line(step, loss=0.5)])
    assert len(folder.metrics()) == 2
    assert len(folder.notes) == 1
    assert folder.notes[0].startswith("TensorBoard events are not written: ")


# Begin, go on, begin anew


def test_the_header_is_written_once_and_read_back(folder):
    assert folder.header == HEADER
    assert json.loads((folder.path / "config.json").read_text()) == HEADER


def test_a_second_start_needs_to_be_told_which_way(folder):
    folder.log([line(7, loss=0.5)])
    before = contents(folder.path)
    with pytest.raises(InputError, match=r"holds a run at step 7\. Pass --resume to go on or --restart"):
        folder.start(HEADER, resume=False)
    with pytest.raises(InputError, match="either resumed or restarted"):
        folder.start(HEADER, resume=True, restart=True)
    assert contents(folder.path) == before


def test_resume_in_a_new_folder_begins(tmp_path):
    with RunFolder.open(tmp_path / "new") as folder:
        folder.start(HEADER, resume=True)
        assert folder.header == HEADER
        assert folder.load() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiment": "convnet"}, "experiment 'mnist' stored and 'convnet' now"),
        ({"seeds": [0, 1]}, r"seeds \[0\] stored and \[0, 1\] now"),
        ({"config": {**HEADER["config"], "lr": 0.01}}, r"config.lr 0.001 stored and 0.01 now"),
        ({"config": {"norm": "layer", "lr": 0.001}}, r"config.batch_size 128 stored and '\(absent\)' now"),
        ({"data": {**DATA, "kind": "embedded"}}, "data.kind 'real' stored and 'embedded' now"),
        ({"data": {**DATA, "sha256": {"images": "cd"}}}, "data.sha256.images 'ab' stored and 'cd' now"),
        ({"experiment": "x", "seeds": [9]}, r"experiment 'mnist' stored and 'x' now; seeds \[0\] stored"),
    ],
)
def test_resume_with_something_else_names_each_difference(folder, change, message):
    before = contents(folder.path)
    with pytest.raises(InputError, match=message):
        folder.start({**HEADER, **change}, resume=True)
    assert contents(folder.path) == before


def test_resume_takes_what_may_change(folder):
    other = {"environment": {"lamina": "9"}, "command": "lamina run --resume", "data": {**DATA, "label": "other"}}
    folder.start({**HEADER, "seeds": (0,), **other}, resume=True)
    assert folder.header == HEADER


@pytest.mark.parametrize("text", ["", "{", "[]", "\0\0"])
@pytest.mark.parametrize("name", ["config.json", "best.json"])
def test_a_damaged_small_file_is_an_error(folder, name, text):
    (folder.path / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name} must be as the run wrote it"):
        folder.header if name == "config.json" else folder.best()


def test_restart_keeps_the_old_run(folder):
    save(folder, 1, best=0.5)
    folder.log([line(1, loss=0.5)])
    for number in (1, 2):
        before = {k: v for k, v in contents(folder.path).items() if not k.startswith(("old-", "run.lock"))}
        folder.start({**HEADER, "seeds": [number]}, resume=False, restart=True)
        assert contents(folder.path / f"old-{number}") == before
        assert folder.header["seeds"] == [number]
        assert (folder.load(), folder.best(), folder.metrics()) == (None, None, [])
        save(folder, 2)
        folder.log([line(2, loss=0.25)])
    assert [item["step"] for item in folder.metrics()] == [2]


def test_a_run_whose_header_is_gone_is_not_written_over(folder):
    save(folder, 1)
    (folder.path / "config.json").unlink()
    for resume in (False, True):
        with pytest.raises(InputError, match=r"no config\.json"):
            folder.start(HEADER, resume=resume)
    folder.start(HEADER, resume=False, restart=True)
    assert saved_steps(folder.path / "old-1") == [1]


def resumed(path: Path, check) -> None:
    with RunFolder.open(path) as folder:
        folder.start(HEADER, resume=True)
        check(folder)


def test_resume_takes_metrics_and_events_back_to_the_checkpoint(folder):
    folder.log([line(1, loss=1.0)])
    save(folder, 1)
    folder.log([line(2, loss=2.0), line(3, loss=3.0)])
    folder.write_json("summary.json", {"finished": True})
    folder.close()

    def check(again):
        assert again.load().step == 1
        assert [item["step"] for item in again.metrics()] == [1]
        assert not (again.path / "summary.json").exists()
        again.log([line(2, loss=20.0)])
        assert [item["step"] for item in again.metrics()] == [1, 2]
        again.load()
        assert [item["step"] for item in again.metrics()] == [1, 2], "only the first load goes back"

    resumed(folder.path, check)
    assert events(folder.path) == {"loss": [(1, 1.0), (2, 20.0)]}


def test_resume_without_a_checkpoint_begins_its_metrics_anew(folder):
    folder.log([line(1, loss=1.0)])
    folder.close()

    def check(again):
        assert again.load() is None
        again.log([line(1, loss=10.0)])
        assert [item["loss"] for item in again.metrics()] == [10.0]

    resumed(folder.path, check)
    assert events(folder.path) == {"loss": [(1, 10.0)]}


def test_load_alone_leaves_metrics_as_they_are(folder):
    save(folder, 1)
    folder.log([line(2, loss=2.0)])
    folder.load()
    assert len(folder.metrics()) == 1


def test_going_back_past_a_damaged_checkpoint_sets_it_aside(folder):
    folder.log([line(1)])
    save(folder, 1)
    folder.log([line(2)])
    (save(folder, 2, best=0.5) / "weights.safetensors").unlink()
    folder.close()

    def check(again):
        assert again.load().step == 1
        assert saved_steps(again.path) == [1]
        assert (again.path / "checkpoints" / "set-aside-1-step-000000002" / "state.pt").exists()
        assert again.best() is None, "its checkpoint is not whole"
        assert [item["step"] for item in again.metrics()] == [1]
        save(again, 2)
        assert again.load().step == 2

    resumed(folder.path, check)


def test_a_checkpoint_that_saw_more_metrics_than_there_are_is_passed_over(folder):
    folder.log([line(1)])
    save(folder, 1)
    size = (folder.path / "metrics.jsonl").stat().st_size
    folder.log([line(2)])
    save(folder, 2)
    folder.close()
    os.truncate(folder.path / "metrics.jsonl", size)

    def check(again):
        assert again.load().step == 1
        assert "metrics.jsonl has" in again.notes[0]

    resumed(folder.path, check)


def test_a_kill_between_checkpoint_and_best_loses_neither(folder):
    save(folder, 1, best=0.5)
    save(folder, 2, best=0.25)
    folder.close()
    (folder.path / "best.json").write_text('{"step": 1, "value": 0.5}')
    resumed(folder.path, lambda again: again.load())
    with RunFolder.open(folder.path) as again:
        assert again.best() == (2, 0.25)


# One process at a time


def test_the_same_process_cannot_open_a_folder_twice(folder):
    with pytest.raises(InputError, match=rf"one process at a time, got .*held by process {os.getpid()} on "):
        RunFolder.open(folder.path)
    folder.close()
    RunFolder.open(folder.path).close()


def hold(path: Path, also=lambda: None):
    """A child that holds the folder until it is killed; returns when the lock is taken."""
    reading, writing = os.pipe()

    def child():
        with RunFolder.open(path):
            also()
            os.write(writing, b".")
            time.sleep(60)

    number = fork(child)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    os.close(reading)
    return number


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    child = hold(tmp_path)
    try:
        with pytest.raises(InputError, match=f"held by process {child} on "):
            RunFolder.open(tmp_path)
        assert status(tmp_path)["running"] is True
    finally:
        kill(child)
    assert status(tmp_path)["running"] is False
    RunFolder.open(tmp_path).close()


def test_a_worker_that_outlives_a_killed_run_does_not_hold_the_lock(tmp_path):
    workers, reported = os.pipe()

    def start_worker():
        os.write(reported, f"{fork(lambda: time.sleep(60))}\n".encode())

    child = hold(tmp_path, start_worker)
    worker = int(os.read(workers, 20))
    try:
        kill(child)
        os.kill(worker, 0)  # still there
        RunFolder.open(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(workers)
        os.close(reported)


def test_a_child_that_leaves_the_with_block_does_not_unlock_its_parent(folder):
    assert run_forked(folder.close) == 0
    assert status(folder.path)["running"] is True


def test_an_instant_of_status_does_not_turn_a_run_away(tmp_path):
    (tmp_path / "run.lock").touch()
    looking = FileLock(tmp_path / "run.lock")
    with looking:
        child = fork(lambda: RunFolder.open(tmp_path).close())
        time.sleep(0.05)
    assert os.waitpid(child, 0)[1] == 0


# Places that cannot be used


def test_a_symbolic_link_to_a_folder_will_do(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with RunFolder.open(tmp_path / "link") as folder:
        save(folder, 1)
        with pytest.raises(InputError, match="one process at a time"):
            RunFolder.open(tmp_path / "real")
    assert saved_steps(tmp_path / "real") == [1]


@pytest.mark.parametrize("place", ["file", "file/below", "nowhere", "loop"])
def test_what_is_no_folder_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="a run folder must be a folder that can be written to"):
        RunFolder.open(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("there_before", [False, True])
def test_a_folder_without_the_right_to_write_is_refused(there_before):
    """In a child that gives up root, whom rights do not bind."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        run = Path(place, "run")
        if there_before:
            RunFolder.open(run).close()
            (run / "run.lock").chmod(0o666)
            run.chmod(0o555)
        else:
            os.chmod(place, 0o555)

        def child():
            if os.getuid() == 0:
                os.setuid(65534)
            with pytest.raises(InputError, match=r"must be a folder that can be written to.*(right|denied)"):
                RunFolder.open(run)

        try:
            assert run_forked(child) == 0
        finally:
            os.chmod(place, 0o755)
            run.exists() and run.chmod(0o755)


# A full disk


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


PLACES = [*(("write", at) for at in range(4)), *(("fsync", at) for at in range(5)), ("rename", 0)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(("call", "at"), PLACES)
def test_a_full_disk_leaves_earlier_checkpoints_and_no_rest(folder, monkeypatch, call, at, number):
    """The call fails at each of the places it is made from, one after the other."""
    save(folder, 1)
    save(folder, 2)
    before = contents(folder.path)
    calls = iter(range(100))
    really = getattr(os, call)

    def failing(*args, **kwargs):
        if next(calls) == at:
            raise OSError(number, os.strerror(number))
        return really(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(
        RunError, match=r"^disk full while writing .*step-000000003: free space and run again with --re"
    ):
        save(folder, 3)
    assert contents(folder.path) == before
    assert sorted(os.listdir(folder.path / "checkpoints")) == ["step-000000001", "step-000000002"]
    monkeypatch.undo()
    assert folder.load().step == 2
    save(folder, 3)
    assert folder.load().step == 3


def test_a_full_disk_when_replacing_a_step_keeps_the_old_one(folder, monkeypatch):
    save(folder, 1)
    really = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: full() if Path(a).name.startswith(".tmp") else really(a, b))
    with pytest.raises(RunError, match="disk full"):
        folder.save(1, weights_of(5), {}, {})
    monkeypatch.undo()
    assert_same(folder.load().weights, weights_of(1))
    assert os.listdir(folder.path / "checkpoints") == ["step-000000001"]


def test_other_failures_to_write_are_named(folder, monkeypatch):
    def failing(*_args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RunError, match=r"could not write .*Input/output error.*--resume"):
        save(folder, 1)


def test_an_interrupted_save_leaves_no_rest(folder, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 1)
    assert os.listdir(folder.path / "checkpoints") == []


def test_small_files_keep_their_old_content_when_the_disk_is_full(folder, monkeypatch):
    folder.write_json("extras.json", {"0": {"x": [1.0, math.nan]}})
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=r"disk full while writing .*extras\.json"):
        folder.write_json("extras.json", {"0": {}})
    assert folder.read_json("extras.json") == {"0": {"x": [1.0, None]}}
    assert folder.read_json("nothing.json") is None
    assert not list(folder.path.glob(".tmp*"))


def test_a_torn_append_is_cut_back(folder, monkeypatch):
    folder.log([line(1)])
    before = (folder.path / "metrics.jsonl").read_bytes()
    really = os.write
    written = []

    def half(file, data):
        if written:
            full()
        written.append(really(file, bytes(data[: len(data) // 2])))
        return written[0]

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunError, match=r"disk full while writing .*metrics\.jsonl"):
        folder.log([line(2), line(3)])
    assert written
    assert (folder.path / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    folder.log([line(2)])
    assert [item["step"] for item in folder.metrics()] == [1, 2]


def test_a_limit_on_file_sizes_is_met_like_a_full_disk(tmp_path):
    """The system's own refusal, short writes and all, in a child that may write files of 16 KiB."""

    def child():
        with RunFolder.open(tmp_path) as folder:
            folder.start(HEADER, resume=False)
            folder._events._given_up = True  # TensorBoard's thread would print its own trouble
            save(folder, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))
            with pytest.raises(RunError, match=r"disk full while writing .*step-000000002"):
                folder.save(2, weights_of(2, size=2**14), optimizer_of(2), {})
            for step in range(14):
                folder.log([line(step, text="x" * 1000)])
            with pytest.raises(RunError, match=r"disk full while writing .*metrics\.jsonl"):
                folder.log([line(14, text="x" * 1000), line(15, text="x" * 1000)])

    assert run_forked(child) == 0
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000001"]
    raw = (tmp_path / "metrics.jsonl").read_bytes()
    assert 2**13 < len(raw) < 2**14
    assert raw.endswith(b"\n")
    with RunFolder.open(tmp_path) as folder:
        assert folder.load().step == 1
        assert [item["step"] for item in folder.metrics()] == list(range(14))


# Looking from outside


def test_status_follows_a_run(tmp_path):
    with pytest.raises(InputError, match="must be a folder"):
        status(tmp_path / "none")
    empty = {"header": None, "step": 0, "checkpoint": None, "finished": False, "running": False}
    assert status(tmp_path) == empty
    with RunFolder.open(tmp_path) as folder:
        folder.start(HEADER, resume=False)
        save(folder, 5)
        folder.log([line(step, note="x" * 300) for step in range(1, 500)])
        seen = status(tmp_path)
        assert seen == {"header": HEADER, "step": 499, "checkpoint": 5, "finished": False, "running": True}
        folder.write_json("summary.json", {"finished": True, "steps": 499})
    assert status(tmp_path) == {**seen, "finished": True, "running": False}


def test_the_module_opens_without_torch():
    code = "import sys, lamina.lab.runs.folder; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


# Killed at any moment


def train_until_killed(path: Path) -> None:
    with RunFolder.open(path) as folder:
        folder.start(HEADER, resume=True)
        found = folder.load()
        step = found.step if found else 0
        while True:
            step += 1
            folder.log([line(step, loss=1 / step)])
            best = 1 / step if step % 5 == 0 else None
            folder.save(step, weights_of(step, size=20_000), optimizer_of(step), {"drawn": step}, best=best)


def check_what_is_left(path: Path, at_least: int) -> int:
    """Everything that was promised; returns the step the run would go on from."""
    with RunFolder.open(path) as folder:
        found = folder.load()
        steps = [item["step"] for item in folder.metrics()]
        assert folder.notes == []
        best = folder.best()
        for _, kept in checkpoints.listed(path / "checkpoints"):
            checkpoints.read(kept)  # not only the newest
    step = found.step if found else 0
    assert step >= at_least
    assert steps == list(range(1, len(steps) + 1)), "a line is missing or there twice"
    assert len(steps) - step in (0, 1)
    if found:
        assert_same(found.weights, weights_of(step, size=20_000))
        assert_same(found.optimizer, optimizer_of(step))
        assert found.state == {"drawn": step}
        marked = best[0] if best else 0
        assert marked in (0, *saved_steps(path))
        # A kill may fall between a checkpoint and best.json; the checkpoint itself then knows that it is the best.
        assert marked == step // 5 * 5 or (marked, found.best) == (step - 5, 1 / step)
    return step


@pytest.mark.parametrize("enough", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_loses_nothing(tmp_path, enough):
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401  here, so that the children need not

    chance, reach, step, kills = random.Random(0), 0.08, 0, 0
    while kills < enough or (step <= 10 and kills < 200):
        child = fork(lambda: train_until_killed(tmp_path))
        time.sleep(chance.uniform(0.0, reach))
        kill(child)
        before, step = step, check_what_is_left(tmp_path, at_least=step)
        reach = min(reach * 1.3, 1.0) if step == before else max(reach / 2, 0.06)  # a busy machine gets more time
        kills += 1
    assert step > 10, "the children hardly got to work: nothing was tested"
