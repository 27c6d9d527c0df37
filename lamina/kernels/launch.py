"""The persistent path: buffers, launches, and the products around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import interpreted
from .forms import Extras, Form, kept_dtype, power
from .plans import OVERRIDE, Plan, cut_for
from .precision import Matrix, as_cudnn_multiplies, matrix_gradient, multiply, precision, reach
from .start import start

Given = Tensor | None
Small = tuple[Given, Given, Given, Given]  # gain, bias, gain_cell, bias_cell


@cache
def _constants(
    form: Form, cut: Plan, hidden: int, multiplied: str, half: bool, spin: bool, stacked: bool
) -> dict[str, Any]:
    return {
        **form.constants(),
        "eps": form.eps,
        "H": hidden,
        "P": cut.members,
        "GP": form.padded_gates,
        "BU": cut.units,
        "BM": cut.rows,
        "K": cut.chunk,
        "NK": -(-cut.members * cut.units // cut.chunk),
        "P2": power(cut.members),
        "SOLO": cut.members == 1,
        "PRECISION": multiplied,
        "HALF": half,
        "SPIN": spin,
        "WARPS": cut.warps,
        "STACKED": stacked,
    }


@cache
def _options(cut: Plan) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": cut.warps, "num_stages": 1}
    if cut.members > 1:
        # The driver refuses a launch whose programs cannot all be on the device at once: no hang.
        options["launch_cooperative_grid"] = True
    if cut.residents > 2:  # two programs of 4 warps have all the registers that a thread can name
        options["maxnreg"] = 65536 // (cut.residents * cut.warps * 32) // 8 * 8
    return options


@dataclass(frozen=True)
class Part:
    """Which sides of stacked tensors a launch walks, and from where on: ``sequence`` says what the numbers mean."""

    sides: int
    steps: int
    place: int = 0
    place_step: int = 1
    begin: int = 0
    lag: int = 0

    def arguments(self) -> dict[str, int]:
        return {
            "place": self.place, "place_step": self.place_step, "begin": self.begin, "lag": self.lag,
            "span": self.steps,
        }  # fmt: skip


ALL = Part(1, 0)  # of tensors that are not stacked; the kernels do not look at it


@dataclass(frozen=True)
class Walk:
    """A pass whose memory is there: its kernel can be launched, whole or part by part."""

    kernel: Any
    form: Form
    cut: Plan
    words: int  # of 64 bits, each group's for its exchange
    arguments: dict[str, Any]
    spaces: dict[int, Tensor] = field(default_factory=dict)  # for exchanges, by the first tile of a launch

    def go(self, part: Part = ALL) -> None:
        """One launch for as many tiles of rows as the device holds groups; groups do not wait for one another."""
        *stacked, steps, batch, width = self.arguments["x"].shape
        places, tiles = stacked[0] if stacked else 1, -(-batch // self.cut.rows)
        constants = self._choices(width // self.form.gates, bool(stacked))
        for first in range(0, tiles, self.cut.groups):
            groups = min(self.cut.groups, tiles - first)
            counts = {"T": steps, "B": batch, "groups": groups, "first": first, "sides": places}
            given = {**constants, **self.arguments, **part.arguments(), **counts}
            given["exchange"] = self._space(first, groups * places)
            start(self.kernel, (groups * part.sides * self.cut.members,), given, _options(self.cut))

    def _choices(self, hidden: int, stacked: bool) -> dict[str, Any]:
        weight = self.arguments["weight"]
        half = weight.dtype != self.arguments["hist"].dtype
        return _constants(self.form, self.cut, hidden, precision(weight.dtype), half, not interpreted(), stacked)

    def _space(self, first: int, groups: int) -> Tensor:
        """All 0 at first, which is no exchange's number; the parts of a pass go on in it."""
        if first not in self.spaces:
            device = self.arguments["x"].device
            self.spaces[first] = torch.zeros(groups * self.words, dtype=torch.int64, device=device)
        return self.spaces[first]


def _statistics(form: Form) -> int:
    """Numbers a row and step that backward needs of the norms."""
    return (form.sums if form.site else 0) + (2 if form.cell_norm else 0)


