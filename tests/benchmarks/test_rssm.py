"""The world model of benchmarks/rssm.py: with our cell or layer it computes what it computes with a port's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import lamina

PLACE = Path(__file__).parents[2] / "benchmarks" / "rssm.py"


@pytest.fixture(scope="module")
def rssm():
    found = importlib.util.spec_from_file_location("rssm", PLACE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def trained(model, loss):
    """The loss and the gradients of what models share."""
    shared = [p for part in (model.before, model.prior, model.posterior) for p in part.parameters()]
    return [loss, *torch.autograd.grad(loss, shared)]


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("posterior", ["state and frame", "frame"])
def test_our_cell_in_the_loop(rssm, backend, posterior, device):
    if backend == "triton":
        pytest.importorskip("triton")
    model = rssm.Model(24, 16, posterior, embedded=8).to(device, torch.float32)
    ours = rssm.with_ours(model, False, backend)
    data = rssm.batch(device, torch.float32, steps=4, cases=3, embedded=8)
    wants, found = (trained(m, m.observe(*data)) for m in (model, ours))
    for want, got in zip(wants, found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("full_float32")
def test_our_layer_instead_of_the_loop(rssm, device):
    model = rssm.Model(24, 16, "frame", embedded=8).to(device, torch.float32)
    ours = rssm.with_ours(model, True, "auto")
    assert isinstance(ours.cell, lamina.GRU)
    data = rssm.batch(device, torch.float32, steps=5, cases=3, embedded=8)
    data[2][3, 1] = True  # an episode begins
    want = trained(model, model.observe(*data))
    found = trained(ours, ours.observe_at_once(*data))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
