"""The recurrence of one product and one kernel a step: against the float64 reference, and what is its own.

``test_sequence`` runs the same problems on every fused path; here are all rows in all three precisions, with the
bounds tight enough to see a second rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from lamina import reference
from lamina.placements import STATES
from lamina.reference import Recurrence
from tests.cases import LAYER, cast, everything, gradients, leaves, random_call

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
steps = importlib.import_module("lamina.kernels.steps")
gates = importlib.import_module("lamina.kernels.gates")
forms = importlib.import_module("lamina.kernels.forms")
fused = importlib.import_module("lamina.kernels.fused")
passes = importlib.import_module("lamina.kernels.passes")
plans = importlib.import_module("lamina.kernels.plans")
precision = importlib.import_module("lamina.kernels.precision")
product = importlib.import_module("lamina.kernels.product")
replay = importlib.import_module("lamina.kernels.replay")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")

DEVICE = "cpu" if INTERPRETED else "cuda"
ROWS = [*LAYER, *((cell, None, None) for cell in ("LSTM", "GRU", "RNN"))]
IDS = ["-".join(map(str, row)) for row in ROWS]
FEW = [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", "layer", "paper"), ("GRU", "layer", "joint")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# All of them on a GPU. The interpreter takes a second for what a GPU does in a millisecond: some in each precision.
SOME = FEW if INTERPRETED else ROWS
PRECISIONS = [(row, dtype) for row in ROWS for dtype in DTYPES if row in SOME or dtype == DTYPES[0]]
# What one rounding of a result costs on average; in float32 the exponential's own error besides.
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}


@pytest.fixture(autouse=True)
def _one_precision():
    """float32 products of the reference round as ours do."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def problem(row, shape, **more) -> Recurrence:
    """A random call whose recurrent matrix has the usual size: larger ones make chaos, where errors say nothing."""
    call = random_call(*row, shape, device=DEVICE, **more)
    matrix = (call.weights.weight_hh.detach() / shape[3] ** 0.5).requires_grad_()
    return dataclasses.replace(call, weights=call.weights._replace(weight_hh=matrix))


def in_steps(call: Recurrence):
    return fused.run(call, "steps")


