"""The CPU's kernels against the float64 reference: outputs, final states and every gradient, and as good citizens."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lamina
from lamina import functional, reference
from lamina.kernels import fused
from lamina.kernels.cpu import layer as cpu
from lamina.kernels.cpu import machine, team
from tests.cases import CELLS, EVERY, assert_same, cast, everything, leaves, random_call
from tests.kernels.gpu.test_sequence import assert_as_good, problem

pytest.importorskip("numba")
ROWS = [row for row in EVERY if row[1] != "batch"]
IDS = ["-".join(map(str, row)) for row in ROWS]
FEW = [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", "layer", "paper"), ("GRU", "layer", "joint")]
CPU, ROOT = torch.device("cpu"), Path(__file__).parents[3]


def run(call):
    return fused.run(call, "cpu")


def assert_equals_reference(call, bound=1e-11):
    """In float64, where rounding hides nothing."""
    got, want = everything(call, run), everything(cast(call, torch.float64, torch.float64), reference.evaluate)
    assert_same(list(got.values()), list(want.values()), bound, list(got))


def extras(row, steps, batch, hidden):
    """Ragged, restarted, masked and dropped."""
    count = 2 if row[0] == "LSTM" else 1
    resets = torch.rand(steps, batch) < 0.3
    return {
        "lengths": torch.randint(0, steps + 1, (batch,)), "resets": resets,
        "zoneout": tuple((torch.rand(steps, batch, hidden) < 0.5).double() for _ in range(count)),
        "recurrent_mask": 2 * (torch.rand(batch, hidden) < 0.5).double(),
    }  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_row(row, threads):
    torch.set_num_threads(threads)
    assert_equals_reference(problem(row, (5, 3, 7, 17), CPU))
    assert_equals_reference(problem(row, (4, 9, 3, 32), CPU, reverse=True))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_ragged_restarted_masked_and_dropped(row):
    for reverse in (False, True):
        assert_equals_reference(problem(row, (6, 4, 3, 9), CPU, reverse=reverse, **extras(row, 6, 4, 9)))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_zoneout_rates_and_the_other_epsilon(row):
    rates = (0.3, 0.4)[: 2 if row[0] == "LSTM" else 1]
    assert_equals_reference(problem(row, (5, 3, 2, 6), CPU, zoneout=rates, eps_mode="std", eps=1e-3))


def test_relu():
    assert_equals_reference(problem(("RNN", "layer", "paper"), (5, 3, 2, 6), CPU, nonlinearity="relu"))
    assert_equals_reference(problem(("RNN", None, None), (5, 3, 2, 6), CPU, nonlinearity="relu"))


SIZES = (1, 2, 3, 17, 31, 33, 100, 257)


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_ugly_sizes(row, size):
    """Each of steps, batch, inputs and units in turn, in float32 against the reference's own error."""
    for axis in range(4):
        shape = tuple(size if n == axis else 3 for n in range(4))
        times = 8 if shape[3] <= 2 else 2  # a norm over one unit or two leaves a sign: whatever rounds is enlarged
        assert_as_good(lambda shape=shape: problem(row, shape, CPU), torch.float32, "cpu", times)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_one_row_whose_columns_threads_share(row, monkeypatch):
    monkeypatch.setattr("lamina.kernels.cpu.layer.SHARE", 1)
    torch.set_num_threads(2)
    assert_equals_reference(problem(row, (5, 1, 3, 33), CPU))


@pytest.mark.parametrize("row", FEW, ids=str)
@pytest.mark.parametrize(("threads", "batch"), [(2, 5), (3, 2), (3, 9), (8, 3), (8, 20)])
def test_rows_whose_columns_threads_share(row, threads, batch, monkeypatch):
    """A small batch with a large matrix: threads split the product's columns, and meet before and after it."""
    monkeypatch.setattr("lamina.kernels.cpu.layer.LARGE", 0)
    torch.set_num_threads(threads)
    for hidden in (3, 33, 70):  # fewer vectors than threads, too
        assert_equals_reference(problem(row, (5, batch, 3, hidden), CPU))
        assert_equals_reference(problem(row, (5, batch, 3, hidden), CPU, **extras(row, 5, batch, hidden)))


