"""Resets: the state goes to the initial one, whatever the sequence began with, and only at a case's own steps."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import functional, reference
from tests.cases import CELLS, assert_same, gradients, random_call
from tests.library.test_recurrent import OURS, flat

BACKENDS = ["reference", "numba", "triton"]
pytestmark = pytest.mark.usefixtures("full_float32")


def built(cell, backend, **options):
    if backend != "reference":
        pytest.importorskip(backend)
    dtype = torch.float32 if backend == "triton" else torch.float64
    device = os.environ.get("LAMINA_TEST_DEVICE", "cpu") if backend == "triton" else "cpu"
    layer = OURS[cell](3, 5, backend=backend, learn_initial_state=True, dtype=dtype, device=device, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("initial"):
                parameter.normal_()
    return layer, 1e-12 if dtype == torch.float64 else 1e-5


def state_of(layer, batch):
    count = len(layer._suffixes())
    states = tuple(torch.randn(count, batch, n).to(layer.weight_ih_l0).requires_grad_() for n in layer.state_sizes)
    return states if layer.cell == "LSTM" else states[0]


def tensors_of(state):
    return [state] if isinstance(state, torch.Tensor) else list(state)


def in_chunks(layer, x, hx, resets, sizes):
    """An actor's loop: each call goes on from the state that the last one left."""
    outputs, state, begin = [], hx, 0
    for size in sizes:
        output, state = layer(x[begin : begin + size], state, resets=resets[begin : begin + size])
        outputs.append(output)
        begin += size
    return [torch.cat(outputs), *tensors_of(state)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("sizes", [[1] * 6, [2, 3, 1]], ids=["steps", "chunks"])
def test_a_sequence_in_chunks_with_a_carried_state_equals_the_whole(cell, backend, sizes):
    layer, bound = built(cell, backend, num_layers=2)
    x = torch.randn(6, 3, 3).to(layer.weight_ih_l0).requires_grad_()
    hx = state_of(layer, 3)
    resets = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    inputs = [x, *tensors_of(hx), *layer.parameters()]
    whole, parts = flat(layer(x, hx, resets=resets)), in_chunks(layer, x, hx, resets, sizes)
    assert_same(parts, whole, bound)
    assert_same(gradients(parts, inputs), gradients(whole, inputs), bound)


@given(st.data())
def test_any_sequence_in_single_steps_equals_the_whole(data):
    steps, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    cell, backend = data.draw(st.sampled_from(CELLS)), data.draw(st.sampled_from(BACKENDS[:2]))
    layer, bound = built(cell, backend, norm=data.draw(st.sampled_from(["layer", "weight", None])))
    flags = data.draw(st.lists(st.booleans(), min_size=steps * batch, max_size=steps * batch))
    resets, hx = torch.tensor(flags).view(steps, batch), state_of(layer, batch)
    x = torch.randn(steps, batch, 3, dtype=torch.float64, requires_grad=True)
    inputs = [x, *tensors_of(hx), *layer.parameters()]
    whole, parts = flat(layer(x, hx, resets=resets)), in_chunks(layer, x, hx, resets, [1] * steps)
    assert_same(parts, whole, bound)
    assert_same(gradients(parts, inputs), gradients(whole, inputs), bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_reset_at_a_single_step_forgets_the_given_state(cell, backend):
    """The rollout of the documentation: gru(x[t : t + 1], h, resets=done[t : t + 1])."""
    layer, bound = built(cell, backend)
    x, hx = torch.randn(1, 2, 3).to(layer.weight_ih_l0), state_of(layer, 2)
    got = flat(layer(x, hx, resets=torch.tensor([[True, False]])))[0]
    assert_same([got[:, 0]], [flat(layer(x))[0][:, 0]], bound)
    assert_same([got[:, 1]], [flat(layer(x, hx))[0][:, 1]], bound)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_reset_in_the_padding_changes_nothing(cell, backend, bidirectional):
    layer, _ = built(cell, backend, bidirectional=bidirectional)
    x = torch.randn(6, 2, 3).to(layer.weight_ih_l0).requires_grad_()
    hx, resets = state_of(layer, 2), torch.zeros(6, 2, dtype=torch.bool)
    resets[2] = True
    inputs = [x, *tensors_of(hx), *layer.parameters()]
    want = flat(layer(x, hx, lengths=[6, 3], resets=resets))
    padded = resets.clone()
    padded[3:, 1] = True
    got = flat(layer(x, hx, lengths=[6, 3], resets=padded))
    assert_same(got, want, 0.0)
    assert_same(gradients(got, inputs), gradients(want, inputs), 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_reset_state_is_where_a_reset_goes(cell, backend):
    layer, bound = built(cell, backend, num_layers=2)
    x = torch.randn(4, 2, 3).to(layer.weight_ih_l0).requires_grad_()
    hx, anew = state_of(layer, 2), state_of(layer, 2)
    resets = torch.tensor([[False, False], [False, False], [True, True], [False, False]])
    got = flat(layer(x, hx, resets=resets, reset_state=anew))
    first, last = flat(layer(x[:2], hx)), flat(layer(x[2:], anew))
    want = [torch.cat([first[0], last[0]]), *last[1:]]
    inputs = [x, *tensors_of(hx), *tensors_of(anew), *layer.parameters()]
    assert_same(got, want, bound)
    assert_same(gradients(got, inputs), gradients(want, inputs), bound)


@pytest.mark.parametrize("cell", CELLS)
def test_packed_and_unbatched_sequences_take_a_reset_state(cell):
    layer, _ = built(cell, "reference")
    x, resets = torch.randn(4, 2, 3, dtype=torch.float64), torch.rand(4, 2) < 0.5
    hx, anew = state_of(layer, 2), state_of(layer, 2)
    want = flat(layer(x, hx, lengths=[2, 4], resets=resets, reset_state=anew))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [2, 4], enforce_sorted=False)
    output, *state = flat(layer(packed, hx, resets=resets, reset_state=anew))
    padded = torch.nn.utils.rnn.pad_packed_sequence(layer(packed, hx, resets=resets, reset_state=anew)[0])[0]
    assert len(output) == 6
    assert_same([padded, *state], want)
    alone = [s[:, 1] for s in tensors_of(hx)], [s[:, 1] for s in tensors_of(anew)]
    one = [tuple(s) if cell == "LSTM" else s[0] for s in alone]
    assert_same([flat(layer(x[:, 1], one[0], resets=resets[:, 1], reset_state=one[1]))[0]], [want[0][:, 1]])


def test_without_resets_the_reset_state_is_not_looked_at():
    layer, _ = built("GRU", "reference")
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    assert_same([layer(x, reset_state=torch.full((1, 1, 5), float("nan"), dtype=torch.float64))[0]], [layer(x)[0]], 0.0)


@pytest.mark.parametrize("cell", CELLS)
def test_functions_take_a_reset_state_as_they_take_a_state(cell):
    call = random_call(cell, "layer", "paper", (5, 2, 3, 4), resets=torch.rand(5, 2) < 0.5)
    name, one = cell.lower(), cell != "LSTM"
    state, anew = (s[0] if one else s for s in (call.state, call.reset_state))
    more = {"placement": "paper", "resets": call.resets, "reset_state": anew}
    want = reference.evaluate(call).output
    for room in (reference, functional):
        assert_same([getattr(room, name)(call.input, state, call.weights, **more)[0]], [want])


@pytest.mark.parametrize("wrong", ["shape", "dtype", "kind"])
def test_a_reset_state_that_does_not_fit_is_refused(wrong):
    layer, resets = lamina.GRU(3, 5), torch.zeros(4, 2, dtype=torch.bool)
    state = {"shape": torch.zeros(1, 3, 5), "dtype": torch.zeros(1, 2, 5).double(), "kind": "zeros"}[wrong]
    with pytest.raises(lamina.InputError, match={"shape": "h_0", "dtype": "reset h", "kind": "reset_state"}[wrong]):
        layer(torch.randn(4, 2, 3), resets=resets, reset_state=state)


@pytest.mark.parametrize("norm", ["layer", "batch"], ids=["fused operator", "opaque operator"])
def test_compiled_layers_reset_as_eager_ones_do(norm):
    layer = lamina.LSTM(3, 5, norm=norm, dtype=torch.float64).eval()
    x, resets = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True), torch.rand(5, 2) < 0.4
    hx, anew = state_of(layer, 2), state_of(layer, 2)
    if norm == "batch":
        layer.train()(x)  # population statistics for evaluation
        layer.eval()
    fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = [x, *hx, *anew, *layer.parameters()]
    got, want = (
        flat(run(x, hx, lengths=torch.tensor([5, 3]), resets=resets, reset_state=anew)) for run in (fast, layer)
    )
    assert_same(got, want)
    assert_same(gradients(got, inputs), gradients(want, inputs))
