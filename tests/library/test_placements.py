"""Each published cell against a few lines written from its own publication, to 1e-12, with every gradient.

The functions below know nothing of lamina: they use torch's layer_norm, their own gate names and their own
parameter layout, and the tests lay lamina's weights out for them.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lamina import reference
from tests.cases import LAYER, SHAPES, assert_same, gradients, leaves, random_call

EPS = 1e-5
sig, tanh = torch.sigmoid, torch.tanh


def ln(z, gain=None, bias=None):
    return F.layer_norm(z, z.shape[-1:], gain, bias, EPS)


def split_gates(w, count):
    """One dict of tensors for each gate, cut from torch's stacked parameters."""
    stacked = {k: v for k, v in w._asdict().items() if v is not None and k not in ("gain_cell", "bias_cell")}
    return [{k: v.chunk(count)[g] for k, v in stacked.items()} for g in range(count)]


def lstm_ba_et_al(x, h, c, w):
    """Ba et al., appendix: (f i o g) = LN(W_h h; a1, b1) + LN(W_x x; a2, b2) + b; h = s(o) tanh(LN(c; a3, b3))."""
    i, f, g, o = split_gates(w, 4)
    order = (f, i, o, g)
    stack = lambda name: torch.cat([gate[name] for gate in order])  # noqa: E731
    gates = ln(h @ stack("weight_hh").T, stack("gain_hh"), stack("bias_hh"))
    gates = gates + ln(x @ stack("weight_ih").T, stack("gain_ih")) + stack("bias_ih")
    f, i, o, g = gates.chunk(4, 1)
    c = sig(f) * c + sig(i) * tanh(g)
    return sig(o) * tanh(ln(c, w.gain_cell, w.bias_cell)), c


def lstm_draw(x, h, c, w):
    """Ba et al., DRAW: plain gates, LN of c under the output's tanh only."""
    pre = [x @ k["weight_ih"].T + k["bias_ih"] + h @ k["weight_hh"].T + k["bias_hh"] for k in split_gates(w, 4)]
    c = sig(pre[1]) * c + sig(pre[0]) * tanh(pre[2])
    return sig(pre[3]) * tanh(ln(c, w.gain_cell, w.bias_cell)), c


def lstm_fastrnns(x, h, c, w):
    """PyTorch fastrnns: two LNs over 4H, and c itself replaced by its LN."""
    gates = ln(x @ w.weight_ih.T, w.gain_ih, w.bias_ih) + ln(h @ w.weight_hh.T, w.gain_hh, w.bias_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = ln(sig(f) * c + sig(i) * tanh(g), w.gain_cell, w.bias_cell)
    return sig(o) * tanh(c), c


def lstm_torchaudio(x, h, c, w):
    """torchaudio RNN-T: one LN over the 4H sum, LN(c) carried."""
    i, f, g, o = ln(x @ w.weight_ih.T + h @ w.weight_hh.T, w.gain_sum, w.bias_ih + w.bias_hh).chunk(4, 1)
    c = ln(sig(f) * c + sig(i) * tanh(g), w.gain_cell, w.bias_cell)
    return sig(o) * tanh(c), c


def lstm_tf_contrib(x, h, c, w):
    """TF contrib: W [x; h], one LN with gamma and beta for each gate, LN(c) carried."""
    xh = torch.cat([x, h], 1)

    def gate(k):
        weight = torch.cat([k["weight_ih"], k["weight_hh"]], 1)
        return ln(xh @ weight.T, k["gain_sum"], k["bias_ih"] + k["bias_hh"])

    i, f, j, o = map(gate, split_gates(w, 4))
    c = ln(c * sig(f) + sig(i) * tanh(j), w.gain_cell, w.bias_cell)
    return tanh(c) * sig(o), c


def gru_ba_et_al(x, h, w):
    """Ba et al., appendix; its z is 1 - torch's z, so the sigmoid's argument changes sign."""
    r, z, n = split_gates(w, 3)
    both = lambda name: torch.cat([z[name], r[name]])  # noqa: E731
    zr = ln(h @ both("weight_hh").T, both("gain_hh"), both("bias_hh"))
    zr = zr + ln(x @ both("weight_ih").T, both("gain_ih"), both("bias_ih"))
    z_t, r_t = zr.chunk(2, 1)
    candidate = ln(x @ n["weight_ih"].T, n["gain_ih"], n["bias_ih"])
    candidate = tanh(candidate + sig(r_t) * ln(h @ n["weight_hh"].T, n["gain_hh"], n["bias_hh"]))
    paper_z = -z_t
    return ((1 - sig(paper_z)) * h + sig(paper_z) * candidate,)


def gru_haste(x, h, w):
    """Haste: one LN over the 3H of each product, gates z r g."""
    r, z, g = split_gates(w, 3)
    stack = lambda name: torch.cat([gate[name] for gate in (z, r, g)])  # noqa: E731
    vx = (ln(x @ stack("weight_ih").T, stack("gain_ih")) + stack("bias_ih")).chunk(3, 1)
    vh = (ln(h @ stack("weight_hh").T, stack("gain_hh")) + stack("bias_hh")).chunk(3, 1)
    z, r = sig(vx[0] + vh[0]), sig(vx[1] + vh[1])
    return (z * h + (1 - z) * tanh(vx[2] + r * vh[2]),)


def gru_dreamer(x, h, w):
    """DreamerV2/V3 ports: LN of W [x; h], reset times candidate, update gate with bias -1."""
    r, u, n = split_gates(w, 3)
    gates = (r, n, u)  # their order: reset, cand, update
    weight = torch.cat([torch.cat([k["weight_ih"], k["weight_hh"]], 1) for k in gates])
    gain = torch.cat([k["gain_sum"] for k in gates])
    bias = torch.cat([k["bias_ih"] + k["bias_hh"] for k in gates])
    reset, cand, update = ln(torch.cat([x, h], -1) @ weight.T, gain, bias).chunk(3, -1)
    update = sig(update + -1)
    return (update * tanh(sig(reset) * cand) + (1 - update) * h,)


def rnn_ba_et_al(x, h, w):
    """Ba et al., Eq. 4, mean and deviation written out."""
    a = h @ w.weight_hh.T + x @ w.weight_ih.T
    mu = a.sum(-1, keepdim=True) / a.shape[-1]
    sigma = (((a - mu) ** 2).sum(-1, keepdim=True) / a.shape[-1] + EPS).sqrt()
    return (tanh(w.gain_sum / sigma * (a - mu) + (w.bias_ih + w.bias_hh)),)


PUBLISHED = {
    ("LSTM", "paper"): lstm_ba_et_al,
    ("LSTM", "cell"): lstm_draw,
    ("LSTM", "carry"): lstm_fastrnns,
    ("LSTM", "joint"): lstm_torchaudio,
    ("LSTM", "gate"): lstm_tf_contrib,
    ("GRU", "paper"): gru_ba_et_al,
    ("GRU", "split"): gru_haste,
    ("GRU", "joint"): gru_dreamer,
    ("RNN", "paper"): rnn_ba_et_al,
}


def test_every_placement_has_a_published_counterpart():
    assert set(PUBLISHED) == {(cell, name) for cell, _, name in LAYER}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("cell", "placement"), PUBLISHED, ids="-".join)
