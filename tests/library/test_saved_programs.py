"""Programs saved by torch.export and AOTInductor run in a new process that names nothing of lamina's but itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lamina
from lamina import reference
from lamina.kernels import fused
from tests.cases import assert_same, everything, random_call, without

ROOT = Path(__file__).parents[2]
LOAD = """
import sys, warnings, torch, lamina
folder, loads, trains, absent = sys.argv[1:]
print("numba" in sys.modules, "triton" in sys.modules)
x, *grads = torch.load(f"{folder}/inputs.pt")
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    model = eval(loads)(f"{folder}/program.pt2")
    model = model.module() if hasattr(model, "module") else model
    outputs = model(x.requires_grad_())
    found = torch.autograd.grad(outputs, [x, *model.parameters()], grads) if trains == "True" else []
slow = sum("numba" in str(w.message) for w in given)
assert slow == (absent == "True"), [str(w.message) for w in given]
torch.save([*(t.detach() for t in outputs), *found], f"{folder}/found-{absent}.pt")
"""


class Model(torch.nn.Module):
    """One recurrence that numba serves, and one that plain PyTorch serves everywhere."""

    def __init__(self):
        super().__init__()
        self.first = lamina.LSTM(3, 5, bidirectional=True)
        self.second = lamina.LSTM(10, 6, proj_size=4)

    def forward(self, x):
        x, (h, c) = self.first(x)
        return self.second(x)[0], h, c


def saved(folder):
    """Save inputs, and upstream gradients, of a program; its outputs and all gradients."""
    model, x = Model(), torch.randn(4, 2, 3, requires_grad=True)
    outputs = model(x)
    grads = [torch.randn_like(t) for t in outputs]
    torch.save([x.detach(), *grads], folder / "inputs.pt")
    gradients = torch.autograd.grad(outputs, [x, *model.parameters()], grads)
    return model, x.detach(), [t.detach() for t in outputs], list(gradients)


def loaded(folder, loads, trains, absent):
    """Outputs, and gradients, of the saved program in a new process."""
    code = (without("numba", "llvmlite") if absent else "") + LOAD
    options = ["-X", "faulthandler", "-W", "ignore"]
    command = [sys.executable, *options, "-c", code, str(folder), loads, str(trains), str(absent)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["False", "False"]
    return torch.load(folder / f"found-{absent}.pt")


def test_exported_where_numba_serves_and_loaded_with_and_without_it(tmp_path):
    pytest.importorskip("numba")
    model, x, outputs, gradients = saved(tmp_path)
    program = torch.export.export(model, (x,))
    named = {str(node.target) for node in program.graph.nodes}
    assert {"lamina.sequence.default", "lamina.recurrence.default"} <= named
    torch.export.save(program, tmp_path / "program.pt2")
    for absent in (False, True):
        found = loaded(tmp_path, "torch.export.load", True, absent)
        torch.testing.assert_close(found, [*outputs, *gradients], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own compiler gives FutureWarnings
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_ahead_of_time_where_numba_serves_and_loaded_without_it(tmp_path):
    pytest.importorskip("numba")
    torch.use_deterministic_algorithms(False)
    model, x, outputs, _ = saved(tmp_path)
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    with torch.no_grad():
        program = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "program.pt2"), inductor_configs=quick
    )
    found = loaded(tmp_path, "torch._inductor.aoti_load_package", False, True)
    torch.testing.assert_close(found, outputs, rtol=1e-4, atol=1e-5)


ACTING = {
    "lengths": torch.tensor([6, 2, 4]),
    "resets": torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]]).bool(),
    "zoneout": (0.3, 0.2),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("row", [("LSTM", "layer", "paper"), ("GRU", "weight", None), ("RNN", None, None)], ids=str)
def test_where_its_kernels_cannot_run_the_operator_is_the_reference(row, reverse, monkeypatch):
    call = random_call(*row, (6, 3, 4, 5), reverse=reverse, **ACTING)
    want = everything(call, reference.evaluate)
    monkeypatch.setattr("lamina.kernels.HAS_NUMBA", False)
    monkeypatch.setattr("lamina.notices._given", {"numba"})
    monkeypatch.setattr(fused, "watched", lambda tensor: True)  # takes the operator
    got = everything(call, lambda call: fused.run(call, "cpu"))
    assert_same(got.values(), want.values(), 1e-12, [*got])


@pytest.mark.parametrize("name", ["LSTM", "BatchNorm"])
def test_naming_a_layer_registers_the_operators(name):
    code = f"import lamina; lamina.{name}; import torch; torch.ops.lamina.sequence, torch.ops.lamina.recurrence"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
