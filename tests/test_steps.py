"""The recurrence of one product and one kernel a step: against the float64 reference, and what is its own.

``test_sequence`` runs the same problems on every fused path; here are all rows in all three precisions, with the
bounds tight enough to see a second rounding.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os

import pytest
import torch

from lamina import reference
from lamina.placements import STATES
from lamina.reference import CellWeights, Recurrence
from tests.cases import LAYER, gradients, leaves, random_call

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)
steps = importlib.import_module("lamina.kernels.steps")
fused = importlib.import_module("lamina.kernels.fused")

DEVICE = "cpu" if INTERPRETED else "cuda"
ROWS = [*LAYER, *((cell, None, None) for cell in ("LSTM", "GRU", "RNN"))]
IDS = ["-".join(map(str, row)) for row in ROWS]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What one rounding of a result costs on average; in float32 the exponential's own error besides.
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}


@pytest.fixture(autouse=True)
def _bfloat16_is_rounded(monkeypatch):
    """As on a GPU; the interpreter cuts it off, which is twice the error."""
    if not INTERPRETED:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    cut_off = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return cut_off(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def _one_precision():
    """float32 products of the reference round as ours do."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def cast(call: Recurrence, dtype: torch.dtype, values: torch.dtype) -> Recurrence:
    """A copy of a call in ``dtype``, its numbers rounded to those of ``values``."""

    def leaf(t):
        return None if t is None else t.detach().to(values).to(dtype).requires_grad_()

    def mask(t):
        return t.to(torch.promote_types(dtype, torch.float32)) if isinstance(t, torch.Tensor) else t

    return dataclasses.replace(
        call, input=leaf(call.input), state=tuple(map(leaf, call.state)), weights=CellWeights(*map(leaf, call.weights)),
        zoneout=tuple(map(mask, call.zoneout)), recurrent_mask=mask(call.recurrent_mask),
    )  # fmt: skip


def problem(row, shape, **more) -> Recurrence:
    """A random call whose recurrent matrix has the usual size: larger ones make chaos, where errors say nothing."""
    call = random_call(*row, shape, device=DEVICE, **more)
    matrix = (call.weights.weight_hh.detach() / shape[3] ** 0.5).requires_grad_()
    return dataclasses.replace(call, weights=call.weights._replace(weight_hh=matrix))


def in_steps(call: Recurrence):
    return fused.run(call, "steps")


def everything(call: Recurrence, run) -> dict[str, torch.Tensor]:
    """Outputs, final states and the gradient of every leaf."""
    result, named = run(call), leaves(call)
    outputs = [result.output, *result.state]
    grads = gradients(outputs, list(named.values()))
    return dict(zip(("output", "h_n", "c_n"), outputs)) | {f"d {name}": g for name, g in zip(named, grads)}


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_row(row, dtype):
    assert_as_good(draws(row, (5, 3, 7, 100)), dtype)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_ragged_and_restarted(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **ragged_and_restarted()), torch.float32)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_zoneout_masks(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **masks(row, 17)), torch.float32)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_zoneout_rates_dropout_and_the_other_epsilon(row):
    assert_as_good(draws(row, (5, 3, 7, 17), **rates_and_dropout(row, 17)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_everything_at_once_in_half_precision(row, dtype):
    more = {**rates_and_dropout(row, 100), **masks(row, 100), **ragged_and_restarted()}
    assert_as_good(draws(row, (5, 3, 7, 100), **more), dtype)


@pytest.mark.parametrize("shape", [(1, 1, 3, 17), (5, 1, 3, 100), (1, 3, 3, 100)], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_sizes(row, shape):
    assert_as_good(draws(row, shape), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_one_unit(row, dtype):
    """Over one unit or two a norm leaves a sign, and whatever rounds otherwise is enlarged."""
    assert_as_good(draws(row, (1, 1, 3, 1), 3), dtype, times=8)
    assert_as_good(draws(row, (5, 3, 3, 1)), dtype, times=8)


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


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_shapes_are_told_beforehand(row, keep):
    call = cast(problem(row, (4, 3, 2, 5)), torch.float16, torch.float16)
    form = fused.form_of(call)
    tensors, extras = fused._prepared(call, form, call.input)
    got = steps.forward(form, *tensors, fused.Extras(*extras), keep)
    assert [(tuple(t.shape), t.dtype) for t in got] == steps.shapes(form, tensors[0], tensors[1], keep)


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
    d, y, x = (torch.randn(steps_of, rows, gates * hidden, device=DEVICE) for _ in range(3))
    stats = torch.rand(steps_of, rows, 2 * gates + 2, device=DEVICE)
    mean, rstd = (t.repeat_interleave(hidden, -1) for t in stats[..., : 2 * gates].chunk(2, -1))
    want = torch.stack([d, d * (y + x - mean) * rstd]).flatten(1, 2).sum(1)
    torch.testing.assert_close(steps.column_sums(d, y, x, stats, gates), want, rtol=1e-5, atol=1e-4)
    want = torch.stack([d, d * y]).flatten(1, 2).sum(1)
    torch.testing.assert_close(steps.column_sums(d, y), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(steps.column_sums(d)[0], want[0], rtol=1e-5, atol=1e-4)


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
