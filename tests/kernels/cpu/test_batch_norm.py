"""Batch-normalised recurrences in the CPU's kernels against the float64 reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import lamina
from lamina import functional, reference
from lamina.kernels import batch_normed, fused
from lamina.kernels.cpu import batch_layer
from lamina.population_statistics import population_statistics
from lamina.reference import Moments
from tests.cases import BATCH, CELLS, assert_same, cast, everything, leaves
from tests.kernels.cpu.test_cpu import extras
from tests.kernels.gpu.test_sequence import assert_as_good, problem

pytest.importorskip("numba")
IDS = ["-".join(row) for row in BATCH]
FEW = [("LSTM", "batch", "paper"), ("GRU", "batch", "paper"), ("RNN", "batch", "paper"), ("GRU", "batch", "joint")]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_problems_are_shared(monkeypatch):
    """Between as many threads as there are, single units too."""
    monkeypatch.setattr(batch_layer, "MEETING", 1)
    monkeypatch.setattr(batch_layer, "UNITS", 1)


def run(call):
    return fused.run(call, "cpu")


def assert_same_moments(got, want, bound):
    assert got.keys() == want.keys()
    for site, moments in want.items():
        assert not got[site].mean.requires_grad
        assert_same(list(got[site]), list(moments), bound, [f"mean {site}", f"var {site}"])


def assert_equals_reference(call, bound=1e-10):
    """In float64, where rounding hides nothing; gradients of random projections, and moments."""
    got, want = (everything(call, path) for path in (run, reference.evaluate))
    assert_same(list(got.values()), list(want.values()), bound, list(got))
    with torch.no_grad():  # which takes a way of its own
        result, asked = run(call), reference.evaluate(call)
    assert_same([result.output, *result.state], [asked.output, *asked.state], bound)
    for found in (result, run(call)):
        assert_same_moments(found.moments, asked.moments, bound)


def population(row, hidden, steps):
    """Moments of a number of steps for every site of a row of the table."""
    width = {"RNN": 1, "LSTM": 4, "GRU": 3}[row[0]] * hidden
    sites = lamina.placements.PLACEMENTS[row[0]][row[2]].sites()
    widths = [hidden if site == "cell" else width for site in sites]
    pairs = [(torch.randn(steps, w).double(), torch.rand(steps, w).double() + 0.1) for w in widths]
    return {site: Moments(*pair) for site, pair in zip(sites, pairs)}


@pytest.mark.parametrize("row", BATCH, ids=IDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_row(row, threads):
    torch.set_num_threads(threads)
    assert_equals_reference(problem(row, (5, 3, 7, 17), CPU))
    assert_equals_reference(problem(row, (4, 9, 3, 32), CPU, reverse=True))


@pytest.mark.parametrize("row", BATCH, ids=IDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_cases_that_have_ended_are_left_out(row, reverse, monkeypatch):
    """A ragged batch runs in parts with fewer and fewer cases; states and moments go from part to part."""
    monkeypatch.setattr(batch_normed, "WORTH", 0)
    torch.set_num_threads(2)
    options = extras(row, 30, 9, 7) | {"lengths": torch.tensor([30, 0, 3, 11, 21, 17, 9, 30, 1])}
    call = problem(row, (30, 9, 3, 7), CPU, reverse=reverse, **options)
    assert [cases for *_, cases in batch_normed._parts(call.forwards())] == [9, 6, 4, 2]
    assert_equals_reference(call)
    assert_equals_reference(replace(call, population=population(row, 7, 13), first_step=2))


def test_parts_are_worth_their_calls():
    lengths, width = torch.tensor([300] * 4 + [10] * 60), 128
    call = problem(("LSTM", "batch", "paper"), (300, 64, width, width), CPU, lengths=lengths)
    assert batch_normed._parts(call) == [(0, 10, 64), (10, 300, 4)]
    assert batch_normed._parts(replace(call, lengths=None)) == [(0, 300, 64)]
    assert batch_normed._parts(replace(call, lengths=torch.full((64,), 299))) == [(0, 300, 64)]
    few = problem(("LSTM", "batch", "paper"), (20, 8, 4, 5), CPU, lengths=torch.tensor([20] + [8] * 7))
    assert len(batch_normed._parts(few)) == 1


@pytest.mark.parametrize("row", BATCH, ids=IDS)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_ragged_restarted_masked_and_dropped(row, threads):
    torch.set_num_threads(threads)
    for reverse in (False, True):
        assert_equals_reference(problem(row, (6, 6, 3, 9), CPU, reverse=reverse, **extras(row, 6, 6, 9)))


@pytest.mark.parametrize("row", BATCH, ids=IDS)
def test_lengths_alone(row):
    """Statistics are those of the rows that go on: all, five, two, one and none."""
    lengths = torch.tensor([4, 2, 3, 3, 2, 0, 1])
    assert_equals_reference(problem(row, (5, 7, 3, 6), CPU, lengths=lengths))
    assert_equals_reference(problem(row, (3, 2, 3, 6), CPU, lengths=torch.tensor([0, 0])))


@pytest.mark.parametrize("row", BATCH, ids=IDS)
@pytest.mark.parametrize(("eps", "mode"), [(1e-3, "std"), (0.1, "var"), (0.0, "var"), (0.0, "std")])
def test_zoneout_rates_and_the_epsilons(row, eps, mode):
    rates = (0.3, 0.4)[: 2 if row[0] == "LSTM" else 1]
    assert_equals_reference(problem(row, (5, 4, 2, 6), CPU, zoneout=rates, eps_mode=mode, eps=eps), 1e-8)


@pytest.mark.parametrize(("eps", "mode"), [(1e-5, "var"), (1e-5, "std"), (0.0, "var"), (0.0, "std")])
@pytest.mark.parametrize("row", FEW, ids=str)
def test_columns_without_variance(row, eps, mode):
    """One case, and cases that are alike: with eps = 0 they normalise to 0, and no gradient is NaN."""
    assert_equals_reference(problem(row, (3, 1, 2, 6), CPU, eps=eps, eps_mode=mode))
    call = problem(row, (3, 5, 2, 6), CPU, eps=eps, eps_mode=mode)
    alike = torch.ones(3, 5, 2).double().requires_grad_(), [torch.ones_like(s).requires_grad_() for s in call.state]
    found = everything(replace(call, input=alike[0], state=tuple(alike[1])), run)
    assert all(value.isfinite().all() for value in found.values())


def test_relu():
    assert_equals_reference(problem(("RNN", "batch", "paper"), (5, 3, 2, 6), CPU, nonlinearity="relu"))


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("batch", [1, 2, 17])
@pytest.mark.parametrize("hidden", [1, 7, 40, 65])
def test_ugly_sizes(row, threads, batch, hidden):
    """In float32 against the reference's own error."""
    torch.set_num_threads(threads)
    times = 8 if batch <= 2 else 2  # a norm over two cases leaves a sign: whatever rounds is enlarged
    assert_as_good(lambda: problem(row, (4, batch, 3, hidden), CPU), torch.float32, "cpu", times)
    assert_equals_reference(problem(row, (4, batch, 3, hidden), CPU), 1e-8)


