"""A recurrence whose weights do not fit on chip: a product and one kernel a step.

The product W~ h' is torch's, or ``product``'s where that is faster; the kernel beside it (``step_kernels``) does the
rest of the step. What a step hands to the next lies in memory that stays where it is: the operand of the next product
and its result, and backward the gradients that pass the product by. A table in memory tells the kernel where the
tensors of the call lie and which step it is. So a step is the same two launches whatever its number and its call, and
``replay`` can make CUDA graphs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
import triton
from torch import Tensor

from . import interpreted, product, replay
from .forms import Extras, Form, kept_dtype, power
from .launch import operands
from .plans import OVERRIDE, processors
from .precision import Matrix, as_cudnn_multiplies, matrix_gradient, multiply, reach
from .start import start
from .step_kernels import (  # fmt: skip
    CLOCKS,
    backward_kernel,
    begin_kernel,
    column_sums_kernel,
    end_kernel,
    forward_kernel,
    table_kernel,
)

Tensors = dict[str, Any]  # by name; None for what a recurrence does not have
Beside = Callable[[Tensors], None]

SHORT = 256  # units of a row that is not worth two parts
PLACES = [f"p{k}" for k in range(24)]  # of the table


class Stepper:
    """Starts one kernel once a step.

    Its arguments are always the same, so Triton is asked only once which compiled kernel serves them: every other
    launch costs a call of the driver and little else.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], warps: int, arguments: dict[str, Any]) -> None:
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.options: dict[str, Any] = {} if interpreted() else {"num_warps": warps, "num_stages": 1}
        self.start: Callable[..., None] | None = None
        self.fixed: list[Any] = []

    def __call__(self) -> None:
        if self.start is not None:
            self.start(*self.fixed)
            return
        compiled = self.kernel[self.grid](**self.arguments, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            values = [self.arguments[name] for name in self.kernel.arg_names]
            # An address is taken as it is; of a tensor the launcher would ask the driver where it lies.
            self.fixed = [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
            self.start = compiled[self.grid]


def row_parts(hidden: int) -> tuple[int, int]:
    """Units of a row's main part and of its rest; no rest where one vector is as short, or the row is.

    The rest is at least a quarter of the main part, of which a thread has 4 units, so that it has one of the rest:
    fewer would be no fewer instructions, and sums over both parts would be more.
    """
    main = 1 << (hidden.bit_length() - 1)
    rest = max(power(hidden - main), main // 4)
    if main in (hidden, rest) or hidden < OVERRIDE.get("parts", SHORT):
        return power(hidden), 0
    return main, rest


def _warps(block: int) -> int:
    """4 elements of each vector a thread; 8 in long rows: fewer instructions in all, few registers spilled."""
    return int(OVERRIDE.get("step_warps") or max(1, min(16, block // 128)))


def _constants(form: Form, hidden: int, tensors: Tensors) -> dict[str, Any]:
    main, rest = row_parts(hidden)
    return {
        **form.constants(),
        "RATE_H": _is_rate(tensors["keep_h"]),
        "RATE_C": _is_rate(tensors["keep_c"]),
        "H": hidden,
        "BLOCK": main,
        "REST": rest,
    }


def _is_rate(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 0


def _masks(extras: Extras, like: Tensor, batch: int) -> Tensors:
    """Kernel arguments, in the kernels' order; a mask that is one number expanded, as that number."""

    def plain(mask: Tensor | None) -> Tensor | None:
        if mask is not None and not any(mask.stride()) and mask.numel():
            return mask[0, 0, 0]
        return None if mask is None else mask.contiguous()

    def whole(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.contiguous()

    states = dict(zip(("reset_h", "reset_c"), extras.reset_states(like, batch)))
    return {
        "lengths": whole(extras.lengths), "resets": whole(extras.resets), "keep_h": plain(extras.keep_h),
        "keep_c": plain(extras.keep_c), "drop": whole(extras.drop),
        **{name: None if state is None else state.float().contiguous() for name, state in states.items()},
    }  # fmt: skip


def _some(tensor: Tensor) -> Tensor | None:
    """For the kernels, which know None and no empty tensors."""
    return tensor if tensor.numel() else None


# A pass over the steps.


@dataclass(frozen=True)
class Way:
    """What differs between forward and backward."""

    backward: bool
    kernel: Any
    scratch: Callable[[Form, Tensor, int, Tensors], Tensors]  # for a matrix and a batch
    factor: str  # in scratch memory: what the matrix is multiplied by
    result: str  # and the product
    history: str  # where the kernels leave the factors of all steps
    changed: tuple[str, ...]  # what makes the factor another than that


def _needs_old_h(form: Form, tensors: Tensors) -> bool:
    """Whether h reaches the next h otherwise than through the product."""
    return form.cell in ("GRU", "DREAMER") or tensors["keep_h"] is not None or tensors["lengths"] is not None


def _forward_scratch(form: Form, weight: Tensor, batch: int, tensors: Tensors) -> Tensors:
    """What a step finds and leaves besides the histories."""
    hidden, carries = weight.shape[1], _needs_old_h(form, tensors)
    return {
        "y": _result(weight, batch, False, tensors),
        "operand": weight.new_empty((batch, hidden)),
        "carried": weight.new_empty((2, batch, hidden), dtype=torch.float32) if carries else None,
    }


def _result(weight: Tensor, batch: int, backward: bool, tensors: Tensors) -> Tensor:
    """Where a product goes: in the model's dtype, but in float32 of scaled float16 and of our own kernel."""
    if product.serves(weight, batch):
        return product.result(weight, batch, backward)
    dtype = weight.dtype if tensors["most"] is None else torch.float32
    count, width = product.shares(weight, batch) if backward else 1, weight.shape[1 if backward else 0]
    return weight.new_empty((batch, width) if count == 1 else (count, batch, width), dtype=dtype)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left right, in as many shares along the contraction as ``out`` has places for."""
    if out.dim() == 3:
        left = left.view(left.shape[0], out.shape[0], -1).transpose(0, 1)
        right = right.view(out.shape[0], -1, right.shape[1])
    multiply(left, right, out)


def _backward_scratch(form: Form, weight: Tensor, batch: int, tensors: Tensors) -> Tensors:
    width, hidden = weight.shape
    in_float32 = partial(weight.new_empty, dtype=torch.float32)
    return {
        "d_now": weight.new_empty((batch, width)),
        "d_h": _result(weight, batch, True, tensors),
        "scale": None if tensors["most"] is None else in_float32(batch),
        "direct": in_float32((batch, hidden)) if _needs_old_h(form, tensors) else None,
        "d_c": in_float32((batch, hidden)) if form.cell == "LSTM" else None,
        "d_reset": in_float32((2, batch, hidden)) if tensors["resets"] is not None else None,
    }


FORWARD = Way(False, forward_kernel, _forward_scratch, "operand", "y", "hist", ("most", "drop", "resets"))
BACKWARD = Way(True, backward_kernel, _backward_scratch, "d_now", "d_h", "d_raw", ("most",))


class Pass:
    """The steps of one direction: a product and a kernel each, always between the same scratch tensors.

    Calls differ in their tensors, of which only the dtypes matter here, and in the number of steps: ``prepare``.
    A pass for one call only (``history`` is that call's) has no copy of its products' factors: they are read where the
    kernels leave them for all steps.
    """

    def __init__(
        self, way: Way, form: Form, weight: Tensor, batch: int, tensors: Tensors, history: Tensor | None = None
    ) -> None:
        self.way, self.batch, hidden = way, batch, weight.shape[1]
        self.scratch = way.scratch(form, weight, batch, tensors)
        self.history = history
        if history is not None:
            self.scratch[way.factor] = None
        self.table = torch.empty(CLOCKS.value + batch, dtype=torch.int64, device=weight.device)
        stand_ins = {name: None if t is None else self.table[:1].view(t.dtype) for name, t in tensors.items()}
        arguments = {
            "B": batch, "eps": float(form.eps), "table": self.table, **stand_ins, **self.scratch,
            **_constants(form, hidden, tensors),
        }  # fmt: skip
        left, out = self.scratch[way.factor], self.scratch[way.result]
        arguments["SHARES"] = out.shape[0] if out.dim() == 3 else 1
        self.kernel = Stepper(way.kernel, (batch, 1, 1), _warps(row_parts(hidden)[0]), arguments)
        self.multiply: Callable[[Any], Any] = partial(_multiply, right=weight if way.backward else weight.t(), out=out)
        if product.serves(weight, batch):
            clock = self.table[CLOCKS.value :]
            own = Stepper(*product.launch(left, weight, way.backward, out, clock))
            self.multiply = lambda _: own()

    def prepare(self, tensors: Tensors, steps: int) -> None:
        """The table of a call."""
        arguments = {
            "table": self.table, "B": self.batch, "T": steps, "begin": steps - 1 if self.way.backward else 0,
            "BLOCK": 128, **dict(zip_longest(PLACES, tensors.values())),
        }  # fmt: skip
        start(table_kernel, (1,), arguments, {"num_warps": 4})

    def step(self, number: int = 0) -> None:
        """Whichever is next; only where factors are read from the history it must be said which."""
        left = self.scratch[self.way.factor] if self.history is None else self.history[number]
        if self.way.backward:
            self.kernel()
            self.multiply(left)
        else:
            self.multiply(left)
            self.kernel()

    def run(self, steps: int) -> None:
        for number in reversed(range(steps)) if self.way.backward else range(steps):
            self.step(number)


class Replayed(Pass):
    """A pass that outlives its call, with a weight of its own, so that CUDA graphs find all they need in its place."""

    def __init__(self, way: Way, form: Form, weight: Tensor, batch: int, tensors: Tensors) -> None:
        self.weight = replay.copy_for(weight)
        super().__init__(way, form, self.weight.tensor, batch, tensors)
        self.loop = replay.Loop(weight.device)

    def run(self, steps: int) -> None:
        self.loop.run(self.step, steps)


def _walk(way: Way, form: Form, weight: Tensor, steps: int, tensors: Tensors, beside: Beside) -> None:
    """All steps of a pass; ``beside`` fills its scratch memory before forward, and reads it after backward."""
    tensors, batch = _aligned(tensors), tensors["x"].shape[1]
    with torch.cuda.device_of(weight), as_cudnn_multiplies(weight.dtype):  # type: ignore[no-untyped-call]
        if not replay.serves(weight):
            _run(Pass(way, form, weight, batch, tensors, _history(way, weight, batch, tensors)), steps, tensors, beside)
            return
        with replay.LOCK:
            key = _key(way, form, weight, batch, tensors)
            held = replay.entry(key, lambda: Replayed(way, form, weight, batch, tensors))
            held.weight.hold(weight, again=way.backward)
            _run(held, steps, tensors, beside)


def _history(way: Way, weight: Tensor, batch: int, tensors: Tensors) -> Tensor | None:
    """The factors of all steps, where the products can read them as they lie."""
    if product.serves(weight, batch) or any(tensors[name] is not None for name in way.changed):
        return None
    return cast(Tensor, tensors[way.history])


def _run(line: Pass, steps: int, tensors: Tensors, beside: Beside) -> None:
    line.prepare(tensors, steps)
    if not line.way.backward:
        beside(line.scratch)
    line.run(steps)
    if line.way.backward:
        beside(line.scratch)


def _aligned(tensors: Tensors) -> Tensors:
    """At multiples of 16 bytes, as the kernels take for granted: torch's own allocations are, views need not be."""
    return {name: t.clone() if t is not None and t.data_ptr() % 16 else t for name, t in tensors.items()}


def _key(way: Way, form: Form, weight: Tensor, batch: int, tensors: Tensors) -> Hashable:
    """Everything a captured step depends on."""
    kinds = tuple(None if t is None else t.dtype for t in tensors.values())
    rates = _is_rate(tensors["keep_h"]), _is_rate(tensors["keep_c"])
    matrix = weight.shape, weight.dtype, replay.stream_of(weight), replay.multiplication(weight.dtype)
    cut, products = row_parts(weight.shape[1]), (product.serves(weight, batch), product.shares(weight, batch))
    return way.backward, form, batch, kinds, rates, matrix, cut, _warps(cut[0]), products


def shapes(form: Form, x: Tensor, dtype: torch.dtype, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives in a model of that dtype."""
    (steps, batch, width), hidden = x.shape, x.shape[2] // form.gates
    lstm, normed = form.cell == "LSTM", form.site or form.cell_norm
    found: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((steps + 1, batch, hidden), dtype),
        ((batch, hidden), dtype),
        ((batch, hidden) if lstm else (0,), dtype),
        ((steps + 1 if lstm else 0, batch, hidden), torch.float32),
        ((steps, batch, width + (hidden if form.cell_norm else 0)), kept_dtype(dtype, hidden)),
        ((steps if normed else 0, batch, form.gates + 1), torch.float32),
    ]
    return found if keep else found[:4]


@torch.no_grad()
def forward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    h: Tensor | None,
    c: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    keep: bool,
) -> tuple[Tensor, ...]:
    """hist [T+1, B, H], the final h and c, c_hist, and with ``keep`` the normalised products and the statistics."""
    made = tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes(form, x, matrix.dtype, keep))
    weight, scales = matrix.values, {"most": matrix.most, "reach": reach(matrix, (h, extras.reset_h), extras.drop)}
    hist, h_n, c_n, c_hist, xhat, stats = (*map(_some, made), None, None)[:6]
    tensors = {
        "x": x, "hist": hist, "c_hist": c_hist, "h_n": h_n, "c_n": c_n, "xhat": xhat, "stats": stats, "gain": gain,
        "bias": bias, "gain_cell": gain_cell, "bias_cell": bias_cell,
        **_masks(extras, weight, x.shape[1]), **scales,
    }  # fmt: skip
    around = {
        "h": h, "c": c, "hist": hist, "c_hist": c_hist, "H": weight.shape[1], "BLOCK": power(weight.shape[1]), **scales,
        **{name: tensors[name] for name in ("drop", "resets", "reset_h")},
    }  # fmt: skip

    def begin(scratch: Tensors) -> None:
        places = {"carried": scratch["carried"], "operand": scratch["operand"]}
        start(begin_kernel, (x.shape[1],), {**around, **places}, {"num_warps": 4})

    _walk(FORWARD, form, weight, x.shape[0], tensors, begin)
    return made


@torch.no_grad()
def backward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_out: Tensor | None,
    d_h: Tensor | None,
    d_c: Tensor | None,
    train_matrix: bool = True,
    overwrite: bool = False,
    place: Tensor | None = None,
) -> dict[str, Any]:
    """Gradients by name: x, weight (if it is trained), the states, gain, bias (if there is one), gain_cell, bias_cell.

    ``weight`` is to be called, when W_h itself, which is as large, need not stay any longer. ``overwrite``: x's own
    memory may become its gradient's. ``place``: where the gradients of W~ h' may go.
    """
    hist, c_hist, xhat, stats = kept
    weight = matrix.values
    sides, states = _gradient_sides(form, x, matrix.dtype, overwrite, place), _gradient_states(form, hist, extras)
    tensors = {
        "x": x, "hist": hist, "c_hist": _some(c_hist), "xhat": xhat, "stats": _some(stats), "gain": gain, "bias": bias,
        "gain_cell": gain_cell, "bias_cell": bias_cell, "d_out": d_out, "d_h_n": d_h,
        "d_c_n": d_c if form.cell == "LSTM" else None, **sides,
        **_masks(extras, weight, x.shape[1]), "most": matrix.most,
    }  # fmt: skip
    around = {
        "drop": tensors["drop"], "resets": tensors["resets"], "h_start": states["h"], "c_start": states.get("c"),
        "new_h": states.get("reset_h"), "new_c": states.get("reset_c"), "B": x.shape[1],
        "H": weight.shape[1], "BLOCK": power(weight.shape[1]),
    }  # fmt: skip

    def end(scratch: Tensors) -> None:
        places = {name: scratch[name] for name in ("d_h", "scale", "direct", "d_c", "d_reset")}
        pieces = scratch["d_h"].shape[0] if scratch["d_h"].dim() == 3 else 1
        start(end_kernel, (x.shape[1],), {**around, **places, "SHARES": pieces}, {"num_warps": 4})

    _walk(BACKWARD, form, weight, x.shape[0], tensors, end)
    d_raw = sides["d_raw"]
    found: dict[str, Any] = {"x": d_raw if sides["d_x"] is None else sides["d_x"], **states}
    if train_matrix:
        found["weight"] = lambda: matrix_gradient(d_raw, operands(hist, extras))
    return found | _parameters(form, sides, xhat, (gain, bias, gain_cell, bias_cell))


def _gradient_sides(form: Form, x: Tensor, dtype: torch.dtype, overwrite: bool, place: Tensor | None) -> Tensors:
    """What the backward kernel writes for all steps; None where another tensor holds it.

    A step's kernel fetches its row of x before it writes that row's gradients, which it makes of it.
    """
    d_x = x if overwrite and x.dtype == dtype else None
    apart = form.site == "hh" or form.cell == "GRU"  # else x and W~ h' are only ever seen as their sum
    own_d_y = form.site == "sum" or (form.site == "hh" and form.cell == "GRU")
    return {
        "d_raw": torch.empty_like(x, dtype=dtype) if place is None or place.dtype != dtype else place,
        "d_x": (torch.empty_like(x, dtype=dtype) if d_x is None else d_x) if apart else None,
        "d_y": torch.empty_like(x, dtype=dtype) if own_d_y else None,
        "d_cell": x.new_empty((*x.shape[:2], x.shape[2] // form.gates), dtype=dtype) if form.cell_norm else None,
    }


def _gradient_states(form: Form, hist: Tensor, extras: Extras) -> dict[str, Tensor]:
    """Memory for the gradients of the initial state and of that after a reset."""
    names = ("h", "c") if form.cell == "LSTM" else ("h",)
    names = names if extras.resets is None else (*names, *(f"reset_{name}" for name in names))
    return {name: hist.new_empty(hist.shape[1:], dtype=torch.float32) for name in names}


def _parameters(form: Form, sides: Tensors, xhat: Tensor, given: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients of gains and biases, by a pass over all steps; in the parameters' dtype, if they share one."""
    bias = given[1]
    d = sides["d_x"] if sides["d_y"] is None else sides["d_y"]
    if not form.site:
        d = None if bias is None else sides["d_raw"]
    if d is None and not form.cell_norm:
        return {}
    normed = bool(form.site or form.cell_norm)
    totals = column_sums(d, sides["d_cell"], xhat if normed else None, form.gates)
    kinds = {t.dtype for t in given if t is not None}
    gates, parts = sides["d_raw"].shape[-1], totals.shape[-1]
    totals = (totals.to(kinds.pop()) if len(kinds) == 1 else totals).view(-1)
    found = torch.split(totals, [gates, parts - gates] * 2)
    names = [("bias", d is not None), ("bias_cell", form.cell_norm), ("gain", form.site), ("gain_cell", form.cell_norm)]
    return {name: part for (name, there), part in zip(names, found) if there}


def column_sums(d: Tensor | None, d_cell: Tensor | None, xhat: Tensor | None, gates: int) -> Tensor:
    """Sums over steps and rows of d and of d * x^, [2, columns of the gates and of the cell].

    The gates' mean nothing without ``d``, the second sums nothing without ``xhat``.
    """
    like = d if d is not None else d_cell
    if like is None:
        raise TypeError("column_sums needs the gradients of the gates or of the cell's norm, got neither.")
    hidden, rows, columns = like.shape[-1] // (gates if d is not None else 1), 32, 128
    first, parts, count = gates if d is None else 0, gates + (d_cell is not None), like.numel() // like.shape[-1]
    across = (parts - first) * triton.cdiv(hidden, columns)
    most = max(1, 4 * processors(like.device) // across)
    per = triton.cdiv(triton.cdiv(max(count, 1), most), rows) * rows
    programs = triton.cdiv(max(count, 1), per)
    sums = torch.empty((programs, 2, parts * hidden), dtype=torch.float32, device=like.device)
    arguments = {
        "d": d, "d_cell": d_cell, "xhat": xhat, "sums": sums, "N": count, "H": hidden, "per": per, "G": gates,
        "FIRST": first, "PARTS": parts, "ROWS": rows, "COLUMNS": columns,
    }  # fmt: skip
    start(column_sums_kernel, (across, programs), arguments, {"num_warps": 4})
    return sums[0] if programs == 1 else sums.sum(0)
