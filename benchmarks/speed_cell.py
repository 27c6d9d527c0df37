"""A cell's step on a GPU: what a call costs the host, and what a captured step costs the device.

    python benchmarks/speed.py --op cell --out results/bench-cell.json

Host: microseconds of a call, forward, in a loop that never waits for the device (which is idle: sizes are small), with
gradients recorded and without; ours, torch.nn's plain cell and our reference, in randomised order. Device: a loop of
steps captured as one CUDA graph, microseconds a step. Every contender's output is compared with the reference's first.

Ours is timed as it is, and with both ways to form its products: in one launch of our own (at most
``cell_product.MOST`` rows; above, this is the library again) and by the library. Which of them a call takes is decided
in ``kernels/cell_product.py``, by counting; here is what to set its thresholds by. What a way is named by costs the
host a few microseconds a call that a call without a name does not have.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import growing
import torch
from torch import Tensor, nn

import lamina
from lamina.kernels import plans

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Batch, units; inputs are as many as units.
SIZES = ((16, 512), (1, 512), (64, 512), (32, 1024), (64, 1024), (16, 4096), (32, 4096), (64, 4096), (128, 1024))
STEPS = 64  # of a captured loop
OURS, TORCH, REFERENCE = "lamina, triton", "torch.nn plain", "lamina, reference"
ONE_LAUNCH, LIBRARY = f"{OURS}, products in one launch", f"{OURS}, products of the library"
WAYS: dict[str, dict[str, Any]] = {ONE_LAUNCH: {"cell_product": True}, LIBRARY: {"cell_product": False}}


def contenders(cell: str, dtype: torch.dtype, hidden: int) -> dict[str, nn.Module]:
    """Cells of the same size, ours with the same weights."""
    make = getattr(lamina, f"{cell}Cell")
    found = {
        OURS: make(hidden, hidden, device="cuda", dtype=dtype, backend="triton"),
        REFERENCE: make(hidden, hidden, device="cuda", dtype=dtype, backend="reference"),
        TORCH: getattr(nn, f"{cell}Cell")(hidden, hidden, device="cuda", dtype=dtype),
    }
    found[REFERENCE].load_state_dict(found[OURS].state_dict())
    return found | dict.fromkeys(WAYS, found[OURS])


@contextmanager
def way(name: str) -> Iterator[None]:
    """In which a contender's products are formed as its name says."""
    plans.OVERRIDE.update(WAYS.get(name, {}))
    try:
        yield
    finally:
        plans.OVERRIDE.clear()


def start_of(cell: str, x: Tensor) -> Any:
    zeros = torch.zeros_like(x)
    return (zeros, zeros) if cell == "LSTM" else zeros


def check(cell: str, cells: dict[str, nn.Module], x: Tensor) -> float:
    """How far our step is from the reference's in the same precision, whichever way it goes."""
    first, outputs = start_of(cell, x), []
    for name in (REFERENCE, OURS, *WAYS):
        with way(name):
            found = cells[name](x, first)
        outputs.append((found[0] if isinstance(found, tuple) else found).detach())
    error = max(float((ours - outputs[0]).abs().max()) for ours in outputs[1:])
    if not error <= (2e-2 if x.dtype == torch.bfloat16 else 5e-3):
        raise RuntimeError(f"{cell} {tuple(x.shape)}: {error:.2g} from the reference: not timed")
    return error


def host(step: Callable[[], Any], repeats: int = 200) -> float:
    """Microseconds of a call as the host sees it: the device is given time to be idle before."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * taken / repeats


def captured(cell: str, layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """A loop of STEPS steps as one graph."""

    def loop() -> Any:
        state = start_of(cell, x)
        for _ in range(STEPS):
            state = layer(x, state)
        return state

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        loop()
        loop()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        loop()
    return graph.replay


def device(replay: Callable[[], None], repeats: int = 20) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / (repeats * STEPS)


def touch(cell: str, dtype: str, batch: int, units: int) -> None:
    """Compile what a case needs."""
    check(cell, contenders(cell, DTYPES[dtype], units), torch.randn(batch, units, device="cuda", dtype=DTYPES[dtype]))


def measure(cell: str, dtype: str, batch: int, hidden: int, rounds: int) -> dict[str, Any]:
    """One row: host and device times of every contender."""
    x = torch.randn(batch, hidden, device="cuda", dtype=DTYPES[dtype])
    cells = contenders(cell, DTYPES[dtype], hidden)
    error, first = check(cell, cells, x), start_of(cell, x)

    def inference(layer: nn.Module) -> Callable[[], Any]:
        def step() -> Any:
            with torch.no_grad():
                return layer(x, first)

        return step

    hosts = {("training", n): lambda c=c: c(x, first) for n, c in cells.items()}
    hosts |= {("inference", n): inference(c) for n, c in cells.items()}
    graphs = {}
    for name, layer in cells.items():
        with way(name):
            graphs[name] = captured(cell, layer, x)
    times: dict[str, dict[str, list[float]]] = {
        "host": {": ".join(names): [] for names in hosts},
        "device": {name: [] for name in graphs},
    }
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for kind, name in random.sample(list(hosts), len(hosts)):
            with way(name):
                times["host"][f"{kind}: {name}"].append(host(hosts[kind, name]))
        for name in random.sample(list(graphs), len(graphs)):
            times["device"][name].append(device(graphs[name]))
    gc.enable()
    medians = {kind: {n: statistics.median(v) for n, v in some.items()} for kind, some in times.items()}
    return {"microseconds": times, "median": medians, "difference": error}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record as people read it."""
    lines = []
    for row in rows:
        host_, device_ = row["median"]["host"], row["median"]["device"]
        lines.append([
            f"{row['cell']} {row['dtype']}", f"{row['batch']}, {row['units']}",
            *(" / ".join(f"{host_[f'{kind}: {name}']:.0f}" for name in (OURS, TORCH))
              for kind in ("training", "inference")),
            *(f"{device_[name]:.1f}" for name in (OURS, ONE_LAUNCH, LIBRARY, TORCH, REFERENCE)),
        ])  # fmt: skip
    columns = ["", "batch, units", "host, training: ours / torch.nn", "host, inference: ours / torch.nn",
               "captured: ours", "products in one launch", "products of the library", "captured: torch.nn",
               "captured: reference"]  # fmt: skip
    return [{"caption": "Microseconds of a forward call, and of a step in a CUDA graph", "columns": columns,
             "rows": lines}]  # fmt: skip


def main(words: list[str]) -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    growing.arguments(parser, "results/bench-cell.json")
    given = parser.parse_args(words)
    torch.backends.cuda.matmul.allow_tf32 = True  # torch.nn's float32 products, as ours
    cases = [
        {"cell": cell, "dtype": dtype, "batch": batch, "units": units}
        for cell in ("LSTM", "GRU")
        for dtype in DTYPES
        for batch, units in SIZES
    ]
    head = {
        "kind": "bench", "name": "cell", "title": "A cell's step on a GPU", "command": growing.command("speed.py"),
        "about": "Layer-normalised cells of the paper's placement against torch.nn's plain ones; medians of rounds in "
        "randomised order.",
    }  # fmt: skip
    return growing.run(
        given, head, table, cases,
        lambda cell, dtype, batch, units: measure(cell, dtype, batch, units, given.rounds),
        lambda row: "  ".join(table([row])[0]["rows"][0]), touch,
    )  # fmt: skip