@pytest.mark.parametrize("row", BATCH, ids=IDS)
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("steps", "first", "stored"), [(5, 0, 9), (5, 0, 3), (5, 2, 4), (1, 0, 3), (1, 2, 5), (1, 7, 5)]
)
def test_the_populations_moments(row, threads, steps, first, stored):
    torch.set_num_threads(threads)
    for batch in (1, 3):
        known = {"population": population(row, 7, stored), "first_step": first}
        more = extras(row, steps, batch, 7) if batch > 1 else {}
        assert_equals_reference(problem(row, (steps, batch, 2, 7), CPU, **known, **more))
        assert run(problem(row, (steps, batch, 2, 7), CPU, **known)).moments == {}


@pytest.mark.parametrize("row", FEW, ids=str)
def test_the_populations_moments_in_float32(row):
    known = {"population": population(row, 40, 3)}
    assert_as_good(lambda: problem(row, (4, 5, 3, 40), CPU, **known), torch.float32, "cpu")


@pytest.mark.parametrize("row", FEW, ids=str)
def test_moments_are_as_exact_as_the_references(row):
    """A mean far from 0 leaves no digits of the variance to a difference of squares."""
    call = problem(row, (3, 700, 3, 5), CPU)
    shifted = (call.input.detach() + 100).requires_grad_()
    call = cast(replace(call, input=shifted), torch.float64, torch.float32)
    want = reference.evaluate(call).moments
    got, plain = (path(cast(call, torch.float32, torch.float32)).moments for path in (run, reference.evaluate))
    for site in want:
        for ours, theirs, truth in zip(got[site], plain[site], want[site]):
            errors = [((some - truth).norm() / truth.norm()).item() for some in (ours, theirs)]
            assert errors[0] <= 2 * errors[1] + 3e-6, (site, errors)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_many_rows(row):
    """In whole panels and past them, in several blocks, and backward in several chunks."""
    for hidden in (8, 11):
        assert_equals_reference(problem(row, (9, 150, 5, hidden), CPU), 1e-8)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("ones", [True, False])
