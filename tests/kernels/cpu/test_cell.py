"""Single steps on a CPU: cells in Python loops, and ``lamina.loop``, against the float64 reference."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.utils import parametrizations

import lamina
from lamina.kernels.cpu import cell as cpu_cell
from lamina.placements import PLACEMENTS

pytest.importorskip("numba")

SIZES = [(1, 4, 8), (5, 7, 13), (17, 33, 40), (2, 3, 65), (130, 30, 16)]
KINDS = [(kind, None) for kind in ("RNN", "LSTM", "GRU")]
KINDS += [(kind, name) for kind, named in PLACEMENTS.items() for name in named]


def make(kind, placement, inputs, units, dtype=torch.float64, **options):
    norm = {"norm": None} if placement is None else {"placement": placement}
    return getattr(lamina, f"{kind}Cell")(inputs, units, dtype=dtype, **norm, **options)


def pair(kind, placement, inputs, units, **options):
    """The same cell in the kernels and by the reference, the gains not 1 and the biases not 0."""
    ours, other = (make(kind, placement, inputs, units, backend=b, **options) for b in ("auto", "reference"))
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    other.load_state_dict(ours.state_dict())
    return ours, other


def states(cell, batch, units):
    found = [torch.randn(batch, units, dtype=cell.weight_ih.dtype, requires_grad=True) for _ in range(2)]
    return found if cell.cell == "LSTM" else found[:1]


def walk(step, xs, state):
    """The outputs of all steps and the last state."""
    state, outputs = tuple(state) if len(state) > 1 else state[0], []
    for x in xs:
        state = step(x, state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return [*outputs, *(state[1:] if isinstance(state, tuple) else ())]


def everything(step, cell, xs, state):
    """Outputs and every gradient, for random upstream gradients."""
    outputs = walk(step, xs, state)
    torch.manual_seed(7)
    upstream = [torch.randn_like(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [xs, *state, *cell.parameters()], upstream)]


def assert_alike(got, want, bound=1e-10):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= bound * b.norm().clamp(min=1.0)


WAYS = {"cell": lambda cell: cell, "loop": lamina.loop}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "placement"), KINDS, ids=str)
def test_every_placement(kind, placement, way):
    ours, other = pair(kind, placement, 5, 12)
    xs, state = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True), states(ours, 3, 12)
    assert_alike(everything(WAYS[way](ours), ours, xs, state), everything(other, other, xs, state))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kind", "options"), [("LSTM", {"eps_mode": "std"}), ("GRU", {"bias": False})], ids=str)
def test_ugly_sizes(kind, options, size, way, threads, monkeypatch):
    monkeypatch.setattr(cpu_cell, "WORTH", 1)
    torch.set_num_threads(threads)
    batch, inputs, units = size
    ours, other = pair(kind, "paper", inputs, units, **options)
    xs, state = torch.randn(3, batch, inputs, dtype=torch.float64, requires_grad=True), states(ours, batch, units)
    assert_alike(everything(WAYS[way](ours), ours, xs, state), everything(other, other, xs, state), 1e-9)
    with torch.no_grad():
        assert_alike(walk(WAYS[way](ours), xs, state), walk(other, xs, state), 1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_float32_is_as_exact_as_the_reference(way):
    ours, plain = pair("LSTM", "paper", 30, 64, dtype=torch.float32)
    exact = make("LSTM", "paper", 30, 64, backend="reference")
    exact.load_state_dict(ours.state_dict())
    xs, state = torch.randn(6, 17, 30, requires_grad=True), states(ours, 17, 64)
    double = [t.detach().double().requires_grad_() for t in (xs, *state)]
    want = everything(exact, exact, double[0], double[1:])
    for got, other, truth in zip(
        everything(WAYS[way](ours), ours, xs, state), everything(plain, plain, xs, state), want, strict=True
    ):
        errors = [((some.double() - truth).norm() / truth.norm()).item() for some in (got, other)]
        assert errors[0] <= 2 * errors[1] + 3e-6


def test_a_cells_gradients_can_be_differentiated():
    ours, _ = pair("GRU", "paper", 2, 3)
    ours(torch.randn(2, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64))  # remembers its step

    def step(x, h):
        return ours(x, h)

    x, h = (torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (2, 3))
    step(x, h)
    assert any(isinstance(s, cpu_cell.Step) for s in ours._fused.values())
    assert torch.autograd.gradgradcheck(step, (x, h))


def test_a_loops_gradients_cannot_be_differentiated_again():
    ours, _ = pair("GRU", "paper", 2, 3)
    xs, state = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True), states(ours, 2, 3)
    output = walk(lamina.loop(ours), xs, state)[-1]
    with pytest.raises(lamina.BackendError, match="Call the cell itself"):
        torch.autograd.grad(output.sum(), xs, create_graph=True)


@pytest.mark.parametrize("unused", [0, 2, 4])
def test_a_loop_of_which_not_all_is_used(unused):
    """Steps after the last used output are not walked back, and an earlier, partial backward pass leaves nothing."""
    ours, other = pair("LSTM", "paper", 3, 8)
    xs, state = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True), states(ours, 2, 8)
    found = []
    for step, cell in ((lamina.loop(ours), ours), (other, other)):
        outputs = walk(step, xs, state)[: 6 - unused]
        torch.autograd.grad(outputs[1].sum(), xs, retain_graph=True)
        first = torch.autograd.grad(outputs[0].sum(), list(cell.parameters()), retain_graph=True, allow_unused=True)
        whole = torch.autograd.grad(sum(o.sin().sum() for o in outputs), [xs, *cell.parameters()], retain_graph=True)
        again = torch.autograd.grad(sum(o.sin().sum() for o in outputs), [xs, *cell.parameters()])
        found.append([*(torch.zeros(1) if g is None else g for g in first), *whole, *again])
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 1e-10 * want.norm().clamp(min=1.0)


def test_a_loop_with_something_inside():
    """What a state decides feeds back into the next input."""
    ours, other = pair("LSTM", "paper", 6, 8)
    xs = torch.randn(7, 3, 4, dtype=torch.float64, requires_grad=True)
    window = torch.nn.Linear(8, 2).double()
    found = []
    for step, cell in ((lamina.loop(ours), ours), (other, other)):
        state, glimpse, outputs = None, torch.zeros(3, 2, dtype=torch.float64), []
        for x in xs:
            state = step(torch.cat([x, glimpse], -1), state)
            glimpse = window(state[0]).tanh()
            outputs.append(glimpse)
        leaves = [xs, *window.parameters(), *cell.parameters()]
        found.append([*outputs, *torch.autograd.grad(sum(o.cos().sum() for o in outputs), leaves)])
    assert_alike(*found)


def test_a_loop_takes_another_batch_and_mode_on_its_way():
    ours, other = pair("GRU", "paper", 3, 8)
    step = lamina.loop(ours)
    for batch in (2, 5, 2):
        for training in (True, False):
            xs, state = torch.randn(3, batch, 3, dtype=torch.float64), states(ours, batch, 8)
            with torch.set_grad_enabled(training):
                assert_alike(walk(step, xs, state), walk(other, xs, state))
    assert step(xs[0]).shape == (2, 8)
    assert step(xs[0, 0]).shape == (8,)


def test_a_loop_in_a_forked_child_prepares_its_own(monkeypatch):
    ours, other = pair("GRU", "paper", 3, 8)
    xs, state = torch.randn(3, 2, 3, dtype=torch.float64), states(ours, 2, 8)
    step = lamina.loop(ours)
    walk(step, xs, state)
    prepared = step._steps
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert_alike(walk(step, xs, state), walk(other, xs, state))
    assert step._steps is not prepared


def test_a_loop_whose_parameters_changed_raises():
    ours, _ = pair("GRU", "paper", 3, 8)
    xs, state = torch.randn(3, 2, 3, dtype=torch.float64), states(ours, 2, 8)
    output = walk(lamina.loop(ours), xs, state)[-1]
    with torch.no_grad():
        ours.weight_hh.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_cell_sees_every_change_of_its_parameters():
    """Also through ``.data``, which torch does not count."""
    ours, other = pair("GRU", "paper", 3, 8)
    x = torch.randn(2, 3, dtype=torch.float64)
    for _ in range(3):
        assert_alike([ours(x)], [other(x)])
        for cell in (ours, other):
            cell.weight_hh.data.mul_(1.5)
            cell.bias_ih.data.add_(0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda: lamina.LSTMCell(3, 8, norm="batch"),
        lambda: lamina.LSTMCell(3, 8, dtype=torch.bfloat16),
        lambda: lamina.LSTMCell(3, 8, zoneout=0.1).eval(),
        lambda: lamina.LSTMCell(3, 8, backend="reference"),
        lambda: parametrizations.weight_norm(lamina.LSTMCell(3, 8), "weight_hh"),
    ],
    ids=["batch norm", "bfloat16", "zoneout", "reference", "parametrised"],
)
def test_a_loop_elsewhere_is_the_cell(change):
    cell = change()
    xs = torch.randn(4, 2, 3, dtype=next(cell.parameters()).dtype)
    with torch.no_grad():
        got, want = ([*_steps(step, xs)] for step in (lamina.loop(cell), cell))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _steps(step, xs):
    state = None
    for number, x in enumerate(xs):
        state = step(x, state)
        yield from state
        del number


def test_only_cells_are_looped():
    with pytest.raises(lamina.InputError, match=r"loop takes lamina\.RNNCell"):
        lamina.loop(lamina.LSTM(3, 4))


def test_several_threads_step_at_once():
    ours, _ = pair("LSTM", "paper", 5, 16)
    xs, state = torch.randn(30, 4, 5, dtype=torch.float64, requires_grad=True), states(ours, 4, 16)
    want, found = everything(ours, ours, xs, state), [None] * 6

    def work(number):
        own = [t.detach().clone().requires_grad_() for t in (xs, *state)]
        found[number] = everything(lamina.loop(ours) if number % 2 else ours, ours, own[0], own[1:])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    outputs = len(xs) + 1
    for got in found:
        assert_alike(got[:outputs], want[:outputs], 1e-12)
