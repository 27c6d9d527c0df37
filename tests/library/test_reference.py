"""The reference itself: hand numbers, torch's norms, gradients of gradients, lengths, resets, reverse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from lamina import reference
from tests.cases import EVERY, IDS, assert_same, gradients, leaves, random_call


def test_layer_norm_by_hand():
    """(1, 2, 3, 6): mean 3, biased variance 3.5."""
    z = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    want = torch.tensor([-2.0, -1.0, 0.0, 3.0], dtype=torch.float64)
    assert_same([reference.layer_norm(z, (4,), eps=0.0)], [want / math.sqrt(3.5)])
    assert_same([reference.layer_norm(z, (4,), eps=0.25)], [want / math.sqrt(3.75)])
    assert_same([reference.layer_norm(z, (4,), eps=0.25, eps_mode="std")], [want / (math.sqrt(3.5) + 0.25)])


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 5, 17), (0, 4)], ids=str)
@pytest.mark.parametrize("axes", [1, 2])
def test_layer_norm_equals_torch(shape, axes, device):
    if len(shape) < axes:
        shape = (3, *shape)
    normalized = shape[-axes:]
    z = (torch.randn(shape, dtype=torch.float64, device=device) + 1000).requires_grad_()
    gain, bias = (torch.randn(normalized, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    got = reference.layer_norm(z, normalized, gain, bias)
    want = F.layer_norm(z, normalized, gain, bias)
    assert_same([got], [want], 1e-10)  # a mean of 1000 costs torch's own one-pass variance some digits
    assert_same(gradients([got], [z, gain, bias]), gradients([want], [z, gain, bias]), 1e-9)


@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_constant_vector_gives_the_bias_and_finite_gradients(eps, eps_mode):
    z = torch.full((2, 8), 3.0, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64)
    out = reference.layer_norm(z, (8,), None, bias, eps, eps_mode)
    assert torch.equal(out, bias.expand(2, 8))
    upstream = torch.randn(2, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad(out, z, upstream)
    scale = 0.0 if eps == 0 else 1 / (math.sqrt(eps) if eps_mode == "var" else eps)
    assert_same([grad], [scale * (upstream - upstream.mean(1, keepdim=True))], 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_statistics_are_float32(dtype):
    """The result is the exact one rounded once; statistics in half would miss every second entry."""
    z = (torch.randn(4, 4096) + 10).to(dtype)
    got = reference.layer_norm(z, (4096,))
    want = reference.layer_norm(z.double(), (4096,)).to(dtype)
    assert got.dtype == dtype
    assert (got == want).double().mean() > 0.99


@pytest.mark.parametrize("unbiased", [False, True])
def test_batch_norm_divisor(unbiased):
    z = torch.randn(4, 3, dtype=torch.float64)
    got = reference.batch_norm(z, eps=0.0, training=True, unbiased=unbiased)
    assert_same([got], [(z - z.mean(0)) / z.std(0, unbiased=unbiased)])


def test_weight_norm_of_a_zero_row_is_zero_with_finite_gradients():
    w = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    out = reference.weight_norm(w, torch.tensor([10.0, 2.0], dtype=torch.float64))
    assert_same([out], [torch.tensor([[6.0, 8.0], [0.0, 0.0]], dtype=torch.float64)])
    (grad,) = torch.autograd.grad(out, w, torch.ones_like(out))
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("norm", ["layer", "batch", "weight", None])
def test_linear_normalises_summed_inputs(norm):
    x, w, g, b = (torch.randn(s, dtype=torch.float64) for s in ((6, 3), (5, 3), (5,), (5,)))
    a = x @ w.T
    want = {
        "layer": (a - a.mean(1, keepdim=True)) / a.var(1, correction=0, keepdim=True).sqrt() * g + b,
        "batch": (a - a.mean(0)) / a.var(0, correction=0).sqrt() * g + b,
        "weight": a / w.norm(dim=1) * g + b,
        None: a + b,
    }[norm]
    got = reference.linear(x, w, b, None if norm is None else g, norm=norm, eps=0.0)
    assert_same([got], [want])


def run_flat(call, *tensors):
    names = list(leaves(call))
    by_name = dict(zip(names, tensors))
    weights = call.weights._replace(**{n: t for n, t in by_name.items() if n in call.weights._fields})
    state = tuple(by_name[s] for s in "hc" if s in by_name)
    result = reference.evaluate(dataclasses.replace(call, input=by_name["input"], state=state, weights=weights))
    return (result.output, *result.state)


def ragged_call(cell, norm, placement, shape=(3, 3, 2, 2), device="cpu"):
    proj = 1 if cell == "LSTM" and shape[-1] > 1 and placement == "paper" else 0
    resets = torch.zeros(shape[:2], dtype=torch.bool, device=device)
    resets[1, 0] = resets[-1, 1] = True
    lengths = torch.full(shape[1:2], shape[0], device=device)
    lengths[-1] -= 1
    return random_call(cell, norm, placement, shape, proj, device=device, lengths=lengths, resets=resets, eps=0.1)


@pytest.mark.parametrize(("cell", "norm", "placement"), EVERY, ids=IDS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_gradcheck_with_lengths_and_resets(cell, norm, placement, reverse):
    call = dataclasses.replace(ragged_call(cell, norm, placement), reverse=reverse)
    tensors = tuple(leaves(call).values())
    assert torch.autograd.gradcheck(lambda *t: run_flat(call, *t), tensors)


@pytest.mark.parametrize(("cell", "norm", "placement"), EVERY, ids=IDS)
def test_gradgradcheck_with_lengths_and_resets(cell, norm, placement):
    call = ragged_call(cell, norm, placement, (2, 2, 1, 2))
    tensors = tuple(leaves(call).values())
    assert torch.autograd.gradgradcheck(lambda *t: run_flat(call, *t), tensors)


@pytest.mark.parametrize(("cell", "norm", "placement"), [row for row in EVERY if row[1] != "batch"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_lengths_equal_cutting_each_case(cell, norm, placement, reverse, device):
    lengths = torch.tensor([4, 1, 3, 0], device=device)
    call = random_call(cell, norm, placement, (4, 4, 3, 5), device=device, lengths=lengths, reverse=reverse)
    got = reference.evaluate(call)
    for case, length in enumerate(lengths.tolist()):
        state = tuple(s[case : case + 1] for s in call.state)
        if length == 0:
            assert_same([s[case : case + 1] for s in got.state], state)
            assert not got.output[:, case].any()
            continue
        x = call.input[:length, case : case + 1]
        alone = reference.evaluate(dataclasses.replace(call, input=x, state=state, lengths=None))
        assert_same([got.output[:length, case : case + 1]], [alone.output])
        assert_same([s[case : case + 1] for s in got.state], alone.state)
        assert not got.output[length:, case].any()


@pytest.mark.parametrize(("cell", "norm", "placement"), [row for row in EVERY if row[1] != "batch"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_resets_equal_separate_segments(cell, norm, placement, reverse, device):
    """Outputs and input gradients of a sequence cut by resets are those of its segments run on their own."""
    resets = torch.tensor([[True], [False], [True], [True], [False], [False]], device=device)
    call = random_call(cell, norm, placement, (6, 1, 3, 5), device=device, resets=resets, reverse=reverse)
    got = reference.evaluate(call).output
    segments = {(0, 2): call.reset_state, (2, 3): call.reset_state, (3, 6): call.reset_state}
    if reverse:
        segments[3, 6] = call.state  # where reading backwards begins
    parts = [
        dataclasses.replace(call, input=call.input[a:b], state=state, resets=None) for (a, b), state in segments.items()
    ]
    want = torch.cat([reference.evaluate(part).output for part in parts])
    tensors = list(leaves(call).values())
    assert_same([got], [want])
    assert_same(gradients([got], tensors), gradients([want], tensors))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize(("cell", "norm", "placement"), EVERY, ids=IDS)
def test_garbage_in_the_padding_touches_nothing(cell, norm, placement, garbage):
    lengths = torch.tensor([3, 1])
    call = random_call(cell, norm, placement, (3, 2, 3, 5), lengths=lengths)
    dirty = call.input.detach().clone()
    dirty[1:, 1] = garbage
    other = dataclasses.replace(call, input=dirty.requires_grad_())
    got, want = reference.evaluate(other), reference.evaluate(call)
    assert_same((got.output, *got.state), (want.output, *want.state), 0.0)
    mine = gradients((got.output, *got.state), list(leaves(other).values()))
    assert_same(mine, gradients((want.output, *want.state), list(leaves(call).values())), 0.0)


def test_batch_statistics_leave_padding_out():
    """At step 2 one case of three is over: the moments are those of the two that go on."""
    call = random_call("RNN", "batch", "paper", (3, 3, 2, 4), lengths=torch.tensor([3, 3, 2]))
    result = reference.evaluate(call)
    moments = result.moments["sum"]
    states = (call.state[0], result.output[0], result.output[1])
    for t, (cases, h) in enumerate(zip((3, 3, 2), states)):
        summed = (call.input[t] @ call.weights.weight_ih.T + h @ call.weights.weight_hh.T)[:cases]
        assert_same([moments.mean[t], moments.var[t]], [summed.mean(0), summed.var(0, correction=0)])


def test_population_moments_repeat_the_last_step():
    call = random_call("LSTM", "batch", "paper", (5, 3, 2, 4))
    known = reference.evaluate(dataclasses.replace(call, input=call.input[:2])).moments
    longer = {
        s: reference.Moments(*(torch.cat([m, m[-1:], m[-1:], m[-1:]]) for m in pair)) for s, pair in known.items()
    }
    got = reference.evaluate(dataclasses.replace(call, population=known))
    want = reference.evaluate(dataclasses.replace(call, population=longer))
    assert_same([got.output], [want.output], 0.0)
    assert got.moments == {}


@pytest.mark.parametrize("cell", ["RNN", "LSTM", "GRU"])
def test_zoneout_keeps_old_values_and_uses_the_expectation(cell):
    call = random_call(cell, "layer", None, (1, 3, 2, 5))
    fresh = reference.evaluate(call).state
    masks = tuple((torch.rand(1, 3, 5, dtype=torch.float64) < 0.5).double() for _ in fresh)
    kept = reference.evaluate(dataclasses.replace(call, zoneout=masks)).state
    assert_same(kept, [torch.where(m[0] > 0, old, new) for m, old, new in zip(masks, call.state, fresh)])
    mean = reference.evaluate(dataclasses.replace(call, zoneout=(0.25, 0.5)[: len(fresh)])).state
    rates = (0.25, 0.5)
    assert_same(mean, [p * old + (1 - p) * new for p, old, new in zip(rates, call.state, fresh)])


def test_recurrent_mask_acts_on_the_recurrent_product_only():
    call = random_call("GRU", None, None, (1, 2, 3, 4))
    mask = torch.tensor([[0.0, 2.0, 2.0, 0.0], [2.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
    got = reference.evaluate(dataclasses.replace(call, recurrent_mask=mask)).state[0]
    w, x, h = call.weights, call.input[0], call.state[0]
    x_r, x_z, x_n = (x @ w.weight_ih.T + w.bias_ih).chunk(3, 1)
    h_r, h_z, h_n = ((h * mask) @ w.weight_hh.T + w.bias_hh).chunk(3, 1)
    z, n = torch.sigmoid(x_z + h_z), torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    # the masked h feeds W_h; what the update gate keeps is the whole h
    assert_same([got], [(1 - z) * n + z * h])
