"""Peak memory of a training step on a GPU, counted: every tensor of a pass is made, but no memory is taken for it.

Passes run on torch's meta device, where a tensor has a size and nothing else; a count of what is alive takes the place
of an allocator, and nothing is launched. At a commit that an H200 had measured, 40 peaks differed from such a count by
5 MB at most, and by less than 1% above 200 MB. cuDNN's peaks are those that results/bench-sequence.json holds.
"""

from __future__ import annotations

import importlib
import json
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lamina
from lamina.kernels import passes, plans, precision, replay

RECORD = Path(__file__).parents[3] / "results" / "bench-sequence.json"
ROWS = [row for row in json.loads(RECORD.read_text())["rows"] if row["dtype"] != "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
H200 = SimpleNamespace(processors=132, shared_memory=227 * 1024, memory=150_000_000_000)

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU measures it itself")


class Count(TorchDispatchMode):
    """Bytes of all tensors that are alive and were not before, and their most."""

    def __init__(self, before) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.alive: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return found

    def add(self, storage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512  # as CUDA's allocator rounds
        if key not in self.alive and key not in self.before:
            self.alive[key] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key) -> None:
        self.now -= self.alive.pop(key)


@pytest.fixture(autouse=True)
def _as_on_an_h200(monkeypatch):
    """Cut to its size, with its ways of multiplying; nothing is launched."""
    pytest.importorskip("triton")
    torch.use_deterministic_algorithms(False)  # which would fill memory that is not there
    for name in ("launch", "rows", "steps"):
        module = importlib.import_module(f"lamina.kernels.{name}")
        monkeypatch.setattr(module, "start", lambda *_: None)
        monkeypatch.setattr(module, "multiply", lambda a, b, out: out, raising=False)
    for name in ("functional", "kernels.fused"):  # a count is no reason to go another way
        monkeypatch.setattr(importlib.import_module(f"lamina.{name}"), "watched", lambda _: False)
    steps = importlib.import_module("lamina.kernels.steps")
    monkeypatch.setattr(steps.Stepper, "__call__", lambda self: None)
    monkeypatch.setattr(precision, "HALF_WHEN_INTERPRETED", True)
    monkeypatch.setattr(plans, "processors", lambda device: H200.processors)
    monkeypatch.setattr(plans, "shared_memory", lambda device: H200.shared_memory - plans.RESERVED)
    monkeypatch.setattr(plans, "interpreted", lambda: False)


@pytest.fixture
def graphs(monkeypatch):
    """Loops and passes are captured as on a GPU, and what graphs need stays."""
    capturing = []

    @contextmanager
    def capture():
        capturing.append(True)
        yield
        capturing.pop()

    def captured(self, work, found):
        with capture(), torch.no_grad():
            found.extend(work())
        return SimpleNamespace(replay=lambda: None)

    def share(x, weight, matrix):
        numbers = x.shape[0] * x.shape[1] * weight.shape[0] + matrix.numel()
        return numbers * x.element_size() / H200.memory

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(replay, "serves", lambda tensor: not capturing)
    monkeypatch.setattr(replay, "take_stream", lambda device: None)
    monkeypatch.setattr(replay, "give_stream", lambda device, stream: None)
    monkeypatch.setattr(replay.Loop, "run", lambda self, step, steps: None)
    monkeypatch.setattr(passes, "_can_be_captured", lambda x: not capturing)
    monkeypatch.setattr(passes, "_share", share)
    monkeypatch.setattr(passes.Space, "captured", captured)
    passes.clear()
    yield
    passes.clear()


def peak(row, steps, **options) -> float:
    """Of so many training steps, what stays between them included: megabytes over cuDNN's."""
    (batch, length, inputs, hidden), dtype = row["shape"], DTYPES[row["dtype"]]
    layer = getattr(lamina, row["cell"])(inputs, hidden, dtype=dtype, device="meta", backend="triton", **options)
    x = torch.empty(length, batch, inputs, dtype=dtype, device="meta", requires_grad=True)
    upstream = torch.empty(length, batch, hidden, dtype=dtype, device="meta")
    leaves = [x, *layer.parameters()]
    with Count([*leaves, upstream]) as count:
        for _ in range(steps):
            torch.autograd.grad(layer(x)[0], leaves, upstream)
    return count.most / 2**20 / row["peak_megabytes"]["cuDNN plain"]


def name_of(row) -> str:
    return "-".join(map(str, (row["cell"], row["dtype"], *row["shape"])))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_step_takes_at_most_half_as_much_again_as_cudnn(row):
    """1.40 at most, when this was written."""
    assert 0.3 < peak(row, 1) <= 1.45


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_and_no_more_with_recompute(row):
    """0.66 at most, when this was written."""
    assert 0.3 < peak(row, 1, recompute=True) <= 0.75


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_nor_with_all_that_graphs_hold(row):
    """1.50 at most, when this was written: LSTM, bfloat16, 2,400 units."""
    found = peak(row, 6)
    print(f"GRAPHS {name_of(row)} {found:.3f}")
    assert 0.3 < found <= 1.51