def test_gradients_over_many_rows_are_as_exact_as_the_references(cell, ones):
    """A running float32 sum over 2^15 rows is off by 1e-5: statistics and gradients are summed in blocks."""
    steps, batch, width = 2, 2**15, 8
    make = partial(getattr(lamina, cell), width, width, norm="batch")
    layer, other, exact = make(backend="numba"), make(backend="reference"), make(backend="reference").double()
    for one in (other, exact):
        one.load_state_dict(layer.state_dict())
    x = torch.randn(steps, batch, width)
    upstream = torch.ones_like(x) if ones else torch.randn_like(x)
    found = []
    for one in (layer, other, exact):
        dtype = one.weight_ih_l0.dtype
        tensors = [x.to(dtype).requires_grad_(), *one.parameters()]
        found.append(torch.autograd.grad(one(tensors[0])[0], tensors, upstream.to(dtype)))
    for name, got, theirs, want in zip(["input", *dict(layer.named_parameters())], *found, strict=True):
        errors = [((some - want).norm() / want.norm().clamp(min=1e-2)).item() for some in (got, theirs)]
        assert errors[0] <= 4 * errors[1] + 5e-7, (name, errors)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("batch", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_forward_where_threads_take_whole_vectors(cell, batch, dtype, monkeypatch):
    """Backward sums over gates in the threads' order, and the end of a row that is no whole vector rounds otherwise."""
    monkeypatch.setattr(batch_layer, "UNITS", 16)
    layer, x = getattr(lamina, cell)(19, 64, norm="batch", dtype=dtype), torch.randn(20, batch, 19, dtype=dtype)
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        output, state = layer(x)
        found.append([output, *(state if cell == "LSTM" else [state])])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others))


