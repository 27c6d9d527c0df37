"""Measurements of the CPU benchmark: each function here runs in a measuring process."""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_plan import (
    BATCH,
    CELL_BATCH,
    CELL_STEPS,
    CELL_UNITS,
    CHECKED_STEPS,
    EAGER,
    LONG,
    LOOP,
    OURS,
    PADDED,
    PLAIN,
    SHORTEST,
    TORCH,
    Shape,
)
from speed import eager_gru, eager_lstm
from torch import Tensor, nn

import lamina
from lamina.kernels import HAS_NUMBA

Step = Callable[[], Any]
MOST_ERROR = 1e-3  # of the float32 reference: a larger one says that not the same thing was computed
PEAK_SIZES = ((1024, 1024, 1024), (512, 1024, 1024))  # rows, depth, columns
PEAK_CALLS = 10  # of each product of each size


def eager_rnn(layer: Any, x: Tensor) -> Tensor:
    """The paper's RNN as people write it, with the layer's own parameters."""
    hidden, outputs = layer.hidden_size, []
    h = x.new_zeros(x.shape[1], hidden)
    bias = layer.bias_ih_l0 + layer.bias_hh_l0
    for now in nn.functional.linear(x, layer.weight_ih_l0).unbind():
        a = now + nn.functional.linear(h, layer.weight_hh_l0)
        h = torch.tanh(nn.functional.layer_norm(a, (hidden,), layer.gain_sum_l0, bias))
        outputs.append(h)
    return torch.stack(outputs)


LOOPS: dict[str, Callable[[Any, Tensor], Tensor]] = {"LSTM": eager_lstm, "GRU": eager_gru, "RNN": eager_rnn}


# Layers


def measure_layer(threads: int, cell: str, shape: Shape, names: list[str], rounds: int) -> dict[str, Any]:
    """Time inference and training of all contenders, after their results were compared with the reference."""
    torch.set_num_threads(threads)
    errors = {name: checked(cell, shape, name) for name in names if name not in (TORCH, EAGER)}
    peak = matrix_peak(threads)
    steps = {kind_and_name: step for name in names for kind_and_name, step in steps_of(cell, shape, name).items()}
    return {"errors": errors, "peak": peak, "milliseconds": timed(steps, rounds)}


def checked(cell: str, shape: Shape, name: str) -> list[float]:
    """Return the errors of ours and of the float32 reference; a contender whose error is too large is not timed."""
    ours, plain = errors(cell, shape, name)
    if not (ours <= 2 * plain + 3e-6 and plain <= MOST_ERROR):
        raise RuntimeError(f"{cell} {shape}, {name}: error {ours:.2g}, reference {plain:.2g}: not timed")
    return [float(f"{error:.2g}") for error in (ours, plain)]


def errors(cell: str, shape: Shape, name: str) -> tuple[float, float]:
    """Return the largest relative errors of output and gradients over a few steps, ours and the float32 reference's."""
    batch, _, inputs, hidden = shape
    layers = [layer_of(cell, name, inputs, hidden), layer_of(cell, name, inputs, hidden, backend="reference")]
    layers.append(layer_of(cell, name, inputs, hidden, backend="reference", dtype=torch.float64))
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    x, upstream = torch.randn(CHECKED_STEPS, batch, inputs), torch.randn(CHECKED_STEPS, batch, hidden)
    lengths = half_lengths(CHECKED_STEPS, batch)
    ours, plain, truth = (_results(call_of(cell, name, layer, lengths), layer, x, upstream) for layer in layers)
    return _largest_error(ours, truth), _largest_error(plain, truth)


