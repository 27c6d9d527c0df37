"""Behaviour that PyTorch's own tests check of torch.nn's recurrent modules, here checked of both libraries at once.

``lamina`` modules have ``norm=None`` and torch's weights, so every number and every error has a counterpart.
"""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lamina
from lamina.kernels import fused
from tests.cases import CELLS, assert_same, gradients
from tests.test_recurrent import flat

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
def test_outputs_of_every_path_change_in_place(options):
    if options.get("backend") == "triton":
        pytest.importorskip("triton")
    layer, x = lamina.RNN(2, 4, **options), torch.randn(3, 1, 2, requires_grad=True)
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


def test_batches_of_gradients_of_a_layer_norm():
    pytest.importorskip("triton")
    theirs, ours = nn.LayerNorm(4), lamina.LayerNorm(4, backend="triton")
    x, results = torch.randn(3, 4, requires_grad=True), []
    upstream = torch.randn(2, 3, 4)
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
