"""The fused input side of a recurrence against the reference in float64: values, every gradient, every mode.

Runs on Triton's interpreter (TRITON_INTERPRET=1 before anything imports triton) or on a GPU.
"""

import importlib
import os

import pytest
import torch

from lamina.kernels.forms import kept_dtype
from lamina.reference import affine, standardise

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")
rows = importlib.import_module("lamina.kernels.rows")

DEVICE = "cpu" if INTERPRETED else "cuda"
MODES = ("norm", "centre", "plain")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = ((4,), (2, 1), (3,), (1, 1, 1, 1), (1,))
WIDTHS = (1, 17, 100, 257)  # H
COUNTS = ((3, 1), (1, 37)) if INTERPRETED else ((1, 1), (3, 1), (1, 37))  # T, B
FORMS = [("var", 1e-5), ("var", 0.0), ("std", 1e-3), ("std", 0.0)]
FLOOR = 3e-7  # rounding of float32, relative to the terms of a sum: two orders of summing may differ by it


class Rows(torch.autograd.Function):
    """The kernels as one differentiable function of W_x x, the gain and a bias."""

    @staticmethod
    def forward(ctx, x, gain, bias, bias_too, groups, mode, eps, eps_mode):
        out, statistics = rows.forward(x, gain, bias, bias_too, groups, mode, eps, eps_mode)
        ctx.save_for_backward(x, gain, statistics)
        ctx.how, ctx.biases = (groups, mode, eps, eps_mode), (bias, bias_too)
        return out

    @staticmethod
    def backward(ctx, d):
        has_bias = any(b is not None for b in ctx.biases)
        d_x, small = rows.backward(d.contiguous(), *ctx.saved_tensors, *ctx.how, has_bias)
        gain = ctx.saved_tensors[1]
        biases = (None if b is None else small[-1].to(b.dtype) for b in ctx.biases)
        return d_x, None if gain is None else small[0].to(gain.dtype), *biases, None, None, None, None


def prepare(x, gain, bias, *how):
    return Rows.apply(x, gain, bias, None, *how)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def composed(x, gain, bias, groups, mode, eps, eps_mode):
    """The same in torch, as the reference writes it."""
    hidden, given = x.shape[-1] // sum(groups), x.dtype
    x = x.to(torch.promote_types(given, torch.float32))
    parts = x.split([g * hidden for g in groups], -1)
    if mode == "norm":
        x = torch.cat([standardise(p, (-1,), eps, eps_mode) for p in parts], -1)
    elif mode == "centre":
        x = torch.cat([p - p.mean(-1, keepdim=True) for p in parts], -1)
    return affine(x, gain, bias).to(torch.promote_types(given, kept_dtype(given, hidden)))


def leaves(count, width, dtype, mode, gain=True, bias=True, parameters=torch.float32):
    """W_x x with a mean, a gain on both sides of 0 and a bias, as the mode takes them, rounded to their dtypes."""
    made = [
        (0.7 + 1.5 * randn(*count, width, seed=1)).to(dtype),
        (1 + randn(width, seed=2)).to(parameters) if gain and mode == "norm" else None,
        randn(width, seed=3).to(parameters) if bias and mode != "centre" else None,
    ]
    return [None if t is None else t.to(DEVICE) for t in made]


def outcome(function, tensors, upstream, *how):
    """The result and the gradients of every tensor that is there."""
    given = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    out = function(*given, *how)
    return [out, *torch.autograd.grad(out, [t for t in given if t is not None], upstream.to(out))]


def sizes(exact, tensors, upstream, groups, mode):
    """The size of the terms that each result is a sum of: what rounding is relative to."""
    x, gain, _ = tensors
    d = upstream if gain is None else upstream * gain.double()
    if mode != "norm":
        return [t.abs().max().item() for t in (x, d, upstream.abs().flatten(0, -2).sum(0))]
    hidden = x.shape[-1] // sum(groups)
    parts = zip(*(t.double().split([g * hidden for g in groups], -1) for t in (x, d)))
    steep = max((q.abs().amax(-1) / p.std(-1, False).clamp(min=1e-2)).max().item() for p, q in parts)
    summed = upstream.abs().flatten(0, -2).sum(0).max().item()
    return [exact[0].abs().max().item(), steep, summed, summed]


def errors(got, want):
    return [(a.double() - b.double()).abs().max().item() for a, b in zip(got, want, strict=True)]