def _results(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of every parameter, as float64."""
    dtype = next(layer.parameters()).dtype
    leaf = x.to(dtype).requires_grad_()
    output = call(leaf)
    gradients = torch.autograd.grad(output, [leaf, *layer.parameters()], upstream.to(dtype))
    return [tensor.detach().double() for tensor in (output, *gradients)]


def _largest_error(tensors: list[Tensor], truth: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in zip(tensors, truth))


def layer_of(cell: str, name: str, inputs: int, hidden: int, **options: Any) -> nn.Module:
    """Make a contender's layer."""
    if name == TORCH:
        return getattr(nn, cell)(inputs, hidden)
    norm = {PLAIN: None, BATCH: "batch"}.get(name, "layer")
    return getattr(lamina, cell)(inputs, hidden, norm=norm, **options)


def call_of(cell: str, name: str, layer: Any, lengths: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a contender's forward pass; only the one with padding takes the lengths."""
    if name == EAGER:
        return lambda y: LOOPS[cell](layer, y)
    if name == PADDED:
        return lambda y: layer(y, lengths=lengths)[0]
    return lambda y: layer(y)[0]


def half_lengths(steps: int, batch: int) -> Tensor:
    """Draw lengths of which pairs add up to ``steps``, so that half of all steps are valid."""
    first = [random.randint(1, steps - 1) for _ in range(batch // 2)]
    return torch.tensor([*first, *(steps - length for length in first), *[steps // 2] * (batch % 2)])


def steps_of(cell: str, shape: Shape, name: str) -> dict[str, Step]:
    """Return a contender's inference and training step, by what the record calls them."""
    batch, steps, inputs, hidden = shape
    layer = layer_of(cell, name, inputs, hidden)
    x, upstream = torch.randn(steps, batch, inputs), torch.randn(steps, batch, hidden)
    lengths = half_lengths(steps, batch)
    train, infer = (call_of(cell, name, one, lengths) for one in (layer, copy.deepcopy(layer).eval()))
    leaf = x.clone().requires_grad_()
    leaves = [leaf, *layer.parameters()]
    return {
        f"inference: {name}": torch.no_grad()(lambda: infer(x)),
        f"training: {name}": lambda: torch.autograd.grad(train(leaf), leaves, upstream),
    }


# Timing


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return each step's milliseconds in every round; the order of the steps is random in each."""
    once = {name: _second_time(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            if once[name] < LONG:
                steps[name]()  # brings its code and data into the caches
            seconds = seconds_of(steps[name], max(1, round(SHORTEST / once[name])))
            times[name].append(float(f"{1000 * seconds:.4g}"))
    gc.enable()
    return times


def _second_time(step: Step) -> float:
    """Return the seconds of a step's second call; the first compiles."""
    step()
    return seconds_of(step, 1)


def seconds_of(step: Step, repeats: int) -> float:
    """Return the mean seconds of several calls."""
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - begin) / repeats


# The machine's matrix peak


_peaks: dict[int, dict[str, Any]] = {}  # of this process, by number of threads


def matrix_peak(threads: int) -> dict[str, Any]:
    """Return the best rate of any product so far on so many threads, in GFLOP/s, and which product reached it.

    The best product is timed again in every call: one measurement may fall into a moment when others use the machine.
    """
    torch.set_num_threads(threads)
    peak = _peaks.get(threads, {"gflops": 0.0, "product": ""})
    for size in PEAK_SIZES:
        for name, product in products(*size).items():
            name = f"{name}, {' x '.join(map(str, size))}"
            if threads not in _peaks or peak["product"] == name:
                rate = 2e-9 * math.prod(size) / _best_seconds(product)
                peak = max(peak, {"gflops": float(f"{rate:.4g}"), "product": name}, key=lambda one: one["gflops"])
    _peaks[threads] = peak
    return peak


def products(rows: int, depth: int, columns: int) -> dict[str, Step]:
    """Return the product of x [rows, depth] and w^T [depth, columns] by each library at hand."""
    x, w, out = torch.randn(rows, depth), torch.randn(columns, depth), torch.empty(rows, columns)
    found: dict[str, Step] = {"torch.mm": lambda: torch.mm(x, w.t(), out=out)}
    if torch.backends.mkldnn.is_available():
        found["oneDNN linear"] = lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    if HAS_NUMBA:
        from lamina.kernels.cpu.layer import multiply

        found["lamina"] = lambda: multiply(x, w, True, out)
    return found


def _best_seconds(step: Step) -> float:
    """Return the shortest time of a call."""
    step()
    return min(seconds_of(step, 1) for _ in range(PEAK_CALLS))


# Streams, memory and first calls


def stream_times(rounds: int) -> dict[str, Any]:
    """Return microseconds of one frame, one case, one thread: our stream and torch.nn.LSTMCell, in turns."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for hidden in (128, 256, 512, 1024):
        steps = _frame_steps(hidden)
        times: dict[str, list[float]] = {name: [] for name in steps}
        with torch.no_grad():
            for _ in range(3 * rounds):
                for name, step in steps.items():
                    times[name].append(1e6 * seconds_of(step, 200 if hidden < 512 else 20))
        result[str(hidden)] = {name: statistics.median(values) for name, values in times.items()}
        result[str(hidden)]["difference"] = stream_difference(hidden)
    return result


def _frame_steps(hidden: int) -> dict[str, Step]:
    stream, x = lamina.stream(lamina.LSTM(hidden, hidden).eval()), torch.randn(1, hidden)
    cell, state = nn.LSTMCell(hidden, hidden), (torch.zeros(1, hidden), torch.zeros(1, hidden))
    return {"stream": lambda: stream(x), "cell": lambda: cell(x, state)}


@torch.no_grad()
def stream_difference(hidden: int, frames: int = 300) -> float:
    """Return the largest difference between a stream's outputs and the same layer's on the whole sequence."""
    layer, x = lamina.LSTM(hidden, hidden).eval(), torch.randn(frames, 1, hidden)
    step = lamina.stream(layer)
    return float((torch.stack([step(frame) for frame in x]) - layer(x)[0]).abs().max())


def cell_times(rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of a training step of a loop over a cell, one thread, by cell and units, then contender."""
    torch.set_num_threads(1)
    cases = [(cell, units) for cell in ("LSTM", "GRU") for units in CELL_UNITS]
    return {f"{cell} {units}": _medians(timed(_cell_steps(cell, units), rounds)) for cell, units in cases}


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def _cell_steps(cell: str, units: int) -> dict[str, Step]:
    """Return the training steps of torch's cell, of ours with layer norm, and of ours through ``lamina.loop``."""
    theirs, ours = getattr(nn, f"{cell}Cell")(units, units), getattr(lamina, f"{cell}Cell")(units, units)
    x, upstream = torch.randn(CELL_STEPS, CELL_BATCH, units, requires_grad=True), torch.randn(CELL_BATCH, units)

    def trained(cell: nn.Module, step: Callable[[], Callable[..., Any]]) -> Step:
        def train() -> Any:
            state, call = None, step()
            for frame in x:
                state = call(frame, state)
            return torch.autograd.grad(
                state[0] if isinstance(state, tuple) else state, [x, *cell.parameters()], upstream
            )

        return train

    return {
        TORCH: trained(theirs, lambda: theirs),
        OURS: trained(ours, lambda: ours),
        LOOP: trained(ours, lambda: lamina.loop(ours)),
    }


def peak_memory(cell: str, shape: Shape, name: str) -> float:
    """Return the megabytes that a training step needs at most, over what the process had before. Linux only."""
    batch, steps, inputs, hidden = shape
    torch.set_num_threads(1)
    layer = layer_of(cell, name, inputs, hidden)

    def train(steps: int) -> None:
        x = torch.randn(steps, batch, inputs, requires_grad=True)
        torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], torch.randn(steps, batch, hidden))

    for _ in range(2):
        train(2)  # libraries are loaded, kernels compiled
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    train(steps)
    return (_memory("VmHWM") - before) / 1024


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def first_call() -> float:
    """Return the seconds of an LSTM's first training step, once torch and lamina are imported."""
    layer, x = lamina.LSTM(32, 64), torch.randn(60, 8, 32)
    begin = time.perf_counter()
    layer(x)[0].sum().backward()
    return time.perf_counter() - begin
