"""A client that matters: the observe loop of a DreamerV3-style world model, with its GRU as ports write it and as ours.

    python benchmarks/rssm.py --out results/bench-rssm.json

The recurrent state-space model walks through a batch of episodes (16 cases, 64 steps): last sample and action make the
cell's input, the cell the new deterministic state, that and the frame's embedding the posterior, whose sample goes on.
The next step needs this step's sample, so a sequence layer cannot take the loop over; it can where the posterior looks
at the frame alone (``--posterior frame`` of ``Model``, as STORM and TransDreamer have it). A training step is forward,
the KL of posterior and prior, and gradients of all parameters. All contenders are the same model with the same weights
and the same noise; their losses are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import growing

import lamina

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNITS = (512, 4096)
STEPS, BATCH, ACTIONS, EMBEDDED, STOCHASTIC, CLASSES = 64, 16, 6, 1024, 32, 32
EAGER, CELL, LAYER = "eager", "lamina cell", "lamina layer"
Step = Callable[[], Any]


class PortedCell(nn.Module):
    """The GRU cell of the ports: one norm over W [h; x], eps 1e-3."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.linear = nn.Linear(units + inputs, 3 * units, bias=False)
        self.layer_norm = nn.LayerNorm(3 * units, eps=1e-3)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        reset, candidate, update = self.layer_norm(self.linear(torch.cat([h, x], -1))).chunk(3, -1)
        update = torch.sigmoid(update - 1)
        return update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs, bias=False), nn.LayerNorm(outputs, eps=1e-3), nn.SiLU())


class Model(nn.Module):
    """The recurrent state-space model; ``posterior`` looks at "state and frame" or at the "frame" alone."""

    def __init__(self, units: int, width: int, posterior: str = "state and frame", embedded: int = EMBEDDED) -> None:
        super().__init__()
        self.units, self.sees_state, sample = units, posterior != "frame", STOCHASTIC * CLASSES
        self.before = block(sample + ACTIONS, width)
        self.cell: nn.Module = PortedCell(width, units)
        self.prior = nn.Sequential(block(units, width), nn.Linear(width, sample))
        self.posterior = nn.Sequential(block(embedded + units * self.sees_state, width), nn.Linear(width, sample))

    def step(self, h: Tensor, sample: Tensor, action: Tensor, frame: Tensor, going: Tensor, noise: Tensor) -> Any:
        """The new state, both distributions and a sample; a new episode begins where ``going`` is 0."""
        h, sample, action = h * going, sample * going, action * going
        h = self.cell(self.before(torch.cat([sample, action], -1)), h)
        post = self.posterior(torch.cat([h, frame], -1) if self.sees_state else frame)
        return h, self.prior(h), post, sampled(post, noise)

    def observe(self, frames: Tensor, actions: Tensor, first: Tensor, noise: Tensor, step: Any = None) -> Tensor:
        """The loss of a batch, one step after another."""
        step = step or self.step
        h = frames.new_zeros(frames.shape[1], self.units)
        sample = frames.new_zeros(frames.shape[1], STOCHASTIC * CLASSES)
        states, priors, posts = [], [], []
        goings = (~first).to(frames.dtype).unsqueeze(-1)
        for action, frame, going, drawn in zip(actions, frames, goings, noise):
            h, prior, post, sample = step(h, sample, action, frame, going, drawn)
            states.append(h)
            priors.append(prior)
            posts.append(post)
        return loss(torch.stack(states), torch.stack(priors), torch.stack(posts))

    def observe_at_once(self, frames: Tensor, actions: Tensor, first: Tensor, noise: Tensor) -> Tensor:
        """The same where the posterior sees frames alone: the cell is a layer over the whole sequence."""
        post = self.posterior(frames)
        samples = sampled(post, noise)
        past = torch.cat([torch.zeros_like(samples[:1]), samples[:-1]])
        going = (~first).to(frames.dtype).unsqueeze(-1)
        states, _ = self.cell(self.before(torch.cat([past * going, actions * going], -1)), resets=first)
        return loss(states, self.prior(states), post)


def sampled(logits: Tensor, noise: Tensor) -> Tensor:
    """A one-hot sample with the probabilities' gradient (straight through)."""
    shaped = logits.unflatten(-1, (STOCHASTIC, CLASSES))
    chances = shaped.softmax(-1)
    drawn = F.one_hot((shaped.detach() + noise).argmax(-1), CLASSES).to(logits.dtype)
    return (drawn + chances - chances.detach()).flatten(-2)


def loss(states: Tensor, prior: Tensor, post: Tensor) -> Tensor:
    """KL of posterior and prior, and a term that reaches every state."""
    p, q = (t.float().unflatten(-1, (STOCHASTIC, CLASSES)).log_softmax(-1) for t in (post, prior))
    return (p.exp() * (p - q)).sum((-2, -1)).mean() + states.float().square().mean()


def with_ours(model: Model, as_layer: bool, backend: str) -> Model:
    """The same model with its cell replaced by ours, weights taken over."""
    ours = Model.__new__(Model)
    nn.Module.__init__(ours)
    ours.units, ours.sees_state = model.units, model.sees_state
    weights = model.cell.state_dict()
    ours.cell = lamina.import_weights(weights, "sheeprl", eps=1e-3, as_layer=as_layer, backend=backend)
    ours.before, ours.prior, ours.posterior = model.before, model.prior, model.posterior
    return ours.to(next(model.parameters()))


