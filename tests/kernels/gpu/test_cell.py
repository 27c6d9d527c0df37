"""The fused step of a cell against the float64 reference: new states and every gradient."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from contextlib import nullcontext

import pytest
import torch

import lamina
from lamina import reference
from lamina.kernels import cell as cells
from lamina.kernels import cell_product, forms, fused, interpreted, plans, prepared
from tests.cases import EVERY, assert_same, cast, everything, leaves, random_call, rounded_products
from tests.kernels.gpu.test_sequence import assert_as_good, problem

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")

ROWS = [row for row in EVERY if row[1] != "batch"]
IDS = ["-".join(map(str, row)) for row in ROWS]
FEW = [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", "layer", "paper"), ("GRU", "layer", "joint")]
SINGLE = torch.float32


def masks(row, batch, hidden, device):
    """Zoneout's masks and that of recurrent dropout."""
    count = 2 if row[0] == "LSTM" else 1
    keep = tuple((torch.rand(1, batch, hidden, device=device) < 0.5).float() for _ in range(count))
    return {"zoneout": keep, "recurrent_mask": 2 * (torch.rand(batch, hidden, device=device) < 0.5).float()}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_row(row, device):
    assert_as_good(lambda: problem(row, (1, 5, 7, 17), device), SINGLE, "cell")
    assert_as_good(lambda: problem(row, (1, 3, 4, 32), device, **masks(row, 3, 32, device)), SINGLE, "cell")


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(row, dtype, device):
    assert_as_good(lambda: problem(row, (1, 4, 9, 33), device), dtype, "cell")


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 31, 33, 127, 257])
def test_ugly_sizes(row, size, device):
    """Each of batch, inputs and units in turn."""
    for axis in range(2 if size > 33 and interpreted() else 1, 4):  # the interpreter runs a program for each row
        shape = tuple(size if n == axis else 1 if n == 0 else 3 for n in range(4))
        times = 8 if shape[3] <= 2 else 2  # a norm over one unit or two leaves a sign: whatever rounds is enlarged
        assert_as_good(lambda shape=shape: problem(row, shape, device), SINGLE, "cell", times)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_rates_and_the_other_epsilon(row, device):
    rates = (0.3, 0.4)[: 2 if row[0] == "LSTM" else 1]
    more = {"zoneout": rates, "eps_mode": "std", "eps": 1e-3}
    assert_as_good(lambda: problem(row, (1, 3, 2, 6), device, **more), SINGLE, "cell")


def test_relu(device):
    assert_as_good(lambda: problem(FEW[2], (1, 3, 2, 6), device, nonlinearity="relu"), SINGLE, "cell")


def test_more_rows_than_programs(device, monkeypatch):
    """Programs walk over rows and add up their shares."""
    monkeypatch.setattr("lamina.kernels.cell.processors", lambda device: 1)
    cells._kind.cache_clear()
    for row in FEW:
        assert_as_good(lambda row=row: problem(row, (1, 7, 3, 9), device), SINGLE, "cell")
    cells._kind.cache_clear()


# Both products in one launch. Every test here takes it where nothing else is said.


def amid_nans(tensor):
    """The same numbers with others around them that nobody may read."""
    room = tensor.new_full((tensor.numel() + 1024,), torch.nan)
    room[512:-512] = tensor.flatten()
    return room[512:-512].view(tensor.shape)


def kind_of(row, shape, dtype, device):
    """The kind of a call, and its input, h and matrices."""
    call = cast(random_call(*row, shape, dtype=torch.float32, device=device), dtype, dtype)
    given = [None if t is None else t.detach() for t in (*fused.tensors_of(call, None), None, None, None)]
    given[0] = given[0][0]
    return cells.kind_of(forms.setting_of(call, "cell"), given), [given[n] for n in (0, 1, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, SINGLE])
@pytest.mark.parametrize("batch", [1, 3, 16, 17, 64])
def test_products_of_ugly_sizes(batch, dtype, device):
    """Each number is one rounding from the truth, as the library's are, and nothing outside is read or left out."""
    for inputs, hidden in ((1, 257), (17, 100), (100, 1), (257, 17)):
        kind, tensors = kind_of(("RNN", None, None), (1, batch, inputs, hidden), dtype, device)
        assert kind._both_products() is not None
        x, h, w_x, w_h = map(amid_nans, tensors)
        for left, matrix, found in zip((x, h), (w_x, w_h), kind._multiplied(x, h, w_x, w_h)):
            want = left.double() @ matrix.double().t()
            with rounded_products() if device.type == "cuda" else nullcontext():  # TF32 is allowed there
                plain = reference.product(left, matrix)
            allowed = (plain.double() - want).norm() + 1e-7 * want.norm()
            assert found.dtype == dtype
            assert (found.double() - want).norm() <= 2 * allowed, (inputs, hidden)


