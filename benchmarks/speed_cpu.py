"""Speed of the recurrences on a CPU: our layer-normalised layer, torch.nn's plain one and the eager loop.

    python benchmarks/speed.py --device cpu --out results/bench-cpu.json

For each number of threads, cell and shape: inference and a training step (forward and backward, gradients of the input
and of every parameter), in randomised order within each round. A case is timed only after its output and gradients
were compared with the float64 reference. The whole is done in several processes, one after another; a ratio is the
median of theirs. Peak memory of a training step and the seconds of a first call are measured in processes of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lamina
from lamina.lab.reports import records

sys.path.insert(0, str(Path(__file__).parent))
import growing
from speed import eager_gru, eager_lstm

# batch, steps, inputs, units
SHAPES = (
    (1, 100, 128, 128), (32, 100, 256, 256), (32, 50, 512, 512), (8, 200, 400, 400), (128, 32, 256, 256),
    (1, 50, 1024, 1024),
)  # fmt: skip
CELLS = ("LSTM", "GRU", "RNN")
OURS, TORCH, EAGER = "LN", "torch.nn plain", "LN, step by step"
SHORTEST = 0.02  # seconds of a timing


def eager_rnn(layer: Any, x: Tensor) -> Tensor:
    """The paper's RNN in the same way."""
    hidden, outputs = layer.hidden_size, []
    h = x.new_zeros(x.shape[1], hidden)
    bias = layer.bias_ih_l0 + layer.bias_hh_l0
    for now in nn.functional.linear(x, layer.weight_ih_l0).unbind():
        a = now + nn.functional.linear(h, layer.weight_hh_l0)
        h = torch.tanh(nn.functional.layer_norm(a, (hidden,), layer.gain_sum_l0, bias))
        outputs.append(h)
    return torch.stack(outputs)


LOOPS: dict[str, Callable[[Any, Tensor], Tensor]] = {"LSTM": eager_lstm, "GRU": eager_gru, "RNN": eager_rnn}


