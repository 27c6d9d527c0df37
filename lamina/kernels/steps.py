"""A recurrence whose weights do not fit on chip: a library product and one kernel a step.

The product W~ h' is torch.mm's; the kernel beside it does the rest of the step, one program for each row of the batch.
A row is whole in its program, so norms are exact and nobody waits for anybody: mean and variance forward, both
projections of the norm's gradient backward. What a step hands to the next lies in memory: the states, the operand of
the next product where it is not h itself, and backward the gradients that pass the product by.

Gates travel as tuples of four [BLOCK] vectors; of RNN only the first is real, of GRU the first three. An argument that
is None is a thing the recurrence does not have, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import interpreted
from .forms import CELLS, SITES, Extras, Form, power
from .formulas import (
    APART,
    GRU,
    LSTM,
    NOWHERE,
    ON_SUM,
    PAIR,
    RNN,
    TOGETHER,
    dreamer_gates,
    gru_backward,
    gru_forward,
    gru_gates,
    inverse_deviation,
    lstm_cell_backward,
    lstm_gates,
    lstm_output_backward,
    rnn_backward,
    rnn_forward,
    std_correction,
    tanh,
    wide,
)  # fmt: skip
from .launch import operands
from .plans import processors
from .precision import as_cudnn_multiplies
from .start import start

COUNTS = ["t", "T", "B"]  # a new step, length or batch size compiles nothing

# Rows of gates.


@triton.jit
def _load_gates(at, j, ok, H: tl.constexpr, G: tl.constexpr):
    a = tl.load(at + j, mask=ok, other=0.0).to(tl.float32)
    b, c, d = a, a, a
    if G > 1:
        b = tl.load(at + H + j, mask=ok, other=0.0).to(tl.float32)
        c = tl.load(at + 2 * H + j, mask=ok, other=0.0).to(tl.float32)
    if G > 3:
        d = tl.load(at + 3 * H + j, mask=ok, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def _store_gates(at, y, j, ok, H: tl.constexpr, G: tl.constexpr):
    dtype = at.dtype.element_ty
    tl.store(at + j, y[0].to(dtype), mask=ok)
    if G > 1:
        tl.store(at + H + j, y[1].to(dtype), mask=ok)
        tl.store(at + 2 * H + j, y[2].to(dtype), mask=ok)
    if G > 3:
        tl.store(at + 3 * H + j, y[3].to(dtype), mask=ok)


@triton.jit
def _add(y, x):
    return y[0] + x[0], y[1] + x[1], y[2] + x[2], y[3] + x[3]


@triton.jit
def _multiply(y, x):
    return y[0] * x[0], y[1] * x[1], y[2] * x[2], y[3] * x[3]


@triton.jit
def _affine(y, gain, bias, j, ok, H: tl.constexpr, G: tl.constexpr):
    if gain is not None:
        y = _multiply(y, _load_gates(gain, j, ok, H, G))
    if bias is not None:
        y = _add(y, _load_gates(bias, j, ok, H, G))
    return y


@triton.jit
def _two_sums(a, b):
    """Both in one reduction: the threads meet once."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def _total(y, G: tl.constexpr):
    total = y[0]
    if G > 1:
        total += y[1] + y[2]
    if G > 3:
        total += y[3]
    return total


@triton.jit
def _group_means(y, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr):
    """The mean of each gate's statistics group; lanes past the row hold 0."""
    if SPLIT == TOGETHER:
        mean = tl.sum(_total(y, G), 0) / (G * H)
        return mean, mean, mean, mean
    elif SPLIT == PAIR:
        pair, alone = _two_sums(y[0] + y[1], y[2])
        pair, alone = pair / (2 * H), alone / H
        return pair, pair, alone, alone
    else:
        a, b = _two_sums(y[0], y[1])
        c, d = _two_sums(y[2], y[3])
        return a / H, b / H, c / H, d / H


