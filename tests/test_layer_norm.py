"""The fused layer norm against the float64 reference: result, sum with a residual and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lamina
from lamina import functional, reference
from lamina.kernels import interpreted, is_small_norm

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


@pytest.fixture
def _in_pieces(monkeypatch):
    """Rows that do not fit, of any length here."""
    monkeypatch.setattr(kernels, "WIDEST", 8)
    monkeypatch.setattr(kernels, "WIDEST_BACK", 8)
    monkeypatch.setattr(kernels, "PIECE", 16)
    kernels.cut.cache_clear()
    yield
    kernels.cut.cache_clear()


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
    base = torch.randn(6, 4, 40, device=DEVICE)
    for x in (base[..., :24], base.transpose(0, 1), base[::2, 1:], base[..., ::2], base[:, :1].expand(6, 4, 40)):
        for residual in (None, x.flip(0)):
            got, want = (run(x, x.shape[-1:], residual=residual) for run in (by_kernel, by_reference))
            torch.testing.assert_close(got, want)


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
def test_what_is_small_is_left_to_torch_by_the_long_way_too(shape, form):
    x = torch.empty(shape, device=DEVICE)
    choice = lamina.explain(functional.layer_norm, x, shape[1:], eps=form[0], eps_mode=form[1])
    assert is_small_norm(x, *form) == (choice.backend == "torch")


@pytest.mark.gpu
def test_large_inputs_take_it_by_themselves():
    large, small = (torch.randn(n, 1024, device="cuda") for n in (65536, 64))
    assert lamina.explain(functional.layer_norm, large, (1024,)).backend == "triton"
    assert lamina.explain(functional.layer_norm, small, (1024,)).backend == "torch"
    with torch.autocast("cuda"):
        assert lamina.explain(functional.layer_norm, large, (1024,)).backend == "torch"


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
