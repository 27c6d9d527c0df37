"""Thousands of random launches of the fused recurrences in a row: no hang, no difference between repeats.

    python benchmarks/stress.py --launches 10000 --out results/stress-sequence.json

Problems are drawn at random from those of ``verify.py`` with at most 37 steps, and run a few times in a row, so that
short passes are captured and evicted. Each launch is a forward and a backward pass, as it is or by replay of a CUDA
graph, while another stream is kept busy with products; its outputs, states and gradients are compared bit for bit with
those of the problem's first run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lamina
from lamina.lab.reports import records
from lamina.placements import STATES

sys.path.insert(0, str(Path(__file__).resolve().parent))
from verify import DTYPES, cases

IN_A_ROW = 6


class Problem:
    """One layer with its input, the results of its first run, and a CUDA graph of it."""

    def __init__(self, case: dict[str, Any]) -> None:
        (cell, norm, placement), (steps, batch, inputs, hidden) = case["row"], case["shape"]
        dtype = DTYPES[case["dtype"]]
        make: Callable[..., Any] = getattr(lamina, cell)
        several = {"directions": {"bidirectional": True}, "stack": {"num_layers": 3}}.get(case["how"], {})
        options = {**several, "backend": "triton"} if several else {}
        self.layer = make(inputs, hidden, norm=norm, placement=placement, device="cuda", dtype=dtype, **options)
        self.x = torch.randn(steps, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
        count, wide = STATES[cell], self.layer.num_directions
        state = (self.layer.num_layers * wide, batch, hidden)
        hx = tuple(torch.randn(state, device="cuda", dtype=dtype, requires_grad=True) for _ in range(count))
        self.hx, self.leaves = hx if count > 1 else hx[0], [self.x, *hx, *self.layer.parameters()]
        shapes = [(steps, batch, hidden * wide), *[state] * count]
        self.upstream = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]
        self.more: dict[str, Tensor] = {}
        if case["more"] & 1:
            self.more["lengths"] = torch.randint(0, steps + 1, (batch,), device="cuda")
        if case["more"] & 2:
            self.more["resets"] = torch.rand(steps, batch, device="cuda") < 0.2
        self.name = f"{cell} {norm} {placement} {case['how']} {(batch, steps, hidden)} {dtype} {sorted(self.more)}"
        self.wanted = [t.clone() for t in self.run()]
        self.graph, self.captured = self._capture()

    def run(self) -> list[Tensor]:
        """Outputs, final states and gradients."""
        out, state = self.layer(self.x, self.hx, **self.more)
        found = [out, *(state if isinstance(state, tuple) else (state,))]
        # Detached: a graph that lives on would bind the parameters' gradients to the stream of this run.
        return [t.detach() for t in (*found, *torch.autograd.grad(found, self.leaves, self.upstream))]

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


def track(some: list[Any], what: str, every: int) -> Iterator[Any]:
    """Says how far it is: someone who waits should be able to tell work from a hang."""
    for done, one in enumerate(some):
        if done % every == 0:
            print(f"{done} of {len(some)} {what}", flush=True)
        yield one


def main() -> None:
    """Launch, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", default="results/stress-sequence.json")
    given = parser.parse_args()
    draw, problem = random.Random(0), None
    torch.manual_seed(0)
    short = [c for c in cases() if c["shape"][0] <= 37]
    several = [c for c in short if c["how"] != "alone"]  # a third of the problems share launches
    chosen = draw.sample([c for c in short if c["how"] == "alone"], given.problems - given.problems // 3)
    chosen += draw.sample(several, given.problems // 3)
    problems = [Problem(case) for case in track(chosen, "problems that are ready", every=10)]
    busy, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    done, different, began = 0, [], time.perf_counter()
    while done < given.launches and time.perf_counter() - began < given.seconds:
        with torch.cuda.stream(busy):
            load = torch.tanh(load @ load)
        if done % IN_A_ROW == 0 or problem is None:
            problem = draw.choice(problems)
        if not problem.again(replay=draw.random() < 0.5):
            different.append(problem.name)
        done += 1
        if done % 1000 == 0:
            print(f"{done} launches", flush=True)
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
