"""The fused layer norm against the float64 reference: result, sum with a residual and every gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import lamina
from lamina import functional, reference
from lamina.kernels import choose, interpreted, prepared
from tests.kernels.gpu.test_cell import noted_launches

pytest.importorskip("triton")
if not interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
norm = pytest.importorskip("lamina.kernels.norm")
kernels = pytest.importorskip("lamina.kernels.layer_norm")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")

DEVICE = "cpu" if interpreted() else "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What one rounding of a result costs on average; in float32 the order of sums besides.
FLOOR = {torch.float32: 3e-7, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
WIDTHS = (1, 3, 17, 255, 257) if interpreted() else (1, 2, 3, 17, 255, 256, 257, 768, 1000, 4096, 8192, 8193, 65537)


class Problem:
    """An input, and perhaps a gain, a bias and a residual."""

    def __init__(self, shape, width, *, gain=True, bias=True, residual=False, offset=0.0, **form):
        make = lambda *size: torch.randn(*size, dtype=torch.float64, device=DEVICE)  # noqa: E731
        self.axes, self.form = width if isinstance(width, tuple) else (width,), form
        self.x = make(*shape, *self.axes) + offset
        self.gain = make(*self.axes) + 1 if gain else None
        self.bias = make(*self.axes) if bias else None
        self.residual = make(*shape, *self.axes) if residual else None
        self.d, self.d_total = make(*shape, *self.axes), make(*shape, *self.axes)

    def found(self, dtype, run, at=None):
        """Everything, computed in ``dtype`` from what ``at`` can hold."""
        at = at or dtype
        named = {"x": self.x, "gain": self.gain, "bias": self.bias, "residual": self.residual}
        leaves = {k: v.to(at).to(dtype).requires_grad_() for k, v in named.items() if v is not None}
        out = run(
            leaves["x"], self.axes, leaves.get("gain"), leaves.get("bias"), residual=leaves.get("residual"), **self.form
        )
        outs = out if isinstance(out, tuple) else (out,)
        upstream = [d.to(at).to(dtype) for d in (self.d, self.d_total)[: len(outs)]]
        grads = torch.autograd.grad(outs, list(leaves.values()), upstream)
        return dict(zip(("out", "total"), outs)) | {f"d {k}": g for k, g in zip(leaves, grads)}


def by_reference(*given, **more):
    return functional.layer_norm(*given, **more, backend="reference")


def by_kernel(*given, **more):
    return functional.layer_norm(*given, **more, backend="triton")


def errors(problem, dtype):
    """Ours and the same-precision reference's, relative to the float64 reference."""
    truth = problem.found(torch.float64, by_reference, at=dtype)
    ours, plain = (problem.found(dtype, run) for run in (by_kernel, by_reference))
    found = {}
    for name, want in truth.items():
        assert ours[name].shape == want.shape
        assert ours[name].dtype == dtype
        size = max(want.norm().item(), 1e-2 * math.sqrt(want.numel()))
        found[name] = [(got[name].double() - want).norm().item() / size for got in (ours, plain)]
    return found


def assert_as_good(dtype, times, *given, **more):
    """At most ``times`` the reference's error; where one draw says no, the geometric mean of eight decides."""
    found = [errors(Problem(*given, **more), dtype)]
    if not all(e <= times * allowed + FLOOR[dtype] for e, allowed in found[0].values()):
        found += [errors(Problem(*given, **more), dtype) for _ in range(7)]
    for name in found[0]:
        error, allowed = (math.exp(sum(math.log(f[name][k] + 1e-12) for f in found) / len(found)) for k in (0, 1))
        assert error <= times * allowed + FLOOR[dtype], f"{name}: {error:.2g}, reference {allowed:.2g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width, dtype):
    assert_as_good(dtype, 8 if width <= 2 else 2, (7,), width)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, *kernels.ACTIVATIONS, "identity"])
