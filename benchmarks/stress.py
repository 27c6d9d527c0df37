"""Thousands of random launches of the fused recurrences in a row: no hang, no difference between repeats.

    python benchmarks/stress.py --launches 10000 --out results/stress-sequence.json

Cells, placements, sizes, dtypes, lengths and resets are drawn at random from a few dozen problems. Each launch is a
forward and a backward pass, plain or by replay of a CUDA graph, while another stream is kept busy with products; its
output and gradients are compared bit for bit with those of the problem's first run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lamina
from lamina import records
from lamina.placements import PLACEMENTS

HIDDEN, BATCHES, STEPS = (1, 17, 100, 256, 257, 512, 1000), (1, 3, 17, 64, 100), (1, 2, 19)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Problem:
    """One random layer with its input, the results of its first run, and a CUDA graph of it."""

    def __init__(self, draw: random.Random) -> None:
        cell = draw.choice(("LSTM", "GRU", "RNN"))
        norm = draw.choice(("layer", "layer", "layer", None))
        placement = draw.choice(list(PLACEMENTS[cell])) if norm else None
        hidden, batch, steps = draw.choice(HIDDEN), draw.choice(BATCHES), draw.choice(STEPS)
        dtype = draw.choice(DTYPES)
        make: Callable[..., Any] = getattr(lamina, cell)
        self.layer = make(33, hidden, norm=norm, placement=placement, device="cuda", dtype=dtype)
        self.x = torch.randn(steps, batch, 33, device="cuda", dtype=dtype, requires_grad=True)
        self.upstream = torch.randn(steps, batch, hidden, device="cuda", dtype=dtype)
        self.more: dict[str, Tensor] = {}
        if draw.random() < 0.5:
            self.more["lengths"] = torch.randint(0, steps + 1, (batch,), device="cuda")
        if draw.random() < 0.3:
            self.more["resets"] = torch.rand(steps, batch, device="cuda") < 0.2
        self.name = f"{cell} {norm} {placement} {(batch, steps, hidden)} {dtype} {sorted(self.more)}"
        self.wanted = [t.clone() for t in self.run()]
        self.graph, self.captured = self._capture()

    def run(self) -> list[Tensor]:
        """Output and gradients."""
        out = self.layer(self.x, **self.more)[0]
        return [out, *torch.autograd.grad(out, [self.x, *self.layer.parameters()], self.upstream)]

    def _capture(self) -> tuple[Any, list[Tensor]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.run()
        return graph, captured

    def again(self, replay: bool) -> bool:
        """Run once more; whether every bit is as it was."""
        if replay:
            self.graph.replay()
        found = self.captured if replay else self.run()
        return all(torch.equal(a, b) for a, b in zip(found, self.wanted))


def main() -> None:
    """Launch, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", default="results/stress-sequence.json")
    given = parser.parse_args()
    draw = random.Random(0)
    torch.manual_seed(0)
    problems = [Problem(draw) for _ in range(given.problems)]
    busy, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    done, different, began = 0, [], time.perf_counter()
    while done < given.launches and time.perf_counter() - began < given.seconds:
        with torch.cuda.stream(busy):
            load = torch.tanh(load @ load)
        problem = draw.choice(problems)
        if not problem.again(replay=draw.random() < 0.5):
            different.append(problem.name)
        done += 1
    record = {
        "schema": records.SCHEMA, "kind": "stress", "name": "sequence",
        "title": "Random launches of the fused recurrences in a row, another stream busy, half of them in CUDA graphs",
        "environment": records.environment(), "launches": done, "different": different,
        "problems": [p.name for p in problems], "seconds": time.perf_counter() - began,
        "command": f"python benchmarks/stress.py --launches {given.launches} --problems {given.problems}",
        "about": "Each launch is a forward and a backward pass of a layer, compared bit for bit with its first run.",
        "tables": [{"caption": "Launches in a row", "columns": ["launches", "problems", "different"],
                    "rows": [[str(done), str(len(problems)), str(len(different))]]}],
    }  # fmt: skip
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    Path(given.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(f"{done} launches of {len(problems)} problems, {len(different)} different, {record['seconds']:.0f} s")


if __name__ == "__main__":
    main()
