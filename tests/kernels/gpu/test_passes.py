"""Whole passes in CUDA graphs: the same numbers as launched piece by piece, whatever a caller does with them."""

from __future__ import annotations

import pytest
import torch

import lamina

pytest.importorskip("triton")
from lamina.kernels import passes, precision, replay

pytestmark = pytest.mark.gpu

SHAPE = (9, 5, 12)  # steps, batch, inputs


@pytest.fixture(autouse=True)
def _forgotten():
    passes.clear()
    yield
    passes.clear()


def layer_and_input(cell="LSTM", hidden=40, dtype=torch.float32, **options):
    layer = getattr(lamina, cell)(SHAPE[2], hidden, device="cuda", dtype=dtype, **options)
    return layer, torch.randn(SHAPE, device="cuda", dtype=dtype, requires_grad=True)


def everything(layer, x, hx=None, **acting):
    """Output, states and gradients of a loss of all of them."""
    out, state = layer(x, hx, **acting)
    states = state if isinstance(state, tuple) else (state,)
    loss = sum((t.float() * torch.linspace(0, 1, t.numel(), device="cuda").view(t.shape)).sum() for t in (out, *states))
    return [out, *states, *torch.autograd.grad(loss, [x, *layer.parameters()])]


def piece_by_piece(layer, x, hx=None, **acting):
    with replay.off():
        return everything(layer, x, hx, **acting)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b))


def spaces():
    return sum(kind.made for kind in passes._kinds.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_same_bits(cell, dtype):
    layer, x = layer_and_input(cell, dtype=dtype)
    for _ in range(7):
        x = torch.randn_like(x).requires_grad_()
        assert same(everything(layer, x), piece_by_piece(layer, x))
    assert spaces() >= 1


@pytest.mark.parametrize("late", [1, 10**9])  # from how many numbers on a matrix's gradient is formed after the graph
def test_outputs_are_the_callers_own(late, monkeypatch):
    monkeypatch.setattr(precision, "LATE", late)
    layer, x = layer_and_input()
    kept = []
    for _ in range(8):
        x = torch.randn_like(x).requires_grad_()
        kept.append([t.detach() for t in everything(layer, x)] + [piece_by_piece(layer, x)])
    for *found, wanted in kept:
        assert same(found, wanted)


def test_weights_that_change_in_place():
    layer, x = layer_and_input()
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(6):
        optimiser.zero_grad()
        layer(x)[0].square().sum().backward()
        with replay.off():
            wanted = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
        assert same([p.grad for p in layer.parameters()], wanted)
        optimiser.step()


def test_several_passes_before_their_backward_passes():
    layer, x = layer_and_input()
    for _ in range(4):
        everything(layer, x)
    inputs = [torch.randn_like(x).requires_grad_() for _ in range(5)]
    outs = [layer(each)[0] for each in inputs]
    for each, out in reversed(list(zip(inputs, outs))):
        (found,) = torch.autograd.grad(out.square().sum(), each)
        with replay.off():
            (wanted,) = torch.autograd.grad(layer(each)[0].square().sum(), each)
        assert torch.equal(found, wanted)


def test_backward_twice_and_twice_differentiated():
    layer, x = layer_and_input()
    for _ in range(4):
        everything(layer, x)
    out = layer(x)[0]
    loss = out.square().sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    layer(torch.randn_like(x).requires_grad_())  # another pass in between
    assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], first)
    (again,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(again.square().sum(), x)[0]).all()


def test_a_changed_weight_is_noticed_before_backward():
    layer, x = layer_and_input()
    for _ in range(4):
        everything(layer, x)
    loss = layer(x)[0].sum()
    with torch.no_grad():
        layer.weight_ih_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_states_given_and_nothing_recorded():
    layer, x = layer_and_input()
    hx = tuple(torch.randn(1, SHAPE[1], 40, device="cuda") for _ in range(2))
    for _ in range(5):
        assert same(everything(layer, x, hx), piece_by_piece(layer, x, hx))
        with torch.no_grad():
            found = layer(x, hx)
            with replay.off():
                wanted = layer(x, hx)
        assert same([found[0], *found[1]], [wanted[0], *wanted[1]])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the test's own streams
