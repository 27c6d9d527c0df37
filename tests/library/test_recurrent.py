"""The recurrent layers and cells: torch.nn's numbers and habits, and what lamina adds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import lamina
from lamina import functional
from lamina.baselines import StepStatistics
from tests.cases import CELLS, EVERY, IDS, LAYER, assert_same, gradients

TORCH = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
OURS = {"RNN": lamina.RNN, "LSTM": lamina.LSTM, "GRU": lamina.GRU}
TORCH_CELL = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}
OURS_CELL = {"RNN": lamina.RNNCell, "LSTM": lamina.LSTMCell, "GRU": lamina.GRUCell}


def flat(result):
    """Output tensor and states of a layer's answer."""
    output, state = result
    output = output.data if isinstance(output, PackedSequence) else output
    return (output, *((state,) if isinstance(state, torch.Tensor) else state))


def twins(cell, *args, **kwargs):
    theirs = TORCH[cell](*args, dtype=torch.float64, **kwargs)
    ours = OURS[cell](*args, dtype=torch.float64, norm=None, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_parity(theirs, ours, inputs, call):
    """Outputs, states and all gradients: of the inputs and of every parameter."""
    want, got = flat(call(theirs)), flat(call(ours))
    assert_same(got, want)
    names = ["input"] * len(inputs) + [n for n, _ in theirs.named_parameters()]
    their_grads = gradients(want, [*inputs, *theirs.parameters()])
    our_grads = gradients(got, [*inputs, *dict(ours.named_parameters()).values()])
    assert_same(our_grads, their_grads, names=names)


def random_hx(layer, batch, dtype=torch.float64):
    cells = layer.num_layers * (2 if layer.bidirectional else 1)
    middle = () if batch is None else (batch,)
    widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
    count = 2 if isinstance(layer, nn.LSTM | lamina.LSTM) else 1
    states = tuple(torch.randn(cells, *middle, w, dtype=dtype, requires_grad=True) for w in widths[:count])
    return states if count == 2 else states[0]


FORMS = [
    (cell, layers, two, first, proj, bias)
    for cell, layers, two, first, proj, bias in itertools.product(
        CELLS, (1, 2, 3), (False, True), (False, True), (0, 3), (True, False)
    )
    if not (proj and cell != "LSTM")
]


@pytest.mark.parametrize("kind", ["padded", "packed", "unbatched"])
@pytest.mark.parametrize(("cell", "layers", "two", "first", "proj", "bias"), FORMS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_without_a_norm_it_is_torch_nn(kind, cell, layers, two, first, proj, bias):
    more = {"proj_size": proj} if proj else {}
    theirs, ours = twins(cell, 4, 5, layers, bias=bias, batch_first=first, bidirectional=two, dropout=0.0, **more)
    shape = (6, 4) if kind == "unbatched" else (3, 6, 4) if first else (6, 3, 4)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    hx = random_hx(theirs, None if kind == "unbatched" else 3)
    inputs = [x, *((hx,) if isinstance(hx, torch.Tensor) else hx)]
    lengths = torch.tensor([4, 6, 1])

    def call(layer, state=hx):
        if kind == "packed":
            return layer(pack_padded_sequence(x, lengths, first, enforce_sorted=False), state)
        return layer(x, state)

    assert_parity(theirs, ours, inputs, call)
    assert_parity(theirs, ours, [x], lambda layer: call(layer, None))


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [None, 0, 1, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_cells_without_a_norm_are_torch_nn(cell, batch, bias, nonlinearity):
    more = {"nonlinearity": nonlinearity} if cell == "RNN" else {}
    theirs = TORCH_CELL[cell](3, 5, bias=bias, dtype=torch.float64, **more)
    ours = OURS_CELL[cell](3, 5, bias=bias, dtype=torch.float64, norm=None, **more)
    ours.load_state_dict(theirs.state_dict())
    middle = () if batch is None else (batch,)
    x = torch.randn(*middle, 3, dtype=torch.float64, requires_grad=True)
    states = [torch.randn(*middle, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for hx in (None, tuple(states) if cell == "LSTM" else states[0]):
        as_tuple = (lambda r: r) if cell == "LSTM" else (lambda r: (r,))
        want, got = as_tuple(theirs(x, hx)), as_tuple(ours(x, hx))
        assert_same(got, want)
        assert_same(gradients(got, [x, *ours.parameters()]), gradients(want, [x, *theirs.parameters()]))


def test_rnn_relu_and_dropout_between_layers():
    theirs, ours = twins("RNN", 3, 4, 2, nonlinearity="relu")
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    assert_parity(theirs, ours, [x], lambda layer: layer(x))
    half = lamina.LSTM(3, 64, 2, dropout=0.5)
    assert torch.equal(half.eval()(x.float())[0], half(x.float())[0])
    half.train()
    x = torch.randn(5, 2, 3)
    assert not torch.equal(half(x)[0], half(x)[0])
    torch.manual_seed(3)
    first = half(x)[0]
    torch.manual_seed(3)
    assert torch.equal(first, half(x)[0])


@pytest.mark.parametrize(("cell", "norm", "placement"), EVERY, ids=IDS)
def test_layer_cell_and_functional_agree(cell, norm, placement, device):
    """A layer is its cell stepped by hand and the functional call on its weights."""
    options = {"norm": norm, "placement": placement, "dtype": torch.float64, "device": device}
    layer, one = OURS[cell](3, 5, **options), OURS_CELL[cell](3, 5, **options)
    one.load_state_dict({k.replace("_l0", ""): v for k, v in layer.state_dict().items()})
    x = torch.randn(4, 3, 3, dtype=torch.float64, device=device)
    output, state = flat(layer(x))[0], None
    for t in range(4):
        state = one(x[t], state, step=t)
        assert_same([output[t]], [state[0] if cell == "LSTM" else state])
    zeros = torch.zeros(3, 5, dtype=torch.float64, device=device)
    initial = (zeros, zeros) if cell == "LSTM" else zeros
    function = getattr(functional, cell.lower())
    again, _ = function(x, initial, layer._weights("_l0"), norm=norm, placement=placement)
    assert_same([again], [output])


@pytest.mark.parametrize("two", [False, True], ids=["one-way", "two-way"])
@pytest.mark.parametrize("first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize(("cell", "norm", "placement"), LAYER)
def test_lengths_equal_packing(cell, norm, placement, first, two):
    layer = OURS[cell](3, 5, 2, batch_first=first, bidirectional=two, dtype=torch.float64, placement=placement)
    x = torch.randn((4, 6, 3) if first else (6, 4, 3), dtype=torch.float64, requires_grad=True)
    lengths = [2, 6, 1, 5]
    hx = random_hx(layer, 4)
    packed = pack_padded_sequence(x, torch.tensor(lengths), first, enforce_sorted=False)
    want_output, want_state = layer(packed, hx)
    want = (pad_packed_sequence(want_output, first)[0], *flat((x, want_state))[1:])
    inputs = [x, *((hx,) if isinstance(hx, torch.Tensor) else hx), *layer.parameters()]
    for given_lengths in (lengths, torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int32)):
        got = flat(layer(x, hx, lengths=given_lengths))
        assert_same(got, want)
    assert_same(gradients(got, inputs), gradients(want, inputs))


@pytest.mark.parametrize("cell", CELLS)
def test_resets_follow_the_layout_of_the_input(cell):
    layer = OURS[cell](3, 5, 2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    resets = torch.rand(6, 2) < 0.4
    output = flat(layer(x, resets=resets))[0]
    layer.batch_first = True
    assert_same([flat(layer(x.transpose(0, 1), resets=resets.T))[0].transpose(0, 1)], [output], 0.0)
    assert_same([flat(layer(x[:, 1], resets=resets[:, 1]))[0]], [output[:, 1]])
    packed = pack_padded_sequence(x.transpose(0, 1), torch.tensor([3, 6]), True, enforce_sorted=False)
    got = pad_packed_sequence(layer(packed, resets=resets.T)[0])[0]
    layer.batch_first = False
    want = flat(layer(x, lengths=[3, 6], resets=resets))[0]
    assert_same([got], [want])


@pytest.mark.parametrize("cell", CELLS)
def test_two_way_resets_keep_segments_apart(cell):
    layer = OURS[cell](3, 5, bidirectional=True, dtype=torch.float64)
    x = torch.randn(6, 1, 3, dtype=torch.float64, requires_grad=True)
    resets = torch.tensor([False, False, True, False, True, False]).unsqueeze(1)
    want = torch.cat([flat(layer(x[a:b]))[0] for a, b in ((0, 2), (2, 4), (4, 6))])
    got = flat(layer(x, resets=resets))[0]
    inputs = [x, *layer.parameters()]
    assert_same([got], [want])
    assert_same(gradients([got], inputs), gradients([want], inputs))


def poisoned_batch(draw_seed, steps, batch, lengths):
    generator = torch.Generator().manual_seed(draw_seed)
    return torch.randn(steps, batch, 3, generator=generator, dtype=torch.float64)


@given(data=st.data(), row=st.sampled_from(LAYER), two=st.booleans(), layers=st.integers(1, 2))
def test_a_case_depends_on_itself_alone(data, row, two, layers):
    """Layer norm, to rounding: not on the other cases, not on padding, not on training or evaluation mode."""
    cell, _, placement = row
    steps, batch = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch))
    x = poisoned_batch(data.draw(st.integers(0, 99)), steps, batch, lengths)
    case = data.draw(st.integers(0, batch - 1))
    torch.manual_seed(0)
    layer = OURS[cell](3, 5, layers, bidirectional=two, dtype=torch.float64, placement=placement)
    got = flat(layer(x, lengths=lengths))
    n = lengths[case]
    alone = flat(layer.eval()(x[:n, case : case + 1]))
    assert_same([got[0][:n, case : case + 1], *(s[:, case : case + 1] for s in got[1:])], alone, 1e-13)
    other = torch.randn_like(x) * 100
    other[:n, case] = x[:n, case]
    again = flat(layer.train()(other, lengths=lengths))
    assert_same([s[:, case] for s in again], [s[:, case] for s in got], 1e-13)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize(("cell", "norm", "placement"), EVERY, ids=IDS)
def test_batch_of_one_and_of_none(cell, norm, placement, batch, device):
    layer = OURS[cell](3, 5, 2, bidirectional=True, norm=norm, placement=placement, device=device)
    x = torch.randn(4, batch, 3, requires_grad=True, device=device)
    for training in (True, False):
        got = flat(layer.train(training)(x))
        want = TORCH[cell](3, 5, 2, bidirectional=True, device=device)(x)
        assert [g.shape for g in got] == [w.shape for w in flat(want)]
        assert all(torch.isfinite(g).all() for g in got)
        grads = gradients(got, [x, *layer.parameters()])
        assert all(torch.isfinite(g).all() for g in grads)


def test_one_seed_gives_torchs_weights_gains_one_biases_zero():
    torch.manual_seed(7)
    theirs = nn.LSTM(3, 5, 2, bidirectional=True, proj_size=2)
    torch.manual_seed(7)
    ours = lamina.LSTM(3, 5, 2, bidirectional=True, proj_size=2)
    for name, parameter in ours.named_parameters():
        if name.startswith("weight"):
            assert torch.equal(parameter, theirs.get_parameter(name)), name
        elif name.startswith("gain"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert name.startswith("bias")
            assert not parameter.any(), name
    before = {n: p.clone() for n, p in ours.named_parameters()}
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1)
    torch.manual_seed(7)
    ours.reset_parameters()
    assert all(torch.equal(p, before[n]) for n, p in ours.named_parameters())


def test_gain_init_and_forget_bias():
    assert torch.equal(lamina.GRU(3, 4, norm="batch").gain_hh_l0, torch.full((12,), 0.1))
    assert torch.equal(lamina.GRU(3, 4, gain_init=0.5).gain_hh_l0, torch.full((12,), 0.5))
    plain, weight = lamina.GRU(3, 4, norm=None), lamina.GRU(3, 4, norm="weight")
    assert_same([weight.gain_ih_l0], [weight.weight_ih_l0.norm(dim=1)], 1e-6)
    weight.load_state_dict(plain.state_dict() | {"gain_ih_l0": plain.weight_ih_l0.norm(dim=1)}, strict=False)
    lstm = lamina.LSTM(3, 4, forget_bias=1.0)
    assert torch.equal((lstm.bias_ih_l0 + lstm.bias_hh_l0)[4:8], torch.ones(4))
    assert not lstm.bias_ih_l0[:4].any()
    assert not lstm.bias_ih_l0[8:].any()
    unnormalised = lamina.LSTM(3, 4, norm=None, forget_bias=1.0)
    assert torch.equal((unnormalised.bias_ih_l0 + unnormalised.bias_hh_l0)[4:8], torch.ones(4))
    assert unnormalised.bias_ih_l0[:4].all()


def test_zoneout_rates_and_expectation():
    """Each unit of h keeps its old value with the stated probability: 3 standard errors."""
    rate, width = 0.3, 4000
    layer = lamina.LSTM(2, width, zoneout=(rate, 0.0))
    h0 = torch.full((1, 1, width), 77.0)
    _, (h, c) = layer(torch.randn(1, 1, 2), (h0, torch.zeros(1, 1, width)))
    kept = (h == 77).double().mean().item()
    assert abs(kept - rate) < 3 * (rate * (1 - rate) / width) ** 0.5
    assert not (c == 0).any()
    layer.eval()
    plain = lamina.LSTM(2, width)
    plain.load_state_dict(layer.state_dict())
    x, state = torch.randn(1, 1, 2), (h0, torch.zeros(1, 1, width))
    want = rate * h0 + (1 - rate) * plain(x, state)[1][0]
    assert_same([layer(x, state)[1][0]], [want], 1e-6)


def test_recurrent_dropout_is_one_mask_a_sequence():
    layer = lamina.RNN(2, 50, norm=None, bias=False, recurrent_dropout=0.5)
    mask = layer._draw_recurrent_mask(3, layer.weight_hh_l0)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.copy_(torch.eye(50) * 0.4)
    h0 = torch.full((1, 1, 50), 0.01)
    steps = layer(torch.zeros(3, 1, 2), h0)[0][:, 0]
    # identity weights: a unit dropped at one step is dropped, hence 0, at every step
    assert torch.equal(steps[0] == 0, steps[2] == 0)
    assert 5 < (steps[0] == 0).sum() < 45
    layer.eval()
    assert (layer(torch.zeros(3, 1, 2), h0)[0] != 0).all()


@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_dropout_in_a_cell_needs_the_sequences_mask(cell):
    one = OURS_CELL[cell](2, 5, recurrent_dropout=0.5)
    x = torch.randn(3, 2)
    with pytest.raises(lamina.InputError, match=r"recurrent_mask\(batch_size\)"):
        one(x)
    mask = one.recurrent_mask(3)
    assert mask.shape == (3, 5)
    one(x, recurrent_mask=mask)
    one.eval()(x)
    assert one.recurrent_mask(3) is None


@pytest.mark.parametrize("cell", CELLS)
def test_learned_initial_state(cell):
    layer = OURS[cell](3, 5, 2, bidirectional=True, learn_initial_state=True, dtype=torch.float64)
    names = {n for n, _ in layer.named_parameters() if n.startswith("initial")}
    states = ["h", "c"] if cell == "LSTM" else ["h"]
    assert names == {f"initial_{s}_l{k}{d}" for s in states for k in range(2) for d in ("", "_reverse")}
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    zeros = torch.zeros(4, 3, 5, dtype=torch.float64)
    assert_same(flat(layer(x)), flat(layer(x, (zeros, zeros) if cell == "LSTM" else zeros)), 0.0)
    with torch.no_grad():
        for name in names:
            layer.get_parameter(name).normal_()
    stack = lambda s: torch.stack([layer.get_parameter(f"initial_{s}{e}") for e in layer._suffixes()])  # noqa: E731
    given = tuple(stack(s).unsqueeze(1).expand(-1, 3, -1) for s in states)
    resets = torch.rand(4, 3) < 0.5
    want = flat(layer(x, given if cell == "LSTM" else given[0], resets=resets))
    got = flat(layer(x, resets=resets))
    assert_same(got, want, 0.0)
    grads = gradients(got, [layer.get_parameter(n) for n in sorted(names)])
    assert all(g.abs().sum() > 0 for g in grads)


def test_batch_norm_population_follows_training_and_evaluation_uses_it():
    layer = lamina.LSTM(3, 4, norm="batch", momentum=None, dtype=torch.float64)
    x = [torch.randn(5, 8, 3, dtype=torch.float64) for _ in range(3)]
    sites = {"ih", "hh", "cell"}
    seen = []
    for batch in x:
        call = layer._recurrence("_l0", batch, layer._default_state("_l0", 8))
        seen.append(lamina.reference.evaluate(call).moments)
        layer(batch)
    statistics = layer.statistics_l0
    assert isinstance(statistics, StepStatistics)
    for site in sites:
        mean = torch.stack([m[site].mean for m in seen]).mean(0)
        assert_same([statistics.population()[site].mean], [mean])
    layer.eval()
    alone = layer(x[0][:, :1])[0]
    assert_same([layer(x[0])[0][:, :1]], [alone])  # population statistics: cases are independent again
    by_batch = lamina.LSTM(3, 4, norm="batch", eval_statistics="batch", dtype=torch.float64)
    by_batch.load_state_dict(layer.state_dict())
    assert_same([by_batch.eval()(x[0])[0]], [by_batch.train()(x[0])[0]], 0.0)
    longer = torch.randn(9, 2, 3, dtype=torch.float64)
    assert torch.isfinite(layer(longer)[0]).all()
    assert statistics.population()["ih"].mean.shape[0] == 5


def test_batch_norm_state_dict_with_more_steps_loads():
    long = lamina.GRU(3, 4, norm="batch")
    long(torch.randn(7, 5, 3))
    fresh = lamina.GRU(3, 4, norm="batch")
    fresh.load_state_dict(long.state_dict())
    x = torch.randn(7, 2, 3)
    assert torch.equal(long.eval()(x)[0], fresh.eval()(x)[0])


def test_batch_norm_reverse_direction_counts_steps_from_each_cases_end():
    """Read backwards, a case's last step is step 0 of the statistics whatever its length."""
    layer = lamina.RNN(3, 4, norm="batch", bidirectional=True, dtype=torch.float64)
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    lengths = torch.tensor([5, 2, 4])
    layer(x, lengths=lengths)
    last = x[lengths - 1, torch.arange(3)] @ layer.weight_ih_l0_reverse.T
    assert_same([layer.statistics_l0_reverse.population()["sum"].mean[0]], [last.mean(0)])


def test_habits_of_torch_nn():
    layer = lamina.LSTM(3, 5, 2, bidirectional=True)
    layer.flatten_parameters()
    weights = layer.all_weights
    assert [len(w) for w in weights] == [8] * 4
    assert weights[1][0] is layer.weight_ih_l0_reverse
    plain = lamina.LSTM(3, 5, 2, norm=None, proj_size=2)
    assert [[p.shape for p in w] for w in plain.all_weights] == [
        [p.shape for p in w] for w in nn.LSTM(3, 5, 2, proj_size=2).all_weights
    ]
    assert repr(plain) == "LSTM(3, 5, proj_size=2, num_layers=2, norm=None)"
    shown = repr(lamina.GRU(3, 5, bias=False, batch_first=True, placement="split", zoneout=0.1))
    assert shown == "GRU(3, 5, bias=False, batch_first=True, norm='layer', placement='split', zoneout=0.1)"
    assert repr(lamina.LSTMCell(3, 5)) == "LSTMCell(3, 5, norm='layer', placement='paper')"
    assert (layer.mode, lamina.RNN(1, 2, nonlinearity="relu").mode) == ("LSTM", "RNN_RELU")
    for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"):
        assert getattr(layer, name) == getattr(nn.LSTM(3, 5, 2, bidirectional=True), name)
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        lamina.LSTM(3, 5, dropout=0.5)


@pytest.mark.parametrize("cell", CELLS)
def test_positional_arguments_are_torchs(cell):
    args = (3, 5, 2, "relu", False, True, 0.1, True) if cell == "RNN" else (3, 5, 2, False, True, 0.1, True)
    ours, theirs = OURS[cell](*args), TORCH[cell](*args)
    for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional"):
        assert getattr(ours, name) == getattr(theirs, name)


RULE_CASES = {
    "rank 1": (lambda m, x: m(x[0, 0]), "3-D input"),
    "rank 4": (lambda m, x: m(x.unsqueeze(0)), "3-D input"),
    "features": (lambda m, x: m(x[..., :2]), r"last axis is 3.*Build LSTM\(2"),
    "no steps": (lambda m, x: m(x[:0]), "at least one step"),
    "dtype": (lambda m, x: m(x.double()), "one dtype"),
    "integers": (lambda m, x: m(x.long()), "dtype|floating"),
    "state batch": (lambda m, x: m(x, (torch.zeros(1, 3, 5), torch.zeros(1, 2, 5))), r"h_0 of shape \[1, 2, 5\]"),
    "state size": (lambda m, x: m(x, (torch.zeros(1, 2, 5), torch.zeros(1, 2, 4))), r"c_0 of shape \[1, 2, 5\]"),
    "state rank": (lambda m, x: m(x, (torch.zeros(1, 5), torch.zeros(1, 5))), r"h_0 of shape \[1, 2, 5\]"),
    "not a state": (lambda m, x: m(x, 3), "h_0 and c_0"),
    "one state": (lambda m, x: m(x, torch.zeros(1, 2, 5)), "h_0 and c_0"),
    "state dtype": (lambda m, x: m(x, (torch.zeros(1, 2, 5).double(),) * 2), "one dtype"),
    "too long": (lambda m, x: m(x, lengths=[4, 5]), "between 0 and the 4 steps"),
    "negative": (lambda m, x: m(x, lengths=[4, -1]), "between 0 and the 4 steps"),
    "count of lengths": (lambda m, x: m(x, lengths=[4, 4, 4]), "2 whole numbers"),
    "float lengths": (lambda m, x: m(x, lengths=[4.0, 2.0]), "whole numbers"),
    "lengths beside packed": (
        lambda m, x: m(pack_padded_sequence(x, torch.tensor([4, 2])), lengths=[4, 2]),
        "own lengths",
    ),
    "packed sizes": (
        lambda m, x: m(PackedSequence(torch.zeros(5, 3), torch.tensor([2, 2]))),
        "sum to the rows",
    ),
    "unbatched lengths": (lambda m, x: m(x[:, 0], lengths=[4]), "for batches"),
    "resets dtype": (lambda m, x: m(x, resets=torch.zeros(4, 2)), "resets must be bool"),
    "resets shape": (lambda m, x: m(x, resets=torch.zeros(2, 4, dtype=torch.bool)), r"shape \[4, 2\]"),
    "device": (lambda m, x: m(x.to("meta")), "one device"),
}


@pytest.mark.parametrize("name", RULE_CASES)
def test_bad_calls_state_rule_value_and_remedy(name):
    layer, x = lamina.LSTM(3, 5), torch.randn(4, 2, 3)
    call, words = RULE_CASES[name]
    with pytest.raises(lamina.InputError, match=words) as caught:
        call(layer, x)
    assert ", got " in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)  # what torch.nn raises for shapes


def test_not_a_tensor():
    with pytest.raises(TypeError, match="Tensor or a PackedSequence"):
        lamina.LSTM(3, 5)([[1.0, 2.0, 3.0]])


BUILD_CASES = {
    "hidden 0": (lambda: lamina.LSTM(3, 0), "hidden_size must be greater than zero"),
    "hidden negative": (lambda: lamina.GRUCell(3, -1), "hidden_size must not be negative"),
    "input 0": (lambda: lamina.RNN(0, 4), "input_size must be greater than zero"),
    "layers": (lambda: lamina.LSTM(3, 4, 0), "num_layers must be greater than zero"),
    "norm": (lambda: lamina.LSTM(3, 4, norm="layr"), "Did you mean 'layer'"),
    "placement": (lambda: lamina.LSTM(3, 4, placement="papre"), "Did you mean 'paper'"),
    "placement of another cell": (lambda: lamina.LSTM(3, 4, placement="split"), "belongs to GRU"),
    "placement of an rnn": (lambda: lamina.RNN(3, 4, placement="carry"), "belongs to LSTM"),
    "placement without norm": (lambda: lamina.LSTM(3, 4, norm=None, placement="paper"), "norm='layer'"),
    "placement with weight norm": (lambda: lamina.GRU(3, 4, norm="weight", placement="paper"), "norm='layer'"),
    "eps nan": (lambda: lamina.LSTM(3, 4, eps=float("nan")), "finite"),
    "eps inf": (lambda: lamina.LSTM(3, 4, eps=float("inf")), "finite"),
    "eps negative": (lambda: lamina.LSTM(3, 4, eps=-1e-5), "not negative"),
    "eps_mode": (lambda: lamina.LSTM(3, 4, eps_mode="vra"), "Did you mean 'var'"),
    "dropout": (lambda: lamina.LSTM(3, 4, 2, dropout=1.5), r"dropout must be a number in \[0, 1\]"),
    "dropout text": (lambda: lamina.LSTM(3, 4, 2, dropout="a"), "dropout must be a number"),
    "zoneout": (lambda: lamina.LSTM(3, 4, zoneout=-0.1), "zoneout must be a number"),
    "zoneout pair": (lambda: lamina.GRU(3, 4, zoneout=(0.1, 0.1)), "for an LSTM"),
    "recurrent dropout": (lambda: lamina.LSTM(3, 4, recurrent_dropout=1.0), r"\[0, 1\)"),
    "projection size": (lambda: lamina.LSTM(3, 4, proj_size=4), "smaller than hidden_size"),
    "projection negative": (lambda: lamina.LSTM(3, 4, proj_size=-1), "whole number"),
    "projection of a gru": (lambda: lamina.GRU(3, 4, proj_size=2), "LSTM only"),
    "projection of an rnn": (lambda: lamina.RNN(3, 4, proj_size=2), "LSTM only"),
    "forget bias of a gru": (lambda: lamina.GRU(3, 4, forget_bias=1.0), "needs an LSTM"),
    "forget bias without bias": (lambda: lamina.LSTM(3, 4, bias=False, forget_bias=1.0), "bias=True"),
    "gain": (lambda: lamina.LSTM(3, 4, gain_init=float("inf")), "finite"),
    "nonlinearity": (lambda: lamina.RNN(3, 4, nonlinearity="tahn"), "Did you mean 'tanh'"),
    "nonlinearity of a cell": (lambda: lamina.RNNCell(3, 4, nonlinearity="sigmoid"), "nonlinearity must be"),
    "backend": (lambda: lamina.LSTM(3, 4, backend="refrence"), "Did you mean 'reference'"),
    "max steps": (lambda: lamina.LSTM(3, 4, norm="batch", max_steps=0), "max_steps must be greater than zero"),
    "momentum": (lambda: lamina.LSTM(3, 4, norm="batch", momentum=2.0), "momentum must be"),
    "statistics": (lambda: lamina.LSTM(3, 4, norm="batch", eval_statistics="popul"), "Did you mean 'population'"),
}


@pytest.mark.parametrize("name", BUILD_CASES)
def test_bad_constructors_state_rule_value_and_remedy(name):
    build, words = BUILD_CASES[name]
    with pytest.raises(lamina.InputError, match=words):
        build()


def test_wrong_types_and_unknown_options_are_type_errors():
    with pytest.raises(TypeError, match="hidden_size must be an int"):
        lamina.LSTM(3, 4.0)
    with pytest.raises(TypeError, match="hidden_size must be an int"):
        lamina.LSTM(3, "4")
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        lamina.LSTM(3, 4, foo=1)
    with pytest.raises(TypeError, match="positional"):
        lamina.LSTM(3, 4, 1, True, False, 0.0, False, 0, None, None, "layer")
    with pytest.raises(TypeError, match="eps must be a number"):
        lamina.LSTM(3, 4, eps="small")


TIGHT = torch.zeros(7, 2)
RESETS = {
    "list": ([[False] * 2] * 7, TypeError, r"a bool tensor, got list .*torch\.as_tensor\(resets, dtype=torch\.bool\)"),
    "array": (TIGHT.bool().numpy(), TypeError, r"a bool tensor, got ndarray shape \[7, 2\]"),
    "float": (TIGHT, ValueError, r"must be bool, got shape \[7, 2\] \(float32, cpu\)\. .* resets\.bool\(\)"),
    "uint8": (TIGHT.to(torch.uint8), ValueError, r"must be bool, got .*uint8.* resets\.bool\(\)"),
    "shape": (TIGHT.bool()[1:], ValueError, r"must have shape \[7, 2\] .*, got shape \[6, 2\]"),
}


@pytest.mark.parametrize("name", RESETS)
def test_wrong_resets_are_told_the_way_out(name):
    resets, error, words = RESETS[name]
    layer, x = lamina.GRU(3, 5), torch.randn(7, 2, 3)
    with pytest.raises(error, match=words):
        layer(x, resets=resets)
    with pytest.raises(error, match=words):
        functional.gru(x, torch.zeros(2, 5), layer._weights("_l0"), resets=resets)
    for call in (lambda: layer(x[:, 0], resets=resets), lambda: lamina.GRU(3, 5, batch_first=True)(x, resets=resets)):
        with pytest.raises(error, match="resets must"):
            call()


BIG = torch.randn(50, 50)
UNSEEN = {
    "hx": (lambda: lamina.LSTM(50, 5)(BIG, (BIG, BIG, BIG)), r"got tuple \(shape \[50, 50\]"),
    "input": (lambda: lamina.LSTM(3, 5)([BIG, BIG]), r"got list \[shape"),
    "weights": (lambda: functional.lstm(BIG, (BIG, BIG), {"weight_ih": BIG}), r"got dict \{'weight_ih': \.\.\.\}"),
    "norm": (lambda: lamina.LSTM(3, 5, norm=BIG.numpy()), r"None, got shape \[50, 50\] .*\. Pass one of them\."),
    "zoneout": (lambda: lamina.LSTM(3, 5, zoneout=BIG), r"zoneout=shape \[50, 50\]"),
    "proj_size": (lambda: lamina.LSTM(3, 5, proj_size=BIG), r"proj_size=shape \[50, 50\]"),
    "dict": (lambda: lamina.convert({"a": BIG}), r"got dict \{'a': \.\.\.\}"),
    "text": (lambda: lamina.LSTM(3, 5, norm="x" * 999), r"got 'x+\.\.\."),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_messages_show_shapes_and_not_values(name):
    build, words = UNSEEN[name]
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        build()
    assert len(str(caught.value)) < 350
    assert "tensor(" not in str(caught.value)


def test_choices_are_listed_once_and_the_nearest_is_named():
    with pytest.raises(lamina.InputError) as caught:
        lamina.LSTM(3, 5, norm="rms")
    assert str(caught.value) == "norm must be one of 'layer', 'batch', 'weight', None, got 'rms'. Pass one of them."
    with pytest.raises(lamina.InputError, match=r"got 'none'\. Did you mean None\?"):
        lamina.LSTM(3, 5, norm="none")
    with pytest.raises(lamina.InputError, match=r"^placement for LSTM must be .*Did you mean 'carry'"):
        lamina.LSTM(3, 5, placement="carr")


FLAGS = ["bias", "batch_first", "bidirectional", "recompute", "learn_initial_state"]


@pytest.mark.parametrize("name", FLAGS)
def test_a_text_is_not_a_flag(name):
    """Any text is true, "False" too; torch.nn refuses it for two of these."""
    with pytest.raises(TypeError, match=f"{name} must be of type bool, got str 'False'"):
        lamina.LSTM(3, 4, **{name: "False"})
    with pytest.raises(TypeError, match=r"got bool\w* np\.False_"):  # torch.nn refuses it too
        lamina.LSTM(3, 4, **{name: np.False_})
    if name == "bias":
        with pytest.raises(TypeError, match="bias must be of type bool"):
            lamina.GRUCell(3, 4, bias="False")


@pytest.mark.parametrize("norm", ["layer", "batch", "weight", None])
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_without_units_works_as_torchs_does(cell, norm):
    one, x = OURS_CELL[cell](3, 0, norm=norm), torch.randn(2, 3, requires_grad=True)
    ours, theirs = one(x), getattr(nn, f"{cell}Cell")(3, 0)(x)
    pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) and a.requires_grad for a, b in pairs)
    sum(a.sum() for a, _ in pairs).backward()
    assert all(p.grad is not None for n, p in one.named_parameters() if "_ih" in n)


@pytest.mark.parametrize("cell", CELLS)
def test_bad_cell_calls(cell):
    one, x, h = OURS_CELL[cell](3, 5), torch.randn(2, 3), torch.randn(2, 5)
    hx = (h, h) if cell == "LSTM" else h
    for bad in (x[..., :2], x.unsqueeze(0), torch.randn(2, 4)):
        with pytest.raises(lamina.InputError, match=r"needs an input \[B, 3\]"):
            one(bad, hx)
    for bad in (h[:1], h[:, :4], h[0]):  # a state of one case is not broadcast, as in torch.nn
        with pytest.raises(lamina.InputError, match=r"of shape \[2, 5\] as hx"):
            one(x, (bad, h) if cell == "LSTM" else bad)


LAYERS = [{}, {"bidirectional": True}, {"num_layers": 3}, {"num_layers": 2, "bidirectional": True}]


@pytest.mark.parametrize("given", [[4, 1], torch.tensor([4, 1]), torch.tensor([4, 1], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_lengths_are_looked_at_once(options, given, monkeypatch):
    """However many recurrences take them: on a GPU each look waits for all that it has to do."""
    looks, aminmax = [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda values: looks.append(values) or aminmax(values))
    lamina.GRU(3, 5, **options)(torch.randn(4, 2, 3), lengths=given)
    assert len(looks) == 1


@pytest.mark.parametrize("bad", [[5, 1], [-1, 2], [2**31, 1]], ids=str)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_lengths_out_of_range(options, bad):
    with pytest.raises(lamina.InputError, match="lengths must lie between 0 and the 4 steps"):
        lamina.GRU(3, 5, **options)(torch.randn(4, 2, 3), lengths=bad)
    weights = lamina.GRU(3, 5)._weights("_l0")
    with pytest.raises(lamina.InputError, match="lengths must lie between 0 and the 4 steps"):
        functional.gru(torch.randn(4, 2, 3), torch.zeros(2, 5), weights, lengths=torch.tensor(bad))


def test_functional_checks_its_weights():
    layer = lamina.LSTM(3, 5)
    x, h = torch.randn(4, 2, 3), torch.zeros(2, 5)
    weights = layer._weights("_l0")
    with pytest.raises(lamina.InputError, match="weight_hh"):
        functional.lstm(x, (h, h), weights._replace(weight_hh=weights.weight_hh[:-1]))
    with pytest.raises(lamina.InputError, match="gain_hh must have shape"):
        functional.lstm(x, (h, h), weights._replace(gain_hh=torch.ones(5)))
    with pytest.raises(lamina.InputError, match="2 state"):
        functional.lstm(x, (h,), weights)
    with pytest.raises(lamina.InputError, match=r"\[T, B, 3\]"):
        functional.lstm(x[0], (h, h), weights)
    with pytest.raises(lamina.InputError, match=r"recurrent_mask must have shape \[2, 5\]"):
        functional.lstm(x, (h, h), weights, recurrent_mask=torch.ones(5))
    with pytest.raises(lamina.InputError, match=r"zoneout mask of c must have shape \[4, 2, 5\]"):
        functional.lstm(x, (h, h), weights, zoneout=(None, torch.ones(2, 5)))
    with pytest.raises(lamina.InputError, match="an entry for each of the 2 states"):
        functional.lstm(x, (h, h), weights, zoneout=(0.5,))
    with pytest.raises(lamina.InputError, match="lengths must be on the input's device"):
        functional.lstm(x, (h, h), weights, lengths=torch.ones(2, dtype=torch.int64, device="meta"))