def shapes(form: Form, x: Tensor, kind: torch.dtype, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives in a model of dtype ``kind``."""
    *stacked, steps, batch, width = x.shape
    hidden, wide = width // form.gates, torch.float32
    lstm = form.cell == "LSTM"
    found: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((steps + 1, batch, hidden), kind),
        ((batch, hidden), wide if stacked else kind),
        ((batch, hidden) if lstm else (0,), kind),
        ((steps + 1 if lstm else 0, batch, hidden), wide),
        ((steps if keep else 0, batch, width), kept_dtype(kind, hidden)),
        ((steps if keep else 0, _statistics(form), batch), wide),
    ]
    return [((*stacked, *shape), dtype) for shape, dtype in found]


def forward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    h: Given,
    c: Given,
    gain: Given,
    bias: Given,
    gain_cell: Given,
    bias_cell: Given,
    extras: Extras,
    keep: bool,
) -> tuple[Tensor, ...]:
    """hist [T+1, B, H], the final h and c, c_hist, x^ and the norms' statistics; the last two only with ``keep``."""
    walk, found = forward_walk(form, x, matrix, h, c, (gain, bias, gain_cell, bias_cell), extras, keep)
    walk.go()
    return found


def forward_walk(
    form: Form, x: Tensor, matrix: Matrix, h: Given, c: Given, small: Small, extras: Extras, keep: bool,
    at_once: int = 1,
) -> tuple[Walk, tuple[Tensor, ...]]:  # fmt: skip
    """The pass, still to be walked, and what it will have found; stacked tensors are walked ``at_once`` at a time."""
    from . import sequence

    weight = matrix.values
    cut = cut_for(form, weight.shape[-1], x.shape[-2], weight, False, at_once)
    (shape, kind), *others = shapes(form, x, matrix.dtype, keep)
    hist = _awaited(shape, kind, x.device) if cut.members > 1 else x.new_empty(shape, dtype=kind)
    h_last, c_last, c_hist, xhat, stats = (x.new_empty(shape, dtype=dtype) for shape, dtype in others)
    c = c if form.cell == "LSTM" else None
    arguments = {
        "weight": weight, "hist": hist, "h_last": h_last, "c_last": c_last, "c_hist": c_hist, "xhat": xhat,
        "stats": stats, "c_first": x if c is None else c, "HAS_C": c is not None, "TRAIN": keep,
        "NARROW": cut.narrow, **_scales(matrix, h, extras),
        "h_first": x if h is None else h, "HAS_H": h is not None,
        **_shared(x, *small), **extras.arguments(weight, x.shape[-2]),
    }  # fmt: skip
    words = 2 * cut.members * cut.rows * (form.sums + 2)
    walk = Walk(sequence.forward_kernel, form, cut, words, arguments)
    return walk, (hist, h_last, c_last, c_hist, xhat, stats)


def _awaited(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Filled with exchange.NOT_YET: members see by it what has not come."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.full(shape, -1, dtype=bits, device=device).view(dtype)


def _scales(matrix: Matrix, h: Given, extras: Extras) -> dict[str, Any]:
    """What scaled float16 factors were or are to be scaled by."""
    bound = reach(matrix, (h, extras.reset_h), extras.drop)
    most = matrix.values if matrix.most is None else matrix.most
    return {"most": most, "reach": most if bound is None else bound, "HAS_REACH": bound is not None}


def backward(
    form: Form,
    x: Tensor,
    matrix: Matrix,
    gain: Given,
    bias: Given,
    gain_cell: Given,
    bias_cell: Given,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_out: Given,
    d_h: Given,
    d_c: Given,
    train_matrix: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Gradients by name: x, weight (if it is trained), h, c, reset_h, reset_c, gain, bias, gain_cell, bias_cell.

    ``weight`` is to be called, after the last use of that of x, whose memory it takes. ``overwrite``: x's own memory
    may become its gradient's.
    """
    hist, _, xhat, stats = kept
    small = gain, bias, gain_cell, bias_cell
    walk, found = backward_walk(form, x, matrix, small, extras, kept, d_out, d_h, d_c, overwrite)
    walk.go()
    del walk  # and what only the steps needed
    return gradients(form, matrix.dtype, small, extras, hist, xhat, stats, found, train_matrix)


class Found(NamedTuple):
    """What a walk backwards leaves: gradients to x, to the normalised product, to the states, and shares."""

    d_x: Tensor
    d_y: Tensor
    d_first: Tensor
    shares: Tensor  # of the gradients of gains and biases, by tiles of rows

    def at(self, side: int) -> Found:
        return Found(*(t[side] for t in self))


def backward_walk(
    form: Form, x: Tensor, matrix: Matrix, small: Small, extras: Extras, kept: tuple[Tensor, ...],
    d_out: Given, d_h: Given, d_c: Given, overwrite: bool, at_once: int = 1,
) -> tuple[Walk, Found]:  # fmt: skip
    """The way back, still to be walked, and where it will leave what it finds."""
    from . import sequence

    hist, c_hist, xhat, stats = kept
    weight, batch, hidden, stacked = matrix.values, x.shape[-2], matrix.values.shape[-1], x.shape[:-3]
    cut = cut_for(form, hidden, batch, weight, True, at_once)
    defer = bool(form.site) and (cut.members > 1 or "defer" in OVERRIDE)
    # A program reads its part of x at step t before it writes the gradients there, which it makes of it.
    d_x = x if overwrite and x.dtype == xhat.dtype else torch.empty_like(xhat)
    d_y = torch.empty_like(xhat) if form.cell == "GRU" else d_x
    states = (2 if form.cell == "LSTM" else 1) * (1 if extras.resets is None else 2)
    d_first = x.new_empty(*stacked, states, batch, hidden, dtype=torch.float32)
    # Filled, because a thread whose first work is cuBLAS's is warned that it has no CUDA context: autograd's threads.
    shares = x.new_zeros(*stacked, -(-batch // cut.rows), 2 * (form.gates + 1) * hidden, dtype=torch.float32)
    whole = weight.dtype == torch.float32 and precision(weight.dtype) != "tf32"  # a share is a word then
    size = cut.units * cut.rows // (1 if whole else 2)
    arguments = {
        "weight": weight, "hist": hist, "c_hist": c_hist,
        "xhat": xhat, "stats": stats, "q": _projections(form, xhat, weight) if defer else weight,
        "most": weight if matrix.most is None else matrix.most,
        **_incoming(x, d_out, d_h, d_c), "d_x": d_x, "d_y": d_y, "d_first": d_first, "shares": shares, "DEFER": defer,
        **_shared(x, *small), **extras.arguments(weight, batch),
        "PC": max(1, min(power(cut.members), 1024 * cut.warps // size)),
    }  # fmt: skip
    words = 2 * cut.members * (cut.rows * (form.sums + 2) + cut.members * size)
    return Walk(sequence.backward_kernel, form, cut, words, arguments), Found(d_x, d_y, d_first, shares)


def gradients(
    form: Form, dtype: torch.dtype, small: Small, extras: Extras, hist: Tensor, xhat: Tensor, stats: Tensor,
    found: Found, train_matrix: bool,
) -> dict[str, Any]:  # fmt: skip
    """Gradients by name, of one recurrence of a model of ``dtype``; ``small`` are its gains and biases."""
    gain, named = small[0], gradients_of_small(form, small, hist.shape[-1], found)
    d_x, d_y, *_ = found

    # In place: d_x, which may be the same, has been used by then, where W_h h' is normed W_x x is too.
    def through() -> Tensor:
        return through_norm(form, d_y, xhat, gain, stats, dtype) if form.site else d_y.to(dtype)

    if form.site == "sum":
        d_x = d_y = through()
    named["x"] = d_x
    if train_matrix:
        named["weight"] = lambda: matrix_gradient(d_y if form.site == "sum" else through(), operands(hist, extras))
    return named


def gradients_of_small(form: Form, small: Small, hidden: int, found: Found) -> dict[str, Any]:
    """Those of gains, biases, the first state and the state after a reset."""
    kinds = {t.dtype for t in small if t is not None}
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    named: dict[str, Any] = {**_added_up(form, hidden, found.shares, small[1] is not None, kind)}
    states = ("h", "c", "reset_h", "reset_c") if form.cell == "LSTM" else ("h", "reset_h")
    named.update(zip(states, found.d_first.unbind()))
    return named


def _shared(x: Tensor, gain: Given, bias: Given, gain_cell: Given, bias_cell: Given) -> dict[str, Any]:
    """What both kernels read; x stands for what there is not."""
    return {
        "x": x, "gain": x if gain is None else gain, "bias": x if bias is None else bias,
        "gain_cell": x if gain_cell is None else gain_cell, "bias_cell": x if bias_cell is None else bias_cell,
        "HAS_BIAS": bias is not None, "HAS_BIAS_CELL": bias_cell is not None,
    }  # fmt: skip


def _incoming(x: Tensor, d_out: Given, d_h: Given, d_c: Given) -> dict[str, Any]:
    """The gradients that arrive; x stands for what there is not."""
    return {
        "d_out": x if d_out is None else d_out, "d_h": x if d_h is None else d_h, "d_c": x if d_c is None else d_c,
        "HAS_D_OUT": d_out is not None, "HAS_D_H": d_h is not None, "HAS_D_C": d_c is not None,
    }  # fmt: skip


def _added_up(form: Form, hidden: int, shares: Tensor, bias: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradients of gains and biases from what each tile of rows adds to them, cast in one go."""
    gates = form.gates * hidden
    there = {"bias": bias, "gain": bool(form.site), "bias_cell": form.cell_norm, "gain_cell": form.cell_norm}
    if not any(there.values()):
        return {}
    total = (shares[0] if shares.shape[0] == 1 else shares.sum(0)).to(dtype)
    parts = zip(there, torch.split(total, [gates, gates, hidden, hidden]))
    return {name: part for name, part in parts if there[name]}


def _projections(form: Form, xhat: Tensor, weight: Tensor) -> Tensor:
    """Q = W~' x^ of each statistics group for all steps at once, [groups, T * B, H]; W~ as it is given, scaled or not.

    |x^| is at most the square root of its group's size: float16 holds it without a scale.
    """
    *stacked, _, hidden = weight.shape
    q = weight.new_empty(*stacked, form.statistics, xhat.shape[-3] * xhat.shape[-2], hidden, dtype=xhat.dtype)
    with as_cudnn_multiplies(weight.dtype):
        for side in zip(q, xhat, weight) if stacked else [(q, xhat, weight)]:
            _project(form, *side)
    return q


def _project(form: Form, q: Tensor, xhat: Tensor, weight: Tensor) -> None:
    hidden, rows = weight.shape[1], xhat.flatten(0, 1).to(weight.dtype)
    if form.split == 1:
        by_gate = rows.view(-1, form.gates, hidden).transpose(0, 1)
        multiply(by_gate, weight.view(-1, hidden, hidden), out=q)
        return
    sizes = [rows.shape[1]] if form.split == 0 else [2 * hidden, hidden]
    for out, part, matrix in zip(q, torch.split(rows, sizes, 1), torch.split(weight, sizes)):
        multiply(part, matrix, out=out)


def operands(hist: Tensor, extras: Extras) -> Tensor:
    """h' as the products saw it, [T, B, H]."""
    before = hist[:-1]
    if extras.resets is not None:
        reset_h = torch.zeros_like(hist[0]) if extras.reset_h is None else extras.reset_h.to(hist.dtype)
        before = torch.where(extras.resets.unsqueeze(-1), reset_h, before)
    return before if extras.drop is None else (before * extras.drop).to(before.dtype)


def through_norm(form: Form, d_y: Tensor, xhat: Tensor, gain: Given, stats: Tensor, dtype: torch.dtype) -> Tensor:
    """What the norm passes on to the product; in the memory of d_y, a program's part of which none but it reads."""
    from . import sequence

    steps, batch, width = d_y.shape
    out = d_y if d_y.dtype == dtype else torch.empty_like(d_y, dtype=dtype)
    block = power((form.gates, 1, 2)[form.split] * width // form.gates)
    arguments = {
        "d_y": d_y, "xhat": xhat, "gain": gain, "stats": stats, "out": out, "B": batch, "eps": form.eps,
        "H": width // form.gates, "G": form.gates, "NSTAT": _statistics(form), "SPLIT": form.split, "STD": form.std,
        "BLOCK": block,
    }  # fmt: skip
    options = {"num_warps": max(1, min(16, block // 512))}
    start(sequence.norm_backward_kernel, (steps * batch, form.statistics), arguments, options)
    return out