@triton.jit
def _projections(d, normed, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr):
    """The means of d and of d * x^ over each gate's group."""
    along = _multiply(d, normed)
    if SPLIT == TOGETHER:
        mean, slope = _two_sums(_total(d, G), _total(along, G))
        mean, slope = mean / (G * H), slope / (G * H)
        return (mean, mean, mean, mean), (slope, slope, slope, slope)
    else:
        return _group_means(d, H, G, SPLIT), _group_means(along, H, G, SPLIT)


@triton.jit
def _less(y, m, ok):
    """y - m on the row, 0 past it."""
    a, b = tl.where(ok, y[0] - m[0], 0.0), tl.where(ok, y[1] - m[1], 0.0)
    return a, b, tl.where(ok, y[2] - m[2], 0.0), tl.where(ok, y[3] - m[3], 0.0)


@triton.jit
def _normalise(y, ok, H: tl.constexpr, eps, G: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr):
    """Every group of gates with mean 0 and deviation 1, and each gate's mean and 1/deviation."""
    mean = _group_means(y, H, G, SPLIT)
    y = _less(y, mean, ok)
    var = _group_means(_multiply(y, y), H, G, SPLIT)
    a, b = inverse_deviation(var[0], eps, STD), inverse_deviation(var[1], eps, STD)
    rstd = (a, b, inverse_deviation(var[2], eps, STD), inverse_deviation(var[3], eps, STD))
    return _multiply(y, rstd), mean, rstd


@triton.jit
def _load_statistics(at, SPLIT: tl.constexpr):
    """One number for each gate, read once for each group."""
    a = tl.load(at)
    b, c, d = a, a, a
    if SPLIT == APART:
        b, c, d = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    if SPLIT == PAIR:
        c = tl.load(at + 2)
    return a, b, c, d


@triton.jit
def _normed_again(y, x, stats, j, ok, H: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, G: tl.constexpr):
    """x^ as forward had it, from the product (with the input side, if the norm stands on their sum)."""
    normed = _load_gates(y, j, ok, H, G)
    if SITE == ON_SUM:
        normed = _add(normed, _load_gates(x, j, ok, H, G))
    if SITE != NOWHERE:
        normed = _less(normed, _load_statistics(stats, SPLIT), ok)
        normed = _multiply(normed, _load_statistics(stats + G, SPLIT))
    return normed


@triton.jit
def _through_norm(d, normed, rstd, H: tl.constexpr, eps, G: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr):
    """rstd (d - mean(d) - x^ mean(d x^)) of each group of gates."""
    mean, slope = _projections(d, normed, H, G, SPLIT)
    a, b = std_correction(rstd[0], eps, STD), std_correction(rstd[1], eps, STD)
    slope = _multiply(slope, (a, b, std_correction(rstd[2], eps, STD), std_correction(rstd[3], eps, STD)))
    a, b = d[0] - mean[0] - normed[0] * slope[0], d[1] - mean[1] - normed[1] * slope[1]
    c = d[2] - mean[2] - normed[2] * slope[2]
    return _multiply((a, b, c, d[3] - mean[3] - normed[3] * slope[3]), rstd)