def test_threads_share_columns_where_each_has_few_rows_of_a_large_matrix():
    torch.set_num_threads(2)
    large, small = torch.empty(4 * 400, 400), torch.empty(4 * 100, 100)
    shared = {batch: cpu._division(batch, large) for batch in (1, 2, 6, 8, 64)}
    assert shared == {1: (2, True), 2: (2, True), 6: (2, True), 8: (2, True), 64: (2, False)}
    assert cpu._division(4, small) == (2, False)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 7, 8, 9, 12, 13, 16, 21])
def test_products_whose_last_panel_is_half_padding(rows):
    """Widths of up to one vector beyond whole panels, for either kind of product."""
    panel = machine.panel_width(4)
    for columns in (1, panel // 2, panel // 2 + 1, panel + 3, 2 * panel + panel // 2, 3 * panel + panel // 2 + 1):
        left, weight = torch.randn(rows, 19), torch.randn(19, columns)
        out, turned = torch.full((rows, columns), torch.nan), torch.full((rows, columns), torch.nan)
        cpu.multiply(left, weight, False, out)
        cpu.multiply(left, weight.t().contiguous(), True, turned)
        want = left.double() @ weight.double()
        assert torch.allclose(out.double(), want, atol=1e-5)
        assert torch.equal(out, turned)
        gradient, right = torch.full((19, columns), torch.nan), torch.randn(rows, columns)
        cpu.add_outer(left, right, gradient, False)
        assert torch.allclose(gradient.double(), left.double().t() @ right.double(), atol=1e-5)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_products_of_many_rows(row):
    """In whole panels and past them; backward in several chunks."""
    for hidden in (8, 11):
        assert_equals_reference(problem(row, (67, 9, 5, hidden), CPU), 1e-9)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(("norm", "ones"), [(None, True), (None, False), ("layer", True)])
def test_gradients_over_many_rows_are_as_exact_as_torchs(cell, norm, ones):
    """A running float32 sum over 2^16 rows is off by 1e-5: biases, gains and matrices are summed in blocks."""
    steps, batch, width = 2, 2**15, 8
    make = partial(getattr(lamina, cell), width, width, norm=norm)
    layer, exact = make(backend="numba"), make(backend="reference", dtype=torch.float64)
    other = make(backend="reference") if norm else getattr(torch.nn, cell)(width, width)
    for one in (other, exact):
        one.load_state_dict(layer.state_dict())
    x = torch.randn(steps, batch, width)
    upstream = torch.ones_like(x) if ones else torch.randn_like(x)
    found = []
    for one in (layer, other, exact):
        dtype = one.weight_ih_l0.dtype
        leaves = [x.to(dtype).requires_grad_(), *one.parameters()]
        found.append(torch.autograd.grad(one(leaves[0])[0], leaves, upstream.to(dtype)))
    for name, got, theirs, want in zip(["input", *dict(layer.named_parameters())], *found, strict=True):
        errors = [((some - want).norm() / want.norm()).item() for some in (got, theirs)]
        assert errors[0] <= 4 * errors[1] + 5e-8, (name, errors)


@settings(max_examples=250)
@given(
    row=st.sampled_from(ROWS), shape=st.tuples(*(st.integers(1, 7) for _ in range(3)), st.integers(1, 40)),
    more=st.booleans(), reverse=st.booleans(), threads=st.sampled_from((1, 2, 3, 8)), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_problem(row, shape, more, reverse, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    options = extras(row, shape[0], shape[1], shape[3]) if more else {}
    assert_equals_reference(problem(row, shape, CPU, reverse=reverse, **options), 1e-7)


@pytest.mark.parametrize("row", FEW, ids=str)
def test_gradcheck(row):
    call = problem(row, (3, 2, 2, 3), CPU)
    named = leaves(call)

    def outputs(*tensors):
        by_name = dict(zip(named, tensors))
        weights = call.weights._replace(**{k: v for k, v in by_name.items() if k not in ("input", "h", "c")})
        states = tuple(by_name[k] for k in "hc" if k in by_name)
        from dataclasses import replace

        found = run(replace(call, input=by_name["input"], state=states, weights=weights))
        return (found.output, *found.state)

    assert torch.autograd.gradcheck(outputs, tuple(named.values()))


def test_twice_differentiable_by_the_references_route():
    call = problem(FEW[0], (3, 2, 2, 3), CPU)
    first = torch.autograd.grad(run(call).output.sum(), call.input, create_graph=True)[0]
    want = torch.autograd.grad(reference.evaluate(call).output.sum(), call.input, create_graph=True)[0]
    grads = [torch.autograd.grad(g.square().sum(), call.weights.weight_hh)[0] for g in (first, want)]
    assert_same([grads[0]], [grads[1]], 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_take_it_by_themselves(dtype):
    layer = lamina.LSTM(3, 5, 2, bidirectional=True, dtype=dtype)
    other = lamina.LSTM(3, 5, 2, bidirectional=True, dtype=dtype, backend="reference")
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 3, dtype=dtype)
    choice = lamina.explain(layer, x)
    assert (choice.backend, choice.path) == ("numba", "cpu")
    torch.testing.assert_close(layer(x)[0], other(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"dtype": torch.bfloat16}, "bfloat16"), ({"proj_size": 2}, "proj_size")],
)
def test_what_it_cannot_serve_it_refuses_with_words(options, word):
    layer = lamina.LSTM(3, 5, backend="numba", **options)
    x = torch.randn(4, 2, 3, dtype=options.get("dtype", torch.float32))
    with pytest.raises(lamina.BackendError, match=word):
        layer(x)
    automatic = lamina.LSTM(3, 5, **options)
    assert lamina.explain(automatic, x).backend == "reference"
    assert word in lamina.explain(automatic, x).reason


def test_without_numba_the_reference_serves(monkeypatch):
    monkeypatch.setattr("lamina.kernels.HAS_NUMBA", False)
    monkeypatch.setattr("lamina.notices._given", {"numba"})
    layer, x = lamina.LSTM(3, 5), torch.randn(4, 2, 3)
    choice = lamina.explain(layer, x)
    assert choice.backend == "reference"
    assert "pip install numba" in choice.reason
    assert layer(x)[0].shape == (4, 2, 5)


def test_without_numba_or_llvm_in_the_process_at_all():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("numba", "llvmlite") else found(name, *more)
sys.meta_path.insert(0, Absent())
import torch, lamina
layer, x = lamina.GRU(3, 5), torch.randn(4, 2, 3, requires_grad=True)
layer(x)[0].sum().backward()
step = lamina.stream(layer.eval())
step(torch.zeros(1, 3))
print(lamina.explain(layer, x).backend, step.choice.backend)
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["reference", "reference"], found.stderr


FIRST = """
import sys, torch, lamina
layer, x = lamina.RNN(3, 4), torch.ones(2, 2, 3)
torch.manual_seed(1)
for p in layer.parameters():
    torch.nn.init.uniform_(p, -1, 1)
with torch.no_grad():
    print("numba" in sys.modules, layer(x)[0].sum().item(), "numba" in sys.modules)
"""


@pytest.mark.slow
def test_code_is_kept_and_whatever_is_not_whole_is_made_anew(tmp_path):
    def first():
        told = {**os.environ, "LAMINA_CACHE": str(tmp_path)}
        found = subprocess.run([sys.executable, "-c", FIRST], cwd=ROOT, env=told, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return found.stdout.split()

    before, number, after = first()
    assert (before, after) == ("False", "True")
    assert first() == ["False", number, "False"]
    kept = sorted(tmp_path.rglob("*.code"))
    for n, place in enumerate(kept):
        data = place.read_bytes()
        place.write_bytes((data[:-7], b"", data[:300] + b"x" + data[301:])[n % 3])
    assert first() == ["False", number, "True"]
    assert first() == ["False", number, "False"]


def test_another_cpu_or_source_has_another_folder(monkeypatch):
    machine.digest.cache_clear()
    before = machine.digest()
    found = {before}
    for name, value in (("features", lambda: ("znver9", "+avx2")), ("SOURCES", machine.SOURCES[1:])):
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, value)
            machine.digest.cache_clear()
            found.add(machine.digest())
    machine.digest.cache_clear()
    assert len(found) == 3
    every = {place.name for place in Path(machine.__file__).parent.glob("*.py")}
    not_compiled = {"__init__.py", "layer.py", "batch_layer.py", "cell.py", "code_cache.py", "stream.py", "team.py"}
    assert every - set(machine.SOURCES) == not_compiled


def test_nothing_is_imported_before_it_is_used():
    code = "import sys, lamina; lamina.LSTM(3, 4); sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_compiled_whole_and_exported():
    layer = lamina.LSTM(3, 5)
    x = torch.randn(4, 2, 3)
    want = layer(x)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], want)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x)[0], want)


