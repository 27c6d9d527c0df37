"""Captured passes without a GPU: what stands for a graph does its work again, into the tensors that it found at first.

What only a GPU can show is in test_passes.py; here, that a backward pass may use up what its forward pass kept.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import lamina
from lamina import functional, kernels
from lamina.kernels import passes, plans, precision, replay, walk
from lamina.kernels.precision import Product

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU has graphs: test_passes.py")

STEPS, BATCH, INPUTS, HIDDEN = 3, 2, 4, 5


class Again:
    """In place of a CUDA graph."""

    replays = 0

    def __init__(self, work, found) -> None:
        self.work, self.found = work, [*found]

    def replay(self) -> None:
        Again.replays += 1
        for old, new in zip(self.found, self.work(), strict=True):
            for a, b in zip(*map(tensors_of, (old, new)), strict=True):
                if a is not b:  # a matrix that is used as it is
                    a.copy_(b)


def tensors_of(found):
    return [found.left, found.right] if isinstance(found, Product) else [] if found is None else [found]


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    def captured(self, work, found):
        kept = [(t, t.clone()) for t in self.found]
        with torch.no_grad():
            found.extend(work())
        for tensor, before in kept:
            tensor.copy_(before)  # nothing runs while it is captured
        return Again(work, found)

    monkeypatch.setattr(passes, "_can_be_captured", lambda x: not replay.off)
    monkeypatch.setattr(passes.Space, "captured", captured)
    monkeypatch.setattr(replay, "take_stream", lambda device: None)
    monkeypatch.setattr(replay, "give_stream", lambda device, stream: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    passes.clear()
    Again.replays = 0
    yield
    passes.clear()


def layer_and_input(cell, dtype=torch.float32, **options):
    layer = getattr(lamina, cell)(INPUTS, HIDDEN, backend="triton", dtype=dtype, **options)
    return layer, torch.randn(STEPS, BATCH, INPUTS, dtype=dtype, requires_grad=True)


def loss_of(out):
    return (out.float() * torch.linspace(0, 1, out.numel()).view(out.shape)).sum()


def everything(layer, x, **acting):
    out, state = layer(x, **acting)
    states = state if isinstance(state, tuple) else (state,)
    loss = sum(map(loss_of, (out, *states)))
    return [out, *states, *torch.autograd.grad(loss, [x, *layer.parameters()])]


def gradients(layer, x, **acting):
    return torch.autograd.grad(loss_of(layer(x, **acting)[0]), [x, *layer.parameters()])


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.fixture(params=["persistent", "steps"])
def path(request, monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "path", request.param)
    return request.param


ROWS = [
    *((cell, {}) for cell in ("LSTM", "GRU", "RNN")), *((cell, {"placement": "joint"}) for cell in ("LSTM", "GRU")),
    *(("LSTM", {"norm": None, "bias": bias}) for bias in (True, False)),
]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("cell", "options"), ROWS, ids=str)
def test_same_bits(cell, options, path, late, monkeypatch):
    """Gradients of matrices formed by the graph, or after it."""
    layer, x = layer_and_input(cell, **options)
    with replay.off():
        wanted = everything(layer, x)
    monkeypatch.setattr(precision, "LATE", 0 if late else 2**30)
    for _ in range(5):
        assert_equal(everything(layer, x), wanted)
    assert Again.replays == 3 + 2  # forward from the third call on, backward from the fourth
    other = torch.randn_like(x, requires_grad=True)
    with replay.off():
        wanted = everything(layer, other)
    assert_equal(everything(layer, other), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_backward_twice(cell, path):
    """The second finds again what the first used up."""
    layer, x = layer_and_input(cell)
    with replay.off():
        wanted = gradients(layer, x)
    for _ in range(4):
        loss = loss_of(layer(x)[0])
        for _ in range(2):
            found = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
            assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"num_layers": 2}, {"num_layers": 2, "norm": None}], ids=str
)
def test_several_recurrences(options):
    layer, x = layer_and_input("LSTM", **options)
    with replay.off():
        wanted = everything(layer, x)
    for _ in range(5):
        assert_equal(everything(layer, x), wanted)
    assert Again.replays


def ragged():
    return {"lengths": torch.randint(0, STEPS + 1, (BATCH,))}


def restarted():
    return {"resets": torch.rand(STEPS, BATCH) < 0.5}


ACTING = [ragged, restarted, lambda: ragged() | restarted()]


@pytest.mark.slow
@pytest.mark.parametrize("acting", ACTING, ids=["lengths", "resets", "both"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_other_lengths_and_resets_in_every_call(cell, acting, path):
    assert_served(*layer_and_input(cell), acting)
    assert Again.replays == 4 + 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bidirectional": True}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("acting", ACTING, ids=["lengths", "resets", "both"])
def test_other_lengths_and_resets_of_several_recurrences(options, acting):
    assert_served(*layer_and_input("LSTM", **options), acting)
    assert Again.replays == 4 + 3


def assert_served(layer, x, acting):
    torch.manual_seed(1)
    for _ in range(6):
        now = acting()
        with replay.off():
            wanted = everything(layer, x, **now)
        assert_equal(everything(layer, x, **now), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("acting", [ragged, restarted])
def test_ragged_passes_are_captured_by_name_only(acting, monkeypatch):
    """No GPU has measured these graphs yet, so backend="auto" does without them."""
    layer, x = layer_and_input("LSTM")
    chosen = functional.choose
    monkeypatch.setattr(functional, "choose", lambda *given: replace(chosen(*given), ragged_eager=True))
    assert_served(layer, x, acting)
    assert Again.replays == 0
    assert_served(layer, x, dict)
    assert Again.replays == 4 + 3


def test_auto_says_that_ragged_passes_are_not_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: kernels.HOPPER)
    monkeypatch.setattr("lamina.kernels.plans.path_for", lambda request: ("persistent", "one launch"))
    request = kernels.Request("recurrence", torch.device("cuda"), torch.float32, cell="LSTM", norm="layer")
    auto, named = kernels.choose(request), kernels.choose(request, "triton")
    assert (auto.ragged_eager, named.ragged_eager) == (True, False)
    assert "lengths or resets have yet to be measured; backend='triton' captures them" in auto.reason
    assert "lengths" not in named.reason


def test_a_pass_with_other_lengths_before_a_backward_pass(path):
    layer, x = layer_and_input("LSTM")
    with replay.off():
        wanted = gradients(layer, x, lengths=torch.tensor([3, 1]))
    for _ in range(5):
        out = layer(x, lengths=torch.tensor([3, 1]))[0]
        layer(x, lengths=torch.tensor([1, 3]))
        assert_equal(torch.autograd.grad(loss_of(out), [x, *layer.parameters()]), wanted)
    assert Again.replays


@pytest.mark.parametrize("options", [{"zoneout": 0.5}, {"recurrent_dropout": 0.5}], ids=str)
def test_masks_are_not_captured(options):
    """They are as large as the states of all steps."""
    layer, x = layer_and_input("LSTM", **options)
    for _ in range(5):
        everything(layer, x, **ragged())
    assert not Again.replays


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_what_was_kept_is_used_up(cell, path, monkeypatch):
    """Else these tests would show nothing: x as the steps take it is overwritten by its gradients."""
    layer, x = layer_and_input(cell)
    changed = []
    backward = walk.backward

    def spied(setting, path, tensors, extras, kept, *rest, once=False):
        kept = [*kept]
        before = [t.clone() for t in kept[1:4]]
        found = backward(setting, path, tensors, extras, kept, *rest, once=once)
        changed.append([not torch.equal(a, b) for a, b in zip(kept[1:4], before)])  # W_x x, its statistics, x
        return found

    monkeypatch.setattr(walk, "backward", spied)
    for _ in range(4):
        everything(layer, x)
    # Twice piece by piece; then launched over what a graph left, captured, and replayed.
    assert changed == [[False] * 3] * 2 + [[True, False, True]] * 3
