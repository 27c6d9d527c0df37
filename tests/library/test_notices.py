"""Notices of a slow environment: one warning or line a process, with the remedy, and none where nothing is missing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lamina
from lamina import functional, kernels, notices
from lamina.errors import SlowPathWarning
from lamina.kernels import Request
from lamina.kernels.cpu import code_cache

ROOT = Path(__file__).parents[2]
X = torch.randn(4, 2, 3)


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch):
    monkeypatch.setattr(notices, "_given", set())
    monkeypatch.setattr(notices, "_compiled", 0.0)


@pytest.fixture
def without_numba(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_NUMBA", False)


LAYER = lambda: lamina.LSTM(3, 5)(X)  # noqa: E731
CALLS = {
    "layer": LAYER,
    "both directions": lambda: lamina.GRU(3, 5, bidirectional=True)(X),
    "cell": lambda: lamina.GRUCell(3, 5)(X[0]),
    "stream": lambda: lamina.stream(lamina.RNN(3, 5).eval())(X[0, :1]),
    "recompute": lambda: lamina.GRU(3, 5, recompute=True)(X),
    "batch norm": lambda: lamina.LSTM(3, 5, norm="batch")(X),
    "compiled": lambda: torch.compile(lamina.GRU(3, 5), fullgraph=True, backend="aot_eager")(X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_without_numba_one_warning_names_the_remedy(call, without_numba):
    with pytest.warns(SlowPathWarning, match="pip install numba") as given:
        call()
    assert [w.filename for w in given] == [__file__]  # the caller's line
    call()
    LAYER()


OWN_REASONS = {
    "by name": lambda: lamina.LSTM(3, 5, backend="reference")(X),
    "projection": lambda: lamina.LSTM(3, 5, proj_size=2)(X),
    "half": lambda: lamina.LSTM(3, 5, dtype=torch.bfloat16)(X.bfloat16()),
    "torch.func": lambda: torch.func.grad(lambda x: lamina.GRU(3, 5)(x)[0].sum())(X),
    "wide cell": lambda: lamina.GRUCell(3, kernels.SMALL_CELL + 1)(X[0]),
    "explained": lambda: lamina.explain(lamina.LSTM(3, 5), X),
    "layer norm": lambda: lamina.LayerNorm(3)(X),
}


@pytest.mark.parametrize("call", OWN_REASONS.values(), ids=OWN_REASONS)
def test_what_numba_would_not_serve_either_is_silent(call, without_numba):
    call()


@pytest.mark.skipif(not kernels.HAS_NUMBA, reason="needs numba")
def test_with_numba_all_is_silent_and_so_are_gradients_of_gradients():
    layer, x = lamina.GRU(3, 5), X.clone().requires_grad_()
    (d,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    d.square().sum().backward()


def test_without_triton_a_gpu_warns_where_its_kernels_would_serve(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    request = Request("recurrence", torch.device("cuda"), torch.float32, cell="LSTM", norm="layer", placement="paper")
    choice = kernels.choose(request)
    assert (choice.backend, choice.missing) == ("reference", "triton")
    for other in ({"norm": "batch"}, {"dtype": torch.float64}, {"projection": True}):
        assert kernels.choose(replace(request, **other)).missing == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.choose(request).missing == ""  # there plain PyTorch serves anyway
    monkeypatch.setattr(functional, "choose", lambda *given: choice)
    with pytest.warns(SlowPathWarning, match="pip install triton"):
        LAYER()
    LAYER()


@pytest.mark.skipif(not kernels.HAS_NUMBA, reason="needs numba")
def test_a_cache_that_cannot_be_written_is_told_once(monkeypatch, tmp_path):
    code = code_cache._read("forward_float32") or code_cache._compiled("forward_float32")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(code_cache, "_compiled", lambda name: code)
    with pytest.warns(SlowPathWarning, match=r"(?s)file.*LAMINA_CACHE"):
        assert code_cache.address.__wrapped__("forward_float32")
    assert code_cache.address.__wrapped__("packs_float32")


def test_a_cache_without_a_home_is_told(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LAMINA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert code_cache._read("forward_float32") is None
    with pytest.warns(SlowPathWarning, match="home directory"):
        code_cache._keep("forward_float32", code_cache.Code("", (), b""))


def test_a_filled_cache_may_be_read_only(monkeypatch, tmp_path):
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    code = code_cache.Code("entry", ["needs"], b"code")
    code_cache._keep("name", code)
    monkeypatch.setattr(code_cache, "_write", lambda *given: pytest.fail("nothing is written"))
    assert code_cache._read("name") == code


def test_long_compiling_is_told_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(notices, "PATIENCE", 0.05)
    with caplog.at_level(logging.WARNING, "lamina"):
        with notices.compiling():
            pass
        assert not caplog.messages
        for _ in range(3):  # several kernels, each in a shorter time
            with notices.compiling():
                time.sleep(0.04)
    assert caplog.messages == [notices.COMPILING]


def test_numba_disable_jit_falls_back():
    code = """
import torch, lamina
layer, x = lamina.LSTM(3, 5), torch.randn(4, 2, 3)
layer(x)[0].sum().backward()
print(lamina.explain(layer, x))
"""
    told = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=told, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("reference: "), done.stderr
    assert "NUMBA_DISABLE_JIT" in done.stdout
