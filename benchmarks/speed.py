"""Speed of the fused recurrences on a GPU: a training step (forward and backward) of one layer, microseconds a step.

    python benchmarks/speed.py --out results/bench-sequence.json
    python benchmarks/speed.py --device cpu    (speed_cpu.py)
    python benchmarks/speed.py --op layer_norm    (speed_norm.py)
    python benchmarks/speed.py --op layers    (speed_layers.py: both directions, stacks, ragged batches, memory)
    python benchmarks/speed.py --op cell    (speed_cell.py)

For each cell, dtype and shape, in one process and in interleaved rounds: our layer-normalised layer, our plain layer,
cuDNN's plain layer, the layer-normalised loop step by step and, in the dtypes of --rivals, a compiled cell in a CUDA
graph. A case is timed only after its output and gradients were compared with the float64 reference. Random numbers
in, input projection included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import growing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lamina
from lamina.kernels import passes

# batch, steps, inputs, units
SHAPES = (
    (64, 100, 512, 512), (32, 512, 1024, 1024), (16, 1024, 768, 768), (8, 500, 400, 400), (8, 500, 384, 384),
    (128, 64, 256, 256), (128, 30, 640, 2400), (128, 40, 384, 1024), (1, 500, 512, 512), (16, 64, 1024, 4096),
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
EAGER, GRAPHED = "LN, step by step", "LN, compiled cell in a CUDA graph"
RIVALS_STEPS = 64  # at most: each costs the host and the graph the same
OURS, PLAIN, CUDNN = "LN", "plain", "cuDNN plain"
WINDOW = 1500  # time steps of a timing at least: its first passes find the host's caches full of another's
WARM_UP = 8  # steps before any is timed: short passes are captured on the way
EXCHANGE = 0.8  # microseconds: what one meeting of 16 programs took, measured alone on an H200
BANDWIDTH = 4.8e6  # bytes a microsecond, of an H200's memory
EXCHANGES = {"LSTM": (3, 2), "GRU": (2, 1)}  # of a layer-normalised step, forward and backward


def persistent(cell: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether cuDNN has its fast kernel for the case: fp16 LSTMs of some sizes."""
    batch, _, _, hidden = shape
    return cell == "LSTM" and dtype == "fp16" and hidden <= 1024 and hidden % 128 == 0 and batch % 8 == 0


def floor(cell: str, dtype: str, shape: tuple[int, ...]) -> float:
    """The least microseconds of a step: exchanges one after another, or what must be moved through memory."""
    batch, steps, inputs, hidden = shape
    gates, size = {"LSTM": 4, "GRU": 3}[cell], torch.empty((), dtype=DTYPES[dtype]).element_size()
    kept = batch * hidden * (5 * gates + 4) * size  # W_x x twice, what backward reads, gradients
    weights = gates * hidden * (hidden * 2 + inputs * size)  # the recurrent matrix has 16 bits in every dtype
    on_chip = weights < 30e6  # the shared memory of all multiprocessors
    moved = kept + weights * (3 / steps if on_chip else 2)
    return max(EXCHANGE * sum(EXCHANGES[cell]), moved / BANDWIDTH)


def contenders(cell: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, nn.Module]:
    """Layers of the same size, by name."""
    _, _, inputs, hidden = shape
    make = getattr(lamina, cell)
    found = {
        OURS: make(inputs, hidden, device="cuda", dtype=dtype),
        PLAIN: make(inputs, hidden, norm=None, device="cuda", dtype=dtype),
        CUDNN: getattr(nn, cell)(inputs, hidden, device="cuda", dtype=dtype),
    }
    return found