def test_activations_and_residuals(activation, residual):
    for dtype in DTYPES[:2]:
        assert_as_good(dtype, 2, (3, 5), 33, activation=activation, residual=residual)


@pytest.mark.parametrize(("gain", "bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("residual", [False, True])
def test_without_gain_or_bias(gain, bias, residual):
    assert_as_good(torch.float32, 2, (6,), 20, gain=gain, bias=bias, residual=residual)


@pytest.mark.parametrize(("eps", "eps_mode"), [(0.0, "var"), (1e-2, "std"), (0.0, "std")])
def test_epsilons(eps, eps_mode):
    assert_as_good(torch.float32, 2, (6,), 20, eps=eps, eps_mode=eps_mode)


def forget():
    """All that is known of kinds of calls and their launches."""
    kernels.cut.cache_clear()
    kernels._code.cache_clear()
    norm._known.clear()


@pytest.fixture
def _in_pieces(monkeypatch):
    """Rows that do not fit, of any length here."""
    monkeypatch.setattr(kernels, "WIDEST", 8)
    monkeypatch.setattr(kernels, "WIDEST_BACK", 8)
    monkeypatch.setattr(kernels, "PIECE", 16)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("_in_pieces")
@pytest.mark.parametrize("width", [16, 17, 33, 100])
@pytest.mark.parametrize(
    "more", [{}, {"residual": True, "activation": "silu"}, {"gain": False, "bias": False}], ids=str
)
def test_rows_in_pieces(width, more):
    for dtype in DTYPES[:2]:
        assert_as_good(dtype, 2, (5,), width, **more)
    assert_as_good(torch.float32, 2, (5,), width, offset=1000.0, eps_mode="std", eps=1e-3, **more)


@pytest.mark.parametrize("width", [64, 257])
def test_a_large_mean_does_not_cancel(width):
    assert_as_good(torch.float32, 2, (9,), width, offset=1000.0)


@given(
    rows=st.integers(1, 40), width=st.integers(1, 70), gain=st.booleans(), bias=st.booleans(), residual=st.booleans(),
    activation=st.sampled_from([None, "relu", "gelu"]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_problem(rows, width, gain, bias, residual, activation, seed):
    torch.manual_seed(seed)
    more = {"gain": gain, "bias": bias, "residual": residual, "activation": activation}
    assert_as_good(torch.float32, 8 if width <= 4 else 3, (rows,), width, **more)


def test_any_leading_shape_axes_and_strides():
    assert_as_good(torch.float32, 2, (2, 3, 4), (5, 6))
    assert_as_good(torch.float32, 2, (), 19)
    base = torch.randn(6, 4, 40, device=DEVICE, requires_grad=True)
    for x in (base[..., :24], base.transpose(0, 1), base[::2, 1:], base[..., ::2], base[:, :1].expand(6, 4, 40)):
        for residual in (None, x.flip(0)):
            got, want = (run(x, x.shape[-1:], residual=residual) for run in (by_kernel, by_reference))
            torch.testing.assert_close(got, want)
            d = torch.randn(x.shape, device=DEVICE)
            outs = (got, want) if residual is None else (got[0], want[0])
            grads = [torch.autograd.grad(out, base, d, retain_graph=True) for out in outs]
            torch.testing.assert_close(*grads)


def test_parameters_whose_numbers_lie_apart():
    x = torch.randn(3, 5, device=DEVICE)
    both = torch.randn(2, 10, device=DEVICE, requires_grad=True)
    found, want = (
        functional.layer_norm(x, (5,), both[0, ::2], both[1, ::2], backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(found, want)
    grads = [torch.autograd.grad(out.square().sum(), both)[0] for out in (found, want)]
    torch.testing.assert_close(*grads)


def test_parameters_of_another_dtype():
    x, gain = (
        torch.randn(4, 24, device=DEVICE, dtype=torch.bfloat16),
        torch.randn(24, device=DEVICE, requires_grad=True),
    )
    got, want = (run(x, (24,), gain) for run in (by_kernel, by_reference))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    (d,) = torch.autograd.grad(got.sum(), gain)
    assert d.dtype == torch.float32


def test_a_nan_harms_its_own_row_alone():
    x = torch.randn(5, 33, device=DEVICE)
    want = by_kernel(x, (33,))
    x[2, 7] = math.nan
    got = by_kernel(x, (33,))
    assert got[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("value", [0.1, -3e4, 1e-30])
def test_a_constant_row_gives_the_bias(value):
    x, bias = torch.full((3, 37), value, device=DEVICE), torch.randn(37, device=DEVICE)
    for eps_mode in ("var", "std"):
        assert torch.equal(by_kernel(x, (37,), None, bias, 0.0, eps_mode), bias.expand(3, 37))


def test_only_one_of_the_outputs_is_used():
    problem = Problem((4,), 12, residual=True)
    x, r = (t.float().requires_grad_() for t in (problem.x, problem.residual))
    _, total = by_kernel(x, (12,), residual=r)
    d = torch.randn_like(total)
    assert all(torch.equal(g, d) for g in torch.autograd.grad(total, (x, r), d))
    found = [torch.autograd.grad(run(x, (12,), residual=r)[0], (x, r), d) for run in (by_kernel, by_reference)]
    torch.testing.assert_close(*found)


def test_gradients_of_gradients_take_the_references_route():
    x = torch.randn(3, 6, device=DEVICE, requires_grad=True)
    gain = torch.randn(6, device=DEVICE, requires_grad=True)
    found = []
    for run in (by_kernel, by_reference):
        (d,) = torch.autograd.grad(run(x, (6,), gain, activation="tanh").square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(d.square().sum(), (x, gain)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_same_bits_every_time():
    problem = Problem((50,), 40, residual=True, activation="gelu")
    first, second = (problem.found(torch.float32, by_kernel) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# Calls like one before.


@pytest.fixture
def launches(monkeypatch):
    """Whether each went the quick way."""
    forget()
    yield noted_launches(torch.device(DEVICE), monkeypatch)
    forget()


FORMS = [
    {}, {"residual": True, "activation": "silu"}, {"gain": False, "eps_mode": "std"}, {"bias": False},
    {"gain": False, "bias": False},
]  # fmt: skip


def assert_quick_the_second_time(launches, dtype, *given, **more):
    problem = Problem(*given, **more)
    first, again = (problem.found(dtype, by_kernel) for _ in range(2))
    half = len(launches) // 2
    assert launches == [False] * half + [True] * half
    for name in first:
        assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_quick_launches_give_the_same_bits(dtype, form, launches):
    assert_quick_the_second_time(launches, dtype, (2, 5), 33, **form)


@pytest.mark.usefixtures("_in_pieces")
@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_quick_launches_for_rows_in_pieces(form, launches):
    assert_quick_the_second_time(launches, torch.float32, (5,), 33, **form)


def test_other_numbers_of_rows_need_no_other_code(launches):
    problems = {rows: Problem((rows,), 33) for rows in (3, 50, 128, 1)}
    found = {rows: problem.found(torch.float32, by_kernel) for rows, problem in problems.items()}
    assert launches == [False] * 3 + [True] * 9
    for rows, problem in problems.items():
        forget()
        want = problem.found(torch.float32, by_kernel)
        assert all(torch.equal(found[rows][name], want[name]) for name in want), rows


def different_calls():
    """That are told apart by one thing each: of x, gain, bias, residual and the form."""
    wide, other = (torch.randn(6, 48, device=DEVICE) for _ in range(2))
    x, aside = wide[:, :24].contiguous(), torch.empty(145, device=DEVICE)[1:].view(6, 24)
    gain, bias = torch.randn(2, 24, device=DEVICE)
    usual = {"x": x, "gain": gain, "bias": bias, "residual": None, "eps": 1e-5, "eps_mode": "var", "activation": None}
    changes = (
        {}, {"x": wide[:, :24]}, {"x": wide[:, ::2]}, {"x": aside.copy_(x)}, {"x": x.view(2, 3, 24)}, {"x": x[:5]},
        {"x": x.bfloat16()}, {"x": x.bfloat16(), "gain": gain.bfloat16()}, {"gain": other[0, ::2]}, {"gain": None},
        {"bias": None}, {"bias": bias.half()}, {"residual": x}, {"residual": other[:, :24]}, {"eps": 0.5},
        {"eps": 0.5, "eps_mode": "std"}, {"activation": "relu"}, {"activation": "identity"},
        {"x": wide[:, :1].contiguous(), "gain": gain[:1], "bias": bias[:1]},
    )  # fmt: skip
    return [usual | change for change in changes]


def served(run, call):
    shape = call["x"].shape[-1:]
    return run(call["x"], shape, *(call[n] for n in ("gain", "bias", "eps", "eps_mode", "activation", "residual")))


def test_kinds_of_calls_are_told_apart(launches):
    calls, want = different_calls(), []
    for call in calls:
        forget()
        want.append(served(norm.run, call))
    forget()
    for run in (norm.run, norm.run, norm.again):
        before = len(launches)
        for call, wanted in zip(calls, want):
            apart = any(t is not None and t.stride(-1) != 1 for t in (call["x"], call["gain"]))
            found = served(run, call)
            assert (found is None) == (apart and run is norm.again)
            for got, first in zip(found or wanted, wanted):
                assert got is first is None or torch.equal(got, first), call
    # Two calls lie apart and are copied to be as the first; one is as the first but for its address.
    assert launches[before:].count(True) == len(norm._known) == len(calls) - 3


def test_a_whole_epsilon_does_not_change_what_is_compiled(launches):
    x = torch.randn(3, 8, device=DEVICE)
    found = [by_kernel(x, (8,), eps=eps) for eps in (1, 1.0, 1)]
    assert all(torch.equal(out, found[0]) for out in found)
    assert [type(kind._forward.constants["eps"]) for kind in norm._known.values()] == [float]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30)), min_size=1, max_size=4), st.integers(1, 4))
def test_rows_are_walked_over_where_torch_sees_them_so(axes, last):
    """One distance between rows whose numbers lie side by side: torch's own view says where that is so."""
    t = torch.empty(512).as_strided(*zip(*axes))
    last = min(last, len(axes))
    width = math.prod(t.shape[-last:])
    try:
        rows = t.view(-1, width)
    except RuntimeError:
        rows = None
    found = norm._row(t, last)
    assert (found is None) == (rows is None or (width > 1 and rows.stride(1) != 1))
    assert found is None or rows.shape[0] == 1 or found == rows.stride(0)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_only_the_wanted_gradients_are_formed(activation, launches):
    problem = Problem((4,), 20)
    tensors = {n: getattr(problem, n).float() for n in ("x", "gain", "bias")}
    d, all_of_them = problem.d.float(), None
    for wanted in [(True,) * 3, *itertools.product((True, False), repeat=3)][:-1]:
        leaves = {n: t.clone().requires_grad_(w) for (n, t), w in zip(tensors.items(), wanted)}
        out = by_kernel(leaves["x"], (20,), leaves["gain"], leaves["bias"], activation=activation)
        before = len(launches)
        out.backward(d)
        assert len(launches) - before == (2 if any(wanted[1:]) else 1)
        found = {n: t.grad for n, t in leaves.items()}
        all_of_them = all_of_them or found
        for (name, grad), w in zip(found.items(), wanted):
            assert torch.equal(grad, all_of_them[name]) if w else grad is None


def test_addresses_hooks_and_devices_decide_whether_a_launch_is_quick(launches, monkeypatch):
    x = torch.randn(3, 8, device=DEVICE)
    aside = torch.empty(25, device=DEVICE)[1:].view(3, 8).copy_(x)  # 4 bytes past a multiple of 16
    want = by_kernel(aside, (8,))
    results = [by_kernel(t, (8,)) for t in (x, x, aside, x)]
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_hooked", lambda runtime: True)
        results.append(by_kernel(x, (8,)))
    if interpreted():
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        results.append(by_kernel(x, (8,)))
    assert all(torch.equal(found, want) for found in results)
    if interpreted():  # whose kernels are learnt whatever the addresses
        assert launches == [False, True, True, False, True, False, False]
    else:
        assert launches == [False, False, True, False, True, False]


def test_what_more_than_autograd_sees_is_looked_at_again():
    x, gain = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    call = {"x": x, "gain": gain, "bias": None, "residual": x, "eps": 1.0, "eps_mode": "var", "activation": None}
    want = served(norm.run, call)[0]
    assert torch.equal(served(norm.again, call)[0], want)
    assert served(norm.again, call | {"residual": x[:2]}) is None
    assert served(norm.again, call | {"eps": True}) is None
    assert torch.equal(served(norm.run, call | {"eps": 1})[0], want)
    with torch.autocast(DEVICE):
        assert served(norm.again, call) is None
    with torch.autograd.forward_ad.dual_level():
        assert served(norm.again, call) is None
    with TorchDispatchMode():
        assert served(norm.again, call) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(served(norm.again, call)) or row)(x)
    torch.func.grad(lambda g: seen.append(served(norm.again, call | {"gain": g})) or g.sum())(gain)
    torch.compile(lambda t: seen.append(served(norm.again, call)) or t, backend="eager")(x)
    assert seen == [None] * 3


def test_layers_take_it_by_name():
    layer = lamina.LayerNorm(12, activation="relu", backend="triton").to(DEVICE)
    x, residual = torch.randn(2, 4, 12, device=DEVICE)
    out, total = layer(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, torch.relu(reference.layer_norm(total, (12,), layer.weight, layer.bias)))
    assert lamina.explain(layer, x).backend == "triton"
    assert "relu" in repr(layer)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"dtype": torch.float64}, "float64"), ({"rows": 0}, "empty")],
)
def test_what_it_cannot_serve_it_refuses_with_words(change, word):
    x = torch.randn(change.get("rows", 3), 8, device=DEVICE, dtype=change.get("dtype", torch.float32))
    with pytest.raises(lamina.BackendError, match=word):
        by_kernel(x, (8,))
    assert functional.layer_norm(x, (8,)).shape == x.shape


def test_bad_neighbours_are_refused_with_words():
    x = torch.randn(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match="residual"):
        functional.layer_norm(x, (8,), residual=x[:2])
    with pytest.raises(ValueError, match="activation"):
        functional.layer_norm(x, (8,), activation="swish")


def test_function_transforms_go_to_torch():
    x = torch.randn(3, 8, device=DEVICE)
    got = torch.func.vmap(lambda row: functional.layer_norm(row, (8,)))(x)
    torch.testing.assert_close(got, reference.layer_norm(x, (8,)))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (1, 2**20)])
@pytest.mark.parametrize("form", [(1e-5, "var"), (0.0, "var"), (1e-5, "std")])
def test_what_no_record_has_measured_is_taken_by_name_only(shape, form):
    """On a GPU too, where explain names the other way."""
    x = torch.empty(shape, device=DEVICE)
    choice = lamina.explain(functional.layer_norm, x, shape[1:], eps=form[0], eps_mode=form[1])
    assert choice.backend == ("torch" if form == (1e-5, "var") else "reference")
    request = functional.norm_request(x, shape[1:], *form)
    on_a_gpu = choose(dataclasses.replace(request, device=torch.device("cuda")))
    assert on_a_gpu.backend == choice.backend
    assert "backend='triton'" in on_a_gpu.reason


@pytest.mark.gpu
def test_inside_a_cuda_graph():
    x = torch.randn(64, 300, device="cuda")
    by_kernel(x, (300,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_kernel(x, (300,))
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, reference.layer_norm(x, (300,)))
