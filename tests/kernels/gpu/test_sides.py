"""Recurrences that share launches, such as the directions of a layer: the numbers that each has alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lamina
from lamina.kernels import fused, interpreted, launch, plans, precision
from lamina.reference import SequenceResult
from tests.cases import cast, gradients, leaves
from tests.kernels.gpu.test_sequence import FUSED, problem

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")


def everything(calls, run) -> dict[str, torch.Tensor]:
    """Outputs, final states and gradients of all calls, by name."""
    results: list[SequenceResult] = run(calls)
    outputs = [t for result in results for t in (result.output, *result.state)]
    named = {f"{name} of {side}": t for side, call in enumerate(calls) for name, t in leaves(call).items()}
    found = gradients(outputs, list(named.values()))
    return dict(zip(map(str, range(len(outputs))), outputs)) | {f"d {n}": g for n, g in zip(named, found)}


def apart(calls):
    return [fused.run(call, "persistent") for call in calls]


def together(calls):
    return fused.run_together(calls, "persistent")


def assert_same(calls) -> None:
    """The same bits together as apart; on a GPU tiles may be cut otherwise, and sums have another order."""
    want, got = everything(calls, apart), everything(calls, together)
    assert list(want) == list(got)
    for name in want:
        if interpreted():
            assert torch.equal(got[name], want[name]), name
        else:
            size = want[name].double().norm() + 1e-2 * want[name].numel() ** 0.5
            bound = 20 * torch.finfo(want[name].dtype).eps if want[name].dtype != torch.float32 else 2e-3
            assert (got[name].double() - want[name].double()).norm() <= bound * size, name


def two(row, shape, device, dtype=torch.float32, **more):
    """Two directions with their own weights, states and inputs."""
    calls = [cast(problem(row, shape, device, **more), dtype, dtype) for _ in range(2)]
    return [calls[0], dataclasses.replace(calls[1], reverse=True)]


# The interpreter is slow: there, one row of each form that a kernel can have.
ROWS = [r for r in FUSED if not interpreted() or r in (
    ("LSTM", "layer", "paper"), ("LSTM", "layer", "joint"), ("GRU", "layer", "paper"), ("GRU", "layer", "joint"),
    ("RNN", "layer", "paper"), ("LSTM", None, None), ("GRU", "weight", None))
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_row(row, device):
    assert_same(two(row, (5, 3, 7, 17), device))


@pytest.mark.parametrize("row", [r for r in ROWS if r[2] == "paper" or not interpreted()], ids=str)
def test_ragged_restarted_and_masked(row, device):
    lengths = torch.tensor([6, 1, 4, 0], device=device)
    resets = torch.rand(6, 4, device=device) < 0.3
    states = 2 if row[0] == "LSTM" else 1
    masks = tuple((torch.rand(6, 4, 9, device=device) < 0.4).float() for _ in range(states))
    drop = (torch.rand(4, 9, device=device) < 0.7).float() / 0.7
    for zoneout in (masks, (0.25,) * states):
        more = {"lengths": lengths, "resets": resets, "zoneout": zoneout, "recurrent_mask": drop}
        assert_same(two(row, (6, 4, 3, 9), device, **more))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    for row in (("LSTM", "layer", "paper"), ("GRU", "layer", "paper")):
        assert_same(two(row, (4, 3, 7, 20), device, dtype))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 37, 1, 5), (2, 1, 2, 65)])
def test_ugly_sizes(shape, device):
    """37 cases are several tiles: a side's tiles lie behind those of the side before."""
    for row in (("LSTM", "layer", "paper"), ("GRU", "layer", "split")):
        assert_same(two(row, shape, device))


def test_scaled_halves(device, monkeypatch):
    monkeypatch.setattr(precision, "HALF_WHEN_INTERPRETED", True)
    calls = two(("LSTM", "layer", "paper"), (4, 3, 7, 20), device)
    scaled = (calls[1].state[0].detach() * 40).requires_grad_()  # each side has its own bound
    assert_same([calls[0], dataclasses.replace(calls[1], state=(scaled, calls[1].state[1]))])


def test_deferred_scalars(device, monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "defer", True)
    for row in (("LSTM", "layer", "paper"), ("GRU", "layer", "paper")):
        assert_same(two(row, (3, 2, 7, 20), device))


def test_three_and_without_gradients(device):
    calls = two(("GRU", "layer", "paper"), (3, 2, 4, 6), device)
    calls.append(dataclasses.replace(calls[0], input=calls[1].input))
    with torch.no_grad():
        want, got = apart(calls), together(calls)
    for a, b in zip(got, want):
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.state[0], b.state[0])
        assert a.output.grad_fn is None