def training_step(layer: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """Forward and backward into fresh gradients."""
    leaves = [x, *layer.parameters()]

    def step() -> None:
        torch.autograd.grad(layer(x)[0], leaves, upstream)

    return step


def eager_lstm(layer: Any, x: Tensor) -> Tensor:
    """The paper's LSTM as people write it, with the layer's own parameters."""
    hidden, outputs = layer.hidden_size, []
    h = c = x.new_zeros(x.shape[1], hidden)
    gates_x = F.linear(x, layer.weight_ih_l0)
    for now in F.layer_norm(gates_x, (4 * hidden,), layer.gain_ih_l0, layer.bias_ih_l0).unbind():
        gates = F.layer_norm(F.linear(h, layer.weight_hh_l0), (4 * hidden,), layer.gain_hh_l0, layer.bias_hh_l0)
        i, f, g, o = (now + gates).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c, (hidden,), layer.gain_cell_l0, layer.bias_cell_l0))
        outputs.append(h)
    return torch.stack(outputs)


def eager_gru(layer: Any, x: Tensor) -> Tensor:
    """The paper's GRU in the same way: r and z share a norm, the candidate has its own."""
    hidden, outputs = layer.hidden_size, []
    h = x.new_zeros(x.shape[1], hidden)
    sizes = (2 * hidden, hidden)
    x_parts, gain_x, bias_x, gain_h, bias_h = (
        t.split(sizes, -1)
        for t in (
            F.linear(x, layer.weight_ih_l0),
            *(getattr(layer, n) for n in ("gain_ih_l0", "bias_ih_l0", "gain_hh_l0", "bias_hh_l0")),
        )
    )
    pair, alone = (F.layer_norm(p, (n,), g, b) for p, n, g, b in zip(x_parts, sizes, gain_x, bias_x))
    for now, candidate in zip(pair.unbind(), alone.unbind()):
        parts = F.linear(h, layer.weight_hh_l0).split(sizes, -1)
        gates, new = (F.layer_norm(p, (n,), g, b) for p, n, g, b in zip(parts, sizes, gain_h, bias_h))
        r, z = torch.sigmoid(now + gates).chunk(2, -1)
        h = (1 - z) * torch.tanh(candidate + r * new) + z * h
        outputs.append(h)
    return torch.stack(outputs)


