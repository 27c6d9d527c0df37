"""Speed of the recurrences on a CPU: our layer-normalised layer, torch.nn's plain one and the eager loop.

    python benchmarks/speed.py --device cpu --out results/bench-cpu.json
    python benchmarks/speed.py --device cpu --quick    (a table in under a minute)
    python benchmarks/speed.py --device cpu --plan     (the cases and how long they take; measures nothing)

For each number of threads, cell and shape, listed or drawn from a seed: inference and a training step (forward and
backward, gradients of the input and of every parameter), in randomised order within each round. On the listed shapes
also our layer without a norm, with batch norm, and with half of its steps padding; on the first six also the eager
loop. RNNs take the first six shapes only. A case is timed only after its output and gradients were compared with the
float64 reference. The share of the peak is the rate of a step's matrix products over the best rate of several products
in the same process. Cells are timed in a training step of a loop over 50 steps.

All of it is done in several processes, one after another; a ratio is the median of theirs. The record is written after
every case. The same command goes on with a run that was stopped. Peak memory of a training step and the seconds of a
first call are measured in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import cpu_timing
import growing
from cpu_plan import CELLS, LISTED, OURS, QUICK_SHAPES, SEED, TORCH, Case, Plan, contenders, drawn_shapes
from cpu_tables import merged, readme, row_cells, tables

QUICK = {"cells": "LSTM", "threads": "1", "processes": 1, "rounds": 3, "drawn": 0, "out": "runs/bench-cpu-quick.json"}
TITLES = ("inference ms: LN / torch", "ratio", "of peak", "training ms: LN / torch", "ratio", "of peak")
WIDTHS = (15, 24, 24, 5, 11, 24, 5, 11)


# Processes


def answer() -> None:
    """Measure what each line of stdin asks for and print the row; end with the parent, which holds stdin open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            reply = {"row": MEASUREMENTS[function](*arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


MEASUREMENTS: dict[str, Callable[..., Case]] = {
    "layer": lambda threads, cell, shape, *rest: cpu_timing.measure_layer(threads, cell, tuple(shape), *rest),
    "stream": lambda rounds: {"microseconds": cpu_timing.stream_times(rounds)},
    "cells": lambda rounds: {"milliseconds": cpu_timing.cell_times(rounds)},
}


class MeasuringProcess:
    """A process that measures one case after another."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--answer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, function: str, *arguments: Any) -> Case:
        """Return the row of one measurement."""
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the measuring process ended with exit status {self.process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return dict(reply["row"])

    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Measuring:
    """Measure a plan's cases: layers, streams and cells in the process of the case, the others in new ones."""

    def __init__(self, plan: Plan, start: Callable[[], Any] = MeasuringProcess) -> None:
        self.plan, self.start = plan, start
        self.number, self.process = 0, None

    def __call__(self, measure: str, process: int = 0, **case: Any) -> Case:
        if process != self.number or (self.process is not None and self.process.ended()):
            self.end()
        self.number = process
        if measure in ALONE:
            return ALONE[measure](**case)
        self.process = self.process or self.start()
        if measure in ("stream", "cells"):
            return self.process.ask(measure, self.plan.rounds)
        names = contenders(tuple(case["shape"]), self.plan.loops)
        return self.process.ask("layer", case["threads"], case["cell"], case["shape"], names, self.plan.rounds)

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
        self.process = None


def alone(words: str, **environment: str) -> Any:
    """Return what ``--alone words`` prints, in a process of its own."""
    command = [sys.executable, __file__, "--alone", words]
    everything = {**os.environ, **environment}
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=everything).stdout)


def answer_alone(words: list[str]) -> float:
    if words[0] == "first":
        return cpu_timing.first_call()
    _, cell, shape, name = words
    return cpu_timing.peak_memory(cell, tuple(map(int, shape.split(","))), OURS if name == "ours" else TORCH)


def memory(cell: str, shape: list[int]) -> Case:
    """Return the peak megabytes of a training step, ours and torch.nn's."""
    words = f"peak {cell} {','.join(map(str, shape))}"
    # Freed memory goes back to the system at once, so that the peak is one of use.
    ours, theirs = (alone(f"{words} {name}", MALLOC_MMAP_THRESHOLD_="65536") for name in ("ours", "torch"))
    return {OURS: ours, TORCH: theirs, "ratio": ours / theirs}


