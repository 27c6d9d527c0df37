"""A good PyTorch citizen: autocast, compile, export, ONNX, double backward, functorch, DDP, copies, meta."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence

import lamina
from lamina import functional, reference
from tests.cases import CELLS, EVERY, IDS, LAYER, assert_same, gradients, leaves, random_call
from tests.library.test_recurrent import OURS, OURS_CELL, flat

# Every cell, norm and placement; but for the paper's layer norm in the slow tier.
FEW_QUICKLY = [row if row[1:] == ("layer", "paper") else pytest.param(row, marks=pytest.mark.slow) for row in EVERY]


def build(row, *args, **kwargs):
    cell, norm, placement = row
    return OURS[cell](*args, norm=norm, placement=placement, **kwargs)


@pytest.mark.parametrize("row", EVERY, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_half_and_keeps_statistics_in_float32(row, dtype, device):
    """Against the float64 reference on the same rounded operands: the error is of the order of the rounding."""
    layer = build(row, 16, 24, device=device)
    x = torch.randn(5, 4, 16, requires_grad=True, device=device)
    with torch.autocast(device.type, dtype):
        got = flat(layer(x))
    assert all(g.dtype == dtype for g in got)
    grads = gradients(got, [x, *layer.parameters()])
    assert all(g.dtype == torch.float32 for g in grads)
    exact = copy.deepcopy(layer).double()
    want = flat(exact(x.double()))
    low = copy.deepcopy(layer).to(dtype)  # the same-precision reference: everything rounded to half
    by_half = flat(low(x.to(dtype)))
    for g, w, h in zip(got, want, by_half):
        assert (g - w).abs().max() <= 2 * (h - w).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("autocast", [False, True], ids=["module", "autocast"])
@pytest.mark.parametrize("row", LAYER)
def test_statistics_and_carried_states_of_half_layers_are_float32(row, autocast, monkeypatch, device):
    seen = []

    def spy(name):
        real = getattr(reference, name)

        def wrapped(*args):
            out = real(*args)
            seen.extend([(name, args[0].dtype), (name, out.dtype)])
            return out

        monkeypatch.setattr(reference, name, wrapped)

    spy("standardise")
    spy("_zoneout")  # every new state of every step passes through it, masked or not
    layer, x = build(row, 8, 16, backend="reference", device=device), torch.randn(3, 2, 8, device=device)
    if autocast:
        with torch.autocast(device.type, torch.bfloat16):
            output = flat(layer(x))
    else:
        output = flat(layer.bfloat16()(x.bfloat16()))
    assert {o.dtype for o in output} == {torch.bfloat16}
    assert set(seen) == {("standardise", torch.float32), ("_zoneout", torch.float32)}


@pytest.mark.parametrize("row", LAYER)
def test_half_modules_lose_what_their_products_lose(row):
    """200 steps of a contracting recurrence: the error stays at the rounding of a few products, it does not grow."""
    layer = build(row, 8, 16)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith(("gain_hh", "gain_sum")):
                p.fill_(0.3)
    layer = layer.bfloat16()
    x = torch.randn(200, 3, 8).bfloat16()
    want = flat(copy.deepcopy(layer).double()(x.double()))[0]
    error = (flat(layer(x))[0] - want).abs().mean(-1).mean(-1)
    assert error[100:].mean() < 2 * torch.finfo(torch.bfloat16).eps


def test_mixed_dtypes_are_refused_outside_autocast_only():
    layer = lamina.LSTM(3, 5)
    with pytest.raises(lamina.InputError, match="autocast"):
        layer(torch.randn(2, 1, 3).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(torch.randn(2, 1, 3))
        assert layer(torch.randn(2, 1, 3), state)[0].dtype == torch.bfloat16


def compiled(layer, **kwargs):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(layer, backend=counter, fullgraph=True, **kwargs), counter


@pytest.mark.parametrize("row", FEW_QUICKLY, ids=IDS)
def test_compile_is_one_graph_whose_size_does_not_depend_on_the_steps(row):
    sizes = []
    stacked = row == ("LSTM", "layer", "paper")
    for steps in (3, 40):
        layer = build(row, 3, 5, 2 if stacked else 1, bidirectional=stacked, dtype=torch.float64)
        twin = copy.deepcopy(layer)
        fast, counter = compiled(layer)
        x = torch.randn(steps, 4, 3, dtype=torch.float64, requires_grad=True)
        lengths = torch.tensor([steps, 1, 2, steps])
        got, want = flat(fast(x, lengths=lengths)), flat(twin(x, lengths=lengths))
        assert_same(got, want)
        inputs, twins = [x, *layer.parameters()], [x, *twin.parameters()]
        assert_same(gradients(got, inputs), gradients(want, twins))
        buffers, others = dict(layer.named_buffers()), dict(twin.named_buffers())  # batch norm's running statistics
        assert list(buffers) == list(others)
        assert_same(list(buffers.values()), list(others.values()))
        assert counter.frame_count == 1
        sizes.append(len(counter.graphs[0].graph.nodes))
    assert sizes[0] == sizes[1]


def dict_equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def test_compile_with_changing_lengths_of_sequence_does_not_recompile():
    layer = lamina.GRU(3, 5)
    fast, counter = compiled(layer, dynamic=True)
    frames = []
    for steps in (4, 9, 17, 30):
        x = torch.randn(steps, 2, 3)
        assert_same([fast(x)[0]], [layer(x)[0]], 1e-6)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_expectation_of_zoneout(dynamic):
    layer = lamina.LSTM(3, 5, zoneout=(0.3, 0.2), dtype=torch.float64).eval()
    fast, _ = compiled(layer, dynamic=dynamic)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    assert_same(flat(fast(x)), flat(layer(x)))
    h = torch.zeros(2, 5, dtype=torch.float64)
    whole = lambda z: functional.lstm(z, (h, h), layer._weights("_l0"), zoneout=(1, None))[0]  # noqa: E731
    fast, _ = compiled(whole)
    assert not fast(x).any()  # h keeps its zeros for ever


def test_compile_with_random_masks_and_resets():
    layer = lamina.LSTM(3, 5, zoneout=(0.3, 0.2), recurrent_dropout=0.4, learn_initial_state=True)
    fast, _ = compiled(layer)
    x, resets = torch.randn(6, 2, 3), torch.rand(6, 2) < 0.3
    out = fast(x, resets=resets)[0]
    out.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    layer.eval()
    fast, _ = compiled(layer)
    assert_same([fast(x, resets=resets)[0]], [layer(x, resets=resets)[0]], 1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_compile_of_a_cell_is_traced_through(cell):
    one = OURS_CELL[cell](3, 5)
    fast, counter = compiled(one)
    x = torch.randn(2, 3)
    got, want = fast(x), one(x)
    assert_same(got if cell == "LSTM" else [got], want if cell == "LSTM" else [want], 1e-6)
    names = [str(n.target) for n in counter.graphs[0].graph.nodes]
    assert not any("lamina" in n for n in names)


def test_compile_under_autocast():
    layer = lamina.LSTM(3, 5)
    x = torch.randn(4, 2, 3)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)[0]

    fast, _ = compiled(run)
    got, want = fast(x), run(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # inductor's own first, empty capture
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # its advice
@pytest.mark.parametrize("cell", CELLS)
def test_inductor_and_cuda_graphs_on_a_gpu(cell):
    """The default compiler, its CUDA-graph mode, and a capture by hand replay the eager numbers."""
    layer, x = OURS[cell](16, 32, device="cuda"), torch.randn(6, 4, 16, device="cuda")
    with torch.no_grad():
        want = layer(x)[0]
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        fast = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            with torch.no_grad():
                got = fast(x)[0].clone()
        assert_same([got], [want], 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(x, lengths=torch.full((4,), 6, device="cuda"))[0]
    captured.zero_()
    graph.replay()
    assert_same([captured], [want], 1e-6)


def test_opaque_operator_passes_torchs_own_checks():
    call = random_call("LSTM", "layer", "paper", (3, 2, 3, 4), lengths=torch.tensor([3, 1]))
    from lamina import opaque

    names, tensors = opaque._flatten(call)
    arguments = (tensors, ",".join(names), "LSTM", "layer", "paper", 1e-5, "var", "tanh", False, [0.0, 0.0], 0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.lamina.recurrence.default, arguments, test_utils=checks)


@pytest.mark.parametrize("row", EVERY, ids=IDS)
def test_opaque_operator_equals_the_reference(row):
    from lamina import opaque

    cell = row[0]
    masks = tuple((torch.rand(4, 3, 5, dtype=torch.float64) < 0.3).double() for _ in "hc"[: 1 + (cell == "LSTM")])
    call = random_call(
        *row,
        (4, 3, 2, 5),
        lengths=torch.tensor([4, 2, 3]),
        resets=torch.rand(4, 3) < 0.3,
        reverse=True,
        zoneout=masks,
        recurrent_mask=torch.rand(3, 5, dtype=torch.float64),
    )
    got, want = opaque.run(call), reference.evaluate(call)
    assert_same((got.output, *got.state), (want.output, *want.state))
    assert got.moments.keys() == want.moments.keys()
    inputs = list(leaves(call).values())
    mine = gradients((got.output, *got.state), inputs)
    assert_same(mine, gradients((want.output, *want.state), inputs))


def test_export_keeps_one_operator_and_any_length():
    layer = lamina.LSTM(3, 5, 2, bidirectional=True).eval()
    steps, batch = torch.export.Dim("steps", min=2), torch.export.Dim("batch", min=2)
    shapes = ({0: steps, 1: batch},)
    program = torch.export.export(layer, (torch.randn(4, 3, 3),), dynamic_shapes=shapes)
    calls = [n for n in program.graph.nodes if "lamina" in str(n.target)]
    assert len(calls) == 4
    for shape in ((7, 2, 3), (2, 5, 3)):
        x = torch.randn(shape)
        assert_same(flat(program.module()(x)), flat(layer(x)), 1e-6)


@pytest.mark.parametrize("row", FEW_QUICKLY, ids=IDS)
def test_onnx_through_the_reference(row, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the dev extra")
    pytest.importorskip("onnxscript", reason="needs the dev extra")
    stacked = row == ("GRU", "layer", "paper")  # one stack both ways: writing steps out is slow
    layer = build(row, 3, 5, 2 if stacked else 1, bidirectional=stacked)
    layer(torch.randn(2, 4, 3), lengths=[2, 2, 1, 1])  # batch norm needs statistics to evaluate with
    layer.eval()
    x = torch.randn(2, 2, 3)
    torch.use_deterministic_algorithms(False)  # its NaN filling would be exported as part of the graph
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        shapes = ({1: torch.export.Dim.DYNAMIC},)  # any batch; the number of steps is fixed
        program = torch.onnx.export(layer, (x,), dynamo=True, verbose=False, dynamic_shapes=shapes)
    path = tmp_path / "layer.onnx"
    program.save(path)
    operators = {node.domain for node in program.model.graph}
    assert operators == {""}  # plain ONNX only
    session = onnxruntime.InferenceSession(path)
    x = torch.randn(2, 5, 3)
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    want = [t.detach().numpy() for t in flat(layer(x))]
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-6)


def test_gradient_penalty_trains_through_a_double_backward():
    layer = lamina.LSTM(3, 5, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    (inner,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    inner.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    assert layer.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.parametrize("row", EVERY, ids=IDS)
def test_vmap_over_an_ensemble_of_weights(row):
    layer = build(row, 3, 5, dtype=torch.float64, eval_statistics="batch").eval()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    stack = {n: torch.stack([p.detach(), p.detach() + 0.1, p.detach() * 0.5]) for n, p in layer.named_parameters()}
    call = lambda p: functional_call(layer, p, (x,))[0]  # noqa: E731
    got = vmap(call)(stack)
    want = torch.stack([call({n: p[k] for n, p in stack.items()}) for k in range(3)])
    assert_same([got], [want])


@pytest.mark.parametrize("layer", [lamina.LayerNorm(6), lamina.LSTM(6, 5), lamina.GRUCell(6, 5)], ids=repr)
def test_transforms_of_something_else(layer):
    """A layer on tensors that a transform does not look at, inside the function it looks at."""
    x, other = torch.randn(3, 6), torch.randn(4)

    def both(a):
        found = layer(x)
        return a.sum() + (found[0] if isinstance(found, tuple) else found).sum().detach()

    torch.testing.assert_close(grad(both)(other), torch.ones(4))


def test_vmap_over_cases_and_lengths():
    layer = lamina.GRU(3, 5, dtype=torch.float64)
    x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([4, 2, 1, 3, 4, 2])
    got = vmap(lambda case, n: layer(case.unsqueeze(1), lengths=n.unsqueeze(0))[0].squeeze(1))(x, lengths)
    want = layer(x.transpose(0, 1), lengths=lengths)[0].transpose(0, 1)
    assert_same([got], [want])


@pytest.mark.parametrize("row", LAYER)
def test_jvp_equals_the_finite_difference(row):
    layer = build(row, 3, 5, dtype=torch.float64)
    x, v = (torch.randn(4, 2, 3, dtype=torch.float64) for _ in range(2))
    call = lambda z: layer(z)[0]  # noqa: E731
    _, tangent = jvp(call, (x,), (v,))
    step = 1e-6
    assert_same([tangent], [(call(x + step * v) - call(x - step * v)) / (2 * step)], 1e-7)


def test_per_sample_gradients():
    layer = lamina.LSTM(3, 5, batch_first=True, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in layer.named_parameters()}
    x = torch.randn(3, 4, 3, dtype=torch.float64)

    def loss(p, case):
        return functional_call(layer, p, (case.unsqueeze(0),))[0].square().sum()

    per_case = vmap(grad(loss), (None, 0))(parameters, x)
    layer(x)[0].square().sum().backward()
    total = [per_case[n].sum(0) for n, _ in layer.named_parameters()]
    assert_same(total, [p.grad for p in layer.parameters()])


@pytest.mark.parametrize("row", EVERY, ids=IDS)
def test_copies_pickles_and_state_dicts_answer_alike(row, device):
    layer = build(row, 3, 5, 2, bidirectional=True, eps=1e-4, device=device)
    x = torch.randn(4, 3, 3, device=device)
    layer(x)
    layer.eval()
    want = layer(x)[0]
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = build(row, 3, 5, 2, bidirectional=True, eps=1e-4, device=device).eval()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(twin(x)[0], want)
        with torch.no_grad():
            twin.weight_hh_l0.add_(1)
    assert torch.equal(layer(x)[0], want)


@pytest.mark.parametrize("row", EVERY, ids=IDS)
def test_meta_device_and_late_materialisation(row):
    ghost = build(row, 3, 5, 2, bidirectional=True, device="meta")
    assert all(p.is_meta for p in ghost.parameters())
    output = flat(ghost(torch.empty(4, 2, 3, device="meta"), lengths=torch.empty(2, dtype=torch.int64, device="meta")))
    assert output[0].shape == (4, 2, 10)
    assert output[0].is_meta
    real = build(row, 3, 5, 2, bidirectional=True, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    real.reset_parameters()
    torch.manual_seed(0)
    want = build(row, 3, 5, 2, bidirectional=True)
    assert dict_equal(real.state_dict(), want.state_dict())


def test_training_is_deterministic_for_a_seed(device):
    def train():
        torch.manual_seed(5)
        layer = lamina.LSTM(3, 8, 2, dropout=0.2, zoneout=(0.1, 0.1), recurrent_dropout=0.2, device=device)
        optimiser = torch.optim.Adam(layer.parameters())
        for _ in range(5):
            loss = layer(torch.randn(6, 4, 3, device=device), lengths=[6, 2, 3, 6])[0].square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return layer.state_dict()

    assert dict_equal(train(), train())


def test_parametrisations_and_weight_changes_are_seen():
    layer = lamina.GRU(3, 5, norm=None)
    x = torch.randn(4, 2, 3)
    before = layer(x)[0]
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    assert_same([layer(x)[0]], [before], 1e-6)
    layer.parametrizations.weight_hh_l0.original0.data.mul_(2)
    assert not torch.allclose(layer(x)[0], before)


def ddp_worker(rank, store, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = DistributedDataParallel(lamina.LSTM(3, 5, 2, bidirectional=True, dtype=torch.float64))
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    mine = slice(3 * rank, 3 * rank + 3)
    layer(x[:, mine], lengths=torch.tensor([4, 2, 1, 3, 4, 4])[mine])[0].square().sum().backward()
    if rank == 0:
        queue.put([p.grad.numpy() for p in layer.parameters()])
    # batch norm's statistics are buffers, which DDP broadcasts: alike in shape though the lengths differ
    layer = DistributedDataParallel(lamina.GRU(3, 5, norm="batch", max_steps=3))
    for steps in (2 + 3 * rank, 4 - rank, 3):
        layer(torch.randn(steps, 4, 3))[0].square().sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive DDP: Python's own farewell aborts or hangs now and then


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=ddp_worker, args=(r, tmp_path / "store", queue)) for r in range(2)]
    for worker in workers:
        worker.start()
    grads = [torch.from_numpy(g) for g in queue.get()]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    torch.manual_seed(0)
    layer = lamina.LSTM(3, 5, 2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    layer(x, lengths=torch.tensor([4, 2, 1, 3, 4, 4]))[0].square().sum().backward()
    assert_same([2 * g for g in grads], [p.grad for p in layer.parameters()])


def test_explain_names_backend_and_reason():
    layer, x = lamina.LSTM(3, 5, placement="joint"), torch.randn(4, 2, 3)
    choice = lamina.explain(layer, x)
    assert choice.backend == "numba"
    assert "compiled kernel" in choice.reason
    assert str(choice) == f"numba: {choice.reason}"
    assert lamina.explain(layer) == choice
    packed = pack_padded_sequence(x, torch.tensor([4, 2]))
    assert lamina.explain(layer, packed) == choice
    for empty in (lamina.explain(lamina.GRUCell(3, 5), x[0, :0]), lamina.explain(lamina.GRU(3, 5), x[:, :0])):
        assert empty.backend == "reference"
        assert "batch is empty" in empty.reason
    forced = lamina.explain(lamina.GRUCell(3, 5, backend="reference"))
    assert "asked for" in forced.reason
    h = torch.zeros(2, 5)
    same = lamina.explain(functional.lstm, x, (h, h), layer._weights("_l0"), placement="joint")
    assert same == choice
    assert lamina.explain(functional.layer_norm, x, (3,)).backend == "torch"
    assert lamina.explain(functional.layer_norm, x, (3,), None, None, 0.0).backend == "reference"
    assert lamina.explain(lamina.LayerNorm(3)).backend == "torch"
    std = lamina.explain(lamina.LayerNorm(3, eps_mode="std"), x)
    assert std.backend == "reference"
    assert "std" in std.reason


def test_explain_and_forced_backends_refuse_with_words():
    with pytest.raises(lamina.InputError, match=r"lamina\.convert"):
        lamina.explain(nn.LSTM(3, 5))
    with pytest.raises(lamina.InputError, match=r"lamina\.functional"):
        lamina.explain(torch.tanh)
    with pytest.raises(lamina.BackendError, match="eps_mode='var'"):
        functional.layer_norm(torch.randn(2, 3), (3,), eps_mode="std", backend="torch")
    with pytest.raises(lamina.InputError, match="backend must be one of"):
        functional.layer_norm(torch.randn(2, 3), (3,), backend="cuda")