def errors(cell: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """The largest relative error of output and gradients over 6 steps, ours and the float32 reference's."""
    batch, _, inputs, hidden = shape
    make = getattr(lamina, cell)
    layers = [make(inputs, hidden), make(inputs, hidden, backend="reference")]
    truth = make(inputs, hidden, dtype=torch.float64, backend="reference")
    for layer in (layers[1], truth):
        layer.load_state_dict(layers[0].state_dict())
    x, d = torch.randn(6, batch, inputs), torch.randn(6, batch, hidden)
    found = []
    for layer in (*layers, truth):
        own = x.to(layer.weight_ih_l0.dtype).requires_grad_()
        out = layer(own)[0]
        found.append([out, *torch.autograd.grad(out, [own, *layer.parameters()], d.to(out.dtype))])
    ours, plain = (
        max(((a.double() - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(some, found[2]))
        for some in found[:2]
    )
    return ours, plain


def contenders(cell: str, shape: tuple[int, ...]) -> dict[str, Callable[[], None]]:
    """By "inference" or "training" and name."""
    batch, steps, inputs, hidden = shape
    ours, plain = getattr(lamina, cell)(inputs, hidden), getattr(nn, cell)(inputs, hidden)
    x, upstream = torch.randn(steps, batch, inputs), torch.randn(steps, batch, hidden)
    leaf = x.clone().requires_grad_()
    runs: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
        OURS: (ours, lambda y: ours(y)[0]),
        TORCH: (plain, lambda y: plain(y)[0]),
        EAGER: (ours, lambda y: LOOPS[cell](ours, y)),
    }
    found: dict[str, Callable[[], None]] = {}
    for name, (layer, run) in runs.items():
        leaves = [leaf, *layer.parameters()]

        def infer(run: Callable[[Tensor], Tensor] = run) -> None:
            with torch.no_grad():
                run(x)

        def train(run: Callable[[Tensor], Tensor] = run, leaves: list[Tensor] = leaves) -> None:
            torch.autograd.grad(run(leaf), leaves, upstream)

        found[f"inference: {name}"], found[f"training: {name}"] = infer, train
    return found


def timed(ready: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round, in an order that is drawn anew for each."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    guess = {name: _seconds(step, 1) for name, step in ready.items() if step() is None}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in random.sample(list(ready), len(ready)):
            ready[name]()  # brings its code and data near
            times[name].append(1000 * _seconds(ready[name], max(1, round(SHORTEST / guess[name]))))
    gc.enable()
    return times


def _seconds(step: Callable[[], None], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - begin) / repeats


def measure(threads: int, cell: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    ours, plain = errors(cell, shape)
    if not ours <= 2 * plain + 3e-6:
        raise RuntimeError(f"{cell} {shape}: error {ours:.2g}, reference {plain:.2g}: not timed")
    times = timed(contenders(cell, shape), rounds)
    return {
        "threads": threads, "cell": cell, "shape": list(shape), "milliseconds": times, "error": ours,
        "error_of_reference": plain,
    }  # fmt: skip


def process(given: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, once."""
    return [
        measure(threads, cell, shape, given.rounds)
        for threads in (1, 2)
        for cell in given.cells.split(",")
        for shape in SHAPES
    ]


def stream_times(rounds: int) -> dict[str, Any]:
    """Microseconds of one frame, one case, one thread: our stream and torch.nn.LSTMCell, in turns."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for hidden in (128, 256, 512, 1024):
        step, x = lamina.stream(lamina.LSTM(hidden, hidden).eval()), torch.randn(1, hidden)
        cell, state = nn.LSTMCell(hidden, hidden), (torch.zeros(1, hidden), torch.zeros(1, hidden))
        with torch.no_grad():
            ready = {"stream": lambda step=step, x=x: step(x), "cell": lambda c=cell, x=x, s=state: c(x, s)}
            times: dict[str, list[float]] = {name: [] for name in ready}
            for _ in range(3 * rounds):
                for name, run in ready.items():
                    times[name].append(1e6 * _seconds(run, 200 if hidden < 512 else 20))
        found[str(hidden)] = {name: statistics.median(values) for name, values in times.items()}
        found[str(hidden)]["difference"] = stream_difference(hidden)
    return found


@torch.no_grad()
def stream_difference(hidden: int, frames: int = 300) -> float:
    """The largest between a stream's outputs and the same layer's on the whole sequence."""
    layer, x = lamina.LSTM(hidden, hidden).eval(), torch.randn(frames, 1, hidden)
    step = lamina.stream(layer)
    return float((torch.stack([step(frame) for frame in x]) - layer(x)[0]).abs().max())


def peak(cell: str, shape: tuple[int, ...], ours: bool) -> float:
    """Megabytes that a training step needs at most, over what the process has before. Linux only."""
    batch, steps, inputs, hidden = shape
    torch.set_num_threads(1)
    layer = getattr(lamina if ours else nn, cell)(inputs, hidden)

    def train(steps: int) -> None:
        x = torch.randn(steps, batch, inputs, requires_grad=True)
        torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], torch.randn(steps, batch, hidden))

    for _ in range(2):
        train(2)  # libraries are loaded, kernels compiled
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _memory("VmRSS")
    train(steps)
    return (_memory("VmHWM") - before) / 1024


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def first() -> float:
    """Seconds of an LSTM's first training step: once torch and lamina are imported, before anything else is."""
    layer, x = lamina.LSTM(32, 64), torch.randn(60, 8, 32)
    begin = time.perf_counter()
    layer(x)[0].sum().backward()
    return time.perf_counter() - begin


def alone(what: str, **environment: str) -> Any:
    """What ``--alone what`` prints, in a process of its own."""
    command = [sys.executable, __file__, "--alone", what]
    told = {**os.environ, **environment}
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=told).stdout)


def memories() -> list[dict[str, Any]]:
    """Peak megabytes of each cell and shape, ours and torch.nn's."""
    found = []
    for cell in CELLS:
        for shape in SHAPES:
            # What is freed goes back at once, so that peaks are peaks.
            ours, theirs = (
                alone(f"peak {cell} {','.join(map(str, shape))} {kind}", MALLOC_MMAP_THRESHOLD_="65536")
                for kind in ("ours", "torch")
            )
            found.append({"cell": cell, "shape": list(shape), "LN": ours, TORCH: theirs, "ratio": ours / theirs})
    return found


def first_calls(times: int = 3) -> dict[str, list[float]]:
    """Cold: nothing is compiled; warm: compiled by another process."""
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            for kind in found:
                found[kind].append(alone("first", LAMINA_CACHE=folder))
    return found


def asked_alone(words: list[str]) -> float:
    if words[0] == "first":
        return first()
    cell, shape, kind = words[1:]
    return peak(cell, tuple(map(int, shape.split(","))), kind == "ours")


def merged(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each case: medians of the processes' ratios."""
    rows = []
    for same in zip(*runs):
        row = {name: same[0][name] for name in ("threads", "cell", "shape", "error", "error_of_reference")}
        row["milliseconds"] = [one["milliseconds"] for one in same]
        for kind in ("inference", "training"):
            medians = [{k: statistics.median(v) for k, v in one["milliseconds"].items()} for one in same]
            for rival, label in ((TORCH, "torch"), (EAGER, "step_by_step")):
                ratios = [m[f"{kind}: {OURS}"] / m[f"{kind}: {rival}"] for m in medians]
                row[f"{kind}_ratio_to_{label}"] = statistics.median(ratios)
                row[f"{kind}_ratios_to_{label}"] = ratios
        rows.append(row)
    return rows


def tables(
    rows: list[dict[str, Any]],
    frames: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    calls: dict[str, list[float]],
) -> list[dict[str, Any]]:
    """The record as people read it."""
    peaks = [
        [one["cell"], ", ".join(map(str, one["shape"])), f"{one['LN']:.1f}", f"{one[TORCH]:.1f}", f"{one['ratio']:.2f}"]
        for one in memory
    ]
    firsts = [[kind, f"{statistics.median(values):.2f}"] for kind, values in calls.items()]
    lines = [
        [
            _case(row["cell"], row["threads"]), ", ".join(map(str, row["shape"])),
            *(f"{row[f'{kind}_ratio_to_{rival}']:.2f}" for rival in ("torch", "step_by_step")
              for kind in ("inference", "training")),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["", "Batch, steps, inputs, units", "inference / torch.nn", "training / torch.nn", "inference / loop",
               "training / loop"]  # fmt: skip
    streams = [
        [
            hidden,
            *(f"{_middle(frames, hidden, name):.1f}" for name in ("stream", "cell")),
            f"{max(one[hidden]['difference'] for one in frames):.1g}",
        ]
        for hidden in frames[0]
    ]
    return [
        {"caption": "Time over that of the same cell of torch.nn, which has no norm, and over the eager loop's",
         "columns": columns, "rows": lines},
        {"caption": "One frame, one case, one thread, microseconds; the largest difference from the sequence call's "
                    "outputs over 300 frames", "columns": ["units", "stream", "nn.LSTMCell", "difference"],
         "rows": streams},
        {"caption": "Peak memory of a training step over what the process had before, megabytes",
         "columns": ["", "Batch, steps, inputs, units", "LN", "torch.nn plain", "ratio"], "rows": peaks},
        {"caption": "An LSTM's first training step in a process, seconds", "columns": ["compiled code", "seconds"],
         "rows": firsts},
    ]  # fmt: skip


def _case(cell: str, threads: int) -> str:
    return f"{cell}, {threads} thread{'s' if threads > 1 else ''}"


def _middle(frames: list[dict[str, Any]], hidden: str, name: str) -> float:
    return statistics.median(one[hidden][name] for one in frames)


def readme(record: dict[str, Any]) -> str:
    """The README's table: our layer-normalised layer's time over torch.nn's plain one's."""
    rows, lines = record["rows"], []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        for threads in (1, 2):
            some = [row for row in rows if (row["cell"], row["threads"]) == (cell, threads)]
            cells = []
            for kind in ("inference", "training"):
                ratios = [row[f"{kind}_ratio_to_torch"] for row in some]
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}, mean {mean:.2f}")
            lines.append([_case(cell, threads), *cells])
    both = [["time over that of `torch.nn`, no norm", "inference", "training"], ["---"] * 3, *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in both) + "\n\n" + _besides(record)


def _besides(record: dict[str, Any]) -> str:
    """The rest in a sentence."""
    rows, frames, calls = record["rows"], record["frames"], record["first_calls"]
    loops = [1 / row[f"{kind}_ratio_to_step_by_step"] for row in rows for kind in ("inference", "training")]
    small = [
        1 / row[f"{kind}_ratio_to_step_by_step"]
        for row in rows if row["shape"] == [1, 100, 128, 128] for kind in ("inference", "training")
    ]  # fmt: skip
    stream, cell = _middle(frames, "128", "stream"), _middle(frames, "128", "cell")
    cold, warm = (statistics.median(calls[kind]) for kind in ("cold", "warm"))
    return (
        f"Against the same layer step by step {min(loops):.1f} to {max(loops):.0f} times as fast, at least "
        f"{min(small):.1f} times for one case of 128 units. `lamina.stream(layer)` takes one frame at a time: "
        f"{stream:.1f} microseconds for an LSTM of 128 units, {cell / stream:.1f} times as fast as `nn.LSTMCell`, "
        f"with the sequence call's numbers bit for bit. A training step's peak memory is {_memory(record)}. The very "
        f"first step takes {cold:.1f} seconds to compile, the first of later processes {warm:.2f}. All of this: "
        f"{growing.source(record)}."
    )


def _memory(record: dict[str, Any]) -> str:
    """The range of peak memory over that of torch.nn, for each cell."""
    ranges = []
    for cell in dict.fromkeys(one["cell"] for one in record["memory"]):
        peaks = [one["ratio"] for one in record["memory"] if one["cell"] == cell]
        ranges.append(f"{min(peaks):.2f} to {max(peaks):.2f} of `nn.{cell}`'s")
    return f"{', '.join(ranges[:-1])} and {ranges[-1]}"


def main(words: list[str]) -> None:
    """Measure in several processes, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--out", default="results/bench-cpu.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--readme", action="store_true", help="measure nothing: print the README's table")
    given = parser.parse_args(words)
    if given.readme:
        print(readme(json.loads(Path(given.out).read_text())))
        return
    if given.alone:
        print(json.dumps(asked_alone(given.alone.split())))
        return
    if given.one:
        print(json.dumps([process(given), stream_times(given.rounds)]))
        return
    runs, frames = [], []
    for number in range(given.processes):
        command = [sys.executable, __file__, "--one", "--cells", given.cells, "--rounds", str(given.rounds)]
        rows, frame = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
        runs.append(rows)
        frames.append(frame)
        print(f"process {number + 1} of {given.processes} done", flush=True)
    rows, memory, calls = merged(runs), memories(), first_calls()
    record = {
        "schema": records.SCHEMA, "kind": "bench", "name": "cpu", "title": "Recurrent layers on a CPU",
        "environment": records.environment(), "rows": rows, "frames": frames, "memory": memory,
        "first_calls": calls, "tables": tables(rows, frames, memory, calls),
        "command": f"python benchmarks/speed.py --device cpu --rounds {given.rounds} --processes {given.processes}",
        "about": "float32; medians of interleaved rounds in randomised order, and of the processes' ratios.",
    }  # fmt: skip
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for table in record["tables"]:
        print("\n".join("  ".join(line) for line in [table["columns"], *table["rows"]]))


if __name__ == "__main__":
    main(sys.argv[1:])
