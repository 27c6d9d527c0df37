"""Time of a cell's step on a CPU, fused over reference: shows where ``kernels.SMALL_CELL`` belongs.

    python benchmarks/cpu_cell.py --threads 1

Prints the median ratio of processor time over interleaved repeats, for a forward step and for a training step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import lamina

CELLS, BATCHES, UNITS = ("LSTMCell", "GRUCell", "RNNCell"), (1, 8, 32, 128), (64, 128, 256, 512, 1024)
SHORTEST = 2e-3  # seconds of one timing


def steps(cell: str, batch: int, units: int, norm: str | None, training: bool) -> list[Callable[[], Any]]:
    """A step of the fused cell and one of the reference with the same weights."""
    make = getattr(lamina, cell)
    fused, plain = (make(units, units, norm=norm, backend=name) for name in ("numba", "reference"))
    plain.load_state_dict(fused.state_dict())
    x, h = torch.randn(batch, units), torch.randn(batch, units)
    hx = (h, h) if cell == "LSTMCell" else h

    def step(module: Any) -> Any:
        out = module(x, hx)
        return torch.autograd.grad(out[0].sum() if isinstance(out, tuple) else out.sum(), list(module.parameters()))

    def infer(module: Any) -> Any:
        with torch.no_grad():
            return module(x, hx)

    return [lambda module=module: (step if training else infer)(module) for module in (fused, plain)]


def seconds(step: Callable[[], Any], repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - begin) / repeats


def ratio(pair: list[Callable[[], Any]], rounds: int) -> float:
    """The median over rounds of the first step's time over the second's."""
    for step in pair:
        step()
    repeats = max(1, int(SHORTEST / max(seconds(pair[1], 3), 1e-6)))
    return statistics.median(seconds(pair[0], repeats) / seconds(pair[1], repeats) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--norm", choices=("layer", "none"), default="layer")
    parser.add_argument("--units", type=int, nargs="+", default=UNITS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    norm = None if given.norm == "none" else given.norm
    print("cell      units  batch  forward  training   (fused over reference)")
    for cell in CELLS:
        for units in given.units:
            for batch in BATCHES:
                found = [ratio(steps(cell, batch, units, norm, kind), given.rounds) for kind in (False, True)]
                print(f"{cell:<9} {units:>5}  {batch:>5}  {found[0]:>7.2f}  {found[1]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
