"""The fused input side of a recurrence against the reference in float64: values, every gradient, every mode.

Runs on Triton's interpreter (TRITON_INTERPRET=1 before anything imports triton) or on a GPU.
"""

import importlib
import os

import pytest
import torch

from lamina.checks import InputError
from lamina.reference import affine, standardise

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
rows = importlib.import_module("lamina.kernels.rows")

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = ((4,), (2, 1), (3,), (1, 1, 1, 1), (1,))
WIDTHS = (1, 17, 100, 257)  # H
COUNTS = ((1, 1), (3, 1), (1, 37))  # T, B
FORMS = [("var", 1e-5), ("var", 0.0), ("std", 1e-3), ("std", 0.0)]
FLOOR = 3e-7  # rounding of float32, relative to the terms of a sum: two orders of summing may differ by it
CUT_OFF = 2**-8 if INTERPRETED else 0.0  # the interpreter cuts bfloat16 off where a GPU rounds it


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def composed(x, gain, bias, groups, mode, eps, eps_mode):
    """The same in torch, as the reference writes it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    hidden = x.shape[-1] // sum(groups)
    parts = x.split([g * hidden for g in groups], -1)
    if mode == "norm":
        x = torch.cat([standardise(p, (-1,), eps, eps_mode) for p in parts], -1)
    elif mode == "centre":
        x = torch.cat([p - p.mean(-1, keepdim=True) for p in parts], -1)
    return affine(x, gain, bias)


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
    upstream = randn(*count, width, seed=4).float().double().to(DEVICE)
    how = (groups, mode, eps, eps_mode)
    doubles = [None if t is None else t.double() for t in tensors]
    exact = outcome(composed, doubles, upstream, *how)
    ours, torchs = (outcome(f, tensors, upstream, *how) for f in (rows.prepare, composed))
    for got, like in zip(ours, [tensors[0].float(), *(t for t in tensors if t is not None)], strict=True):
        assert (got.shape, got.dtype) == (like.shape, like.dtype)
    floors = [FLOOR * size for size in sizes(exact, tensors, upstream, groups, mode)]
    if dtype == torch.bfloat16:
        floors[1] += CUT_OFF * exact[1].abs().max().item()
    for k, (mine, theirs, floor) in enumerate(zip(errors(ours, exact), errors(torchs, exact), floors)):
        assert mine <= 2 * theirs + floor, (k, mine, theirs, floor)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("mode", rows.MODES)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    found = outcome(rows.prepare, tensors, upstream, *how)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, parameters, parameters]
    wanted = outcome(composed, [t.double() for t in tensors], upstream, *how)
    for got, want in zip(found, wanted):
        bound = 1e-6 if got.dtype in (torch.float32, torch.float64) else torch.finfo(got.dtype).eps
        assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "hidden"), [((4,), 2400), ((2, 1), 4200), ((1, 1), 9000)], ids=str)
def test_wide_parts_are_cut_into_slices(groups, hidden, dtype):
    assert rows.cut(sum(groups) * hidden, groups, "norm", True).slices > 1
    for mode in rows.MODES:
        check((1, 5), sum(groups) * hidden, dtype, groups, mode)


@pytest.mark.parametrize("eps_mode", ["var", "std"])
@pytest.mark.parametrize("groups", [(4,), (2, 1)], ids=str)
@pytest.mark.parametrize("value", [0.1, -3e4, 1e-30])
def test_constant_row_gives_the_bias_and_no_gradient(value, groups, eps_mode):
    """0.1 is no sum of powers of two: its mean over 257 entries is not 0.1 unless care is taken."""
    x, gain, bias = leaves((2, 3), sum(groups) * 257, torch.float32, "norm")
    x[1, 1] = value
    upstream = randn(*x.shape, seed=4).to(DEVICE)
    out, d_x, d_gain, _ = outcome(rows.prepare, (x, gain, bias), upstream, groups, "norm", 0.0, eps_mode)
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
    out = rows.prepare(x, None, None, (4,), "norm", 1e-5, "var")
    exact = composed(x.double(), None, None, (4,), "norm", 1e-5, "var")
    assert (out - exact).abs().max() < 2**-10


@pytest.mark.parametrize("mode", rows.MODES)
@pytest.mark.parametrize("shape", [(5, 0, 12), (0, 3, 12)], ids=str)
def test_no_rows(shape, mode):
    tensors = leaves(shape[:2], shape[2], torch.bfloat16, mode)
    out, *found = outcome(rows.prepare, tensors, torch.zeros(shape, device=DEVICE), (2, 1), mode, 1e-5, "var")
    assert (out.shape, out.dtype) == (shape, torch.float32)
    assert (found[0].shape, found[0].dtype) == (shape, torch.bfloat16)
    assert all(d.shape == (12,) and not d.any() for d in found[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_takes_any_dtype_and_layout(dtype):
    x, gain, bias = leaves((4, 5), 51, torch.float32, "norm")
    d = randn(5, 4, 51, seed=4).to(DEVICE, dtype).transpose(0, 1)
    _, kept = rows._rows(x, gain, bias, (3,), "norm", 1e-5, "var")
    d_summed, d_parameters = rows._rows_backward(d, x, gain, kept, (3,), "norm", 1e-5, "var", True, torch.float32)
    wanted = outcome(composed, [t.double() for t in (x, gain, bias)], d.double(), (3,), "norm", 1e-5, "var")
    for got, want in zip((d_summed, *d_parameters), wanted[1:], strict=True):
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()


def test_input_of_any_layout():
    x, gain, bias = leaves((4, 5), 51, torch.float32, "norm")
    how = ((3,), "norm", 1e-5, "var")
    wanted = rows.prepare(x, gain, bias, *how)
    assert torch.equal(rows.prepare(x.transpose(0, 1), gain, bias, *how), wanted.transpose(0, 1))
    spread = torch.stack([gain, gain], 1)[:, 0]
    assert torch.equal(rows.prepare(x, spread, bias, *how), wanted)
    x = x.requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(rows.prepare(x, gain, bias, *how).sum(), x),
        torch.autograd.grad(composed(x, gain, bias, *how).sum(), x),
    )


def test_same_bits_every_time():
    tensors = leaves((37, 1), 1028, torch.bfloat16, "norm")
    upstream = randn(37, 1, 1028, seed=4).to(DEVICE)
    first, second = (outcome(rows.prepare, tensors, upstream, (4,), "norm", 1e-5, "var") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_frozen_parameter_gets_no_gradient():
    x, gain, bias = leaves((2, 3), 51, torch.float32, "norm")
    gain.requires_grad_()
    rows.prepare(x, gain, bias, (2, 1), "norm", 1e-5, "var").sum().backward()
    assert gain.grad is not None
    assert x.grad is None
    assert bias.grad is None


@pytest.mark.parametrize("mode", rows.MODES)
def test_second_derivatives(mode):
    """A gradient of gradients, through every input and through what arrives from above."""
    tensors = leaves((2, 3), 15, torch.float32, mode)
    upstream = randn(2, 3, 15, seed=4).float().to(DEVICE)
    found = []
    for function, dtype in ((rows.prepare, torch.float32), (composed, torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in tensors if t is not None]
        passed = [None if t is None else next(rest) for rest in [iter(given)] for t in tensors]
        d = upstream.to(dtype).requires_grad_()
        out = function(*passed, (2, 1), mode, 1e-3, "std")
        once = torch.autograd.grad(out, given, d, create_graph=True)
        weights = [randn(*g.shape, seed=5 + k).to(g) for k, g in enumerate(once)]
        twice = torch.autograd.grad(once, [*given, d], weights, allow_unused=True, materialize_grads=True)
        found.append(twice)
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)


@pytest.mark.parametrize("mode", rows.MODES)
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_operators_pass_torchs_own_checks(mode):
    tensors = [None if t is None else t.requires_grad_() for t in leaves((2, 3), 15, torch.float32, mode)]
    torch.library.opcheck(rows._rows, (*tensors, (2, 1), mode, 1e-5, "var"))
    x, gain, bias = (None if t is None else t.detach() for t in tensors)
    _, kept = rows._rows(x, gain, bias, (2, 1), mode, 1e-5, "var")
    saved = (x, gain, kept) if mode == "norm" else (None, None, None)
    args = (torch.ones_like(x), *saved, (2, 1), mode, 1e-5, "var", bias is not None, torch.bfloat16)
    torch.library.opcheck(rows._rows_backward, args)


@pytest.mark.parametrize("mode", rows.MODES)
@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_compiles_without_a_break(mode):
    tensors = leaves((4, 5), 51, torch.bfloat16, mode)
    upstream = randn(4, 5, 51, seed=4).to(DEVICE)
    compiled = torch.compile(rows.prepare, fullgraph=True, backend="aot_eager")
    how = ((2, 1), mode, 1e-5, "var")
    both = [outcome(f, tensors, upstream, *how) for f in (compiled, rows.prepare)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_rejects_what_a_mode_has_no_use_for():
    x, gain, bias = leaves((1, 2), 12, torch.float32, "norm")
    for given in ((gain, None, (4,), "centre"), (None, bias, (4,), "centre"), (gain, None, (4,), "plain")):
        with pytest.raises(InputError, match="has no use"):
            rows.prepare(x, *given, 1e-5, "var")
    with pytest.raises(InputError, match="mode must be one of"):
        rows.prepare(x, None, None, (4,), "normed", 1e-5, "var")