def test_two_streams():
    layer, x = layer_and_input()
    wanted = piece_by_piece(layer, x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(6):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(everything(layer, x))
    torch.cuda.synchronize()
    assert all(same(each, wanted) for each in found)


def test_long_and_masked_problems_are_not_captured():
    layer, x = layer_and_input()
    masked, _ = layer_and_input(zoneout=0.1)
    long = torch.randn(passes.LONGEST + 1, 2, SHAPE[2], device="cuda", requires_grad=True)
    for _ in range(4):
        layer(long)[0].sum().backward()
        masked(x)[0].sum().backward()
    assert spaces() == 0


def acting():
    """Lengths and restarts, other ones in every call, on the host."""
    return {"lengths": torch.randint(0, SHAPE[0] + 1, SHAPE[1:2]), "resets": torch.rand(SHAPE[:2]) < 0.3}


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 3}], ids=str)
@pytest.mark.parametrize("hidden", [40, 2400])  # one path and the other
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_ragged_and_restarted_passes(cell, hidden, options):
    layer, x = layer_and_input(cell, hidden, torch.bfloat16, backend="triton", **options)
    for _ in range(6):
        x, now = torch.randn_like(x).requires_grad_(), acting()
        assert same(everything(layer, x, **now), piece_by_piece(layer, x, **now))
    assert spaces() >= 1


def test_ragged_passes_are_captured_by_name_only():
    """No record has their time yet."""
    layer, x = layer_and_input()
    for _ in range(4):
        everything(layer, x, **acting())
    assert spaces() == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # says that it is a prototype
@pytest.mark.parametrize("hidden", [40, 2400])
def test_nobody_waits_for_the_device_in_a_ragged_step(hidden):
    """Lengths that lie on the host are looked at there, and travel behind what the device has still to do."""
    layer, x = layer_and_input(hidden=hidden, backend="triton", bidirectional=True)
    for _ in range(5):  # compiled and captured
        layer(x, **acting())[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, **acting())[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_few_kinds_are_remembered():
    layer, _ = layer_and_input()
    for steps in range(1, passes.KINDS + 4):
        x = torch.randn(steps, *SHAPE[1:], device="cuda", requires_grad=True)
        for _ in range(4):
            assert same(everything(layer, x), piece_by_piece(layer, x))
    assert len(passes._kinds) <= passes.KINDS


def test_inside_a_capture_of_the_users():
    layer, x = layer_and_input()
    for _ in range(4):
        everything(layer, x)
    with torch.no_grad(), replay.off():
        wanted = layer(x)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = layer(x)[0]
    graph.replay()
    assert torch.equal(found, wanted)


def test_autocast_and_weight_norm_are_captured_once():
    """Their matrices are new tensors in every call, wherever they lie."""
    for options, dtype in (({}, torch.bfloat16), ({"norm": "weight"}, None)):
        passes.clear()
        layer, x = layer_and_input(**options)
        for _ in range(9):
            x = torch.randn_like(x).requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
                found = everything(layer, x)
                wanted = piece_by_piece(layer, x)
            assert same(found, wanted)
        assert len(passes._kinds) == 1
        assert 1 <= spaces() <= passes.SPACES


@pytest.mark.parametrize("hidden", [40, 2400])
def test_inference_mode_and_others_in_turn(hidden):
    """What is kept in one mode serves in the others: on both paths."""
    layer, x = layer_and_input(hidden=hidden)
    with torch.no_grad(), replay.off():
        wanted = layer(x)[0]
    for _ in range(2):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            for _ in range(4):
                with mode():
                    found = layer(x)[0]
                if mode is torch.enable_grad:
                    found.sum().backward()
                else:
                    assert torch.equal(found, wanted)