def test_several_threads_at_once():
    torch.set_num_threads(2)
    layer = lamina.GRU(8, 33)
    xs = [torch.randn(20, 5, 8) for _ in range(8)]
    want = [layer(x)[0].detach() for x in xs]
    found = [None] * 8

    def work(n):
        for _ in range(5):
            found[n] = layer(xs[n])[0].detach()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_works_alone():
    code = """
import os, torch, lamina
torch.set_num_threads(2)
layer, x = lamina.LSTM(3, 7), torch.randn(5, 4, 3)
want = layer(x)[0].detach()
child = os.fork()
if child == 0:
    from lamina.kernels.cpu import team
    torch.set_num_threads(1)
    os._exit(not (torch.allclose(layer(x)[0], want, atol=1e-6) and team.threads() == 1))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.slow
def test_other_instruction_sets(tmp_path):
    """AVX2 only: the same numbers, from code of its own."""
    code = """
import torch, lamina
from lamina.kernels.cpu import machine
torch.manual_seed(0)
layer, other = lamina.LSTM(9, 37), lamina.LSTM(9, 37, backend="reference")
other.load_state_dict(layer.state_dict())
x = torch.randn(7, 13, 9)
(a,), (b,) = (torch.autograd.grad(m(x)[0].sum(), [m.weight_hh_l0]) for m in (layer, other))
torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print(lamina.explain(layer, x).backend, machine.vector_bytes())
"""
    features = "+avx,+avx2,+fma,+sse4.2"
    place = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features, "LAMINA_CACHE": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **place}, capture_output=True, text=True
    )
    assert found.stdout.split() == ["numba", "32"], found.stderr


def test_functional_takes_it_by_name():
    call = random_call("GRU", "layer", "paper", (3, 2, 4, 5))
    out, h = functional.gru(call.input, call.state[0], call.weights, backend="numba")
    want, h_want = functional.gru(call.input, call.state[0], call.weights, backend="reference")
    assert_same([out, h], [want, h_want], 1e-11)


def test_one_thread_where_torchs_library_is_not_found(monkeypatch):
    monkeypatch.setattr(team, "library", lambda: None)
    torch.set_num_threads(2)
    assert team.threads() == 1


# Others who look on.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("kind", "shape"), [("LSTM", (4, 2, 3)), ("GRUCell", (2, 3))])
def test_traced(kind, shape):
    """torch.jit.trace gets plain operations, before and after a call that was none of its business."""
    layer = getattr(lamina, kind)(3, 5).eval()
    for _ in range(2):
        with torch.no_grad():
            traced = torch.jit.trace(layer, torch.randn(shape), check_trace=False)
            x = torch.randn(shape)
            torch.testing.assert_close(traced(x)[0], layer(x)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(lamina.BackendError, match=r"torch\.jit\.trace"):
        torch.jit.trace(getattr(lamina, kind)(3, 5, backend="numba"), torch.randn(shape), check_trace=False)


@pytest.mark.parametrize(("kind", "shape"), [("LSTM", (4, 2, 3)), ("LSTMCell", (2, 3))])
def test_fake_tensors_have_shapes_and_no_numbers(kind, shape):
    with FakeTensorMode():
        layer = getattr(lamina, kind)(3, 5)
        for _ in range(2):
            out = layer(torch.randn(shape))[0]
            assert out.shape == (*shape[:-1], 5)
        out.sum().backward()
        assert all(p.grad.shape == p.shape for p in layer.parameters())


def test_a_mode_sees_the_operator_and_the_numbers_are_the_same():
    layer, x = lamina.LSTM(3, 5), torch.randn(4, 2, 3)
    want = layer(x)[0]
    seen = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Looks():
        assert torch.equal(layer(x)[0], want)
    assert any("lamina.sequence" in name for name in seen)


# Cells.


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_cells_take_it_by_themselves(row):
    """The first call, which is looked at, and those like it, which are not: values and gradients of several steps."""
    cell, norm, placement = row
    layer = getattr(lamina, f"{cell}Cell")(4, 9, norm=norm, placement=placement, dtype=torch.float64)
    other = getattr(lamina, f"{cell}Cell")(
        4, 9, norm=norm, placement=placement, dtype=torch.float64, backend="reference"
    )
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    assert lamina.explain(layer, x[0]).path == "cpu"

    def trained(model):
        state = None
        for frame in x:
            state = model(frame, state)
        h = state[0] if cell == "LSTM" else state
        return [h, *torch.autograd.grad(h.square().sum(), list(model.parameters()))]

    want = trained(other)
    for _ in range(2):
        assert_same(trained(layer), want, 1e-11)
    assert bool(layer._fused) == (norm != "weight")
    with torch.no_grad():
        got, asked = layer(x[0].t().contiguous().t()), other(x[0])
    assert_same(got if cell == "LSTM" else [got], asked if cell == "LSTM" else [asked], 1e-12)


def test_large_cells_are_torchs():
    layer, x = lamina.GRUCell(4, 600), torch.randn(2, 4)
    assert "products" in lamina.explain(layer, x).reason
    assert layer(x).shape == (2, 600)
    assert lamina.explain(lamina.GRUCell(4, 600, backend="numba"), x).path == "cpu"


def test_a_cell_survives_copies_and_pickles():
    layer, x = lamina.LSTMCell(3, 5), torch.randn(2, 3)
    want = layer(x)[0]
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(made(x)[0], want)


# One frame at a time.


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    ("batch", "layers", "inputs", "hidden"), [(1, 1, 128, 128), (1, 3, 17, 33), (3, 2, 5, 100), (9, 1, 31, 257)]
)
def test_a_stream_gives_the_sequences_bits(cell, batch, layers, inputs, hidden):
    """Not only nearly: an LSTM enlarges the last bit of a sum a thousandfold in fifty frames."""
    layer = getattr(lamina, cell)(inputs, hidden, layers, zoneout=0.1, learn_initial_state=True).eval()
    step, x = lamina.stream(layer, batch), torch.randn(300, batch, inputs)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            want, state = layer(x)
        assert torch.equal(torch.stack([step(frame) for frame in x]), want)
        for got, asked in zip(step.state, state):
            assert torch.equal(got, asked)
        step.reset()
    assert step.choice.backend == "numba"


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_gives_the_same_bits_cut_anywhere_on_any_threads(cell, batch, dtype, monkeypatch):
    monkeypatch.setattr("lamina.kernels.cpu.layer.SHARE", 1)  # of one row too
    monkeypatch.setattr("lamina.kernels.cpu.layer.WORTH", 1)
    layer, x = getattr(lamina, cell)(19, 37, dtype=dtype), torch.randn(200, batch, 19, dtype=dtype)
    torch.set_num_threads(1)
    want, state = layer(x)
    torch.set_num_threads(3)
    for cut in (1, 7, 60, 199):
        first, middle = layer(x[:cut])
        second, end = layer(x[cut:], middle)
        assert torch.equal(torch.cat([first, second]), want)
        for got, asked in zip(end, state):
            assert torch.equal(got, asked)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 127, 300])
def test_products(rows, turned, threads, monkeypatch):
    """Of few columns and many, shared by columns and by rows, against torch's in float64."""
    monkeypatch.setattr("lamina.kernels.cpu.layer.WORTH", 1)
    torch.set_num_threads(threads)
    for depth, columns in ((1, 1), (3, 31), (17, 33), (40, 257), (530, 70), (64, 128)):
        left = torch.randn(rows, depth, dtype=torch.float64)
        weight = torch.randn((columns, depth) if turned else (depth, columns), dtype=torch.float64)
        out = torch.full((rows, columns), float("nan"), dtype=torch.float64)
        cpu.multiply(left, weight, turned, out)
        assert_same([out], [left @ (weight.t() if turned else weight)], 1e-13)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 7, 256, 300, 515])