def check(count, width, dtype, groups, mode, eps=1e-5, eps_mode="var", **which):
    tensors = leaves(count, width, dtype, mode, **which)
    upstream = randn(*count, width, seed=4).to(dtype).double().to(DEVICE)
    how = (groups, mode, eps, eps_mode)
    doubles = [None if t is None else t.double() for t in tensors]
    exact = outcome(composed, doubles, upstream, *how)
    ours, torchs = (outcome(f, tensors, upstream, *how) for f in (prepare, composed))
    kept = tensors[0].to(kept_dtype(dtype, width // sum(groups)))
    for got, like in zip(ours, [kept, *(t for t in tensors if t is not None)], strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
    floors = [FLOOR * size for size in sizes(exact, tensors, upstream, groups, mode)]
    for k, (mine, theirs, floor) in enumerate(zip(errors(ours, exact), errors(torchs, exact), floors)):
        assert mine <= 2 * theirs + floor, (k, mine, theirs, floor)


KINDS = [(d, g) for d in DTYPES for g in GROUPS if not INTERPRETED or d == torch.float32 or g in ((4,), (2, 1))]


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "groups"), KINDS, ids=str)
def test_equals_reference(dtype, groups, mode, hidden):
    for count in COUNTS:
        check(count, sum(groups) * hidden, dtype, groups, mode)


@pytest.mark.parametrize(("eps_mode", "eps"), FORMS)
@pytest.mark.parametrize("groups", [(4,), (2, 1)], ids=str)
def test_eps_forms(groups, eps_mode, eps):
    for hidden in (17, 100):
        check((37, 1), sum(groups) * hidden, torch.float32, groups, "norm", eps, eps_mode)


@pytest.mark.parametrize("which", [{"gain": False}, {"bias": False}, {"gain": False, "bias": False}], ids=str)
@pytest.mark.parametrize("mode", ["norm", "plain"])
def test_without_gain_or_bias(mode, which):
    check((3, 5), 51, torch.float32, (2, 1), mode, **which)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_another_dtype(parameters):
    tensors = leaves((37, 1), 51, torch.float32, "norm", parameters=parameters)
    upstream = randn(37, 1, 51, seed=4).to(DEVICE)
    how = ((3,), "norm", 1e-5, "var")
    found = outcome(prepare, tensors, upstream, *how)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, parameters, parameters]
    wanted = outcome(composed, [t.double() for t in tensors], upstream, *how)
    for got, want in zip(found, wanted):
        bound = 1e-6 if got.dtype in (torch.float32, torch.float64) else torch.finfo(got.dtype).eps
        assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "hidden"), [((4,), 2400), ((2, 1), 4200), ((1, 1), 9000)], ids=str)
def test_wide_parts_are_cut_into_slices(groups, hidden, dtype):
    assert rows.cut(sum(groups) * hidden, groups, "norm", True).slices > 1
    for mode in MODES:
        check((1, 5), sum(groups) * hidden, dtype, groups, mode)


@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize("groups", [(4,), (2, 1)], ids=str)
@pytest.mark.parametrize("value", [0.1, -3e4, 1e-30])
def test_constant_row_gives_the_bias_and_no_gradient(value, groups, eps_mode):
    """0.1 is no sum of powers of two: its mean over 257 entries is not 0.1 unless care is taken."""
    x, gain, bias = leaves((2, 3), sum(groups) * 257, torch.float32, "norm")
    x[1, 1] = value
    upstream = randn(*x.shape, seed=4).to(DEVICE)
    out, d_x, d_gain, _ = outcome(prepare, (x, gain, bias), upstream, groups, "norm", 0.0, eps_mode)
    assert torch.equal(out[1, 1], bias)
    assert not d_x[1, 1].any()
    rest = torch.cat([x[0], x[1, [0, 2]]]).unsqueeze(0)
    others = torch.cat([upstream[0], upstream[1, [0, 2]]]).unsqueeze(0)
    wanted = outcome(composed, [t.double() for t in (rest, gain, bias)], others, groups, "norm", 0.0, eps_mode)
    assert (torch.cat([d_x[0], d_x[1, [0, 2]]]) - wanted[1][0]).abs().max() < 1e-5
    assert (d_gain - wanted[2]).abs().max() < 1e-5


def test_large_mean_does_not_cancel():
    """The mean itself is rounded to 2^-11 here; a variance from E[x^2] - E[x]^2 would be off by more than 1."""
    x = (1e4 + randn(1, 7, 1028)).float().to(DEVICE)
    out = prepare(x, None, None, (4,), "norm", 1e-5, "var")
    exact = composed(x.double(), None, None, (4,), "norm", 1e-5, "var")
    assert (out - exact).abs().max() < 2**-10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_takes_any_dtype(dtype):
    x, gain, bias = leaves((4, 5), 51, torch.float32, "norm")
    d = randn(4, 5, 51, seed=4).to(DEVICE, dtype)
    _, kept = rows.forward(x, gain, bias, None, (3,), "norm", 1e-5, "var")
    d_summed, d_parameters = rows.backward(d, x, gain, kept, (3,), "norm", 1e-5, "var", True)
    wanted = outcome(composed, [t.double() for t in (x, gain, bias)], d.double(), (3,), "norm", 1e-5, "var")
    for got, want in zip((d_summed, *d_parameters), wanted[1:], strict=True):
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("mode", ["norm", "plain"])
def test_two_biases_are_their_sum(mode):
    x, gain, bias = leaves((4, 5), 51, torch.float32, mode)
    more, how = randn(51, seed=9).float().to(DEVICE), ((2, 1), mode, 1e-5, "var")
    both = Rows.apply(x, gain, bias, more, *how)
    torch.testing.assert_close(both, prepare(x, gain, bias, *how) + more)
    assert torch.equal(Rows.apply(x, gain, None, more, *how), prepare(x, gain, more, *how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "hidden"), [((4,), 1), ((2, 1), 37), ((1, 1, 1, 1), 65), ((3,), 190)], ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_centred_matrices_have_columns_of_mean_0(groups, hidden, dtype, large, monkeypatch):
    monkeypatch.setattr(rows, "LARGE", 1 if large else 10**9)
    weight = (0.3 + randn(sum(groups) * hidden, hidden)).to(DEVICE, dtype)
    parts = weight.double().split([g * hidden for g in groups])
    want = torch.cat([p - p.mean(0) for p in parts])
    assert (rows.matrix(weight, groups, False).values.double() - want).abs().max() <= torch.finfo(
        dtype
    ).eps * want.abs().max()


def test_same_bits_every_time():
    tensors = leaves((37, 1), 1028, torch.bfloat16, "norm")
    upstream = randn(37, 1, 1028, seed=4).to(DEVICE)
    first, second = (outcome(prepare, tensors, upstream, (4,), "norm", 1e-5, "var") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