def errors(call: Recurrence, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Ours and the same-precision reference's, relative to the float64 reference."""
    truth = everything(cast(call, torch.float64, dtype), reference.evaluate)
    both = [everything(cast(call, dtype, dtype), run) for run in (in_steps, reference.evaluate)]
    found = {}
    for name, want in truth.items():
        assert (both[0][name].shape, both[0][name].dtype) == (want.shape, dtype), name
        size = max(want.norm().item(), 0.1 * want.numel() ** 0.5)  # what is 0 but for eps has no digits to compare
        found[name] = tuple((got[name].double() - want).norm().item() / size for got in both)
    return found


def mean_square(values) -> float:
    values = list(values)
    return math.sqrt(sum(v * v for v in values) / len(values))


def assert_as_good(calls, dtype: torch.dtype, times: float = 2.0) -> None:
    """At most twice the reference's error over all calls; one tensor's luck of rounding is not held against another."""
    found = [errors(call, dtype) for call in calls]
    pooled = {name: [mean_square(e[name][k] for e in found) for k in (0, 1)] for name in found[0]}
    typical = mean_square(theirs for _, theirs in pooled.values())
    for name, (ours, theirs) in pooled.items():
        words = f"{name}: {ours:.2g}, reference {theirs:.2g}, all {typical:.2g}"
        assert ours <= times * max(theirs, typical) + FLOOR[dtype], words


def draws(row, shape, count=1, **more):
    return [problem(row, shape, **more) for _ in range(count)]


def ragged_and_restarted():
    resets = torch.zeros(5, 3, dtype=torch.bool, device=DEVICE)
    resets[0, 2] = resets[2, 1] = resets[2, 0] = resets[3, 0] = True
    return {"lengths": torch.tensor([5, 2, 3], device=DEVICE), "resets": resets}


def masks(row, hidden):
    keep = tuple((torch.rand(5, 3, hidden, device=DEVICE) < 0.3).float() for _ in range(STATES[row[0]]))
    return {"zoneout": keep}


def rates_and_dropout(row, hidden):
    drop = (torch.rand(3, hidden, device=DEVICE) < 0.7).float() / 0.7
    return {"zoneout": (0.2, 0.1)[: STATES[row[0]]], "recurrent_mask": drop, "eps": 1e-3, "eps_mode": "std"}


@pytest.mark.parametrize(("row", "dtype"), PRECISIONS, ids=str)
def test_every_row(row, dtype):
    assert_as_good(draws(row, (3, 3, 7, 100)), dtype)


@pytest.mark.parametrize("path", ["steps", "persistent"])
def test_matrices_whose_gradients_are_formed_last(path, monkeypatch):
    """Large ones, which a captured pass would have to copy."""
    call = problem(("LSTM", "layer", "paper"), (3, 2, 7, 5))
    call = cast(call, torch.float32, torch.float32)
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(precision, "LATE", least)
        found.append(everything(call, lambda c: fused.run(c, path)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("row", "shape"),
    [
        (("LSTM", "layer", "paper"), (3, 3, 7, 100)),
        (("GRU", "layer", "paper"), (2, 17, 3, 33)),
        (("RNN", None, None), (3, 1, 2, 257)),
    ],
    ids=str,
)
def test_own_product(row, shape, dtype, monkeypatch):
    """As for matrices that are larger than the L2 cache: every other step reads them backwards."""
    monkeypatch.setitem(plans.OVERRIDE, "product", True)
    assert_as_good(draws(row, shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("row", "shape"), [(ROWS[0], (3, 3, 7, 24)), (("GRU", "layer", "paper"), (2, 17, 3, 32))])
def test_products_in_shares(row, shape, dtype, monkeypatch):
    """Three along the contraction, which the step adds up."""
    monkeypatch.setitem(plans.OVERRIDE, "shares", 3)
    assert_as_good(draws(row, shape), dtype)


@pytest.mark.parametrize(
    ("batch", "hidden", "gates", "want"),
    [(128, 2400, 4, 3), (128, 2400, 3, 3), (128, 1024, 4, 4), (64, 4096, 4, 4), (1, 4098, 1, 1), (128, 1026, 4, 3),
     (128, 2401, 4, 1), (4096, 1024, 4, 1), (128, 256, 4, 2), (128, 128, 4, 1)],
)  # fmt: skip
def test_number_of_shares(batch, hidden, gates, want, monkeypatch):
    class OnGPU:
        device, shape = torch.device("cuda"), (gates * hidden, hidden)

        def element_size(self):
            return 2

    monkeypatch.setattr(product, "processors", lambda device: 132)
    assert product.shares(OnGPU(), batch) == want
    assert want == 1 or gates * hidden % (8 * want) == 0


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_ragged_and_restarted(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **ragged_and_restarted()), torch.float32)


@pytest.mark.parametrize("row", SOME, ids=str)
def test_zoneout_masks(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **masks(row, 17)), torch.float32)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_zoneout_rates_dropout_and_the_other_epsilon(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **rates_and_dropout(row, 17)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("row", SOME, ids=str)
def test_everything_at_once_in_half_precision(row, dtype):
    more = {**rates_and_dropout(row, 100), **masks(row, 100), **ragged_and_restarted()}
    assert_as_good(draws(row, (5, 3, 7, 100), **more), dtype)


@pytest.mark.parametrize("shape", [(1, 1, 3, 17), (3, 1, 3, 65), (1, 3, 3, 100)], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_sizes(row, shape):
    assert_as_good(draws(row, shape), torch.float32)


@pytest.mark.parametrize(("row", "dtype"), PRECISIONS, ids=str)
def test_one_unit(row, dtype):
    """Over one unit or two a norm leaves a sign, and whatever rounds otherwise is enlarged: few draws say little."""
    assert_as_good(draws(row, (1, 1, 3, 1), 3 if INTERPRETED else 24), dtype, times=8)
    assert_as_good(draws(row, (5, 3, 3, 1), 1 if INTERPRETED else 8), dtype, times=8)


# Rows in two parts, of any length here.


@pytest.fixture
def _in_parts(monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "parts", 1)


@pytest.mark.parametrize(
    ("hidden", "want"),
    [(2400, (2048, 512)), (2100, (2048, 512)), (3000, (2048, 1024)), (3500, (4096, 0)), (4096, (4096, 0)),
     (5000, (4096, 1024)), (768, (512, 256)), (1000, (1024, 0)), (257, (256, 64)), (255, (256, 0)), (17, (32, 0)),
     (1, (1, 0))],
)  # fmt: skip
def test_parts_of_a_row(hidden, want):
    assert steps.row_parts(hidden) == want


@pytest.mark.usefixtures("_in_parts")
def test_parts_hold_every_row():
    for hidden in range(1, 5000):
        main, rest = steps.row_parts(hidden)
        assert hidden <= main + rest <= plans.power(hidden)
        assert not rest or (main <= hidden and main // rest in (2, 4) and main % rest == 0) or main < 4


@triton.jit
def sums_kernel(values, out, BLOCK: tl.constexpr, REST: tl.constexpr):
    parts = (tl.load(values + tl.arange(0, BLOCK)), tl.load(values + BLOCK + tl.arange(0, REST)))
    tl.store(out, tl.sum(gates.joined(parts), 0))
    tl.store(out + 1, tl.max(gates.joined(parts, True), 0))


@pytest.mark.parametrize(
    ("main", "rest"), [(2, 1), (32, 8), (64, 32), (2048, 512), (4096, 1024), (4096, 2048), (8192, 2048), (8192, 4096)]
)
def test_sums_over_parts(main, rest):
    for largest in (0, main - 1, main, main + rest - 1):
        values = torch.randint(-9, 10, (main + rest,), device=DEVICE).float()
        values[largest] = 10
        out = torch.empty(2, device=DEVICE)
        sums_kernel[(1,)](values, out, main, rest)
        assert out.tolist() == [values.sum().item(), 10]


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize(("hidden", "dtype"), [(40, torch.float32), (80, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("row", SOME, ids=str)
def test_parts(row, dtype, hidden):
    assert_as_good(draws(row, (3, 3, 7, hidden)), dtype)


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("row", FEW, ids=str)
def test_parts_masked(row):
    assert_as_good(draws(row, (5, 3, 7, 48), **masks(row, 48), **ragged_and_restarted()), torch.float32)


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("row", FEW, ids=str)
def test_parts_with_rates_and_dropout(row):
    assert_as_good(draws(row, (5, 3, 7, 40), **rates_and_dropout(row, 40), **ragged_and_restarted()), torch.float32)


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", None, None)], ids=str)
def test_parts_of_our_own_product(row, monkeypatch):
    monkeypatch.setitem(plans.OVERRIDE, "product", True)
    assert_as_good(draws(row, (5, 3, 7, 40)), torch.bfloat16)


def test_relu():
    assert_as_good(draws(("RNN", "layer", "paper"), (5, 3, 7, 17), nonlinearity="relu"), torch.float32)
    assert_as_good(draws(("RNN", None, None), (5, 3, 7, 17), nonlinearity="relu"), torch.float32)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_inference_is_training_without_what_is_kept(row):
    call = cast(problem(row, (5, 3, 7, 17), **rates_and_dropout(row, 17)), torch.bfloat16, torch.bfloat16)
    want = in_steps(call)
    with torch.no_grad():
        got = in_steps(call)
    assert torch.equal(got.output, want.output)
    assert all(torch.equal(a, b) for a, b in zip(got.state, want.state))


def prepared(row, shape, dtype=torch.float32):
    """Arguments of ``steps.forward`` up to the states, and the parameters after them."""
    count, batch, _, hidden = shape
    form = forms.form_of(forms.setting_of(problem(row, (1, 1, 1, 2))))
    random = functools.partial(torch.randn, device=DEVICE)
    x, weight = random(count, batch, form.gates * hidden), random(form.gates * hidden, hidden).to(dtype) / hidden**0.5
    gates, units = (random(n).to(dtype) for n in (form.gates * hidden, hidden))
    there = (form.site, form.site == "sum" or form.cell == "GRU", form.cell_norm, form.cell_norm)
    matrix = precision.Matrix(weight, dtype)
    return (form, x, matrix), [t if wanted else None for t, wanted in zip((gates, gates / 2, units, units / 2), there)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_shapes_are_told_beforehand(row, keep):
    (form, x, matrix), parameters = prepared(row, (4, 3, 2, 5), torch.float16)
    got = steps.forward(form, x, matrix, None, None, *parameters, forms.Extras(), keep)
    assert [(tuple(t.shape), t.dtype) for t in got] == steps.shapes(form, x, torch.float16, keep)


@pytest.mark.parametrize("row", SOME, ids=str)
def test_nothing_is_zeros(row):
    """States and gradients that are not given."""
    (form, x, matrix), parameters = prepared(row, (4, 3, 2, 5))
    zeros, found = torch.zeros(3, 5, device=DEVICE), []
    upstream = torch.randn(4, 3, 5, device=DEVICE)
    for nothing in (None, zeros):
        hist, h_n, c_n, *kept = steps.forward(form, x, matrix, nothing, nothing, *parameters, forms.Extras(), True)
        more = [
            (upstream, nothing, nothing),
            (None if nothing is None else zeros.expand_as(upstream).clone(), zeros + 1, nothing),
        ]
        grads = [steps.backward(form, x, matrix, *parameters, forms.Extras(), (hist, *kept), *d) for d in more]
        found.append([hist, h_n, c_n, *(t() if callable(t) else t for by_name in grads for t in by_name.values())])
        assert torch.equal(hist[-1], h_n)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper")], ids=str)
def test_backward_leaves_what_it_was_given(row):
    """It may run twice over one forward: nothing kept, and no gradient handed in, is written over."""
    call = cast(problem(row, (4, 3, 2, 9)), torch.float32, torch.float32)
    result, named = in_steps(call), list(leaves(call).values())
    upstream = [torch.randn_like(t) for t in (result.output, *result.state)]
    before = [t.clone() for t in upstream]
    first, second = (
        torch.autograd.grad([result.output, *result.state], named, upstream, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(upstream, before))


@pytest.mark.parametrize(("steps_of", "rows", "gates", "hidden"), [(1, 1, 1, 1), (7, 37, 3, 130), (5, 9, 4, 17)])
def test_column_sums(steps_of, rows, gates, hidden):
    shape = (steps_of, rows)
    d, d_cell = (torch.randn(*shape, n * hidden, device=DEVICE) for n in (gates, 1))
    xhat = torch.randn(*shape, (gates + 1) * hidden, device=DEVICE)
    both = torch.cat([d, d_cell], -1)
    want = torch.stack([both, both * xhat]).flatten(1, 2).sum(1)
    width = gates * hidden
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    close(steps.column_sums(d, d_cell, xhat, gates), want)
    close(steps.column_sums(d, None, xhat[..., :width].contiguous(), gates), want[:, :width])
    close(steps.column_sums(None, d_cell, xhat, gates)[:, width:], want[:, width:])
    close(steps.column_sums(d, None, None, gates)[0], want[0, :width])


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_follow_cudnns_switch_and_leave_torchs_as_it_was(cudnn, precision):
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        effective = matmul.fp32_precision
        with torch.backends.cudnn.flags(allow_tf32=cudnn), steps.as_cudnn_multiplies(torch.float32):
            assert (matmul.fp32_precision == "tf32") == cudnn
        assert matmul.fp32_precision == effective
        assert torch.get_float32_matmul_precision() == precision
        with torch.backends.cudnn.flags(allow_tf32=cudnn), steps.as_cudnn_multiplies(torch.bfloat16):
            assert matmul.fp32_precision == effective
    finally:
        torch.set_float32_matmul_precision(before)


# Replayed: the steps find their tensors through a table. Where there is no GPU they are launched one by one.


TABLED = [("LSTM", "layer", "paper"), ("LSTM", "layer", "gate"), ("GRU", "layer", "paper"), ("RNN", None, None)]
TURNS = 2 if INTERPRETED else 4  # on a GPU: launched, captured, replayed and replayed again


@pytest.fixture
def _empty_store():
    replay.clear()
    yield
    replay.clear()


@pytest.fixture
def directly(monkeypatch):
    """Outputs and gradients of a call without tables or graphs."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "serves", lambda tensor: False)
            return everything(call, in_steps)

    return run


@pytest.fixture
def by_table(monkeypatch, _empty_store):
    """The same as if there were graphs."""
    if INTERPRETED:
        monkeypatch.setattr(replay, "serves", lambda tensor: True)
    return lambda call: everything(call, in_steps)


def assert_equal(got, want):
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def extras_of(row, kind, hidden):
    return {
        "plain": dict,
        "masks": lambda: {**masks(row, hidden), **ragged_and_restarted()},
        "rates": lambda: {**rates_and_dropout(row, hidden), **ragged_and_restarted()},
    }[kind]()


KINDS = [(row, kind) for row in TABLED for kind in ("plain", "masks", "rates")]


@pytest.mark.parametrize(("row", "kind"), KINDS[::4] if INTERPRETED else KINDS, ids=str)
def test_by_table(row, kind, directly, by_table):
    call = cast(problem(row, (5, 3, 7, 24), **extras_of(row, kind, 24)), torch.float16, torch.float16)
    want = directly(call)
    for _ in range(TURNS):
        assert_equal(by_table(call), want)
    if kind == "plain":
        with torch.no_grad():
            assert torch.equal(in_steps(call).output, want["output"])
    assert len(replay._entries) == (3 if kind == "plain" else 2)


def test_one_store_for_every_length(directly, by_table):
    whole = problem(("LSTM", "layer", "paper"), (37, 3, 7, 24))
    for count in (3, 1, 5) if INTERPRETED else (37, 1, 5, 16, 37, 32):
        cut = dataclasses.replace(whole, input=whole.input[:count])
        call = cast(cut, torch.bfloat16, torch.bfloat16)
        assert_equal(by_table(call), directly(call))
    assert len(replay._entries) == 2


def test_layers_in_turn_share_a_store(directly, by_table):
    calls = [cast(problem(("GRU", "layer", "paper"), (5, 3, 7, 24)), torch.float16, torch.float16) for _ in range(2)]
    wanted = [directly(call) for call in calls]
    for _ in range(TURNS):
        results = [in_steps(call) for call in calls]
        for call, result, want in zip(calls, results, wanted):
            grads = gradients([result.output, *result.state], list(leaves(call).values()))
            assert torch.equal(result.output, want["output"])
            assert_equal(
                {f"d {name}": g for name, g in zip(leaves(call), grads)},
                {k: v for k, v in want.items() if k[:2] == "d "},
            )
    assert len(replay._entries) == 2


def test_the_longest_unused_makes_room(directly, by_table, monkeypatch):
    monkeypatch.setattr(replay, "LIMIT", 2)
    monkeypatch.setattr(passes, "lease", lambda *call: None)  # captured whole, a pass has no entry here
    calls = [cast(problem(row, (5, 3, 7, 24)), torch.float16, torch.float16) for row in ROWS[:3]]
    wanted = [directly(call) for call in calls]
    before = []
    for call, want in list(zip(calls, wanted)) * TURNS:
        assert_equal(by_table(call), want)
        assert all(entry() is None for entry in before)  # gone at once, no garbage to be collected
        before = [weakref.ref(entry) for entry in replay._entries.values()]
        assert len(before) == 2


def test_a_store_knows_whose_weight_it_holds():
    weight, other = (torch.randn(4, 2, device=DEVICE) for _ in range(2))
    copy = replay.Copy(weight)
    for held in (weight, other, weight):
        copy.hold(held, again=True)
        assert torch.equal(copy.tensor, held)
    copy.tensor.zero_()
    copy.hold(weight, again=True)
    assert not copy.tensor.any()  # it was there already
    weight += 1
    copy.hold(weight, again=True)
    assert torch.equal(copy.tensor, weight)
    copy.tensor.zero_()
    copy.hold(weight, again=False)
    assert torch.equal(copy.tensor, weight)


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 37, 100])
def test_blocks(count):
    sizes = replay.blocks(count)
    assert sum(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) <= {1 << k for k in range(6)}


class Driver:
    """Stands in for torch.cuda: counts steps that were launched and steps that graphs ran."""

    def __init__(self, patch, refuses=False):
        self.launched, self.replayed, self.captured, self.recording = 0, 0, [], None
        driver = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert pool == (driver.captured[0] if driver.captured else None)
                assert capture_error_mode == "thread_local"
                driver.recording, self.size = self, 0

            def capture_end(self):
                driver.recording = None
                driver.captured.append(id(self))
                if refuses:
                    raise RuntimeError("refused")

            def pool(self):
                return id(self)

            def replay(self):
                driver.replayed += self.size

            def reset(self):
                driver.captured.remove(id(self))

        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", lambda device, priority: object())
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(replay, "_streams", {})

    def step(self):
        if self.recording is None:
            self.launched += 1
        else:
            self.recording.size += 1


def test_a_loop_is_launched_once_and_then_replayed(monkeypatch):
    driver, loop = Driver(monkeypatch), replay.Loop(torch.device("cuda", 0))
    loop.run(driver.step, 37)
    assert (driver.launched, driver.replayed, driver.captured) == (37, 0, [])
    loop.run(driver.step, 37)
    loop.run(driver.step, 100)
    assert (driver.launched, driver.replayed, len(driver.captured)) == (37, 137, 3)  # of 32, 4 and 1 steps
    loop.run(driver.step, 2)
    assert (driver.replayed, len(driver.captured)) == (139, 4)
    stream = loop.stream
    loop.close()
    assert (driver.captured, replay._streams[loop.device]) == ([], [stream])


def test_a_loop_that_cannot_be_captured_is_launched(monkeypatch):
    driver, loop = Driver(monkeypatch, refuses=True), replay.Loop(torch.device("cuda", 0))
    loop.run(driver.step, 5)
    with pytest.warns(UserWarning, match="one by one"):
        loop.run(driver.step, 5)
    loop.run(driver.step, 5)  # and nobody tries again
    assert (driver.launched, driver.replayed) == (15, 0)


def test_off_is_for_one_thread():
    class OnGPU:
        is_cuda = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert replay.serves(OnGPU())
        with replay.off(), replay.off():
            assert not replay.serves(OnGPU())
            with ThreadPoolExecutor(1) as other:
                assert other.submit(replay.serves, OnGPU()).result()
        assert replay.serves(OnGPU())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not replay.serves(OnGPU())


def graphs_kept() -> int:
    return sum(len(entry.loop.graphs) for entry in replay._entries.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5, 16, 37])
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", None, None)], ids=str)
def test_graphs_as_launched(row, count, dtype, directly, by_table):
    call = cast(problem(row, (count, 19, 33, 1000)), dtype, dtype)
    want = directly(call)
    for turn in range(3):
        assert_equal(by_table(call), want)
        assert graphs_kept() == (2 * len(set(replay.blocks(count))) if turn else 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the test's own streams
def test_graphs_on_two_streams(directly, by_table):
    """They run at the same time and have nothing in common."""
    calls = [
        cast(problem(("LSTM", "layer", "paper"), (37, 20, 33, 1000)), torch.bfloat16, torch.bfloat16) for _ in "ab"
    ]
    wanted = [directly(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for call, stream in zip(calls, streams):
            with torch.cuda.stream(stream):
                found.append(by_table(call))
        torch.cuda.synchronize()
        for got, want in zip(found, wanted):
            assert_equal(got, want)
    assert len(replay._entries) == 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the first work of a thread
def test_graphs_from_two_threads(directly, by_table):
    """On one stream they take turns."""
    calls = [cast(problem(("GRU", "layer", "paper"), (37, 20, 33, 1000)), torch.bfloat16, torch.bfloat16) for _ in "ab"]
    wanted = [directly(call) for call in calls]

    def several(call):
        return [by_table(call) for _ in range(10)]

    with ThreadPoolExecutor(2) as threads:
        for found, want in zip(threads.map(several, calls), wanted):
            for got in found:
                assert_equal(got, want)


@pytest.mark.gpu
def test_graphs_keep_their_workspace(directly, by_table):
    """cuBLAS's memory is torch's and may be cleared by anyone; what graphs use of it is their own."""
    call = cast(problem(("LSTM", "layer", "paper"), (37, 128, 33, 2400)), torch.bfloat16, torch.bfloat16)
    want = directly(call)
    for _ in range(3):
        by_table(call)
    torch._C._cuda_clearCublasWorkspaces()
    garbage = [torch.full((1 << 25,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    for _ in range(3):
        assert_equal(by_table(call), want)
    assert all((g == 255).all() for g in garbage)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_inside_a_users_graph(by_table):
    """What is kept for replays is not touched by a capture, nor needed by its graph."""
    call = cast(problem(("LSTM", "layer", "paper"), (9, 20, 33, 1000)), torch.float32, torch.float32)
    named, upstream = leaves(call), torch.randn(9, 20, 1000, device=DEVICE)

    def step():
        out = in_steps(call).output
        return out, *torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True, materialize_grads=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    replay.clear()
    for _ in range(3):
        with torch.no_grad():
            call.input.normal_()
        graph.replay()
        want = step()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.gpu
def test_torchs_switches_are_in_the_key(directly, by_table):
    """A graph multiplies as it was captured, so another precision is another graph."""
    call = cast(problem(("RNN", None, None), (5, 64, 33, 1024)), torch.float32, torch.float32)
    for tf32 in (False, True, False):
        with torch.backends.cudnn.flags(allow_tf32=tf32):
            want = directly(call)
            for _ in range(3):
                assert_equal(by_table(call), want)
    assert len(replay._entries) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "batch"), [(1024, 17), (2400, 16), (4096, 3), (5000, 2)])
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper")], ids=str)
def test_large_on_a_gpu(row, hidden, batch, dtype):
    assert_as_good(draws(row, (4, batch, 33, hidden)), dtype)


@pytest.mark.gpu
def test_repeats_are_identical():
    call = cast(problem(("LSTM", "layer", "paper"), (9, 20, 33, 300)), torch.bfloat16, torch.bfloat16)
    first = everything(call, in_steps)
    for _ in range(10):
        again = everything(call, in_steps)
        assert all(torch.equal(first[name], again[name]) for name in first)
