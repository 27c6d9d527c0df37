"""Behaviour that PyTorch's own tests check of torch.nn's recurrent modules, here checked of both libraries at once.

``lamina`` modules have ``norm=None`` and torch's weights, so every number and every error has a counterpart.
"""

from __future__ import annotations

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