def batch(device: str, dtype: torch.dtype, steps: int = STEPS, cases: int = BATCH, embedded: int = EMBEDDED) -> Any:
    """Frames' embeddings, actions, where episodes begin, and the noise of samples."""
    frames, actions = torch.randn(steps, cases, embedded), torch.randn(steps, cases, ACTIONS)
    first = torch.rand(steps, cases) < 0.05
    first[0] = True
    noise = -torch.log(-torch.log(torch.rand(steps, cases, STOCHASTIC, CLASSES)))
    return [t.to(device, dtype if t.is_floating_point() else None) for t in (frames, actions, first, noise)]


def trained(model: Model, observe: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> tuple[Tensor, ...]:
        found = observe()
        return (found.detach(), *torch.autograd.grad(found, parameters))

    return step


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The whole training step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def run() -> Any:
        graph.replay()
        return found

    return run


def contenders(units: int, posterior: str, data: Any, dtype: torch.dtype, compiled: bool) -> dict[str, Step]:
    """Training steps by name. The first is what is written today."""
    width, device = (512 if units <= 1024 else 1024), data[0].device
    torch.manual_seed(0)
    model = Model(units, width, posterior).to(device, dtype)
    ours = with_ours(model, False, "triton")
    steps: dict[str, Step] = {
        EAGER: trained(model, lambda: model.observe(*data)),
        CELL: trained(ours, lambda: ours.observe(*data)),
    }
    if compiled:
        torch._dynamo.reset()  # after eight models it would give up and not compile at all
        fast = torch.compile(model.step, fullgraph=True, dynamic=False)
        steps["eager, step compiled"] = trained(model, lambda: model.observe(*data, step=fast))
    if posterior == "frame":
        layer = with_ours(model, True, "auto")
        steps[LAYER] = trained(layer, lambda: layer.observe_at_once(*data))
    return steps


def with_graphs(steps: dict[str, Step]) -> dict[str, Step]:
    """Each also as one CUDA graph, but for what a compiler has made."""
    return steps | {f"{name}, CUDA graph": captured(step) for name, step in steps.items() if "compiled" not in name}


def milliseconds(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Each in turn, in an order drawn anew for every round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            steps[name]()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(3):
                steps[name]()
            torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - begin) / 3)
    gc.enable()
    return times


def checked(steps: dict[str, Step], dtype: torch.dtype) -> dict[str, float]:
    """Losses by name; they may differ by rounding and by samples that rounding decides otherwise."""
    losses = {name: float(step()[0]) for name, step in steps.items()}
    first = next(iter(losses.values()))
    allowed = 0.02 if dtype == torch.float32 else 0.1
    for name, value in losses.items():
        if not abs(value - first) <= allowed * abs(first):
            raise RuntimeError(f"{name}: loss {value:.4g}, wanted {first:.4g}: not timed")
    return losses


def measure(units: int, dtype: str, posterior: str, rounds: int, compiled: bool) -> dict[str, Any]:
    """One row: milliseconds of every contender in every round."""
    kind = DTYPES[dtype]
    steps = with_graphs(contenders(units, posterior, batch("cuda", kind), kind, compiled))
    losses = checked(steps, kind)
    return {"milliseconds": milliseconds(steps, rounds), "losses": losses}


def touch(units: int, dtype: str, posterior: str, compiled: bool) -> None:
    """Compile what a case needs."""
    for step in contenders(units, posterior, batch("cuda", DTYPES[dtype], steps=2), DTYPES[dtype], compiled).values():
        step()


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record as people read it."""
    lines = [
        [str(row["units"]), row["dtype"], row["posterior"], name, f"{statistics.median(times):.2f}",
         f"{statistics.median(row['milliseconds'][EAGER]) / statistics.median(times):.1f}"]
        for row in rows
        for name, times in row["milliseconds"].items()
    ]  # fmt: skip
    columns = ["units", "dtype", "posterior sees", "", "milliseconds", "times as fast as eager"]
    return [{"caption": f"A training step, {BATCH} cases, {STEPS} steps", "columns": columns, "rows": lines}]


def shown(row: dict[str, Any]) -> str:
    times = (f"{name}: {statistics.median(values):.2f}" for name, values in row["milliseconds"].items())
    return "\n  ".join([f"{row['units']} {row['dtype']} {row['posterior']}", *times])


def main() -> int:
    """Measure on a GPU, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--units", default=",".join(map(str, UNITS)))
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--no-compiled", action="store_true")
    growing.arguments(parser, "results/bench-rssm.json")
    given = parser.parse_args()
    cases = [
        {"units": int(units), "dtype": dtype, "posterior": posterior}
        for dtype in given.dtypes.split(",")
        for units in given.units.split(",")
        for posterior in ("state and frame", "frame")
    ]
    head = {
        "kind": "bench", "name": "rssm", "title": "A world model's observe loop",
        "command": growing.command("rssm.py"),
        "about": "Medians of interleaved rounds in randomised order; the same weights and noise for all.",
    }  # fmt: skip
    return growing.run(
        given, head, table, cases, lambda **case: measure(**case, rounds=given.rounds, compiled=not given.no_compiled),
        shown, lambda **case: touch(**case, compiled=not given.no_compiled),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
