"""Speed and memory of whole layers on a GPU: both directions, three layers, ragged batches, and recompute=True.

    python benchmarks/speed.py --op layers --out results/bench-layers.json

Training steps of our layer-normalised layers and of cuDNN's plain ones doing the same, in interleaved rounds: one
direction, both, three layers, and lengths drawn uniformly from 1 to T (ours takes lengths=, cuDNN a PackedSequence that
was packed beforehand). Of both directions and three layers, ours also in common launches (backend="triton"). Then, for
the ten shapes of ``speed.py``, peak memory of a step with and without recompute=True, of several steps with all that
CUDA graphs hold, cuBLAS's workspaces included, and what recompute=True costs in time. A case is timed only after its
outputs and gradients were compared with the reference's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import growing
import torch
from speed import CUDNN, DTYPES, OURS, SHAPES, _peak, _peak_with_graphs, as_cudnn_users, interleaved
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import lamina

KINDS: dict[str, dict[str, Any]] = {
    "one direction": {}, "both directions": {"bidirectional": True}, "three layers": {"num_layers": 3}, "ragged": {},
}  # fmt: skip
MAIN = (SHAPES[0], SHAPES[3])
RECOMPUTE = "LN, recompute"
TOGETHER = "LN, common launches"
TIME, MEMORY = "time", "memory"


def lengths_for(shape: tuple[int, ...]) -> Tensor:
    batch, steps, *_ = shape
    return torch.randint(1, steps + 1, (batch,), generator=torch.Generator().manual_seed(0))


def training_step(layer: nn.Module, x: Tensor, lengths: Tensor | None) -> Callable[[], None]:
    """Forward and backward into fresh gradients; ours of padded input and lengths, cuDNN's of packed input."""
    leaves = [x, *layer.parameters()]
    ours = not isinstance(layer, nn.RNNBase)
    packed = None if lengths is None or ours else pack_padded_sequence(x.detach(), lengths, enforce_sorted=False)
    if packed is not None:
        packed.data.requires_grad_()
        leaves[0] = packed.data

    def run() -> Tensor:
        if packed is not None:
            return layer(packed)[0].data
        return layer(x)[0] if lengths is None else layer(x, lengths=lengths)[0]

    upstream = torch.randn_like(run())

    def step() -> None:
        torch.autograd.grad(run(), leaves, upstream)

    return step