@pytest.mark.parametrize(
    ("row", "shape", "dtype"),
    [
        (FEW[0], (1, 17, 257, 17), torch.bfloat16),
        (FEW[1], (1, 3, 17, 100), torch.float16),
        (FEW[2], (1, 1, 100, 257), SINGLE),
        (FEW[3], (1, 3, 1, 100), torch.bfloat16),
    ],
    ids=str,
)
def test_steps_of_ugly_sizes(row, shape, dtype, device):
    assert_as_good(lambda: problem(row, shape, device), dtype, "cell")


@pytest.mark.parametrize(("row", "dtype"), [*zip(FEW, (torch.bfloat16, SINGLE) * 2)], ids=str)
def test_the_librarys_products(row, dtype, device, monkeypatch):
    kind, _ = kind_of(row, (1, 4, 9, 33), dtype, device)
    assert kind._both_products() is not None
    monkeypatch.setitem(plans.OVERRIDE, "cell_product", False)
    assert kind._both_products() is None
    assert_as_good(lambda: problem(row, (1, 4, 9, 33), device), dtype, "cell")


def sizes(batch, hidden, itemsize=2, inputs=None, width=None):
    device = torch.device("cuda", 0)
    return cell_product.Sizes(batch, inputs or hidden, hidden, width or 4 * hidden, itemsize, False, device)


def test_how_products_are_cut(monkeypatch):
    """To a program for each multiprocessor, with all of its weights on their way, within its shared memory."""
    monkeypatch.setattr(plans, "processors", lambda device: 132)
    monkeypatch.setattr(plans, "shared_memory", lambda device: 199 * 1024)
    assert cell_product.cut(sizes(16, 512)) == cell_product.Cut(32, 16, 128, 5, 4)
    assert cell_product.launch(sizes(16, 512), cell_product.cut(sizes(16, 512)))[0] == 128
    assert cell_product.cut(sizes(16, 256)).columns == 16
    assert cell_product.cut(sizes(16, 1024)).columns == 64
    assert cell_product.cut(sizes(16, 512, itemsize=4)).depth == 64
    assert cell_product.cut(sizes(64, 512)) is not None
    assert cell_product.cut(sizes(64, 4096)) is None  # programs would read more of x and h than of the matrices
    assert cell_product.cut(sizes(32, 4096)) is not None
    assert cell_product.cut(sizes(65, 512)) is None
    for batch, hidden, itemsize in itertools.product((1, 17, 32, 64), (1, 100, 512, 1024, 8192), (2, 4)):
        cut = cell_product.cut(sizes(batch, hidden, itemsize))
        held = 0 if cut is None else cut.stages * cut.depth * itemsize * (cut.columns + cut.rows)
        assert held <= 128 * 1024


def test_float32_that_keeps_its_digits_is_the_librarys(device, monkeypatch):
    kind, _ = kind_of(FEW[0], (1, 3, 4, 5), SINGLE, device)
    monkeypatch.setattr(cells, "interpreted", lambda: False)
    for wanted in (True, False):
        with torch.backends.cudnn.flags(allow_tf32=wanted):
            assert (kind._both_products() is not None) == wanted
            assert kind_of(FEW[0], (1, 3, 4, 5), torch.bfloat16, device)[0]._both_products() is not None


# Launches past Triton's look at their arguments.


def noted_launches(device, monkeypatch):
    """Whether each went the quick way. Without a GPU the interpreter stands for compiled kernels, given addresses."""
    ways, live, nobody = [], [], types.SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    quickly = prepared.Launch.quickly

    def noted(launch, tensors):
        live[:] = tensors
        ways.append(quickly(launch, tensors))
        return ways[-1]

    def learn(launch, tensors):
        def run(x, y, z, stream, function, metadata, told, enter, leave, *values):
            assert [*values[: len(live)]] == [0 if t is None else t.data_ptr() for t in live]
            launch.kernel[x, y, z](*live, *values[len(live) :])

        launch.code.ready = run, None, None, nobody

    monkeypatch.setattr(prepared.Launch, "quickly", noted)
    if device.type != "cuda":
        monkeypatch.setattr(prepared.Launch, "learn", learn)
        for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
            monkeypatch.setattr(torch._C, name, lambda *index: None, raising=False)
    return ways


