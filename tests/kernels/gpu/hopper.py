"""Kernels compiled and assembled for Hopper on a machine without a GPU: Triton's interpreter accepts more than it does.

    python -m tests.kernels.gpu.hopper

runs layers with every launch replaced by a compilation, and prints the kernels' names and how often they were compiled.
In a process of its own: whether Triton interprets is decided when it is imported.
"""

from __future__ import annotations

import collections
import dataclasses
import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamina.kernels import cell, forms, fused, launch, layer_norm, norm, plans, precision, prepared, rows, steps
from tests.cases import cast, random_call

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
counts: collections.Counter[str] = collections.Counter()


def compiled(kernel, arguments, options) -> None:
    """As a launch with these arguments would have it compiled."""
    kinds, constants, hints = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            kinds[name], hints[(at,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif kernel.params[at].is_constexpr or not isinstance(value, (int, float)) or isinstance(value, bool):
            kinds[name], constants[(at,)] = "constexpr", value
        else:
            kinds[name] = "i32" if isinstance(value, int) else "fp32"
    known = {k: v for k, v in options.items() if k != "launch_cooperative_grid"}
    found = triton.compile(ASTSource(kernel, kinds, constants, hints), target=HOPPER, options=known)
    if not found.asm["cubin"]:
        raise RuntimeError(f"{kernel.__name__}: no machine code")
    counts[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.__name__}"] += 1


def start(kernel, grid, arguments, options) -> None:
    compiled(kernel, arguments, options)


def without_a_gpu() -> None:
    """Launches become compilations; the device is as large as an H200."""
    for module in (cell, launch, layer_norm, prepared, rows, steps):
        module.start = start
        if hasattr(module, "processors"):
            module.processors = lambda device: 132
    plans.processors, plans.shared_memory = lambda device: 132, lambda device: 227 * 1024
    plans.memory_beside = lambda device, residents: {1: 227, 2: 85, 3: 73}[residents] * 1024
    steps.Stepper.__call__ = lambda self: compiled(self.kernel, self.arguments, self.options)
    launch.interpreted = lambda: False
    precision.halves = lambda *given: False
    forms.halves = lambda *given: False


def passes(row, hidden: int, dtype: torch.dtype, path: str) -> None:
    """Forward and backward of one layer or cell."""
    call = cast(random_call(*row, (1 if path == "cell" else 2, 4, 3, hidden), dtype=torch.float32), dtype, dtype)
    fused.run(dataclasses.replace(call), path).output.sum().backward()


def directions(row, hidden: int, dtype: torch.dtype) -> None:
    """Forward and backward of two recurrences in common launches."""
    calls = [cast(random_call(*row, (2, 4, 3, hidden), dtype=torch.float32), dtype, dtype) for _ in range(2)]
    sum(result.output.sum() for result in fused.run_together(calls, "persistent")).backward()


def main() -> None:
    without_a_gpu()
    directions(("LSTM", "layer", "paper"), 512, torch.bfloat16)
    for row in (("LSTM", "layer", "paper"), ("GRU", "layer", "joint")):
        passes(row, 512, torch.bfloat16, "cell")
        passes(row, 512, torch.bfloat16, "persistent")
    passes(("GRU", "layer", "paper"), 1000, torch.float32, "cell")
    passes(("LSTM", "layer", "paper"), 2400, torch.bfloat16, "steps")
    for width in (1024, 65537):
        x, gain = torch.zeros(8, width, requires_grad=True), torch.ones(width, requires_grad=True)
        norm.run(x, (width,), gain, gain, 1e-5, "var", "silu", None)[0].sum().backward()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