@triton.jit
def _kept(keep, t, b, j, ok, B, H: tl.constexpr, RATE: tl.constexpr):
    """Zoneout's weight of the old state: one number, or a mask [T, B, H]."""
    if RATE:
        return tl.load(keep).to(tl.float32)
    else:
        return tl.load(keep + (wide(t) * B + b) * H + j, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _seen(centred, gain_cell, bias_cell, j, ok):
    if gain_cell is not None:
        centred = centred * tl.load(gain_cell + j, mask=ok, other=0.0)
    if bias_cell is not None:
        centred = centred + tl.load(bias_cell + j, mask=ok, other=0.0)
    return centred


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    t, T, B, eps,
    x, y,  # [T, B, G*H]: the input side and W~ h'; without TRAIN y has one step
    hist, c_hist,  # [T+1, B, H], known up to step t; hist in the product's dtype, c_hist float32
    carried,  # [2, B, H] float32: the initial h, and the last one where its rounded form in hist would not do
    operand,  # [B, H]: h' of the next product, where it is not h
    stats,  # [T, B, 2*G+2]: mean of each gate's group, 1/deviation of each, and both of the cell's norm
    gain, bias, gain_cell, bias_cell,  # [G*H], [G*H], [H], [H]
    lengths, resets, keep_h, keep_c, drop,  # [B], [T, B], [T, B, H] or one number, twice, [B, H]
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr, TRAIN: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step t of one row: everything but the product."""
    b = wide(tl.program_id(0))
    j = tl.arange(0, BLOCK)
    ok = j < H
    at, plane = b * H + j, wide(B) * H
    step = wide(t) * B + b
    normed = _load_gates(y + (step if TRAIN else b) * (G * H), j, ok, H, G)
    inputs = _load_gates(x + step * (G * H), j, ok, H, G)
    source = wide(t)  # the entry of the histories that this step starts from
    if resets is not None:
        source = tl.where(tl.load(resets + step) != 0, 0, source)
    if CELL == LSTM:
        c_old = tl.load(c_hist + source * plane + at, mask=ok, other=0.0)
    if carried is not None:
        h_old = tl.load(carried + tl.where(source > 0, plane, 0) + at, mask=ok, other=0.0)

    if SITE == ON_SUM:
        normed = _add(normed, inputs)
    if SITE != NOWHERE:
        normed, mean, rstd = _normalise(normed, ok, H, eps, G, SPLIT, STD)
        if TRAIN:
            for gate in tl.static_range(G):
                tl.store(stats + step * (2 * G + 2) + gate, mean[gate])
                tl.store(stats + step * (2 * G + 2) + G + gate, rstd[gate])
    a = _affine(normed, gain, bias, j, ok, H, G)
    if (SITE != ON_SUM) & ((CELL == LSTM) | (CELL == RNN)):
        a = _add(a, inputs)

    if CELL == LSTM:
        i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3])
        c = f * c_old + i * g
        seen = c
        if CELL_NORM:
            cell_mean = tl.sum(c, 0) / H  # past the row c is 0
            apart = tl.where(ok, c - cell_mean, 0.0)
            cell_rstd = inverse_deviation(tl.sum(apart * apart, 0) / H, eps, STD)
            seen = _seen(apart * cell_rstd, gain_cell, bias_cell, j, ok)
            if TRAIN:
                tl.store(stats + step * (2 * G + 2) + 2 * G, cell_mean)
                tl.store(stats + step * (2 * G + 2) + 2 * G + 1, cell_rstd)
        h = o * tanh(seen)
        if CARRY:
            c = seen
    elif CELL == RNN:
        h = rnn_forward(a[0], RELU)
    else:
        if CELL == GRU:
            r, z, n = gru_gates(inputs[0], inputs[1], inputs[2], a[0], a[1], a[2])
        else:
            r, z, n = dreamer_gates(a[0], a[1], a[2])
        h = gru_forward(z, n, h_old)

    if keep_h is not None:
        keep = _kept(keep_h, t, b, j, ok, B, H, RATE_H)
        h = keep * h_old + (1.0 - keep) * h
    if keep_c is not None:
        keep = _kept(keep_c, t, b, j, ok, B, H, RATE_C)
        c = keep * c_old + (1.0 - keep) * c
    if lengths is not None:
        going = t < tl.load(lengths + b)
        h = tl.where(going, h, h_old)
        if CELL == LSTM:
            c = tl.where(going, c, c_old)
    after = (wide(t) + 1) * plane + at
    tl.store(hist + after, h.to(hist.dtype.element_ty), mask=ok)
    if CELL == LSTM:
        tl.store(c_hist + after, c, mask=ok)
    if carried is not None:
        tl.store(carried + plane + at, h, mask=ok)
    if operand is not None:
        if resets is not None:
            restarts = tl.load(resets + step + B, mask=t + 1 < T, other=0) != 0
            h = tl.where(restarts, tl.load(hist + at, mask=ok & restarts, other=0.0).to(tl.float32), h)
        if drop is not None:
            h *= tl.load(drop + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(operand + at, h.to(operand.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    t, T, B, eps,
    x, y, hist, c_hist, stats, gain, bias, gain_cell, bias_cell,  # as forward left them
    d_hist,  # [T+1, B, H]
    d_h,  # [B, H]: W~' d_raw of the step after
    direct,  # [B, H] float32: what reaches the old h past the product
    d_c,  # [B, H] float32
    first,  # [2, B, H] float32: what restarted rows sent to the initial h and c
    d_raw, d_x, d_y,  # [T, B, G*H]: to W~ h', to x, to the normalised product; None where another is the same
    cell_sides,  # [2, T, B, H]: the gradient behind the cell's norm and the normalised c
    lengths, resets, keep_h, keep_c, drop,
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step t of one row backwards, from the gradients of what it left to that of its product."""
    b = wide(tl.program_id(0))
    j = tl.arange(0, BLOCK)
    ok = j < H
    at, plane = b * H + j, wide(B) * H
    step = wide(t) * B + b
    y += step * (G * H)
    x += step * (G * H)
    stats += step * (2 * G + 2)

    # The cell, made anew from what forward kept.
    normed = _normed_again(y, x, stats, j, ok, H, SITE, SPLIT, G)
    a = _affine(normed, gain, bias, j, ok, H, G)
    if SITE != ON_SUM:
        inputs = _load_gates(x, j, ok, H, G)
        if CELL != GRU:
            a = _add(a, inputs)

    # What arrives from the step after and from the outputs.
    inner = t + 1 < T
    dh = tl.load(d_h + at, mask=ok & inner, other=0.0).to(tl.float32)
    if drop is not None:
        dh *= tl.load(drop + at, mask=ok, other=0.0).to(tl.float32)
    if direct is not None:
        dh += tl.load(direct + at, mask=ok & inner, other=0.0)
    if CELL == LSTM:
        dc = tl.load(d_c + at, mask=ok, other=0.0)
    source = wide(t)
    if resets is not None:
        source = tl.where(tl.load(resets + step) != 0, 0, source)
        restarted = tl.load(resets + step + B, mask=inner, other=0) != 0
        gone = ok & restarted
        tl.store(first + at, tl.load(first + at, mask=gone, other=0.0) + dh, mask=gone)
        dh = tl.where(restarted, 0.0, dh)
        if CELL == LSTM:
            tl.store(first + plane + at, tl.load(first + plane + at, mask=gone, other=0.0) + dc, mask=gone)
            dc = tl.where(restarted, 0.0, dc)
    dh += tl.load(d_hist + (wide(t) + 1) * plane + at, mask=ok, other=0.0).to(tl.float32)
    past, past_c = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if lengths is not None:
        going = t < tl.load(lengths + b)
        past = tl.where(going, 0.0, dh)
        dh = tl.where(going, dh, 0.0)
        if CELL == LSTM:
            past_c = tl.where(going, 0.0, dc)
            dc = tl.where(going, dc, 0.0)
    if keep_h is not None:
        keep = _kept(keep_h, t, b, j, ok, B, H, RATE_H)
        past += keep * dh
        dh = (1.0 - keep) * dh
    if keep_c is not None:
        keep = _kept(keep_c, t, b, j, ok, B, H, RATE_C)
        past_c += keep * dc
        dc = (1.0 - keep) * dc

    if CELL == LSTM:
        c_old = tl.load(c_hist + source * plane + at, mask=ok, other=0.0)
        i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3])
        seen = f * c_old + i * g
        if CELL_NORM:
            cell_rstd = tl.load(stats + 2 * G + 1)
            centred = tl.where(ok, (seen - tl.load(stats + 2 * G)) * cell_rstd, 0.0)
            seen = _seen(centred, gain_cell, bias_cell, j, ok)
        out = tanh(seen)
        d3, d_seen = lstm_output_backward(o, out, dh)
        if CELL_NORM:
            if CARRY:
                d_seen += dc
            side = cell_sides + step * H + j
            tl.store(side, d_seen.to(side.dtype.element_ty), mask=ok)
            tl.store(side + T * plane, centred.to(side.dtype.element_ty), mask=ok)
            d_seen = _seen(d_seen, gain_cell, None, j, ok)
            mean, along = _two_sums(d_seen, d_seen * centred)
            along = along / H * std_correction(cell_rstd, eps, STD)
            d_seen = tl.where(ok, (d_seen - mean / H - centred * along) * cell_rstd, 0.0)
            if not CARRY:
                d_seen += dc
        else:
            d_seen += dc
        d0, d1, d2, dc = lstm_cell_backward(i, f, g, c_old, d_seen)
        tl.store(d_c + at, dc + past_c, mask=ok)
        d = (d0, d1, d2, d3)
    elif CELL == RNN:
        d0 = rnn_backward(rnn_forward(a[0], RELU), dh, RELU)
        d = (d0, d0, d0, d0)
    else:
        h_old = tl.load(hist + source * plane + at, mask=ok, other=0.0).to(tl.float32)
        if CELL == GRU:
            r, z, n = gru_gates(inputs[0], inputs[1], inputs[2], a[0], a[1], a[2])
        else:
            r, z, n = dreamer_gates(a[0], a[1], a[2])
        d0, d1, d2, d3 = gru_backward(r, z, n, a[2], h_old, dh)
        past += d3
        if CELL != GRU:
            d1 = -d1  # z falls where dreamer's u rises
        d = (d0, d1, d2, d2)
    if direct is not None:
        tl.store(direct + at, past, mask=ok)
    if (SITE != ON_SUM) & (d_x is not None):
        _store_gates(d_x + step * (G * H), d, j, ok, H, G)
    if (CELL != LSTM) & (CELL != RNN):
        d = (d0, d1, d2 * r, d2)

    # The norm.
    if d_y is not None:
        _store_gates(d_y + step * (G * H), d, j, ok, H, G)
    if SITE != NOWHERE:
        if CELL == LSTM:  # four gates of it, kept so long, would not leave registers for the cell
            normed = _normed_again(y, x, stats, j, ok, H, SITE, SPLIT, G)
        d = _affine(d, gain, None, j, ok, H, G)
        d = _through_norm(d, normed, _load_statistics(stats + G, SPLIT), H, eps, G, SPLIT, STD)
    _store_gates(d_raw + step * (G * H), d, j, ok, H, G)
    if (SITE == ON_SUM) & (d_x is not None):
        _store_gates(d_x + step * (G * H), d, j, ok, H, G)


