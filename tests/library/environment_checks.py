"""CPU library checks for one environment: run by ``test_environments`` with the interpreter of a virtual environment.

    python -I environment_checks.py BACKEND [CHECK ...]

BACKEND is the one that recurrences are to run on, CHECK a function below (default: all). Needs torch, numpy and the
installed library, nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import sys
import warnings

import torch

import lamina
from lamina.errors import SlowPathWarning

GPU_KERNELS = {
    "cell_kernels", "exchange", "formulas", "gates", "layer_norm", "product", "rows", "sequence", "sides",
    "step_kernels", "steps", "wavefront",
}  # fmt: skip
CPU_KERNELS = {
    *("backward", "batch_norm", "call_parts", "columns", "entries", "forward", "jit", "matmul", "rows", "simd"),
}
LENGTHS = torch.tensor([6, 3, 5])
RESETS = torch.zeros(6, 3, dtype=torch.bool)
RESETS[2, 0] = RESETS[3, 2] = True


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, check_dtype=False)


def gradients(module, x, **given):
    """Output, final states and all gradients, for random upstream gradients."""
    x = x.detach().requires_grad_()
    output, state = module(x, **given)
    state = state if isinstance(state, tuple) else (state,)
    torch.manual_seed(3)
    loss = sum((t * torch.randn_like(t, dtype=torch.float32)).sum() for t in (output, *state))
    return [output, *state, *torch.autograd.grad(loss, [x, *module.parameters()])]


def oracle(module):
    """The same module on the reference, in float64."""
    other = copy.deepcopy(module).double()
    other.options = dataclasses.replace(other.options, backend="reference", recompute=False)
    return other


def check_layers(backend):
    for cell in ("RNN", "LSTM", "GRU"):
        for norm in ("layer", None):
            layer = getattr(lamina, cell)(4, 5, 2, norm=norm, bidirectional=True)
            for given in ({}, {"lengths": LENGTHS}, {"resets": RESETS}, {"lengths": LENGTHS, "resets": RESETS}):
                x = torch.randn(6, 3, 4)
                same(gradients(layer, x, **given), gradients(oracle(layer), x.double(), **given))
            assert lamina.explain(layer, x).backend == backend, lamina.explain(layer, x)
    plain, ours = torch.nn.GRU(4, 5), lamina.GRU(4, 5, norm=None)
    ours.load_state_dict(plain.state_dict())
    same(gradients(ours, x), gradients(plain, x))


def check_recompute(backend):
    layer = lamina.GRU(4, 5, norm=None, recompute=True)
    x = torch.randn(300, 4, 4)
    same(gradients(layer, x), gradients(oracle(layer), x.double()))


def check_cells(backend):
    for cell in ("RNN", "LSTM", "GRU"):
        step = getattr(lamina, f"{cell}Cell")(4, 5)
        x, other = torch.randn(3, 4), oracle(step)
        for _ in range(3):  # a kind of call that is known takes a shorter way
            found, want = step(x), other(x.double())
            found, want = (s if isinstance(s, tuple) else (s,) for s in (found, want))
            same(found, want)
            a, b = (torch.autograd.grad(sum(t.square().sum() for t in s), [*m.parameters()]) for s, m in
                    ((found, step), (want, other)))  # fmt: skip
            same(a, b)
        assert lamina.explain(step, x).backend == backend


def check_gradients_of_gradients(backend):
    layer, x = lamina.GRU(4, 5, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    same(torch.func.grad(lambda x: layer(x)[0].square().sum())(x), want)


def check_streams(backend):
    layer = lamina.LSTM(4, 5, 2).eval()
    step, frames = lamina.stream(layer, batch_size=3), torch.randn(6, 3, 4)
    with torch.no_grad():
        same(torch.stack([step(frame) for frame in frames]), layer(frames)[0])
    assert step.choice.backend == backend


def check_other_layers(backend):
    model = torch.nn.Sequential(lamina.Linear(4, 6), lamina.LayerNorm(6))
    model(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    x, plain = torch.randn(6, 3, 4), torch.nn.LSTM(4, 5)
    want = plain(x)[0]
    same(lamina.convert(plain, norm=None).model(x)[0], want)
    lamina.convert(torch.nn.GRU(4, 5)).model(x)[0].sum().backward()
    lamina.GRU(4, 5, norm="batch")(torch.randn(6, 3, 4))[0].sum().backward()
    lamina.GRU(4, 5, dtype=torch.bfloat16)(torch.randn(6, 3, 4, dtype=torch.bfloat16))[0].sum().backward()


def check_compilers(backend):
    layer, x = lamina.LSTM(4, 5), torch.randn(6, 3, 4)
    want = gradients(layer, x)
    same(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), x), want)
    same(torch.export.export(layer, (x,)).module()(x)[0], want[0])


def check_imports(backend):
    """Only GPU kernels need Triton, only CPU kernels numba, and only the experiments anything else."""
    refused = {}
    for found in pkgutil.walk_packages(lamina.__path__, "lamina."):
        if found.name.endswith("__main__") or found.name.startswith("lamina.lab.cli"):  # which end the process
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            refused.setdefault(error.name.partition(".")[0], set()).add(found.name.rpartition(".")[2])
    assert refused.get("triton", set()) <= GPU_KERNELS, refused
    assert refused.get("numba", set()) | refused.get("llvmlite", set()) <= CPU_KERNELS, refused
    assert not (refused.keys() - {"triton", "numba", "llvmlite"}) & {"torch", "numpy"}


def main():
    backend, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for name, check in list(globals().items()):
            if name in chosen or (not chosen and name.startswith("check_")):
                try:
                    check(backend)
                except Exception as error:
                    raise AssertionError(name) from error
    slow = [w for w in given if issubclass(w.category, SlowPathWarning)]
    assert all(w.filename == __file__ for w in slow), slow
    print(lamina.__file__, *(w.message for w in slow))


if __name__ == "__main__":
    main()
