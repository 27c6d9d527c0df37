"""Behaviour that PyTorch's own tests check of torch.nn's recurrent modules, here checked of both libraries at once.

``lamina`` modules have ``norm=None`` and torch's weights, so every number and every error has a counterpart.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lamina
from lamina.kernels import fused
from tests.cases import CELLS, assert_same, gradients
from tests.library.test_recurrent import flat

BACKENDS = ("auto", "reference")
SINGLE = tuple(f"{cell}Cell" for cell in CELLS)
DOUBLE = torch.float64


def pair(kind, *sizes, backend="auto", recompute=False, **options):
    """torch's module and ours with the same weights, in float64."""
    own = {"recompute": True} if recompute else {}
    theirs = getattr(nn, kind)(*sizes, dtype=DOUBLE, **options)
    ours = getattr(lamina, kind)(*sizes, dtype=DOUBLE, norm=None, backend=backend, **own, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def numbers(*shape, grad=True):
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=grad)


def outputs(module, *given):
    """Everything that a layer or a cell returns, in one tuple."""
    found = module(*given)
    return (found,) if isinstance(found, torch.Tensor) else found if found[0].dim() == 2 else flat(found)


# Outputs are ordinary tensors: a change in place gives the numbers and gradients of the same change out of place.

CHANGES = {
    "relu": (torch.relu_, torch.relu),
    "dropout": (lambda t: F.dropout(t, 0.5, True, inplace=True), lambda t: F.dropout(t, 0.5, True)),
    "product": (lambda t: t.mul_(t.detach() + 2), lambda t: t * (t.detach() + 2)),
    "view": (lambda t: (t[..., :2].zero_(), t)[1], lambda t: torch.cat([0 * t[..., :2], t[..., 2:]], -1)),
}
FORMS = [{}, {"batch_first": True}, {"num_layers": 2}, {"bidirectional": True}]


@pytest.fixture(params=[0, 2**30], ids=["shared", "copied"])
def _outputs_of_both_kinds(request, monkeypatch):
    """Small outputs of the CPU's kernels are copies, large ones share the memory of the states."""
    monkeypatch.setattr(fused, "COPIED", request.param)


@pytest.mark.usefixtures("_outputs_of_both_kinds")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, -1], ids=["output", "state"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_change_in_place(cell, backend, which, change):
    in_place, apart = CHANGES[change]
    x = numbers(5, 3, 4)
    for form in FORMS:
        layer = pair(cell, 4, 6, backend=backend, **form)[1]
        results = []
        for changed in (in_place, apart):
            found = list(outputs(layer, x))
            torch.manual_seed(1)
            found[which] = changed(found[which])
            results.append([*found, *gradients(found, [x, *layer.parameters()])])
        assert_same(*results)


OTHER_PATHS = [
    {"recompute": True},
    {"backend": "triton"},
    {"backend": "triton", "bidirectional": True},
    {"backend": "triton", "num_layers": 2},
]


@pytest.mark.usefixtures("_outputs_of_both_kinds")
@pytest.mark.parametrize("options", OTHER_PATHS, ids=str)
def test_outputs_of_every_path_change_in_place(options, device):
    if options.get("backend") == "triton":
        pytest.importorskip("triton")
    layer, x = lamina.RNN(2, 4, device=device, **options), torch.randn(3, 1, 2, device=device, requires_grad=True)
    inputs, upstream = [x, *layer.parameters()], torch.randn_like(layer(x)[0])
    want = torch.autograd.grad(layer(x)[0] * 2, inputs, upstream)
    output = layer(x)[0].mul_(2)
    for _ in range(2):  # a graph that is kept gives the same gradients again
        assert_same(torch.autograd.grad(output, inputs, upstream, retain_graph=True), want, 1e-5)


@pytest.mark.usefixtures("_outputs_of_both_kinds")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*CELLS, *SINGLE])
def test_outputs_are_detached_and_reshaped_in_place(kind, backend):
    x = numbers(3, 4) if kind in SINGLE else numbers(5, 3, 4)
    for module in pair(kind, 4, 6, backend=backend):
        for found in outputs(module, x):
            assert not found.detach_().requires_grad
        with torch.no_grad():
            outside = outputs(module, x)
        for found in outside:
            assert found.unsqueeze_(0).mul_(torch.ones(1, dtype=DOUBLE, requires_grad=True)).requires_grad