def first_call(number: int) -> Case:
    """Return the seconds of a first call; cold: nothing is compiled; warm: compiled by another process."""
    with tempfile.TemporaryDirectory() as folder:
        return {kind: alone("first", LAMINA_CACHE=folder) for kind in ("cold", "warm")}


ALONE: dict[str, Callable[..., Case]] = {"memory": memory, "first call": first_call}


# The command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--drawn", type=int, default=20, help="how many shapes are drawn besides the listed ones")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the drawn shapes")
    parser.add_argument("--quick", action="store_true", help="LSTMs of eight shapes, one thread, one process, 3 rounds")
    parser.add_argument("--plan", action="store_true", help="measure nothing: say what would be, and how long it takes")
    parser.add_argument("--out", default="results/bench-cpu.json", help=f"with --quick {QUICK['out']}")
    parser.add_argument("--keep", action="store_true", help="go on with a record even if it is whole")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case that may not end in this time")
    parser.add_argument("--readme", action="store_true", help="measure nothing: print the README's table")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    return parser


def plan_of(given: argparse.Namespace) -> Plan:
    return Plan(
        cells=tuple(given.cells.split(",")),
        threads=tuple(map(int, given.threads.split(","))),
        processes=given.processes,
        rounds=given.rounds,
        shapes=(*(QUICK_SHAPES if given.quick else LISTED), *drawn_shapes(given.drawn, given.seed)),
        loops=not given.quick,
        besides=not given.quick,
    )


def head(given: argparse.Namespace, words: list[str]) -> Case:
    """Return what the record says besides its rows."""
    return {
        "kind": "bench",
        "name": "cpu",
        "title": "Recurrent layers on a CPU" + (", quick" if given.quick else ""),
        "command": growing.command("speed.py", ["--device", "cpu", *words]),
        "about": "float32; medians of interleaved rounds in randomised order, and of the processes' ratios. Shapes are "
        f"drawn evenly on a logarithmic scale from seed {given.seed}.",
    }


def shown(row: Case) -> str:
    """Return a row as it is told on the way."""
    if row["measure"] == "layer":
        return _aligned(row_cells(merged([row])[0]))
    return ", ".join(str(value) for value in row.values() if isinstance(value, (str, int)))


def _aligned(cells: list[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS)).rstrip()


def measured(given: argparse.Namespace, plan: Plan, record: growing.Growing, measure: Measuring) -> int:
    """Measure what the record lacks, print on the way and at the end; the exit status."""
    cases = plan.cases()
    print(plan, f"\nIn {given.out} already: {len(cases) - len(record.left(cases))} of {len(cases)} cases.")
    print(" " * len("1 of 8: ") + _aligned(["", "batch, steps, in, units", *TITLES]), flush=True)
    try:
        status = record.measure(cases, measure, shown)
    finally:
        measure.end()
    for table in json.loads(Path(given.out).read_text())["tables"]:
        print_table(table)
    return status


def print_table(table: Case) -> None:
    lines = [table["columns"], *table["rows"]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f"\n{table['caption']}")
    print("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines), flush=True)


def main(words: list[str]) -> int:
    """Measure, print, and write the record after every case."""
    parser = arguments()
    parser.set_defaults(**QUICK if "--quick" in words else {})
    given = parser.parse_args(words)
    if given.answer:
        answer()
    elif given.alone:
        print(json.dumps(answer_alone(given.alone.split())))
    elif given.readme:
        print(readme(json.loads(Path(given.out).read_text())))
    elif given.plan:
        print(plan_of(given))
    else:
        return measure_all(given, words)
    return growing.DONE


def measure_all(given: argparse.Namespace, words: list[str]) -> int:
    """Go on with the record of this command if it was stopped, or begin one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
    plan, about = plan_of(given), head(given, words)
    given.keep = given.keep or growing.stopped(Path(given.out), about["command"])
    return measured(given, plan, growing.Growing(given, about, tables), Measuring(plan))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
