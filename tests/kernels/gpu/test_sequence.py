"""The fused recurrence against the float64 reference: outputs, final states, every gradient.

Without a GPU Triton's interpreter runs the kernels, one program after another: there a group is one program, which
waits for nobody. On a GPU (``make test-gpu``) groups are what the device holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import lamina
from lamina import functional, kernels, reference
from lamina.kernels import forms, fused, interpreted, plans, precision, walk
from lamina.kernels.given import extras_of, tensors_of
from lamina.placements import PLACEMENTS
from lamina.reference import Recurrence
from tests.cases import EVERY, cast, everything, leaves, random_call, rounded_products

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("bfloat16_is_rounded")

FUSED = [row for row in EVERY if row[1] != "batch"]
IDS = ["-".join(map(str, row)) for row in FUSED]
PATHS = ("persistent", "steps")  # of the second, more is in test_steps


@pytest.fixture(params=[False, True], ids=["exact", "deferred"])
def _deferred(request, monkeypatch):
    """The form in which several members share the norm's backward sums, also where a group is one program."""
    if request.param:
        monkeypatch.setitem(plans.OVERRIDE, "defer", True)


# Below these an error says nothing: what the reference itself may gain by luck of rounding.
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}


def errors(call: Recurrence, dtype: torch.dtype, path: str) -> dict[str, tuple[float, float]]:
    """By name: how far the fused path and the reference in the same precision are from the truth."""
    truth = everything(cast(call, torch.float64, dtype), reference.evaluate)
    tf32 = call.input.device.type == "cuda" or precision.HALF_WHEN_INTERPRETED  # cuDNN's switch is on
    with rounded_products() if tf32 else nullcontext():
        plain = everything(cast(call, dtype, dtype), reference.evaluate)
    ours = everything(cast(call, dtype, dtype), lambda c: fused.run(c, path))
    found = {}
    for name, want in truth.items():
        assert ours[name].shape == want.shape, name
        assert ours[name].dtype == dtype, name
        size = max(want.norm().item(), 1e-2 * want.numel() ** 0.5)  # what is 0 but for eps has no digits to compare
        error, allowed = ((got[name].double() - want).norm().item() / size for got in (ours, plain))
        found[name] = error, allowed
    return found


DRAWS = 8  # at most


def assert_as_good(make: Callable[[], Recurrence], dtype: torch.dtype, path: str, times: float = 2.0) -> None:
    """The fused path errs at most ``times`` as much as the reference in the same precision.

    Where one draw says no, more are asked: errors are products of many factors, of which geometric means can be
    compared, and of few units a single one is luck.
    """
    found = [errors(make(), dtype, path)]
    if not all(e <= times * allowed + FLOOR[dtype] for e, allowed in found[0].values()):
        found += [errors(make(), dtype, path) for _ in range(DRAWS - 1)]
    for name in found[0]:
        error, allowed = (math.exp(sum(math.log(f[name][k] + 1e-12) for f in found) / len(found)) for k in (0, 1))
        assert error <= times * allowed + FLOOR[dtype], f"{name}: {error:.2g}, reference {allowed:.2g}"


def small_weights(call: Recurrence) -> Recurrence:
    """Recurrent matrices of the usual size: with large ones a recurrence is chaotic and errors say nothing."""
    w = call.weights
    matrix = (w.weight_hh.detach() / w.weight_hh.shape[1] ** 0.5).requires_grad_()
    return dataclasses.replace(call, weights=w._replace(weight_hh=matrix))


def problem(row, shape, device, **more) -> Recurrence:
    return small_weights(random_call(*row, shape, device=device, **more))


@pytest.mark.usefixtures("_deferred")
@pytest.mark.parametrize("row", [r for r in FUSED if r[1] == "layer"], ids=str)
def test_one_product_before_the_norms_scalars(row, device):
    assert_as_good(lambda: problem(row, (4, 3, 7, 40), device), torch.float32, "persistent")


# The interpreter is slow, and test_steps has all rows of the other path.
@pytest.mark.parametrize(
    ("row", "path"),
    [(row, path) for row in FUSED for path in PATHS if path == "persistent" or row[2] == "paper" or not interpreted()],
    ids=str,
)
def test_every_row(row, path, device):
    assert_as_good(lambda: problem(row, (5, 3, 7, 17), device), torch.float32, path)