@triton.jit(do_not_specialize=["N", "per"])
def column_sums_kernel(
    d, y, x, stats, sums,  # [N, G*H] three times, [N, 2*G+2], [programs, 2, G*H]
    N, H, per,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over this program's ``per`` rows of d and of d * x^, to be added up; x^ is y itself, or y (+ x) normed."""
    blocks = tl.cdiv(H, COLUMNS)
    gate, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    units = block * COLUMNS + tl.arange(0, COLUMNS)
    columns = gate * H + units
    begin = wide(tl.program_id(1)) * per
    end = tl.minimum(begin + per, N)
    total, along = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for skip in tl.range(0, per, ROWS):
        rows = begin + skip + tl.arange(0, ROWS)
        ok = (rows < end)[:, None] & (units < H)[None, :]
        at = rows[:, None] * (G * H) + columns[None, :]
        part = tl.load(d + at, mask=ok, other=0.0).to(tl.float32)
        total += part
        if y is not None:
            normed = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
            if x is not None:
                normed += tl.load(x + at, mask=ok, other=0.0)
            if stats is not None:
                at_stats = stats + rows * (2 * G + 2) + gate
                mean = tl.load(at_stats, mask=rows < end, other=0.0)
                normed = (normed - mean[:, None]) * tl.load(at_stats + G, mask=rows < end, other=0.0)[:, None]
            along += part * normed
    out = sums + wide(tl.program_id(1)) * 2 * G * H + columns
    tl.store(out, tl.sum(total, 0), mask=units < H)
    if y is not None:
        tl.store(out + G * H, tl.sum(along, 0), mask=units < H)


class Stepper:
    """Starts one kernel once a step.

    Its arguments are alike but for t, so Triton is asked only once which compiled kernel serves them: every other
    launch costs a call of the driver and little else.
    """

    def __init__(self, kernel: Any, batch: int, warps: int, arguments: dict[str, Any]) -> None:
        self.kernel, self.grid = kernel, (batch, 1, 1)
        self.arguments = arguments
        self.options: dict[str, Any] = {} if interpreted() else {"num_warps": warps, "num_stages": 1}
        self.start: Callable[..., None] | None = None
        self.fixed: list[Any] = []

    def __call__(self, t: int) -> None:
        if self.start is not None:
            self.start(t, *self.fixed)
            return
        compiled = self.kernel[self.grid](t=t, **self.arguments, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            values = [self.arguments[name] for name in self.kernel.arg_names[1:]]
            # An address is taken as it is; of a tensor the launcher would ask the driver where it lies.
            self.fixed = [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
            self.start = compiled[self.grid]


def _warps(block: int) -> int:
    """4 elements of each vector a thread: one access each, and an LSTM's backward step fits into the registers."""
    return max(1, min(32, block // 128))


def _constants(form: Form, hidden: int, masks: dict[str, Any]) -> dict[str, Any]:
    return {
        "CELL": CELLS[form.cell],
        "SITE": SITES[form.site],
        "SPLIT": form.split,
        "CELL_NORM": form.cell_norm,
        "CARRY": form.carry,
        "RELU": form.relu,
        "STD": form.std,
        "RATE_H": _is_rate(masks["keep_h"]),
        "RATE_C": _is_rate(masks["keep_c"]),
        "H": hidden,
        "G": form.gates,
        "BLOCK": power(hidden),
    }


def _is_rate(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 0


def _masks(extras: Extras) -> dict[str, Tensor | None]:
    """Kernel arguments; a mask that is one number expanded, as that number."""

    def plain(mask: Tensor | None) -> Tensor | None:
        if mask is not None and not any(mask.stride()) and mask.numel():
            return mask[0, 0, 0]
        return None if mask is None else mask.contiguous()

    found = {"lengths": extras.lengths, "resets": extras.resets, "drop": extras.drop}
    found = {name: None if tensor is None else tensor.contiguous() for name, tensor in found.items()}
    return {**found, "keep_h": plain(extras.keep_h), "keep_c": plain(extras.keep_c)}


def _needs_old_h(form: Form, extras: Extras) -> bool:
    """Whether h reaches the next h otherwise than through the product."""
    return form.cell in ("GRU", "DREAMER") or extras.keep_h is not None or extras.lengths is not None


def _first_entry(shape: tuple[int, ...], value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of which only the first entry is written."""
    out = torch.empty(shape, dtype=dtype, device=value.device)
    out[0] = value
    return out


def _first_operand(h: Tensor, masks: dict[str, Tensor | None]) -> Tensor | None:
    """A buffer for h' where it is not h, holding that of step 0; a row that restarts there has its initial h anyway."""
    if masks["drop"] is not None:
        return (h * masks["drop"]).to(h.dtype)
    return None if masks["resets"] is None else h.clone()


def shapes(form: Form, x: Tensor, weight: Tensor, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives."""
    (steps, batch, width), hidden, wide = x.shape, weight.shape[1], torch.float32
    found: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((steps + 1, batch, hidden), weight.dtype),
        ((steps + 1 if form.cell == "LSTM" else 0, batch, hidden), wide),
        ((steps, batch, width), weight.dtype),
        ((steps, batch, 2 * form.gates + 2), wide),
    ]
    return found if keep else found[:2]


@torch.no_grad()
def forward(
    form: Form,
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    keep: bool,
) -> tuple[Tensor, ...]:
    """hist [T+1, B, H] and c_hist, and with ``keep`` the products W~ h' and the norms' statistics."""
    (steps, batch, width), hidden, masks = x.shape, weight.shape[1], _masks(extras)
    hist = _first_entry((steps + 1, batch, hidden), h, weight.dtype)
    c_hist = x.new_empty((0, batch, hidden))
    if c is not None:
        c_hist = _first_entry((steps + 1, batch, hidden), c, torch.float32)
    carried = _first_entry((2, batch, hidden), h, torch.float32) if _needs_old_h(form, extras) else None
    y = x.new_empty((steps if keep else 1, batch, width), dtype=weight.dtype)
    stats = x.new_empty((steps if keep else 0, batch, 2 * form.gates + 2))
    operand = _first_operand(hist[0], masks)
    arguments = {
        "T": steps, "B": batch, "eps": float(form.eps), "x": x, "y": y, "hist": hist, "c_hist": c_hist,
        "carried": carried, "operand": operand, "stats": stats, "gain": gain, "bias": bias, "gain_cell": gain_cell,
        "bias_cell": bias_cell, **masks, **_constants(form, hidden, masks), "TRAIN": keep,
    }  # fmt: skip
    _walk(Stepper(forward_kernel, batch, _warps(power(hidden)), arguments), hist, operand, weight, y)
    return (hist, c_hist, y, stats) if keep else (hist, c_hist)


def _walk(step: Stepper, hist: Tensor, operand: Tensor | None, weight: Tensor, y: Tensor) -> None:
    """All steps forward: a product and a kernel each."""
    steps, across = hist.shape[0] - 1, weight.t()
    befores = hist.unbind() if operand is None else (operand,) * steps
    products = y.unbind() if y.shape[0] == steps else (y[0],) * steps
    with as_cudnn_multiplies(weight.dtype):
        for t in range(steps):
            torch.mm(befores[t], across, out=products[t])
            step(t)


@torch.no_grad()
def backward(
    form: Form,
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_hist: Tensor,
    d_c: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by name: x, weight, h, c, gain, bias, gain_cell, bias_cell; no bias where there is none to sum for."""
    hist, c_hist, y, stats = kept
    (steps, batch, _), hidden, masks = x.shape, weight.shape[1], _masks(extras)
    buffers = _gradient_buffers(form, x, weight, extras, d_c)
    arguments = {
        "T": steps, "B": batch, "eps": float(form.eps), "x": x, "y": y, "hist": hist, "c_hist": c_hist,
        "stats": stats, "gain": gain, "bias": bias, "gain_cell": gain_cell, "bias_cell": bias_cell, "d_hist": d_hist,
        **buffers, **masks, **_constants(form, hidden, masks),
    }  # fmt: skip
    step = Stepper(backward_kernel, batch, _warps(power(hidden)), arguments)
    d_raw, d_h = buffers["d_raw"], buffers["d_h"]
    found = {"weight": torch.empty_like(weight)}
    with as_cudnn_multiplies(weight.dtype):
        rows = d_raw.unbind()
        for t in reversed(range(steps)):
            step(t)
            torch.mm(rows[t], weight, out=d_h)
        torch.mm(d_raw.flatten(0, 1).t(), operands(hist, extras).flatten(0, 1), out=found["weight"])
    found["x"] = d_raw if buffers["d_x"] is None else buffers["d_x"]
    return found | _initial_states(form, buffers, extras) | _parameters(form, buffers, x, y, stats, bias)


def _gradient_buffers(form: Form, x: Tensor, weight: Tensor, extras: Extras, d_c: Tensor | None) -> dict[str, Any]:
    """What the backward kernel writes; None where a recurrence has no such thing or another tensor holds it."""
    (steps, batch, _), hidden, dtype = x.shape, weight.shape[1], weight.dtype
    state = (batch, hidden)
    same_sides = form.site != "hh" and form.cell != "GRU"  # x and W~ h' are only ever seen as their sum
    own_d_y = form.site == "sum" or (form.site == "hh" and form.cell == "GRU")
    old_c = None if d_c is None else d_c.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if form.cell == "LSTM" and old_c is None:
        old_c = x.new_zeros(state)
    return {
        "d_h": torch.empty(state, dtype=dtype, device=x.device),
        "direct": x.new_empty(state) if _needs_old_h(form, extras) else None,
        "d_c": old_c,
        "first": None if extras.resets is None else x.new_zeros((2, *state)),
        "d_raw": torch.empty_like(x, dtype=dtype),
        "d_x": None if same_sides and dtype == x.dtype else torch.empty_like(x),
        "d_y": torch.empty_like(x, dtype=dtype) if own_d_y else None,
        "cell_sides": x.new_empty((2, steps, *state), dtype=dtype) if form.cell_norm else None,
    }


def _initial_states(form: Form, buffers: dict[str, Any], extras: Extras) -> dict[str, Tensor]:
    """Gradients of h and c: what left the first step and what restarted rows sent."""
    d_h = buffers["d_h"].float() if extras.drop is None else buffers["d_h"] * extras.drop.float()
    if buffers["direct"] is not None:
        d_h += buffers["direct"]
    found = {"h": d_h} | ({"c": buffers["d_c"]} if form.cell == "LSTM" else {})
    if buffers["first"] is not None:
        for gradient, more in zip(found.values(), buffers["first"]):
            gradient += more
    return found


def _parameters(
    form: Form, buffers: dict[str, Any], x: Tensor, y: Tensor, stats: Tensor, bias: Tensor | None
) -> dict[str, Tensor]:
    """Gradients of gains and biases, by a pass over all steps."""
    found = {}
    if form.site:
        d_y = buffers["d_x"] if buffers["d_y"] is None else buffers["d_y"]
        inputs = x if form.site == "sum" else None
        found["bias"], found["gain"] = column_sums(d_y, y, inputs, stats, form.gates)
    elif bias is not None:
        found["bias"] = column_sums(buffers["d_raw"])[0]
    if form.cell_norm:
        found["bias_cell"], found["gain_cell"] = column_sums(*buffers["cell_sides"])
    return found


def column_sums(
    d: Tensor, y: Tensor | None = None, x: Tensor | None = None, stats: Tensor | None = None, gates: int = 1
) -> Tensor:
    """Sums over steps and rows of d and of d * x^, [2, G*H]; only the first is meant without ``y``."""
    width, rows, columns = d.shape[-1], 32, 128
    count, across = d.numel() // width, gates * triton.cdiv(width // gates, columns)
    most = max(1, 4 * processors(d.device) // across)
    per = triton.cdiv(triton.cdiv(max(count, 1), most), rows) * rows
    programs = triton.cdiv(max(count, 1), per)
    sums = torch.empty((programs, 2, width), dtype=torch.float32, device=d.device)
    arguments = {
        "d": d, "y": y, "x": x, "stats": stats, "sums": sums, "N": count, "H": width // gates, "per": per, "G": gates,
        "ROWS": rows, "COLUMNS": columns,
    }  # fmt: skip
    start(column_sums_kernel, (across, programs), arguments, {"num_warps": 4})
    return sums.sum(0)