def test_watching_an_output_keeps_no_memory():
    """Nothing but the caller holds the states where hooks took the saved tensors elsewhere."""
    layer, kept = lamina.GRU(4, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.clone()) or len(kept) - 1, kept.__getitem__):
        output = layer(torch.randn(100, 3, 4))[0]  # 19,200 numbers share memory
    loss, storage = output.sum(), StorageWeakRef(output.untyped_storage())
    want = torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)
    del output
    assert storage.expired()
    assert_same(torch.autograd.grad(loss, [*layer.parameters()]), want, 0)


# Checkpoints, modes and batches of gradients.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [*CELLS, *SINGLE])
def test_checkpoints_under_a_dispatch_mode(kind, backend):
    x = numbers(3, 4) if kind in SINGLE else numbers(5, 3, 4)
    results = []
    for module in pair(kind, 4, 6, backend=backend):
        with FlopCounterMode(display=False):
            found = checkpoint(lambda module=module: outputs(module, x), use_reentrant=False)
            sum(t.square().sum() for t in found).backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
        x.grad = None
    assert_same(*results)


BATCHED = [{}, {"backend": "reference"}, {"recompute": True}, {"bidirectional": True}]


@pytest.mark.parametrize("options", BATCHED, ids=str)
@pytest.mark.parametrize("kind", CELLS)
def test_batches_of_gradients_of_layers(kind, options):
    check_batches_of_gradients(*pair(kind, 4, 6, **options), numbers(3, 2, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SINGLE)
def test_batches_of_gradients_of_cells(kind, backend):
    check_batches_of_gradients(*pair(kind, 4, 6, backend=backend), numbers(2, 4))


def check_batches_of_gradients(theirs, ours, x):
    results = []
    for module in (theirs, ours):
        found, inputs = outputs(module, x), [x, *module.parameters()]
        torch.manual_seed(1)
        upstream = [torch.randn(3, *t.shape, dtype=DOUBLE) for t in found]
        batch = torch.autograd.grad(found, inputs, upstream, is_grads_batched=True)
        assert not any(g.requires_grad for g in batch)
        results.append(batch)
    assert_same(*results)


def test_batches_of_gradients_of_a_layer_norm(device):
    pytest.importorskip("triton")
    theirs, ours = nn.LayerNorm(4, device=device), lamina.LayerNorm(4, backend="triton", device=device)
    x, results = torch.randn(3, 4, device=device, requires_grad=True), []
    upstream = torch.randn(2, 3, 4, device=device)
    for module in (theirs, ours):
        found = module(x)
        results.append(torch.autograd.grad(found, [x, *module.parameters()], upstream, is_grads_batched=True))
    assert_same(*results, 1e-6)


# Graphs that torch.fx, torch.jit and the older ONNX exporter make.

MODULES = {
    "LayerNorm": (lambda: lamina.LayerNorm(4), (3, 4)),
    "NoisyLayerNorm": (lambda: lamina.NoisyLayerNorm(4, 8), (3, 4)),
    "Linear": (lambda: lamina.Linear(4, 5), (3, 4)),
    "Conv2d": (lambda: lamina.Conv2d(4, 5, 3), (2, 4, 6, 6)),
    "BatchNorm": (lambda: lamina.BatchNorm(4), (3, 4)),
    **{kind: ((lambda kind=kind: getattr(lamina, kind)(4, 5)), (3, 2, 4)) for kind in CELLS},
    **{kind: ((lambda kind=kind: getattr(lamina, kind)(4, 5)), (2, 4)) for kind in SINGLE},
}


class Around(nn.Module):
    """A model of which the layer is a part."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x + 0)
        return found[0] if isinstance(self.layer, lamina.recurrent.RecurrentLayer | lamina.LSTMCell) else found


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_leaves_of_a_traced_graph(name):
    make, shape = MODULES[name]
    model, x = Around(make()), torch.randn(shape)
    graph = torch.fx.symbolic_trace(model)
    calls = [node for node in graph.graph.nodes if node.op in ("call_module", "get_attr")]
    assert [(node.op, node.target) for node in calls] == [("call_module", "layer")]
    torch.manual_seed(1)
    want = model(x)
    torch.manual_seed(1)
    assert torch.equal(graph(x), want)
    with pytest.raises(lamina.InputError, match="one node"):
        torch.fx.symbolic_trace(make())


def test_a_traced_graph_keeps_states_and_options():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = lamina.LayerNorm(4), lamina.LSTM(4, 5)

        def forward(self, x, h, c, lengths):
            x, total = self.norm(x, x)
            output, (h, c) = self.layer(x, (h, c), lengths=lengths)
            return output, h + total.sum(), c

    model, h = Model(), torch.randn(1, 2, 5)
    given = torch.randn(3, 2, 4), h, h, torch.tensor([3, 1])
    assert_same(torch.fx.symbolic_trace(model)(*given), model(*given), 0)


SCRIPTED = [
    lambda: lamina.LayerNorm(4, bias=False),
    lambda: lamina.Linear(4, 5),
    lambda: lamina.Linear(4, 5, norm=None),
]


@pytest.mark.parametrize("make", SCRIPTED)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_script_of_layers_in_torchs_form(make):
    layer, x = make(), torch.randn(3, 4)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    model, want = nn.Sequential(layer, nn.ReLU()), torch.relu(layer(x))
    for _ in range(2):
        assert_same([torch.jit.script(model)(x)], [want], 1e-6)
    assert isinstance(model[0], type(layer))  # torch leaves the scriptable form in the model
    assert repr(model[0]) == repr(layer)
    assert torch.equal(model(x), want)


REFUSED = [
    lambda: lamina.LayerNorm(4, activation="relu"),
    lambda: lamina.Linear(4, 5, norm="batch"),
    *(make for name, (make, _) in MODULES.items() if name not in ("LayerNorm", "Linear")),
]


@pytest.mark.parametrize("make", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_script_of_others_names_what_serves(make):
    with pytest.raises(lamina.InputError, match=r"torch\.jit\.script compiles .* Use torch\.export"):
        torch.jit.script(nn.Sequential(make()))


@pytest.mark.parametrize("kind", ["LSTM", "GRUCell"])
@pytest.mark.filterwarnings("ignore")
def test_the_older_onnx_exporter_takes_a_bare_layer(kind):
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the dev extra")
    make, shape = MODULES[kind]
    layer, x, file = make().eval(), torch.randn(shape), io.BytesIO()
    torch.use_deterministic_algorithms(False)  # its NaN filling would be exported as part of the graph
    torch.onnx.export(layer, (x,), file, dynamo=False)
    session = onnxruntime.InferenceSession(file.getvalue())
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_same([torch.from_numpy(t) for t in got], outputs(layer, x), 2e-6)


# Arguments, parameters and errors.

BUILDS = {
    "no layers": ((4, 5, 0), {}),
    "no units": ((4, -1), {}),
    "units of a float": ((4, 5.0), {}),
    "dropout above one": ((4, 5, 2), {"dropout": 1.5}),
    "dropout of a truth value": ((4, 5, 2), {"dropout": True}),
    "dropout of a text": ((4, 5, 2), {"dropout": "half"}),
    "unknown option": ((4, 5), {"units": 3}),
    "projection": ((4, 5), {"proj_size": 5}),
    "negative projection": ((4, 5), {"proj_size": -1}),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("cell", CELLS)
def test_constructors_refuse_what_torchs_refuse(cell, name):
    sizes, options = BUILDS[name]
    with pytest.raises((TypeError, ValueError)) as theirs:
        getattr(nn, cell)(*sizes, **options)
    with pytest.raises(theirs.type):
        getattr(lamina, cell)(*sizes, norm=None, **options)


@pytest.mark.parametrize("kind", SINGLE)
def test_constructors_of_cells_refuse_another_nonlinearity_and_unknown_options(kind):
    for library, more in ((nn, {}), (lamina, {"norm": None})):
        with pytest.raises(TypeError):
            getattr(library, kind)(4, 5, units=3, **more)


CALLS = {
    "rank 1": lambda m, x, h: m(x[0, 0]),
    "rank 4": lambda m, x, h: m(x.unsqueeze(0)),
    "features": lambda m, x, h: m(x[..., :3]),
    "state of another batch": lambda m, x, h: m(x, h(1, 3, 5)),
    "state of another size": lambda m, x, h: m(x, h(1, 2, 4)),
    "state of more layers": lambda m, x, h: m(x, h(2, 2, 5)),
    "unbatched state": lambda m, x, h: m(x, h(1, 5)),
    "batched state, unbatched input": lambda m, x, h: m(x[:, 0], h(1, 2, 5)),
    "no steps": lambda m, x, h: m(x[:0]),
    "half input": lambda m, x, h: m(x.half()),
    "packed state of another batch": lambda m, x, h: m(pack_sequence([x[:, 0], x[:2, 1]]), h(1, 3, 5)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("cell", CELLS)
def test_calls_that_torch_refuses_raise_the_same_type(cell, name):
    def state(*shape):
        h = numbers(*shape, grad=False)
        return (h, h) if cell == "LSTM" else h

    theirs, ours = pair(cell, 4, 5)
    x = numbers(3, 2, 4, grad=False)
    with pytest.raises((RuntimeError, ValueError)) as wanted:
        CALLS[name](theirs, x, state)
    with pytest.raises(wanted.type):
        CALLS[name](ours, x, state)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_parameters_come_in_torchs_order(cell, options):
    theirs, ours = pair(cell, 4, 5, 2, **options)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())  # the way back
    for mine, their in zip(ours.all_weights, theirs.all_weights, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, their, strict=True))


@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("first", [False, True], ids=["time-first", "batch-first"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_packed_sequence_keeps_its_order_and_its_fields(cell, first, sort):
    lengths = [5, 3, 1] if sort else [1, 5, 3]
    sequences = [numbers(n, 4) for n in lengths]
    results = []
    for module in pair(cell, 4, 6, 2, batch_first=first, bidirectional=True):
        given = pack_sequence(sequences, enforce_sorted=sort)
        output, state = module(given)
        assert isinstance(output, PackedSequence)
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            mine, its = getattr(output, name), getattr(given, name)
            assert its is mine is None or torch.equal(mine, its)
        padded, counts = pad_packed_sequence(output, first)
        assert counts.tolist() == lengths
        found = [padded, *(state if cell == "LSTM" else (state,))]
        results.append([*found, *gradients(found, [*sequences, *module.parameters()])])
    assert_same(*results)


@pytest.mark.parametrize("kind", [*CELLS, *SINGLE])
def test_a_gradient_of_one_output_alone(kind):
    """Of each output by itself, as the others are not used in many models."""
    x = numbers(2, 4) if kind in SINGLE else numbers(3, 2, 4)
    theirs, ours = pair(kind, 4, 6)
    for which in range(len(outputs(theirs, x))):
        results = [gradients([outputs(m, x)[which]], [x, *m.parameters()]) for m in (theirs, ours)]
        assert_same(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*CELLS, *SINGLE])
def test_half_precision_on_a_cpu_follows_torchs(kind, dtype):
    theirs, ours = (module.to(dtype) for module in pair(kind, 4, 6))
    x = torch.randn((2, 4) if kind in SINGLE else (3, 2, 4), dtype=dtype)
    want, got = outputs(theirs, x), outputs(ours, x)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [dtype] * len(got)
    assert_same([t.float() for t in got], [t.float() for t in want], 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("cell", CELLS)
def test_training_moves_and_copies_as_torchs_do(cell):
    """A copy that is trained leaves the original alone; both libraries take the same three steps."""
    x, trained = numbers(4, 2, 4, grad=False), []
    for module in pair(cell, 4, 6, 2, bidirectional=True):
        twin = copy.deepcopy(module)
        twin.flatten_parameters()
        before = [p.clone() for p in module.parameters()]
        optimiser = torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            twin(x)[0].square().sum().backward()
            optimiser.step()
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))
        trained.append([*twin.parameters()])
    assert_same(*trained)


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_and_states_that_do_not_lie_side_by_side(cell):
    x, h = numbers(2, 4, 3).permute(2, 0, 1), numbers(1, 1, 6).expand(1, 2, 6)
    results = []
    for module in pair(cell, 4, 6):
        found = outputs(module, x, (h, h) if cell == "LSTM" else h)
        results.append([*found, *gradients(found, [x, h, *module.parameters()])])
    assert_same(*results)


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_of_one_empties_the_layers_above_and_may_be_set_later(cell):
    x, results = numbers(3, 2, 4), []
    for module in pair(cell, 4, 6, 2):
        module.dropout = 1.0
        dropped = outputs(module, x)
        assert not gradients(dropped[:1], [x])[0].any()
        results.append([*dropped, *outputs(module.eval(), x)])
    assert_same(*results)