@settings(max_examples=150)
@given(
    row=st.sampled_from(BATCH),
    shape=st.tuples(*(st.integers(1, 7) for _ in range(3)), st.integers(1, 40)),
    more=st.booleans(),
    known=st.integers(0, 5),
    reverse=st.booleans(),
    threads=st.sampled_from((1, 2, 3, 8)),
    seed=st.integers(0, 2**31),
)
def test_any_problem(row, shape, more, known, reverse, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    options = extras(row, shape[0], shape[1], shape[3]) if more else {}
    options |= {"population": population(row, shape[3], known)} if known else {}
    assert_equals_reference(problem(row, shape, CPU, reverse=reverse, **options), 1e-6)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("row", FEW, ids=str)
def test_gradcheck(row, known):
    call = problem(row, (3, 4, 2, 3), CPU, population=population(row, 3, 2) if known else None)
    named = leaves(call)

    def outputs(*tensors):
        by_name = dict(zip(named, tensors))
        weights = call.weights._replace(**{k: v for k, v in by_name.items() if k not in ("input", "h", "c")})
        states = tuple(by_name[k] for k in "hc" if k in by_name)
        found = run(replace(call, input=by_name["input"], state=states, weights=weights))
        return (found.output, *found.state)

    assert torch.autograd.gradcheck(outputs, tuple(named.values()))


@pytest.mark.parametrize("known", [False, True])
def test_twice_differentiable_by_the_references_route(known):
    row = FEW[0]
    moments = population(row, 3, 4) if known else None
    call = problem(row, (3, 4, 2, 3), CPU, population=moments, first_step=1)
    first = torch.autograd.grad(run(call).output.sum(), call.input, create_graph=True)[0]
    want = torch.autograd.grad(reference.evaluate(call).output.sum(), call.input, create_graph=True)[0]
    grads = [torch.autograd.grad(g.square().sum(), call.weights.weight_hh)[0] for g in (first, want)]
    assert_same([grads[0]], [grads[1]], 1e-9)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_an_output_that_is_changed_in_place_and_a_graph_that_is_used_twice(row):
    """Backward reads the states from memory that the output shares: of 2^12 numbers or more."""
    call = problem(row, (5, 30, 2, 40), CPU)
    tensors = list(leaves(call).values())
    output = run(call).output
    upstream = torch.randn_like(output)
    want = torch.autograd.grad(output, tensors, upstream, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(output, tensors, upstream, allow_unused=True)
    changed = run(call).output
    changed.mul_(2)
    twice = torch.autograd.grad(changed, tensors, upstream / 2, allow_unused=True)
    for a, b, c in zip(want, again, twice):
        assert (a is None and b is None) or (torch.equal(a, b) and torch.allclose(a, c, atol=1e-9))


def test_moments_belong_to_the_caller():
    """Changing them changes no gradient."""
    call = problem(FEW[0], (3, 4, 2, 5), CPU)
    want = torch.autograd.grad(run(call).output.sum(), call.input)[0]
    result = run(call)
    for moments in result.moments.values():
        moments.mean.fill_(7)
        moments.var.fill_(7)
    assert torch.equal(torch.autograd.grad(result.output.sum(), call.input)[0], want)


# Layers and cells.


def twins(cell, *sizes, **options):
    """The same layer by the kernels and by the reference."""
    ours, other = (getattr(lamina, cell)(*sizes, norm="batch", backend=b, **options) for b in ("auto", "reference"))
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p) / 10)
    other.load_state_dict(ours.state_dict())
    return ours, other