def eager_step(cell: str, layer: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """A training step of the loop, over its first steps: each costs the same."""
    loop = {"LSTM": eager_lstm, "GRU": eager_gru}[cell]
    x, upstream = x.detach()[:RIVALS_STEPS].requires_grad_(), upstream[:RIVALS_STEPS]

    def step() -> None:
        torch.autograd.grad(loop(layer, x), [x, *layer.parameters()], upstream)

    return step


def looped_step(cell: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[], None]:
    """A training step of a loop over a compiled cell."""
    batch, steps, inputs, hidden = shape
    layer = getattr(lamina, f"{cell}Cell")(inputs, hidden, device="cuda", dtype=dtype)
    torch._dynamo.reset()  # after eight shapes it would give up and not compile at all
    compiled = torch.compile(layer)
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(steps, batch, hidden, device="cuda", dtype=dtype)

    first = x.new_zeros(batch, hidden)

    def step() -> None:
        state, outputs = (first, first) if cell == "LSTM" else first, []
        for now in x.unbind():
            state = compiled(now, state)
            outputs.append(state[0] if cell == "LSTM" else state)
        torch.autograd.grad(torch.stack(outputs), [x, *layer.parameters()], upstream)

    return step


def graphed_step(cell: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Callable[[], None], int]:
    """The same, captured whole, and how many time steps it has."""
    batch, steps, inputs, hidden = shape
    steps = min(steps, RIVALS_STEPS)
    step = looped_step(cell, dtype, (batch, steps, inputs, hidden))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, steps


def errors(cell: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[float, float]:
    """The largest relative error of outputs and gradients over 8 steps, ours and the same-precision reference's."""
    batch, _, inputs, hidden = shape
    layers = [
        getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=dtype, backend=b) for b in ("auto", "reference")
    ]
    truth = getattr(lamina, cell)(inputs, hidden, device="cuda", dtype=torch.float64)
    for layer in (*layers[1:], truth):
        layer.load_state_dict(layers[0].state_dict())
    x, d = (torch.randn(8, batch, n, device="cuda").to(dtype) for n in (inputs, hidden))
    found = []
    for layer in (*layers, truth):
        own = x.to(next(layer.parameters()).dtype).requires_grad_()
        out = layer(own)[0]
        found.append([out, *torch.autograd.grad(out, [own, *layer.parameters()], d.to(out.dtype))])
    ours, plain = (
        torch.stack([(a.double() - b).norm() / b.norm().clamp(min=1e-9) for a, b in zip(some, found[2])]).max().item()
        for some in found[:2]
    )
    return ours, plain


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # brings its code and data near, after the others', and gives the GPU something to do
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def measure(cell: str, dtype: str, shape: tuple[int, ...], rounds: int, rivals: bool) -> dict[str, Any]:
    """One row: microseconds a step of every contender in every round, ratios to cuDNN, errors and memory."""
    kind, (batch, steps, inputs, hidden) = DTYPES[dtype], shape
    ours, plain = errors(cell, kind, shape)
    if not ours <= 2 * plain + 1e-3:
        raise RuntimeError(f"{cell} {dtype} {shape}: error {ours:.2g}, reference {plain:.2g}: not timed")
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=kind, requires_grad=True)
    upstream = torch.randn(steps, batch, hidden, device="cuda", dtype=kind)
    layers = contenders(cell, kind, shape)
    ready = {name: training_step(layer, x, upstream) for name, layer in layers.items()}
    memory = {name: _peak(step) for name, step in ready.items()}
    lengths = dict.fromkeys(ready, steps)
    if hidden <= 1024:
        ready[EAGER], lengths[EAGER] = eager_step(cell, layers[OURS], x, upstream), min(steps, RIVALS_STEPS)
    if rivals and hidden <= 1024:
        ready[GRAPHED], lengths[GRAPHED] = graphed_step(cell, kind, shape)
    times = interleaved(ready, lengths, rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "cudnn_persistent": persistent(cell, dtype, shape),
        "backend": str(lamina.explain(layers[OURS], x)), "microseconds": times, "median": medians,
        "ratio_to_cudnn": medians[OURS] / medians[CUDNN], "ratio_to_own_plain": medians[OURS] / medians[PLAIN],
        "ratio_to_step_by_step": medians[OURS] / medians[EAGER] if EAGER in medians else None,
        "ratio_to_graphed": medians[OURS] / medians[GRAPHED] if GRAPHED in medians else None,
        "share_of_floor": floor(cell, dtype, shape) / medians[OURS], "peak_megabytes": memory,
        "error": ours, "error_of_reference": plain,
    }  # fmt: skip