def test_products_for_gradients(rows, dtype, threads, monkeypatch):
    """The transpose of one matrix times another, written or added, against torch's in float64."""
    monkeypatch.setattr("lamina.kernels.cpu.layer.WORTH", 1)
    torch.set_num_threads(threads)
    for height, width in ((1, 1), (3, 31), (33, 17), (40, 257), (530, 70), (128, 64)):
        left, right = torch.randn(rows, height, dtype=dtype), torch.randn(rows, width, dtype=dtype)
        out, want = torch.full((height, width), float("nan"), dtype=dtype), left.double().t() @ right.double()
        for times in (1, 2):
            cpu.add_outer(left, right, out, times > 1)
            assert_same([out.double()], [times * want], 1e-13 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_case_has_the_same_bits_whatever_the_lengths_of_others(cell, threads):
    torch.set_num_threads(threads)
    layer, x = getattr(lamina, cell)(7, 40), torch.randn(9, 6, 7)
    lengths = torch.tensor([3, 9, 1, 6, 6, 2])
    with torch.no_grad():
        output, state = layer(x, lengths=lengths)
        whole, _ = layer(x)
    h = state[0] if cell == "LSTM" else state
    for case, length in enumerate(lengths.tolist()):
        assert torch.equal(output[:length, case], whole[:length, case])
        assert not output[length:, case].any()
        assert torch.equal(h[0, case], whole[length - 1, case])


@pytest.mark.parametrize("again", [False, True], ids=["once", "differentiable"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_padding_is_not_read(cell, again):
    """It may hold NaN, also where gradients are to be differentiated."""
    layer, lengths = getattr(lamina, cell)(3, 8, dtype=torch.float64), torch.tensor([2, 5, 0, 4])
    x, found = torch.randn(5, 4, 3, dtype=torch.float64), []
    for padding in (0.0, float("nan")):
        own = x.clone()
        for case, length in enumerate(lengths):
            own[length:, case] = padding
        own.requires_grad_()
        output, state = layer(own, lengths=lengths)
        ends = [output.square().sum(), *(s.sum() for s in (state if cell == "LSTM" else (state,)))]
        found.append(torch.autograd.grad(sum(ends), [own, *layer.parameters()], create_graph=again))
    assert_same(found[1], found[0], 0.0)


@pytest.mark.parametrize("training", [True, False])
def test_padding_is_not_multiplied(training, monkeypatch):
    """Neither by the input's matrix nor for its gradient, nor in the gradients of matrices."""
    counts, multiply, add_outer = {"products": 0, "gradients": 0}, cpu.multiply, cpu.add_outer

    def counted(left, *rest):
        counts["products"] += left.shape[0]
        multiply(left, *rest)

    def counted_gradient(left, *rest):
        counts["gradients"] += left.shape[0]
        add_outer(left, *rest)

    monkeypatch.setattr(cpu, "multiply", counted)
    monkeypatch.setattr(cpu, "add_outer", counted_gradient)
    layer, x, lengths = lamina.LSTM(7, 40), torch.randn(9, 6, 7, requires_grad=True), torch.tensor([3, 9, 1, 6, 6, 2])
    with torch.set_grad_enabled(training):
        output = layer(x, lengths=lengths)[0]
    if training:
        output.sum().backward()
        assert not x.grad[3:, 0].any()
    steps = int(lengths.sum())
    assert counts == {"products": steps * (1 + training), "gradients": 2 * steps * training}


@pytest.mark.parametrize("kind", ["RNNCell", "LSTMCell", "GRUCell"])
def test_a_cell_is_fused_where_that_is_faster(kind):
    """Up to 512 units where gradients are recorded, up to 1,024 where they are not, call after call."""
    for units, training, path in ((512, True, "cpu"), (513, True, ""), (513, False, "cpu"), (1025, False, "")):
        cell, x = getattr(lamina, kind)(2, units), torch.randn(1, 2)
        with torch.set_grad_enabled(training):
            assert lamina.explain(cell, x).path == path
    cell = getattr(lamina, kind)(2, 513)
    with torch.no_grad():
        cell(x)
    state = cell(x)
    h = state[0] if kind == "LSTMCell" else state
    assert "_Sequence" not in str(h.grad_fn)


def test_a_stream_where_kernels_do_not_serve():
    layer = lamina.LSTM(5, 7, proj_size=3, batch_first=True).eval()
    step, x = lamina.stream(layer, 2), torch.randn(2, 4, 5)
    with torch.no_grad():
        want, (h, c) = layer(x)
    torch.testing.assert_close(torch.stack([step(x[:, t]) for t in range(4)], 1), want)
    torch.testing.assert_close(step.state, (h, c))
    assert "proj_size" in step.choice.reason


def test_a_stream_goes_on_from_a_given_state_and_takes_new_weights():
    layer = lamina.GRU(5, 6).eval()
    step, x = lamina.stream(layer), torch.randn(4, 1, 5)
    h = torch.randn(1, 1, 6)
    step.reset(h)
    with torch.no_grad():
        torch.testing.assert_close(step(x[0]), layer(x[:1], h)[0][0], rtol=1e-5, atol=1e-6)
        layer.weight_ih_l0.mul_(2)
        step.reset()
        torch.testing.assert_close(step(x[0][0]), layer(x[:1])[0][0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_stream_takes_loaded_weights_and_keeps_its_state(backend, assign):
    layer, other = (lamina.LSTM(5, 6, 2, backend=backend).eval() for _ in range(2))
    step, x = lamina.stream(layer, 3), torch.randn(2, 3, 5)
    with torch.no_grad():
        _, state = layer(x[:1])
        step(x[0])
        layer.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=assign)
        want, state = other(x[1:], state)
        torch.testing.assert_close(step(x[1]), want[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step.state, state, rtol=1e-5, atol=1e-6)
        layer.double()
        assert step(x[1].double()).dtype is torch.float64


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("again", ["refresh", "reset", "reset a case"])
def test_a_stream_reloads_weights_that_torch_does_not_count(backend, again):
    """A target network is often updated through ``parameter.data``, which no version counter sees."""
    layer, x = lamina.GRU(5, 6, backend=backend).eval(), torch.randn(2, 5)
    step = lamina.stream(layer, 2)
    layer.weight_ih_l0.data.mul_(-1)
    {"refresh": step.refresh, "reset": step.reset, "reset a case": lambda: step.reset(cases=[0])}[again]()
    torch.testing.assert_close(step(x), layer(x.unsqueeze(0))[0][0], rtol=1e-5, atol=1e-6)


def test_a_refused_reset_keeps_the_state():
    step = lamina.stream(lamina.GRU(5, 6).eval())
    step(torch.randn(1, 5))
    before = step.state.clone()
    with pytest.raises(lamina.InputError):
        step.reset(torch.zeros(1, 2, 6))
    assert torch.equal(step.state, before)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("cases", [[True, False, True], torch.tensor([2, 0]), []])
def test_a_stream_resets_single_cases(backend, cases):
    layer = lamina.LSTM(5, 6, 2, backend=backend, learn_initial_state=True).eval()
    chosen = [] if isinstance(cases, list) and not cases else [0, 2]
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
        step = lamina.stream(layer, 3)
        start = step.state
        step(torch.randn(3, 5))
        for given in (None, tuple(torch.randn_like(s) for s in start)):
            before = step.state
            step.reset(given, cases=cases)
            for new, old, first in zip(step.state, before, given or start):
                want = old.clone()
                want[:, chosen] = first[:, chosen]
                torch.testing.assert_close(new, want, rtol=0, atol=0)
            step(torch.randn(3, 5))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: lamina.stream(lamina.LSTM(3, 4)), "eval"),
        (lambda: lamina.stream(lamina.LSTM(3, 4, bidirectional=True).eval()), "backwards"),
        (lambda: lamina.stream(lamina.LSTM(3, 4, norm="batch").eval()), "batch norm"),
        (lambda: lamina.stream(torch.nn.LSTM(3, 4)), r"got torch\.nn\.LSTM.*lamina\.convert"),
        (lambda: lamina.stream(lamina.LSTMCell(3, 4)), r"got lamina\.LSTMCell"),
        (lambda: lamina.stream(lamina.LSTM(3, 4).eval(), 2).reset(cases=[2]), r"indices of 2 cases, got \[2\]"),
        (lambda: lamina.stream(lamina.LSTM(3, 4).eval(), 2).reset(cases=[True]), r"bool mask \[2\]"),
        (lambda: lamina.stream(lamina.LSTM(3, 4).eval())(torch.zeros(2, 3)), "takes frames"),
        (lambda: lamina.stream(lamina.LSTM(3, 4).eval())(torch.zeros(1, 3).double()), "takes frames"),
        (lambda: lamina.stream(lamina.LSTM(3, 4).eval(), 0), "batch_size"),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_words(make, word):
    with pytest.raises((TypeError, ValueError), match=word):
        make()


@pytest.mark.parametrize("cell", CELLS)
def test_an_input_without_features_counts_as_zeros(cell):
    call = random_call(cell, "layer", "paper", (4, 2, 0, 3))
    found, want = (everything(call, run) for run in (lambda c: fused.run(c, "cpu"), reference.evaluate))
    assert_same(list(found.values()), list(want.values()), 1e-12, list(found))