def errors(cell: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str, backend: str) -> tuple[float, float]:
    """The largest relative error of outputs and gradients over 6 steps, ours and the same-precision reference's."""
    batch, _, inputs, hidden = shape
    make, options = getattr(lamina, cell), KINDS[kind]
    layers = [make(inputs, hidden, device="cuda", dtype=dtype, backend=b, **options) for b in (backend, "reference")]
    layers.append(make(inputs, hidden, device="cuda", dtype=torch.float64, **options))
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    x = torch.randn(6, batch, inputs, device="cuda").to(dtype)
    lengths = torch.arange(batch, device="cuda") % 6 + 1 if kind == "ragged" else None
    found, d = [], None
    for layer in layers:
        own = x.to(next(layer.parameters()).dtype).requires_grad_()
        out = layer(own, lengths=lengths)[0]
        d = torch.randn_like(out) if d is None else d
        found.append([out, *torch.autograd.grad(out, [own, *layer.parameters()], d.to(out.dtype))])
    ours, plain = (
        max(((a.double() - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(some, found[2]))
        for some in found[:2]
    )
    return ours, plain


def ways(options: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Ours, cuDNN's and, where there is more than one recurrence, ours in common launches."""
    found: list[tuple[str, Any, dict[str, Any]]] = [(OURS, lamina, {}), (CUDNN, nn, {})]
    return found + ([(TOGETHER, lamina, {"backend": "triton"})] if options else [])


def measure(cell: str, dtype: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Microseconds a time step of every kind, ours and cuDNN's."""
    kind_of, (batch, steps, inputs, hidden) = DTYPES[dtype], shape
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=kind_of, requires_grad=True)
    ready: dict[str, Callable[[], None]] = {}
    checked = {}
    for kind, options in KINDS.items():
        lengths = lengths_for(shape) if kind == "ragged" else None
        for name, package, more in ways(options):
            if package is lamina:
                label = f"{kind}: {name}"
                checked[label] = errors(cell, kind_of, shape, kind, more.get("backend", "auto"))
                if not checked[label][0] <= 2 * checked[label][1] + 1e-3:
                    raise RuntimeError(f"{cell} {dtype} {shape} {label}: errors {checked[label]}: not timed")
            layer = getattr(package, cell)(inputs, hidden, device="cuda", dtype=kind_of, **options, **more)
            ready[f"{kind}: {name}"] = training_step(layer, x, lengths)
    times = interleaved(ready, dict.fromkeys(ready, steps), rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    one = medians[f"one direction: {OURS}"]
    ours = {f"{kind}{', common launches' if name == TOGETHER else ''}": (kind, medians[f"{kind}: {name}"])
            for kind, options in KINDS.items() for name, package, _ in ways(options) if package is lamina}  # fmt: skip
    return {
        "microseconds": times, "median": medians, "errors": checked,
        "ratio_to_cudnn": {name: time / medians[f"{kind}: {CUDNN}"] for name, (kind, time) in ours.items()},
        "ratio_to_one_direction": {name: time / one for name, (_, time) in ours.items()},
    }  # fmt: skip


def memory(cell: str, dtype: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Peak megabytes of a training step, and its time, with and without recompute=True."""
    kind, (batch, steps, inputs, hidden) = DTYPES[dtype], shape
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=kind, requires_grad=True)
    layers = {
        OURS: getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=kind),
        RECOMPUTE: getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=kind, recompute=True),
        CUDNN: getattr(nn, cell)(inputs, hidden, device="cuda", dtype=kind),
    }
    ready = {name: training_step(layer, x, None) for name, layer in layers.items()}
    peaks = {name: _peak(step) for name, step in ready.items()}
    with_graphs = {name: _peak_with_graphs(step) for name, step in ready.items()}
    times = interleaved(ready, dict.fromkeys(ready, steps), rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "peak_megabytes": peaks, "microseconds": times,
        "memory_ratio": {name: peaks[name] / peaks[CUDNN] for name in (OURS, RECOMPUTE)},
        "peak_megabytes_with_graphs": with_graphs, "memory_ratio_with_graphs": with_graphs[OURS] / with_graphs[CUDNN],
        "time_of_recompute": medians[RECOMPUTE] / medians[OURS], "time_ratio": medians[RECOMPUTE] / medians[CUDNN],
    }  # fmt: skip


def touch(cell: str, dtype: str, shape: Sequence[int], what: str) -> None:
    """Compile what a case needs."""
    batch, _, inputs, hidden = shape
    short, kind = (batch, 6, inputs, hidden), DTYPES[dtype]
    x = torch.randn(6, batch, inputs, device="cuda", dtype=kind, requires_grad=True)
    every: list[tuple[dict[str, Any], Tensor | None]] = [({}, None), ({"recompute": True}, None)]
    if what == TIME:
        every = [
            ({**options, **more}, lengths_for(short) if name == "ragged" else None)
            for name, options in KINDS.items()
            for _, package, more in ways(options)
            if package is lamina
        ]
    for options, lengths in every:
        training_step(getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=kind, **options), x, lengths)()


def tables(both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record as people read it."""
    rows, peaks = ([row for row in both if row["what"] == what] for what in (TIME, MEMORY))
    every = [*rows[0]["ratio_to_cudnn"]] if rows else [*KINDS]
    others = [kind for kind in every if kind != "one direction"]
    speed = [
        [f"{row['cell']} {row['dtype']}", ", ".join(map(str, row["shape"])),
         *(f"{row['ratio_to_cudnn'][kind]:.2f}" for kind in every),
         *(f"{row['ratio_to_one_direction'][kind]:.2f}" for kind in others)]
        for row in rows
    ]  # fmt: skip
    held = [
        [f"{row['cell']} {row['dtype']}", ", ".join(map(str, row["shape"])), f"{row['peak_megabytes'][CUDNN]:.0f}",
         f"{row['memory_ratio'][OURS]:.2f}", f"{row['memory_ratio_with_graphs']:.2f}",
         f"{row['memory_ratio'][RECOMPUTE]:.2f}",
         f"{row['time_of_recompute']:.2f}", f"{row['time_ratio']:.2f}"]
        for row in peaks
    ]  # fmt: skip
    found = [
        {"caption": "Time of a training step over cuDNN's plain one, then over our own one-direction layer's",
         "columns": ["", "batch, steps, inputs, units", *every, *(f"{kind} / one" for kind in others)], "rows": speed},
        {"caption": "Peak memory of a training step over cuDNN's, and what recompute=True costs",
         "columns": ["", "batch, steps, inputs, units", "cuDNN, megabytes", "LN / cuDNN", "with what graphs hold",
                     "recompute / cuDNN",
                     "time of recompute / LN", "time of recompute / cuDNN"], "rows": held},
    ]  # fmt: skip
    return [table for table in found if table["rows"]]


def main(words: list[str]) -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="LSTM,GRU")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=5)
    growing.arguments(parser, "results/bench-layers.json")
    given = parser.parse_args(words)
    as_cudnn_users()
    kinds = [(cell, dtype) for cell in given.cells.split(",") for dtype in given.dtypes.split(",")]
    cases = [
        {"cell": cell, "dtype": dtype, "shape": list(shape), "what": what}
        for what, shapes in ((TIME, MAIN), (MEMORY, SHAPES))
        for cell, dtype in kinds
        for shape in shapes
    ]

    def one(cell: str, dtype: str, shape: Sequence[int], what: str) -> dict[str, Any]:
        return (measure if what == TIME else memory)(cell, dtype, tuple(shape), given.rounds)

    head = {
        "kind": "bench", "name": "layers", "title": "Whole recurrent layers on a GPU",
        "command": growing.command("speed.py"),
        "about": "Forward and backward, input projection included, float32 in TF32; medians of interleaved rounds.",
    }  # fmt: skip
    return growing.run(given, head, tables, cases, one, lambda row: "  ".join(tables([row])[0]["rows"][0]), touch)