@pytest.mark.parametrize("row", FUSED, ids=IDS)
def test_ragged_and_restarted(row, device):
    lengths = torch.tensor([6, 1, 4, 0], device=device)
    resets = torch.zeros(6, 4, dtype=torch.bool, device=device)
    resets[0, 1] = resets[2, 0] = resets[3, 0] = resets[3, 2] = resets[5, 2] = True
    for reverse in (False, True):
        more = {"lengths": lengths, "resets": resets, "reverse": reverse}
        assert_as_good(lambda more=more: problem(row, (6, 4, 3, 9), device, **more), torch.float32, "persistent")


@pytest.mark.parametrize("row", FUSED, ids=IDS)
def test_masks(row, device):
    states = 2 if row[0] == "LSTM" else 1
    masks = tuple((torch.rand(4, 3, 6, device=device) < 0.4).float() for _ in range(states))
    drop = (torch.rand(3, 6, device=device) < 0.7).float() / 0.7
    for zoneout in (masks, (0.25,) * states, (None, masks[-1])[:states]):
        more = {"zoneout": zoneout, "recurrent_mask": drop}
        assert_as_good(lambda more=more: problem(row, (4, 3, 5, 6), device, **more), torch.float32, "persistent")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [r for r in FUSED if r[2] in ("paper", "joint", None)], ids=str)
def test_half_precision(row, dtype, device):
    assert_as_good(lambda: problem(row, (4, 3, 7, 20), device), dtype, "persistent")


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 17, 3, 2), (3, 37, 1, 5), (2, 1, 2, 65), (1, 16, 4, 33)])
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("RNN", "layer", "paper")])
def test_ugly_sizes(row, shape, device):
    # Over one unit or two a norm is a sign: whatever rounds otherwise is enlarged.
    assert_as_good(lambda: problem(row, shape, device), torch.float32, "persistent", times=8 if shape[3] <= 2 else 2)


@pytest.mark.parametrize(("eps", "mode"), [(0.0, "var"), (1e-2, "std"), (0.0, "std")])
@pytest.mark.parametrize("row", [r for r in FUSED if r[1] == "layer"], ids=str)
def test_epsilons(row, eps, mode, device):
    assert_as_good(lambda: problem(row, (3, 2, 5, 8), device, eps=eps, eps_mode=mode), torch.float32, "persistent")


@pytest.mark.parametrize("path", PATHS)
def test_padding_may_hold_anything(path, device):
    lengths = torch.tensor([3, 1], device=device)
    call = cast(
        problem(("LSTM", "layer", "paper"), (3, 2, 4, 6), device, lengths=lengths), torch.float32, torch.float32
    )
    clean = everything(call, lambda c: fused.run(c, path))
    x = call.input.detach().clone()
    x[1:, 1] = float("nan")
    dirty = everything(dataclasses.replace(call, input=x.requires_grad_()), lambda c: fused.run(c, path))
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_harms_its_own_case_alone(path, device):
    """A NaN is a value like others to the programs that wait for it: nothing hangs."""
    call = cast(problem(("LSTM", "layer", "paper"), (3, 4, 4, 6), device), torch.float32, torch.float32)
    x = call.input.detach().clone()
    x[0, 2] = float("nan")
    out = fused.run(dataclasses.replace(call, input=x), path).output
    assert torch.isnan(out[:, 2]).all()
    others = [0, 1, 3]
    assert torch.equal(out[:, others], fused.run(call, path).output[:, others])


@pytest.mark.parametrize("path", PATHS)
def test_without_gradients_nothing_is_kept(path, device):
    call = cast(problem(("LSTM", "layer", "paper"), (3, 2, 4, 6), device), torch.float32, torch.float32)
    want = fused.run(call, path)
    with torch.no_grad():
        got = fused.run(call, path)
    assert torch.equal(got.output, want.output)
    assert all(torch.equal(a, b) for a, b in zip(got.state, want.state))
    assert got.output.grad_fn is None


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "layer", "paper"), ("LSTM", "layer", "joint")])
def test_gradients_of_gradients_take_the_reference_route(row, device):
    lengths = torch.tensor([3, 2], device=device)
    call = cast(problem(row, (3, 2, 4, 5), device, lengths=lengths), torch.float32, torch.float32)
    names = leaves(call)

    def penalty(run):
        first = torch.autograd.grad(run(call).output.square().sum(), list(names.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(names.values()), allow_unused=True)

    want, got = penalty(reference.evaluate), penalty(lambda c: fused.run(c, "persistent"))
    for name, a, b in zip(names, got, want):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a - b).norm() <= 2e-3 * b.norm() + 1e-4, name