def interleaved(ready: dict[str, Callable[[], None]], lengths: dict[str, int], rounds: int) -> dict[str, list[float]]:
    """Microseconds a time step of each contender in each round, after a warm-up.

    Python's collector is off, as in ``timeit``: it would run when one contender has made objects enough, in another's
    time, and with a compiler loaded it takes tens of milliseconds.
    """
    for name, step in ready.items():
        for _ in range(2 if name == EAGER else WARM_UP):
            step()
    gc.collect()
    gc.freeze()  # what is there stays: nothing of it need be looked at again
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, step in ready.items():
            gc.collect(0)
            gc.disable()
            repeats = 1 if name == EAGER else max(3, WINDOW // lengths[name])
            times[name].append(1000 * milliseconds(step, repeats) / lengths[name])
            gc.enable()
    return times


def _peak(step: Callable[[], None]) -> float:
    """Megabytes at the highest point of a step that is not captured, after one that compiles what is to be compiled."""
    passes.clear()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_with_graphs(step: Callable[[], None]) -> float:
    """Megabytes at the highest point of seven steps: with all that graphs hold, cuBLAS's workspaces included."""
    passes.clear()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(7):
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def geometric_means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the ratios to cuDNN, by cell and dtype; cuDNN's persistent cases apart."""
    found: dict[str, list[float]] = {}
    for row in rows:
        corner = ", cuDNN persistent" if row["cudnn_persistent"] else ""
        found.setdefault(f"{row['cell']} {row['dtype']}{corner}", []).append(row["ratio_to_cudnn"])
    return {
        name: {"mean": math.exp(statistics.fmean(map(math.log, ratios))), "highest": max(ratios), "n": len(ratios)}
        for name, ratios in found.items()
    }


def touch(cell: str, dtype: str, shape: Sequence[int], rivals: bool = False) -> None:
    """Compile what a case needs: a pass over two steps uses the same kernels."""
    batch, _, inputs, hidden = shape
    x = torch.randn(2, batch, inputs, device="cuda", dtype=DTYPES[dtype], requires_grad=True)
    for norm in ("layer", None):
        layer = getattr(lamina, cell)(inputs, hidden, norm=norm, device="cuda", dtype=DTYPES[dtype])
        layer(x)[0].sum().backward()
    if rivals and hidden <= 1024:
        looped_step(cell, DTYPES[dtype], (batch, 2, inputs, hidden))()


def as_cudnn_users() -> None:
    """What all recurrent benchmarks of a GPU set first."""
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    torch.backends.cuda.matmul.allow_tf32 = True  # the reference's float32 products, as cuDNN's and ours


def main() -> int:
    """Measure, print, and write the record after every row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="LSTM,GRU")
    parser.add_argument("--dtypes", default="bf16,fp32,fp16")
    parser.add_argument(
        "--shapes", default=",".join(map(str, range(len(SHAPES)))), help="numbers in the list of shapes"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", default="bf16,fp32,fp16", help="dtypes in which to time the compiled loop as well")
    parser.add_argument(
        "--readme", action="store_true", help="measure nothing: print the README's table of that record"
    )
    growing.arguments(parser, "results/bench-sequence.json")
    given = parser.parse_args()
    if given.readme:
        print(readme(json.loads(Path(given.out).read_text())))
        return growing.DONE
    as_cudnn_users()
    chosen = [SHAPES[int(number)] for number in given.shapes.split(",")]
    cases = [
        {"cell": cell, "dtype": dtype, "shape": list(shape)}
        for cell in given.cells.split(",")
        for dtype in given.dtypes.split(",")
        for shape in chosen
    ]
    rivals = given.rivals.split(",")
    status = growing.run(
        given, _head(), tables, cases,
        lambda cell, dtype, shape: measure(cell, dtype, tuple(shape), given.rounds, dtype in rivals), shown,
        lambda cell, dtype, shape: touch(cell, dtype, shape, dtype in rivals),
    )  # fmt: skip
    return status


def shown(row: dict[str, Any]) -> str:
    """A row as it is told on the way."""
    times = "  ".join(f"{name} {value:.1f}" for name, value in row["median"].items())
    return f"{row['cell']} {row['dtype']} {tuple(row['shape'])}: {times}  ratio {row['ratio_to_cudnn']:.2f}"


def tables(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record as people read it."""
    names = [name for name in (OURS, PLAIN, CUDNN, EAGER, GRAPHED) if any(name in row["median"] for row in rows)]
    columns = [
        "Cell",
        "Batch, steps, inputs, units",
        *names,
        "LN / cuDNN",
        "LN / plain",
        "Share of floor",
        "LN / cuDNN MB",
    ]
    lines = [
        [
            f"{row['cell']} {row['dtype']}{' *' if row['cudnn_persistent'] else ''}", ", ".join(map(str, row["shape"])),
            *(f"{row['median'][name]:.1f}" if name in row["median"] else "-" for name in names),
            f"{row['ratio_to_cudnn']:.2f}", f"{row['ratio_to_own_plain']:.2f}", f"{row['share_of_floor']:.0%}",
            f"{row['peak_megabytes'][OURS]:.0f} / {row['peak_megabytes'][CUDNN]:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    means = [[n, f"{m['mean']:.2f}", f"{m['highest']:.2f}", str(m["n"])] for n, m in geometric_means(rows).items()]
    return [
        {"caption": "Microseconds a time step; * marks cuDNN's persistent kernel", "columns": columns, "rows": lines},
        {"caption": "LN / cuDNN", "columns": ["", "geometric mean", "highest", "shapes"], "rows": means},
    ]


def readme(record: dict[str, Any]) -> str:
    """The README's tables: our layer-normalised layer's time over cuDNN's plain one's, and over its rivals'."""
    rows = record["rows"]
    kinds = list(dict.fromkeys(f"{row['cell']} {row['dtype']}" for row in rows))
    ratios = {
        (*row["shape"], f"{row['cell']} {row['dtype']}"): f"{row['ratio_to_cudnn']:.2f}"
        + (" \\*" if row["cudnn_persistent"] else "")
        for row in rows
    }
    lines = [
        [", ".join(map(str, shape)), *(ratios.get((*shape, kind), "-") for kind in kinds)]
        for shape in dict.fromkeys(tuple(row["shape"]) for row in rows)
    ]
    means = geometric_means(rows)
    for name, end in (("geometric mean", ""), ("geometric mean of \\*", ", cuDNN persistent")):
        lines.append([name, *(f"{means[k + end]['mean']:.2f}" if k + end in means else "-" for k in kinds)])
    first = _markdown(["batch, steps, inputs, units", *kinds], lines)
    second = _markdown(["", "least", "geometric mean", "most", "cases"], _against(rows))
    return f"{first}\n\n{second}\n\n{_memory(rows)} All of this: {growing.source(record)}."


def _memory(rows: list[dict[str, Any]]) -> str:
    """Peak memory over cuDNN's, in a sentence."""
    peaks = [row["peak_megabytes"][OURS] / row["peak_megabytes"][CUDNN] for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, peaks)))
    return (
        f"A training step's peak memory is {min(peaks):.2f} to {max(peaks):.2f} of cuDNN's, {mean:.2f} in the "
        f"geometric mean; it is higher than cuDNN's in {sum(peak > 1 for peak in peaks)} of {len(peaks)} cases."
    )


def _against(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Over all shapes and dtypes: how many times faster than each rival, and our own plain layer's part."""
    found = []
    for title, key, inverse in (
        ("times faster than the same layer step by step", "ratio_to_step_by_step", True),
        ("times faster than a compiled cell in a CUDA graph", "ratio_to_graphed", True),
        ("time over that of our own layer without a norm", "ratio_to_own_plain", False),
    ):
        for cell in ("LSTM", "GRU"):
            some = [row[key] for row in rows if row["cell"] == cell and row[key] is not None]
            some = sorted(1 / r if inverse else r for r in some)
            mean = math.exp(statistics.fmean(map(math.log, some)))
            found.append([f"{cell}: {title}", f"{some[0]:.2f}", f"{mean:.2f}", f"{some[-1]:.2f}", str(len(some))])
    return found


def _markdown(columns: list[str], lines: list[list[str]]) -> str:
    both = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in both)


def _head() -> dict[str, Any]:
    return {
        "kind": "bench", "name": "sequence", "command": growing.command("speed.py"),
        "title": "Training step of one recurrent layer on a GPU, microseconds a time step",
        "about": "Forward and backward of one layer, input projection included, float32 in TF32; medians. LN is our "
        "layer-normalised layer (the paper's placement), plain ours without a norm, cuDNN torch.nn's, which in "
        "bfloat16 copies its weights together in every call, as it tells its users.",
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:3] == ["--device", "cpu"]:
        import speed_cpu

        sys.exit(speed_cpu.main(sys.argv[3:]))
    elif sys.argv[1:2] == ["--op"]:
        parts = {"layer_norm": "speed_norm", "layers": "speed_layers", "cell": "speed_cell"}
        if sys.argv[2:3] == [] or sys.argv[2] not in parts:
            sys.exit(f"--op must be one of {', '.join(parts)}, got {' '.join(sys.argv[2:3]) or 'nothing'}.")
        sys.exit(importlib.import_module(parts[sys.argv[2]]).main(sys.argv[3:]))
    else:
        sys.exit(main())