def test_what_differs_goes_one_after_the_other(device):
    first, second = two(("LSTM", "layer", "paper"), (3, 2, 4, 6), device)
    odd = dataclasses.replace(second, lengths=torch.tensor([3, 1], device=device))
    assert not fused._alike([first, odd])
    assert fused._alike([first, second])
    got, want = together([first, odd]), apart([first, odd])
    assert all(torch.equal(a.output, b.output) for a, b in zip(got, want))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_layers_in_both_directions(cell, device):
    """Against the reference, ragged and with states given; gradients of gradients too."""
    torch.manual_seed(3)
    options = {"bidirectional": True, "device": device}
    layer, other = (getattr(lamina, cell)(3, 5, 2, backend=b, **options) for b in ("triton", "reference"))
    other.load_state_dict(layer.state_dict())
    assert "both directions in one launch" in lamina.explain(layer).reason
    x, found = torch.randn(4, 3, 3, device=device, requires_grad=True), []
    with torch.backends.cudnn.flags(allow_tf32=False):
        for each in (layer, other):
            out, state = each(x, lengths=torch.tensor([4, 0, 2]))
            first = torch.autograd.grad(out.square().sum(), [x, *each.parameters()], create_graph=True)
            again = torch.autograd.grad(first[0].square().sum(), each.weight_hh_l0_reverse)
            found.append([out, *(state if cell == "LSTM" else (state,)), *first, *again])
    for a, b in zip(*found):  # over five units a norm enlarges what is rounded otherwise
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-4


def test_the_answer_says_why_not(device):
    def said(**options):
        return lamina.explain(lamina.LSTM(3, 5, bidirectional=True, backend="triton", device=device, **options)).reason

    assert "one after the other: recompute=True" in said(recompute=True)
    layer = lamina.LSTM(3, 5, backend="triton", device=device)
    assert "direction" not in lamina.explain(layer).reason


@pytest.fixture
def _as_on_an_h200(monkeypatch):
    monkeypatch.setattr(plans, "processors", lambda device: 132)
    monkeypatch.setattr(plans, "shared_memory", lambda device: 227 * 1024 - plans.RESERVED)
    beside = {1: 227, 2: 113, 3: 101}  # KiB; of the last less is left to the compiler
    monkeypatch.setattr(plans, "memory_beside", lambda device, n: beside[n] * 1024 - plans.RESERVED)
    monkeypatch.setattr(plans, "interpreted", lambda: False)


@pytest.mark.usefixtures("_as_on_an_h200")
@pytest.mark.parametrize("backward", [False, True])
def test_plans_of_two(backward):
    """All programs of a launch fit on the device at once, and each side is whole in it."""
    cpu = torch.device("cpu")
    for gates, size, hidden in ((4, 2, 400), (4, 2, 512), (4, 2, 1000), (1, 4, 256), (4, 8, 100)):
        for batch in (1, 8, 33, 64, 128, 1000):
            found = plans.plan_together(gates, hidden, batch, size, cpu, backward, 2)
            if found is None:
                continue
            programs = 2 * found.groups * found.members
            assert found.rows * found.groups >= batch
            assert programs <= 132 * found.residents
            assert found.residents == 1 or found.warps == 4
    small, large = (plans.plan_together(4, h, b, 2, cpu, backward, 2) for h, b in ((400, 8), (512, 64)))
    assert small is not None
    assert (small.rows, small.groups) == (8, 1)
    alone = plans.plan_together(4, 512, 64, 2, cpu, backward, 1)
    assert large is not None
    assert large == dataclasses.replace(alone, residents=2)


@pytest.mark.usefixtures("_as_on_an_h200")
def test_a_third_program_has_room_forward(monkeypatch):
    """For one chunk of h at a time, in 16 bits. Backward it is for tuners: registers would be spilled."""
    cpu, given = torch.device("cpu"), (4, 512, 64)
    there, back = (plans.plan_together(*given, 2, cpu, backward, 3) for backward in (False, True))
    assert there is not None
    assert back is None
    assert (there.rows, there.residents, there.chunk, there.narrow) == (16, 3, 128, True)
    assert 3 * (64 * 512 * 2 + 16 * 128 * 4 + 1024) <= 228 * 1024  # weights, and a chunk of float32 on its way
    assert plans.plan_together(*given, 4, cpu, False, 3) is None
    monkeypatch.setitem(plans.OVERRIDE, "residents", 3)
    back = plans.plan_together(*given, 2, cpu, True, 3)
    assert back is not None
    assert (back.rows, back.residents) == (16, 3)
    assert launch._options(back)["maxnreg"] == 168