@pytest.fixture
def launches(device, monkeypatch):
    cells._kind.cache_clear()
    yield noted_launches(device, monkeypatch)
    cells._kind.cache_clear()


@pytest.mark.parametrize(("row", "dtype"), [*zip(FEW, (torch.bfloat16, SINGLE) * 2)], ids=str)
def test_quick_launches_give_the_same_bits(row, dtype, device, launches):
    call = cast(problem(row, (1, 3, 17, 9), device, **masks(row, 3, 9, device)), dtype, dtype)
    first, again = (everything(call, lambda c: fused.run(c, "cell")) for _ in range(2))
    assert launches == [False] * 3 + [True] * 3
    for name in first:
        assert torch.equal(first[name], again[name]), name


def test_addresses_and_hooks_decide_whether_a_launch_is_quick(device, launches, monkeypatch):
    cell = lamina.GRUCell(4, 8, backend="triton", device=device)
    x, h = torch.randn(3, 4, device=device), torch.randn(3, 8, device=device)
    with torch.no_grad():
        want = cell(x, h)
        assert torch.equal(cell(x, h), want)
        assert launches == [False, False, True, True]
        aside = torch.empty(13, device=device)[1:].view(3, 4).copy_(x)  # 4 bytes past a multiple of 16
        assert torch.equal(cell(aside, h), want)
        assert launches[4:] == [False, True]
        monkeypatch.setattr(prepared, "_hooked", lambda runtime: True)
        assert torch.equal(cell(x, h), want)
        assert launches[6:] == [False, False]


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("row", FEW, ids=str)
def test_without_a_state(row, device):
    """None is 0: the same numbers as zeros, and no gradient for what is not there."""
    call = cast(problem(row, (1, 3, 4, 9), device), SINGLE, SINGLE)
    zeros = tuple(torch.zeros_like(s) for s in call.state)
    want = reference.evaluate(dataclasses.replace(call, state=zeros))
    result = fused.run(dataclasses.replace(call, state=(None,) * len(zeros)), "cell")
    torch.testing.assert_close(result.output, want.output, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(result.output.sum(), call.weights.weight_hh, allow_unused=True)[0]
    assert found is None or not found.any()


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("row", FEW, ids=str)
def test_only_what_is_asked_for(row, device):
    """One state's gradient arrives, one tensor's is wanted."""
    call = cast(problem(row, (1, 3, 4, 9), device), SINGLE, SINGLE)
    for name in leaves(call):
        found, want = (
            torch.autograd.grad(run(call).state[0].square().sum(), leaves(call)[name])[0]
            for run in (lambda c: fused.run(c, "cell"), reference.evaluate)
        )
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    frozen = dataclasses.replace(call, weights=call.weights._replace(
        **{k: v.detach() for k, v in call.weights._asdict().items() if v is not None}))  # fmt: skip
    found = torch.autograd.grad(fused.run(frozen, "cell").output.sum(), call.input)[0]
    want = torch.autograd.grad(reference.evaluate(frozen).output.sum(), call.input)[0]
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("row", FEW, ids=str)
def test_twice_differentiable_by_the_references_route(row, device):
    call = cast(problem(row, (1, 3, 2, 5), device), SINGLE, SINGLE)
    grads = []
    for run in (lambda c: fused.run(c, "cell"), reference.evaluate):
        first = torch.autograd.grad(run(call).output.square().sum(), call.input, create_graph=True)[0]
        grads.append(torch.autograd.grad(first.square().sum(), call.weights.weight_ih)[0])
    assert_same([grads[0]], [grads[1]], 1e-4)


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_take_it_by_name(kind, device):
    cell = getattr(lamina, kind)(3, 9, backend="triton", device=device)
    other = getattr(lamina, kind)(3, 9, backend="reference", device=device)
    other.load_state_dict(cell.state_dict())
    x = torch.randn(4, 3, device=device)
    choice = lamina.explain(cell, x)
    assert (choice.backend, choice.path) == ("triton", "cell")
    state = state_other = None
    for _ in range(3):
        state, state_other = cell(x, state), other(x, state_other)
    torch.testing.assert_close(state, state_other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cell(x[0]), other(x[0]), rtol=1e-4, atol=1e-5)


def known(cell, device):
    """A cell that has seen a call of three cases, and what that gave."""
    x = torch.randn(3, 4, device=device)
    state = torch.randn(3, 5, device=device), torch.randn(3, 5, device=device)
    first, again = cell(x, state), cell(x, list(state))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert len(cell._fused) == 1
    return x, state, first


def test_a_call_like_one_before_is_not_looked_at_twice_unless_something_changed(device):
    """A new dtype, shape, parametrisation or mode is: it is served or refused as if it were the first."""
    cell = lamina.LSTMCell(4, 5, backend="triton", device=device)
    x, (h, c), want = known(cell, device)
    with torch.no_grad():
        assert torch.equal(cell(x, (h, c))[0], want[0])
    turned = torch.randn(5, 3, device=device).t()
    torch.testing.assert_close(cell(x, (turned, c)), cell(x, (turned.contiguous(), c)))
    with pytest.raises(lamina.InputError, match="of shape"):
        cell(x, (h[:2], c[:2]))
    with pytest.raises(lamina.InputError, match="one dtype"):
        cell(x, (h.double(), c))
    with pytest.raises(lamina.InputError, match="as hx"):
        cell(x, (h, None))
    twin = copy.deepcopy(cell)
    assert not twin._fused  # what is known of kernels and devices does not travel
    torch.testing.assert_close(twin(x, (h, c)), want)
    torch.nn.utils.parametrizations.weight_norm(cell, "weight_hh")
    for _ in range(2):
        torch.testing.assert_close(cell(x, (h, c)), want)
    cell.double()
    with pytest.raises(lamina.BackendError, match="float64"):
        cell(x.double(), (h.double(), c.double()))


def test_parameters_that_were_changed_are_looked_at_again(device):
    """Kernels are given addresses: what lies there must be what it was."""
    cell = lamina.LSTMCell(4, 5, backend="triton", device=device)
    x, state, want = known(cell, device)
    cell.weight_ih.data = cell.weight_ih.data.t().contiguous().t()
    cell.gain_cell.data = torch.stack([cell.gain_cell.data] * 2, 1)[:, 0]
    torch.testing.assert_close(cell(x, state), want)
    assert len(cell._fused) == 1
    bias, cell.bias_ih = cell.bias_ih, None
    changed = cell(x, state)[0]
    cell.bias_ih = torch.nn.Parameter(torch.zeros_like(bias))
    torch.testing.assert_close(cell(x, state)[0], changed)
    assert len(cell._fused) == 2
    cell.weight_hh.data = cell.weight_hh.data.half()
    with pytest.raises(RuntimeError, match="same dtype"):
        cell(x, state)
    cell.weight_hh.data = cell.weight_hh.data.float()[:, :3]
    with pytest.raises(lamina.InputError, match="the initial h"):
        cell(x, state)


def test_transforms_and_compilers_see_plain_operations(device):
    cell = lamina.GRUCell(4, 5, device=device)
    x = torch.randn(3, 4, device=device)
    want = cell(x)
    torch.testing.assert_close(torch.func.vmap(cell)(x), want)
    torch.testing.assert_close(torch.compile(cell, fullgraph=True, backend="eager")(x), want)
    named = lamina.GRUCell(4, 5, device=device, backend="triton")
    named(x)
    with pytest.raises(lamina.BackendError, match=r"torch\.func"):
        torch.func.vmap(named)(x)


def test_states_of_another_dtype_under_autocast(device):
    cell = lamina.LSTMCell(3, 9, backend="triton", device=device)
    x, h = torch.randn(4, 3, device=device), torch.randn(4, 9, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        out, c = cell(x, (h, torch.zeros_like(h)))
    assert out.dtype == torch.bfloat16
    (out.float().sum() + c.float().sum()).backward()
    assert h.grad.dtype == torch.float32
    assert cell.weight_hh.grad.dtype == torch.float32


def test_what_it_cannot_serve_it_refuses_with_words(device):
    x = torch.randn(2, 3, device=device)
    with pytest.raises(lamina.BackendError, match="mixes the cases"):
        lamina.LSTMCell(3, 4, norm="batch", backend="triton", device=device)(x)
    with pytest.raises(lamina.BackendError, match="at most 8192 units"):
        lamina.explain(lamina.RNNCell(3, 8193, backend="triton", device=device), x)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_captured_steps_give_the_same_numbers(kind):
    """A loop of steps, forward and backward, as one CUDA graph."""
    cell = getattr(lamina, kind)(16, 32, backend="triton", device="cuda")
    x = torch.randn(5, 4, 16, device="cuda")

    def train():
        state = None
        for frame in x:
            state = cell(frame, state)
        h = state[0] if isinstance(state, tuple) else state
        return [h, *torch.autograd.grad(h.square().sum(), list(cell.parameters()))]

    want = [t.detach().clone() for t in train()]  # a graph that lives on would tie the weights to this stream
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = train()
    for _ in range(3):
        graph.replay()
        for got, asked in zip(found, want, strict=True):
            assert torch.equal(got, asked)
