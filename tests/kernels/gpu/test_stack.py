"""Layers one above another as a wavefront: the numbers of layer after layer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.kernels import passes, plans, precision, wavefront
from tests.cases import gradients

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")

FLOOR = {torch.float32: 3e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("most", [2, 3, 4])
@pytest.mark.parametrize(("layers", "steps", "parts"), [(2, 1, 1), (2, 7, 3), (3, 100, 5), (4, 10, 4), (3, 5, 5)])
def test_every_piece_comes_after_those_it_builds_upon(layers, steps, parts, most, backward, monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "parts_of_stack", parts)
    seen, launches = set(), 0
    for part, pieces in wavefront.launches(layers, steps, most, backward):
        launches += 1
        assert 1 <= len(pieces) == part.sides <= most
        for side, (layer, begin, end) in enumerate(pieces):
            assert layer == part.place + side * part.place_step  # as the kernels find them
            assert begin == part.begin - side * part.lag
            assert end == min(steps, begin + part.steps)
            below, before = (layer + 1, begin), (layer, end)
            if not backward:
                below, before = (layer - 1, begin), (layer, begin - part.steps)
            assert below in seen or below[0] in (-1, layers)
            assert before in seen or not 0 <= before[1] < steps
        seen |= {(layer, begin) for layer, begin, _ in pieces}
    count = len({begin for _, begin in seen})
    assert len(seen) == layers * count
    if most >= layers:
        assert launches == count + layers - 1
    elif (layers, most) == (3, 2):
        assert launches <= -(-3 * count // 2) + 1


def errors(cell, dtype, device, shape, count=3, lengths=None, resets=None, given=False, **options):
    """By name: how far the wavefront and the same-precision reference are from float64, gradients included."""
    (steps, batch, inputs, hidden), found = shape, []
    kinds = ((torch.float64, "reference"), (dtype, "reference"), (dtype, "triton"))
    torch.manual_seed(1)
    layers = [getattr(lamina, cell)(inputs, hidden, count, backend=b, device=device, dtype=d, **options)
              for d, b in kinds]  # fmt: skip
    with torch.no_grad():
        for p in layers[-1].parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(steps, batch, inputs, device=device).to(dtype)
    state = torch.randn(2, count, batch, hidden, device=device).to(dtype) if given else None
    for layer in layers:
        layer.load_state_dict(layers[-1].state_dict())
        kind = layer.weight_ih_l0.dtype
        own = x.to(kind, copy=True).requires_grad_()
        hx = None if state is None else state.to(kind) if cell == "LSTM" else state[0].to(kind)
        hx = tuple(hx) if given and cell == "LSTM" else hx
        out, last = layer(own, hx, lengths=lengths, resets=resets)
        outputs = [out, *(last if cell == "LSTM" else (last,))]
        named = dict(layer.named_parameters())
        grads = gradients(outputs, [own, *named.values()])
        found.append(dict(zip(["output", "h", "c"], outputs)) | dict(zip(["d input", *named], grads)))
    truth, plain, ours = found
    assert all(ours[name].dtype == dtype for name in ours)
    size = {name: max(t.norm().item(), 1e-2 * t.numel() ** 0.5) for name, t in truth.items()}
    return {n: [((f[n].double() - truth[n]).norm() / size[n]).item() for f in (ours, plain)] for n in truth}


def assert_as_good(cell, dtype, device, shape, **options) -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = errors(cell, dtype, device, shape, **options)
    for name, (error, allowed) in found.items():
        assert error <= 2 * allowed + FLOOR[dtype], f"{name}: {error:.2g}, reference {allowed:.2g}"


@pytest.fixture(autouse=True)
def _three_parts(monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "parts_of_stack", 3)


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize(
    ("cell", "placement"), [("LSTM", "paper"), ("LSTM", "joint"), ("GRU", "paper"), ("GRU", "joint"), ("RNN", "paper")]
)
def test_layers_are_as_good_as_the_reference(cell, placement, most, device, monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "at_once", most)
    assert_as_good(cell, torch.float32, device, (7, 3, 5, 11), placement=placement, given=True)


@pytest.mark.parametrize(
    "options", [{"norm": None}, {"norm": "weight"}, {"bias": False}, {"placement": "cell"}], ids=str
)
def test_other_norms(options, device):
    assert_as_good("LSTM", torch.float32, device, (5, 2, 4, 9), **options)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_ragged_and_restarted(cell, device):
    """Parts begin where rows have ended, and with states that were started anew on the way."""
    lengths = torch.tensor([7, 1, 4, 0])
    resets = torch.rand(7, 4, device=device) < 0.3
    assert_as_good(cell, torch.float32, device, (7, 4, 3, 9), lengths=lengths, resets=resets, given=True)


def assert_as_good_as_apart(monkeypatch, *given, **options) -> None:
    """Errors are those of layer after layer: rounding may fall otherwise in products of parts, but not more often."""
    together = errors(*given, **options)
    monkeypatch.setitem(plans.OVERRIDE, "at_once", 1)
    for name, (allowed, _) in errors(*given, **options).items():
        assert together[name][0] <= 1.25 * allowed + FLOOR[given[1]] / 4, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cell", "hidden"), [("LSTM", 20), ("GRU", 12)])  # of few units x^ is kept in float32
def test_half_precision(cell, hidden, dtype, device, monkeypatch):
    assert_as_good_as_apart(monkeypatch, cell, dtype, device, (6, 3, 7, hidden), count=2)


def test_scaled_halves_and_deferred_scalars(device, monkeypatch):
    monkeypatch.setattr(precision, "HALF_WHEN_INTERPRETED", True)
    monkeypatch.setitem(plans.OVERRIDE, "defer", True)
    assert_as_good_as_apart(monkeypatch, "LSTM", torch.float32, device, (4, 3, 5, 20), count=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_chunk_by_chunk(cell, dtype, device, monkeypatch):
    """As where three programs share a multiprocessor: h is brought to the product in parts, one after another."""
    monkeypatch.setattr(plans.Plan, "narrow", property(lambda self: True))
    monkeypatch.setitem(plans.OVERRIDE, "chunk", 16)
    monkeypatch.setattr(precision, "HALF_WHEN_INTERPRETED", True)
    assert_as_good_as_apart(monkeypatch, cell, dtype, device, (5, 3, 4, 40))


def test_zoneout_in_evaluation_and_no_gradients(device):
    made = [lamina.GRU(3, 6, 3, zoneout=0.3, dropout=0.5, backend=b, device=device) for b in ("triton", "reference")]
    made[1].load_state_dict(made[0].state_dict())
    x = torch.randn(5, 2, 3, device=device)
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        (out, h), (want, h_too) = (layer.eval()(x) for layer in made)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h, h_too, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_masks_and_learned_states_in_training(cell, device, monkeypatch):
    """Without dropout between them layers draw the same masks as one after another."""
    rates = (0.3, 0.2) if cell == "LSTM" else 0.3
    layer = getattr(lamina, cell)(
        3, 6, 3, zoneout=rates, recurrent_dropout=0.2, learn_initial_state=True, backend="triton", device=device
    )
    x, found = torch.randn(7, 3, 3, device=device, requires_grad=True), []
    for most in (3, 1):
        monkeypatch.setitem(plans.OVERRIDE, "at_once", most)
        torch.manual_seed(2)
        out, last = layer(x, lengths=torch.tensor([7, 2, 5]))
        outputs = [out, *(last if cell == "LSTM" else (last,))]
        found.append([*outputs, *gradients(outputs, [x, *layer.parameters()])])
    for a, b in zip(*found):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-5


@pytest.mark.usefixtures("full_float32")
def test_dropout_between_layers(device):
    """Half of what a layer gives is dropped, the rest is doubled, and gradients go where something was given."""
    layer = lamina.RNN(3, 6, 2, dropout=0.5, backend="triton", device=device)
    x = torch.randn(5, 4, 3, device=device, requires_grad=True)
    torch.manual_seed(5)
    out, _ = layer(x)
    torch.manual_seed(5)
    mask = torch.nn.functional.dropout(torch.ones(5, 4, 6, device=device), 0.5)
    assert 0 < (mask == 0).sum() < mask.numel()
    lower, upper = (lamina.RNN(n, 6, backend="reference", device=device) for n in (3, 6))
    for at, one in enumerate((lower, upper)):
        one.load_state_dict({k.replace("_l0", "") + "_l0": v for k, v in _of(layer, at).items()})
    want = upper(lower(x)[0] * mask)[0]
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    found, wanted = (torch.autograd.grad(o.square().sum(), x)[0] for o in (out, want))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def _of(layer, at):
    return {k.removesuffix(f"_l{at}"): v for k, v in layer.state_dict().items() if k.endswith(f"_l{at}")}


def test_gradients_of_gradients(device):
    made = [lamina.LSTM(3, 5, 2, backend=b, device=device) for b in ("triton", "reference")]
    made[1].load_state_dict(made[0].state_dict())
    x, found = torch.randn(4, 2, 3, device=device, requires_grad=True), []
    with torch.backends.cudnn.flags(allow_tf32=False):
        for layer in made:
            (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [x, layer.weight_hh_l1, layer.weight_ih_l0]))
    for a, b in zip(*found):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-4


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_compiled_without_a_graph_break(options, device):
    """Each recurrence is an operator then; numbers and gradients are the same."""
    layer = lamina.LSTM(4, 6, backend="triton", device=device, **options)
    x, found = torch.randn(3, 2, 4, device=device, requires_grad=True), []
    with torch.backends.cudnn.flags(allow_tf32=False):
        for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            out = run(x)[0]
            found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*found):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-4


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_checkpointed(options, device):
    layer = lamina.GRU(4, 6, backend="triton", device=device, **options)
    x = torch.randn(3, 2, 4, device=device, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    out = checkpoint(lambda t: layer(t)[0], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], want)


def test_autocast(device):
    """Matrices and input in bfloat16, gains and statistics in float32: as layer after layer."""
    layer = lamina.LSTM(3, 16, 2, backend="triton", device=device)
    x = torch.randn(5, 2, 3, device=device, requires_grad=True)
    found = []
    for most in (2, 1):
        with pytest.MonkeyPatch.context() as patch, torch.autocast(device.type, torch.bfloat16):
            patch.setitem(plans.OVERRIDE, "at_once", most)
            out, (h, c) = layer(x)
        found.append([out, h, c, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*found):
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm() + 1e-4


def test_bad_input_is_told_before_anything_else(device):
    layer = lamina.LSTM(3, 6, 2, backend="triton", device=device)
    with pytest.raises(lamina.InputError, match="one dtype"):
        layer(torch.zeros(4, 2, 3, dtype=torch.int64, device=device))
    with pytest.raises(lamina.InputError, match="h_0 of shape"):
        layer(torch.zeros(4, 2, 3, device=device), (torch.zeros(1, 2, 6, device=device),) * 2)


def test_the_answer_says_how(device):
    def said(count=3, **options):
        return lamina.explain(lamina.LSTM(3, 5, count, backend="triton", device=device, **options)).reason

    assert "parts of 3 layers in one launch" in said()
    assert "layer after layer: recompute=True" in said(recompute=True)
    assert "layer" not in said(1)
    assert "both directions in one launch" in said(bidirectional=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"num_layers": 3}, {"bidirectional": True}], ids=str)
def test_captured(options):
    passes.clear()
    layer = lamina.LSTM(16, 40, device="cuda", backend="triton", **options)
    x = torch.randn(9, 5, 16, device="cuda", requires_grad=True)
    first = None
    for _ in range(7):
        out, state = layer(x)
        found = [out, *state, *torch.autograd.grad(out.sum() + state[1].sum(), [x, *layer.parameters()])]
        first = found if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(found, first))
    assert sum(kind.made for kind in passes._kinds.values()) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "hidden"), [(64, 512), (8, 400), (17, 257)])
def test_groups_of_many_members(batch, hidden, dtype, monkeypatch):
    """At the sizes that the record has: programs that wait for each other, two on a multiprocessor."""
    for cell in ("LSTM", "GRU"):
        with monkeypatch.context() as patch:
            assert_as_good_as_apart(patch, cell, dtype, torch.device("cuda"), (7, batch, hidden, hidden))