@pytest.mark.parametrize("path", PATHS)
def test_lengths_of_any_stride(path, device):
    table = torch.tensor([[3, 9], [1, 9], [2, 9]], device=device)
    row, more = ("LSTM", "layer", "paper"), {"lengths": table[:, 0]}
    assert_as_good(lambda: problem(row, (3, 3, 4, 6), device, **more), torch.float32, path)


@pytest.mark.parametrize("path", PATHS)
def test_gains_without_a_norm_are_not_looked_at(path, device):
    three = torch.full((24,), 3.0, dtype=torch.float64, device=device)
    more = {f"gain_{site}": three.clone().requires_grad_() for site in ("ih", "hh")}

    def make() -> Recurrence:
        call = problem(("LSTM", "layer", "joint"), (3, 2, 4, 6), device)
        return dataclasses.replace(call, weights=call.weights._replace(**more))

    assert_as_good(make, torch.float32, path)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("gates", [1, 4])
def test_a_compiled_call_finds_a_plan_for_every_batch(gates, size, monkeypatch):
    """On an H200: 132 multiprocessors with 227 KiB of shared memory each."""
    memory = 227 * 1024 - plans.RESERVED
    monkeypatch.setattr(plans, "processors", lambda device: 132)
    monkeypatch.setattr(plans, "shared_memory", lambda device: memory)
    for hidden in range(1, 1700, 37):
        if plans._path_for(gates, hidden, 0, size, torch.device("cpu"), "")[0] != "persistent":
            continue
        for batch in (1, 8, 17, 33, 64, 100, 128, 500):
            for backward in (False, True):
                assert plans.plan(gates, hidden, batch, size, 132, memory, backward) is not None, (hidden, batch)


@pytest.mark.usefixtures("full_float32")
def test_layers_take_it_by_name(device):
    torch.manual_seed(3)
    layer = lamina.LSTM(3, 5, 2, bidirectional=True, backend="triton", device=device)
    other = lamina.LSTM(3, 5, 2, bidirectional=True, backend="reference", device=device)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 3, device=device)
    (ours, (h, c)), (theirs, (h2, c2)) = layer(x), other(x)
    for a, b in ((ours, theirs), (h, h2), (c, c2)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    choice = lamina.explain(layer, x)
    assert (choice.backend, choice.path) == ("triton", "persistent")
    assert "asked for by name" in choice.reason


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"norm": "batch"}, "mixes the cases"),
        ({"proj_size": 2}, "proj_size"),
    ],
)
def test_what_it_cannot_serve_it_refuses_with_words(options, word, device):
    layer = lamina.LSTM(3, 5, backend="triton", device=device, **options)
    x = torch.randn(4, 2, 3, device=device, dtype=options.get("dtype", torch.float32))
    with pytest.raises(lamina.BackendError, match=word):
        layer(x)
    automatic = lamina.LSTM(3, 5, device=device, **options)
    choice = lamina.explain(automatic, x)
    on_cpu = device.type == "cpu" and word in ("float64", "mixes the cases")  # numba's kernels serve both
    assert choice.backend == ("numba" if on_cpu and kernels.HAS_NUMBA else "reference")
    assert word in choice.reason or choice.backend == "numba"
    assert automatic(x)[0].shape[0] == 4


def test_empty_batches_go_to_the_reference(device):
    with pytest.raises(lamina.BackendError, match="empty"):
        lamina.GRU(3, 5, backend="triton", device=device)(torch.randn(2, 0, 3, device=device))