def test_equals_the_published_cell(cell, placement, shape, device):
    call = random_call(cell, "layer", placement, shape, device=device)
    result = reference.evaluate(call)
    state, outputs = call.state, []
    for x in call.input:
        state = PUBLISHED[cell, placement](x, *state, call.weights)
        outputs.append(state[0])
    want = (torch.stack(outputs), *state)
    got = (result.output, *result.state)
    assert_same(got, want)
    tensors = leaves(call)
    inputs = list(tensors.values())
    assert_same(gradients(got, inputs), gradients(want, inputs), names=list(tensors))


def bn_lstm_step(x, h, c, w):
    """Cooijmans et al. 2016: BN(W_h h; g_h) + BN(W_x x; g_x) + b; h = s(o) tanh(BN(c; g_c, b_c))."""

    def bn(z, gain, bias=None):
        return F.batch_norm(z, None, None, gain, bias, training=True, eps=EPS)

    gates = bn(h @ w.weight_hh.T, w.gain_hh) + bn(x @ w.weight_ih.T, w.gain_ih) + w.bias_ih + w.bias_hh
    i, f, g, o = gates.chunk(4, 1)
    c = sig(f) * c + sig(i) * tanh(g)
    return sig(o) * tanh(bn(c, w.gain_cell, w.bias_cell)), c


def test_recurrent_batch_norm_equals_cooijmans_et_al(device):
    call = random_call("LSTM", "batch", "paper", (5, 7, 3, 11), device=device)
    result = reference.evaluate(call)
    state, outputs = call.state, []
    for x in call.input:
        state = bn_lstm_step(x, *state, call.weights)
        outputs.append(state[0])
    got, want = (result.output, *result.state), (torch.stack(outputs), *state)
    assert_same(got, want)
    tensors = leaves(call)
    inputs = list(tensors.values())
    assert_same(gradients(got, inputs), gradients(want, inputs), names=list(tensors))


@pytest.mark.parametrize("cell", ["RNN", "LSTM", "GRU"])
def test_weight_norm_equals_salimans_and_kingma(cell, device):
    """w = g v/||v||, the norm taken by torch.linalg row by row."""
    call = random_call(cell, "weight", None, (4, 3, 5, 7), device=device)
    w = call.weights
    unit = lambda v: v / torch.linalg.vector_norm(v, dim=1, keepdim=True)  # noqa: E731
    plain = w._replace(
        weight_ih=w.gain_ih.unsqueeze(1) * unit(w.weight_ih),
        weight_hh=w.gain_hh.unsqueeze(1) * unit(w.weight_hh),
        gain_ih=None,
        gain_hh=None,
    )
    other = reference.Recurrence(cell, call.input, call.state, plain, None, call.placement)
    got, want = reference.evaluate(call), reference.evaluate(other)
    outputs, wanted = (got.output, *got.state), (want.output, *want.state)
    assert_same(outputs, wanted)
    tensors = leaves(call)
    assert_same(gradients(outputs, list(tensors.values())), gradients(wanted, list(tensors.values())))
