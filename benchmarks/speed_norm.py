"""Speed of layer norm on a GPU: GB/s of useful traffic, beside a copy, torch's own kernel and torch.compile's.

    python benchmarks/speed.py --op layer_norm --out results/bench-norm.json

Useful traffic is what must be read and written: forward 2 tensors, backward 3. Times are of the device, of launches one
after another; "calls" are the wall clock of a forward and of a backward call from Python, which at small sizes is the
host's, "call" is both together. A case is timed only after its result and gradients were compared with the float64
reference.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import growing
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina import functional

SHAPES = (
    (16384, 1024), (32768, 1024), (16384, 2048), (16384, 4096), (32768, 4096), (16384, 8192), (131072, 256),
    (4096, 768), (1024, 768), (4096, 256), (512, 512), (64, 1024), (1, 4096), (65536, 64), (4096, 16384), (512, 65537),
    (8, 1048576),
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPY, OURS, AUTO, TORCH, COMPILED = "copy", "lamina", "lamina auto", "torch", "torch.compile"
FLUSH = 2**28  # bytes written between timings: caches hold nothing of a case


def errors(x: Tensor, gain: Tensor, bias: Tensor, d: Tensor) -> tuple[float, float]:
    """The largest relative error of result and gradients, ours and that of the reference in the same precision."""
    found = []
    for dtype, backend in ((x.dtype, "triton"), (x.dtype, "reference"), (torch.float64, "reference")):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, gain, bias)]
        out = functional.layer_norm(leaves[0], x.shape[1:], *leaves[1:], backend=backend)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, d.to(dtype))])
    ours, plain = (
        max(((a.double() - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(some, found[2]))
        for some in found[:2]
    )
    return ours, plain


Passes = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def contenders(x: Tensor, gain: Tensor, bias: Tensor, d: Tensor, compiled: bool) -> Passes:
    """Forward and backward by name."""
    shape = x.shape[1:]
    runs: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: functional.layer_norm(x, shape, gain, bias, backend="triton"),
        AUTO: lambda: functional.layer_norm(x, shape, gain, bias),
        TORCH: lambda: F.layer_norm(x, shape, gain, bias),
    }
    if compiled:
        torch._dynamo.reset()  # after eight shapes it would give up and not compile at all
        fast = torch.compile(F.layer_norm, dynamic=False)
        runs[COMPILED] = lambda: fast(x, shape, gain, bias)
    out = torch.empty_like(x)
    ready: Passes = {COPY: (lambda: out.copy_(d), lambda: out.copy_(d))}
    for name, run in runs.items():
        made = run()

        def back(made: Tensor = made) -> Any:
            return torch.autograd.grad(made, (x, gain, bias), d, retain_graph=True)

        def forth(run: Callable[[], Tensor] = run) -> Any:
            with torch.no_grad():
                return run()

        ready[name] = forth, back
    return ready


def microseconds(step: Callable[[], Any], spare: Tensor) -> float:
    """Of the device alone: what the host does beforehand is hidden behind a long kernel."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spare.zero_()
    torch.cuda._sleep(6_000_000)  # cycles: some 3 ms, in which the host gets all of a backward pass started
    begin.record()
    step()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def wall(step: Callable[[], Any], repeats: int = 20) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / repeats


def problem(dtype: str, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """x, gain, bias and the gradient that arrives."""
    x, d = (torch.randn(*shape, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    gain, bias = (torch.randn(shape[1], device="cuda").to(DTYPES[dtype]).requires_grad_() for _ in range(2))
    return x.requires_grad_(), gain, bias, d


def touch(dtype: str, shape: Sequence[int], compiled: bool) -> None:
    """Compile what a case needs."""
    for forth, back in contenders(*problem(dtype, shape), compiled).values():
        forth()
        back()


def measure(dtype: str, shape: Sequence[int], rounds: int, compiled: bool) -> dict[str, Any]:
    x, gain, bias, d = problem(dtype, shape)
    ours, plain = errors(x, gain, bias, d)
    if not ours <= 2 * plain + 1e-6:
        raise RuntimeError(f"{dtype} {shape}: error {ours:.2g}, reference {plain:.2g}: not timed")
    ready = contenders(x, gain, bias, d, compiled)
    spare = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    times: dict[str, list[list[float]]] = {name: [[], [], [], []] for name in ready}
    for turn in range(rounds + 2):
        for name in random.sample(list(ready), len(ready)):
            forth, back = ready[name]
            found = [microseconds(step, spare) for step in (forth, back)]
            found += [0.0 if name == COPY else wall(step) for step in (forth, back)]
            if turn > 1:
                for values, value in zip(times[name], found):
                    values.append(value)
    bytes_ = x.numel() * x.element_size()
    row: dict[str, Any] = {"error": ours, "error_of_reference": plain, "microseconds": times,
                           "gigabytes_per_second": {}}  # fmt: skip
    for name, values in times.items():
        *both, forth, back = map(statistics.median, values)
        row["gigabytes_per_second"][name] = [
            2 * bytes_ / both[0] / 1e3, (2 if name == COPY else 3) * bytes_ / both[1] / 1e3
        ]  # fmt: skip
        row.setdefault("calls", {})[name] = [forth, back]
        row.setdefault("call", {})[name] = forth + back
    return row


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [name for name in (COPY, OURS, TORCH, COMPILED) if name in rows[0]["gigabytes_per_second"]]
    lines = []
    for row in rows:
        speed, copy = row["gigabytes_per_second"], row["gigabytes_per_second"][COPY][0]
        lines.append([
            row["dtype"], " x ".join(map(str, row["shape"])),
            *(f"{speed[n][0]:.0f}" + ("" if n == COPY else f" / {speed[n][1]:.0f}") for n in names),
            f"{speed[OURS][0] / copy:.2f} / {speed[OURS][1] / copy:.2f}",
            f"{row['call'][AUTO] / row['call'][TORCH]:.2f}",
        ])  # fmt: skip
    columns = ["", "Rows x width", *(n + ("" if n == COPY else ", forward / backward") for n in names),
               "share of the copy's", "a call's time / torch's"]  # fmt: skip
    return [{"caption": "GB/s of useful traffic; a call by backend='auto', forward and backward, host included",
             "columns": columns, "rows": lines}]  # fmt: skip


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, which takes minutes")
    growing.arguments(parser, "results/bench-norm.json")
    given = parser.parse_args(words)
    cases = [{"dtype": dtype, "shape": list(shape)} for dtype in given.dtypes.split(",") for shape in SHAPES]
    head = {
        "kind": "bench", "name": "norm", "title": "Layer norm on a GPU", "command": growing.command("speed.py"),
        "about": "Gain and bias; medians of rounds in randomised order, caches emptied before each timing.",
    }  # fmt: skip
    return growing.run(
        given, head, table, cases, lambda dtype, shape: measure(dtype, shape, given.rounds, given.compiled),
        lambda row: "  ".join(table([row])[0]["rows"][0]), lambda dtype, shape: touch(dtype, shape, given.compiled),
    )  # fmt: skip