def test_function_transforms_go_to_the_reference(device):
    layer = lamina.GRU(3, 5, device=device)
    x = torch.randn(4, 2, 3, device=device)
    seen = []

    def loss(y):
        seen.append(lamina.explain(layer, y).reason)
        return layer(y)[0].sum()

    torch.func.grad(loss)(x)
    assert "torch.func" in seen[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", None, None)], ids=str)
def test_operators_keep_torchs_rules(row, path, device):
    call = cast(problem(row, (3, 2, 4, 5), device), torch.float32, torch.float32)
    tensors = [None if t is None else t.detach().requires_grad_() for t in tensors_of(call, None)]
    names, given = fused._named(tensors, extras_of(call))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (given, names, *forms.setting_of(call).encode(), path, True)
    torch.library.opcheck(fused._sequence, arguments, test_utils=checks)


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_compiled_without_a_graph_break(cell, device):
    torch._dynamo.reset()
    layer = getattr(lamina, cell)(3, 5, backend="triton", device=device)
    x = torch.randn(4, 2, 3, device=device, requires_grad=True)
    want = layer(x)[0]
    want_grads = torch.autograd.grad(want.square().sum(), [x, *layer.parameters()])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(x)[0]
    got_grads = torch.autograd.grad(got.square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(got, want)
    for a, b in zip(got_grads, want_grads):
        torch.testing.assert_close(a, b)


def test_settings_survive_as_text():
    for cell, rows in PLACEMENTS.items():
        for name in rows:
            call = random_call(cell, "layer", name, (1, 1, 1, 2), eps=1e-3, eps_mode="std")
            setting = forms.setting_of(call)
            assert forms.Setting.decode(*setting.encode()) == setting
            assert setting.where is rows[name]


@pytest.mark.usefixtures("full_float32")
def test_functional_takes_it_by_name(device):
    call = cast(problem(("GRU", "layer", "paper"), (3, 2, 4, 5), device), torch.float32, torch.float32)
    out, h = functional.gru(call.input, call.state[0], call.weights, backend="triton")
    want, h2 = reference.gru(call.input, call.state[0], call.weights)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, h2, rtol=1e-5, atol=1e-5)


# On a GPU: many programs that wait for each other.

SIZES = [(17, 3), (100, 17), (256, 128), (257, 8), (400, 8), (512, 64), (768, 17), (1000, 3), (1024, 64), (2400, 17)]
GPU_ROWS = [
    ("LSTM", "layer", "paper"),
    ("GRU", "layer", "paper"),
    ("RNN", "layer", "paper"),
    ("LSTM", "layer", "joint"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("hidden", "batch"), SIZES)
@pytest.mark.parametrize("row", GPU_ROWS[:2], ids=str)
def test_sizes_on_a_gpu(row, hidden, batch, dtype, device):
    path = "steps" if hidden > 2000 else "persistent"
    assert_as_good(lambda: problem(row, (5, batch, 33, hidden), device), dtype, path)


@pytest.mark.gpu
@pytest.mark.parametrize("row", GPU_ROWS[2:], ids=str)
def test_other_rows_on_a_gpu(row, device):
    assert_as_good(lambda: problem(row, (5, 17, 33, 300), device), torch.bfloat16, "persistent")


@pytest.mark.gpu
def test_repeats_are_identical_under_load(device):
    """Launches in a row, another stream busy: no hang, no difference."""
    call = cast(problem(("LSTM", "layer", "paper"), (37, 20, 33, 300), device), torch.bfloat16, torch.bfloat16)
    run = lambda c: fused.run(c, "persistent")  # noqa: E731
    first = everything(call, run)
    busy, load = torch.cuda.Stream(), torch.randn(2048, 2048, device=device)
    for _ in range(50):
        with torch.cuda.stream(busy):
            load = torch.tanh(load @ load)
        again = everything(call, run)
        assert all(torch.equal(first[name], again[name]) for name in first)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the test's own streams
@pytest.mark.parametrize("path", PATHS)
def test_inside_a_cuda_graph(path, device):
    call = cast(problem(("LSTM", "layer", "paper"), (9, 20, 33, 300), device), torch.float32, torch.float32)
    named = leaves(call)
    upstream = torch.randn(9, 20, 300, device=device)

    def step():
        out = fused.run(call, path).output
        return out, torch.autograd.grad(out, list(named.values()), upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    for _ in range(3):
        with torch.no_grad():
            call.input.normal_()
        graph.replay()
        want, wanted = step()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted))


@pytest.mark.parametrize("path", PATHS)
def test_a_frozen_matrix_costs_no_product_and_changes_nothing(path, device, monkeypatch):
    call = cast(problem(("LSTM", "layer", "paper"), (3, 2, 4, 5), device), torch.float32, torch.float32)
    want = torch.autograd.grad(fused.run(call, path).output.sum(), call.input)
    frozen = dataclasses.replace(call, weights=call.weights._replace(weight_hh=call.weights.weight_hh.detach()))
    asked = []
    backward = walk.module(path).backward
    monkeypatch.setattr(walk.module(path), "backward", lambda *a, **k: asked.append(k) or backward(*a, **k))
    assert torch.equal(torch.autograd.grad(fused.run(frozen, path).output.sum(), frozen.input)[0], want[0])
    assert [k["train_matrix"] for k in asked] == [False]