def assert_same_buffers(ours, other):
    for (name, a), b in zip(ours.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("lengths", [None, [6, 2, 3, 6, 4]])
def test_layers_take_it_by_themselves_and_collect_the_same_statistics(cell, lengths):
    ours, other = twins(cell, 3, 5, 2, bidirectional=True)
    assert (lamina.explain(ours).backend, lamina.explain(ours).path) == ("numba", "cpu")
    for _ in range(3):
        x = torch.randn(6, 5, 3)
        results = [layer(x, lengths=lengths)[0] for layer in (ours, other)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert_same_buffers(ours, other)
    x = torch.randn(9, 2, 3)  # longer than any sequence before
    torch.testing.assert_close(ours.eval()(x)[0], other.eval()(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_exact_population_statistics_and_evaluation_by_the_batch(cell):
    ours, other = twins(cell, 3, 5)
    batches = [torch.randn(4, 6, 3) for _ in range(3)]
    for layer in (ours, other):
        population_statistics(layer, batches)
        layer.eval()
    assert_same_buffers(ours, other)
    torch.testing.assert_close(ours(batches[0])[0], other(batches[0])[0], rtol=1e-4, atol=1e-5)
    ours, other = (layer.eval() for layer in twins(cell, 3, 5, eval_statistics="batch"))
    torch.testing.assert_close(ours(batches[0])[0], other(batches[0])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["RNNCell", "LSTMCell", "GRUCell"])
def test_cells(cell):
    ours, other = twins(cell, 3, 5)
    assert lamina.explain(ours, torch.randn(4, 3)).path == "cpu"
    for training in (True, False):
        states = [None, None]
        for step in range(4):
            x = torch.randn(4, 3)
            states = [layer.train(training)(x, state, step=step) for layer, state in zip((ours, other), states)]
            got, want = (s if cell == "LSTMCell" else [s] for s in states)
            assert_same(got, want, 1e-4)
        assert_same_buffers(ours, other)


@pytest.mark.parametrize("cell", CELLS)
def test_recompute_changes_nothing(cell):
    ours, other = getattr(lamina, cell)(3, 5, norm="batch", recompute=True), None
    other = getattr(lamina, cell)(3, 5, norm="batch")
    other.load_state_dict(ours.state_dict())
    assert "recompute=True changes nothing under batch norm" in lamina.explain(ours).reason
    x = torch.randn(4, 6, 3)
    grads = [torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters())) for layer in (ours, other)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_compiled_whole_and_exported_by_the_references_operator():
    layer = lamina.LSTM(3, 5, norm="batch", max_steps=4)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 6, 3)
    want = layer(x)[0]
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], want, rtol=1e-5, atol=1e-6)
    assert_same_buffers(layer, other)
    exported = torch.export.export(layer.eval(), (x,)).module()
    torch.testing.assert_close(exported(x)[0], layer(x)[0], rtol=1e-5, atol=1e-6)


def test_where_the_reference_serves():
    layer, x = lamina.LSTM(3, 5, norm="batch", dtype=torch.bfloat16), torch.randn(4, 2, 3).bfloat16()
    assert "bfloat16" in lamina.explain(layer, x).reason
    with pytest.raises(lamina.BackendError, match="proj_size"):
        lamina.LSTM(3, 5, norm="batch", proj_size=2, backend="numba")(torch.randn(4, 2, 3))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.randn(4, 2, 3))
        assert lamina.LSTM(3, 5, norm="batch").eval()(fake)[0].shape == (4, 2, 5)


def test_gradients_of_the_populations_moments_are_the_references():
    moments = population(FEW[0], 5, 3)
    mean = moments["hh"].mean.requires_grad_()
    call = problem(FEW[0], (3, 4, 2, 5), CPU, population=moments)
    found = [torch.autograd.grad(path(call).output.sum(), mean)[0] for path in (run, reference.evaluate)]
    assert torch.equal(*found)


def test_torch_func_takes_the_reference():
    layer, x = lamina.GRU(3, 5, norm="batch", eval_statistics="batch").eval(), torch.randn(4, 2, 3)
    found = torch.func.grad(lambda x: layer(x)[0].square().sum())(x)
    again = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(again)[0].square().sum(), again)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_functional_takes_it_by_name(cell):
    call = problem((cell, "batch", "paper"), (3, 4, 4, 5), CPU)
    state = call.state if cell == "LSTM" else call.state[0]
    function = getattr(functional, cell.lower())
    results = [function(call.input, state, call.weights, norm="batch", backend=b) for b in ("numba", "reference")]
    assert_same([results[0][0]], [results[1][0]], 1e-11)


@pytest.mark.parametrize("cell", CELLS)
def test_an_input_without_features_counts_as_zeros(cell):
    assert_equals_reference(problem((cell, "batch", "paper"), (4, 3, 0, 3), CPU))
