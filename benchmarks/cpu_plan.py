"""Which cases the CPU benchmark measures, who competes in each, and about how long all of it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]  # batch, steps, inputs, units
Case = dict[str, Any]

SHAPES: tuple[Shape, ...] = (
    (1, 100, 128, 128),
    (32, 100, 256, 256),
    (32, 50, 512, 512),
    (8, 200, 400, 400),
    (128, 32, 256, 256),
    (1, 50, 1024, 1024),
)
MORE_SHAPES: tuple[Shape, ...] = (
    (64, 120, 64, 64),
    (64, 30, 200, 200),
    (128, 13, 300, 256),
    (128, 13, 300, 1024),
    (8, 300, 128, 128),
    (8, 500, 400, 400),
    (64, 111, 240, 240),
    (1, 300, 128, 128),
)
LISTED = (*SHAPES, *MORE_SHAPES)
QUICK_SHAPES: tuple[Shape, ...] = (
    (1, 100, 128, 128),
    (32, 100, 256, 256),
    (8, 200, 400, 400),
    (128, 32, 256, 256),
    (1, 50, 1024, 1024),
    (64, 120, 64, 64),
    (64, 30, 200, 200),
    (8, 300, 128, 128),
)
RANGES = ((1, 128), (13, 500), (32, 1024), (32, 1024))  # of a drawn shape
SEED = 24
MOST_FLOPS = 60e9  # of a drawn LSTM's training step

CELLS = ("LSTM", "GRU", "RNN")
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
KINDS = ("inference", "training")
CELL_UNITS, CELL_BATCH, CELL_STEPS = (64, 128, 182, 256, 400), 8, 50  # of cells in loops
OURS, TORCH, EAGER = "LN", "torch.nn plain", "LN, step by step"
LOOP = "lamina.loop"
PLAIN, BATCH, PADDED = "no norm", "batch norm", "LN, half padding"
RATIOS = {
    "ratio_to_torch": (OURS, TORCH),
    "ratio_to_step_by_step": (OURS, EAGER),
    "ratio_to_no_norm": (OURS, PLAIN),
    "batch_norm_to_layer_norm": (BATCH, OURS),
    "half_padding_to_none": (PADDED, OURS),
}
SHORTEST = 0.02  # seconds of a timing
LONG = 0.1  # seconds of a step that needs no warm-up: cold caches cost it next to nothing
CHECKED_STEPS = 6  # time steps over which results are compared with the float64 reference

RATE = 150e9  # floating-point operations a second and thread, for the estimate
EAGER_STEP = 200e-6  # seconds that the eager loop spends on the operators of one time step
PROCESS_SECONDS = 16.0  # imports, the matrix peak, streams and cells of one measuring process
MEMORY_SECONDS, FIRST_SECONDS = 8.0, 14.0  # of one case: two processes each, one of which compiles


def flops(cell: str, shape: Shape, kind: str) -> float:
    """Count the operations of the matrix products: one forward, and two more of the same size for gradients."""
    batch, steps, inputs, hidden = shape
    return (2 if kind == "inference" else 6) * GATES[cell] * batch * steps * hidden * (inputs + hidden)


def drawn_shapes(count: int, seed: int = SEED) -> tuple[Shape, ...]:
    """Draw shapes evenly on a logarithmic scale; those that would take too long are drawn again."""
    numbers = random.Random(seed)
    shapes: list[Shape] = []
    while len(shapes) < count:
        shape = tuple(round(math.exp(numbers.uniform(math.log(low), math.log(high)))) for low, high in RANGES)
        if flops("LSTM", shape, "training") <= MOST_FLOPS and shape not in (*LISTED, *shapes):
            shapes.append(shape)
    return tuple(shapes)


def contenders(shape: Shape, loops: bool = True) -> list[str]:
    """Name who is timed: a drawn shape compares ours with torch.nn's only."""
    names = [OURS, TORCH]
    if shape in LISTED:
        names += [PLAIN, PADDED, *([BATCH] if shape[0] > 1 else [])]  # one case has no batch statistics
    return names + [EAGER] * (loops and shape in SHAPES)


@dataclass(frozen=True)
class Plan:
    """All that one run of the benchmark measures."""

    cells: tuple[str, ...] = CELLS
    threads: tuple[int, ...] = (1, 2)
    processes: int = 3
    rounds: int = 4
    shapes: tuple[Shape, ...] = LISTED
    loops: bool = True  # time the eager loop too
    besides: bool = True  # measure streams, cells, memory and first calls too

    def cases(self) -> list[Case]:
        """List the cases in the order of measurement: one process after another, then what has its own processes."""
        cases: list[Case] = []
        for process in range(1, self.processes + 1):
            cases += [{"measure": "layer", "process": process, **case} for case in self._layers()]
            cases += [{"measure": name, "process": process} for name in ("stream", "cells")] * self.besides
        return cases + [*self._memories(), *self._first_calls()] * self.besides

    def _layers(self) -> Iterator[Case]:
        for threads in self.threads:
            for cell in self.cells:
                for shape in self.shapes:
                    if cell != "RNN" or shape in SHAPES:
                        yield {"threads": threads, "cell": cell, "shape": list(shape)}

    def _memories(self) -> Iterator[Case]:
        for cell in self.cells:
            for shape in SHAPES:
                yield {"measure": "memory", "cell": cell, "shape": list(shape)}

    def _first_calls(self) -> Iterator[Case]:
        for number in range(1, self.processes + 1):
            yield {"measure": "first call", "number": number}

    def seconds(self) -> float:
        """Estimate how long all cases take at RATE."""
        return self.processes * PROCESS_SECONDS + sum(self._case_seconds(case) for case in self.cases())

    def _case_seconds(self, case: Case) -> float:
        if case["measure"] == "layer":
            names = contenders(tuple(case["shape"]), self.loops)
            checks = sum(_check_seconds(case) for name in names if name not in (TORCH, EAGER))
            return checks + sum(self._contender_seconds(case, name, kind) for name in names for kind in KINDS)
        return {"memory": MEMORY_SECONDS, "first call": FIRST_SECONDS}.get(case["measure"], 0.0)

    def _contender_seconds(self, case: Case, name: str, kind: str) -> float:
        once = flops(case["cell"], tuple(case["shape"]), kind) / (RATE * case["threads"])
        if name == EAGER:
            once = 2 * once + EAGER_STEP * case["shape"][1]
        elif name == PADDED:
            once /= 2
        warm_up = 0.0 if once > LONG else once
        return 2 * once + self.rounds * (warm_up + max(SHORTEST, once))

    def __str__(self) -> str:
        layers = sum(case["measure"] == "layer" for case in self.cases())
        drawn = [shape for shape in self.shapes if shape not in LISTED]
        return (
            f"Layers: {layers} cases over all processes ({self.processes}), {self.rounds} rounds each.\n"
            f"Other cases (streams, cells, memory, first calls): {len(self.cases()) - layers}.\n"
            f"Estimate: {self.seconds() / 60:.1f} minutes at {RATE / 1e9:.0f} GFLOP/s a thread.\n"
            f"Listed shapes: {len(self.shapes) - len(drawn)}. Drawn shapes: {', '.join(map(str, drawn)) or 'none'}."
        )


def _check_seconds(case: Case) -> float:
    """Estimate the comparison of one contender: three layers, of which the float64 one takes twice as long."""
    work = flops(case["cell"], tuple(case["shape"]), "training") * CHECKED_STEPS / case["shape"][1]
    return 4 * work / (RATE * case["threads"])
