"""Speed of layer norm on a GPU: GB/s of useful traffic, beside a copy, torch's own kernel and torch.compile's.

    python benchmarks/speed.py --op layer_norm --out results/bench-norm.json

Useful traffic is what must be read and written: forward 2 tensors, backward 3. Times are of the device, of launches one
after another; "calls" are the wall clock of a forward and of a backward call from Python, which at small sizes is the
host's, "call" is both together. A case is timed only after its result and gradients were compared with the float64
reference.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina import functional, records

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


def contenders(x: Tensor, gain: Tensor, bias: Tensor, d: Tensor, compiled: Callable[..., Tensor] | None) -> Passes:
    """Forward and backward by name."""
    shape = x.shape[1:]
    runs: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: functional.layer_norm(x, shape, gain, bias, backend="triton"),
        AUTO: lambda: functional.layer_norm(x, shape, gain, bias),
        TORCH: lambda: F.layer_norm(x, shape, gain, bias),
    }
    if compiled is not None:
        runs[COMPILED] = lambda: compiled(x, shape, gain, bias)
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


def measure(dtype: str, shape: tuple[int, int], rounds: int, compiled: Callable[..., Tensor] | None) -> dict[str, Any]:
    rows, width = shape
    x, d = (torch.randn(rows, width, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    gain, bias = (torch.randn(width, device="cuda").to(DTYPES[dtype]).requires_grad_() for _ in range(2))
    x.requires_grad_()
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
    row: dict[str, Any] = {"dtype": dtype, "shape": list(shape), "error": ours, "error_of_reference": plain,
                           "microseconds": times, "gigabytes_per_second": {}}  # fmt: skip
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


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--out", default="results/bench-norm.json")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, which takes minutes")
    given = parser.parse_args(words)
    compiled = torch.compile(F.layer_norm, dynamic=False) if given.compiled else None
    rows = []
    for dtype in given.dtypes.split(","):
        for shape in SHAPES:
            rows.append(measure(dtype, shape, given.rounds, compiled))
            print("  ".join(table(rows[-1:])[0]["rows"][0]), flush=True)
    record = {
        "schema": records.SCHEMA, "kind": "bench", "name": "norm", "title": "Layer norm on a GPU",
        "environment": records.environment(), "rows": rows, "tables": table(rows),
        "command": f"python benchmarks/speed.py --op layer_norm --rounds {given.rounds} --dtypes {given.dtypes}"
        + " --compiled" * given.compiled,
        "about": "Gain and bias; medians of rounds in randomised order, caches emptied before each timing.",
    }  # fmt: skip
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
