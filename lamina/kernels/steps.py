"""A recurrence whose weights do not fit on chip: a library product and one kernel a step.

The product W~ h' is torch.mm's; the kernel beside it does the rest of the step, one program for each row of the batch.
A row is whole in its program, so norms are exact and nobody waits for anybody. What a step hands to the next lies in
memory that stays where it is: the operand of the next product and its result, and backward the gradients that pass
the product by. A table in memory tells the kernel where the tensors of the call lie and which step it is. So a step is
the same two launches whatever its number and its call, and ``replay`` can make CUDA graphs of them.

Gates travel as tuples of four [BLOCK] vectors; of RNN only the first is real, of GRU the first three. An argument that
is None is a thing the recurrence does not have, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import interpreted, replay
from .forms import Extras, Form, power
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
from .plans import OVERRIDE, processors
from .precision import as_cudnn_multiplies
from .start import start

Tensors = dict[str, Any]  # by name; None for what a recurrence does not have
Beside = Callable[[Tensors], None]

# The table of a pass: the number of steps, addresses of tensors, and from CLOCKS on each row's step.
PLACES = [f"p{k}" for k in range(24)]
CLOCKS = tl.constexpr(32)


@triton.jit(do_not_specialize=["B", "T", "begin"])
def table_kernel(
    table, B, T, begin,
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19, p20, p21, p22, p23,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the tensors of a call lie, how many steps it has, and at which of them all rows begin."""
    tl.store(table, wide(T))
    given = (p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17, p18, p19, p20, p21, p22,
             p23)  # fmt: skip
    for k in tl.static_range(24):
        if given[k] is not None:
            tl.store(table + 1 + k, given[k].to(tl.int64))
    for skip in tl.range(0, B, BLOCK):
        b = skip + tl.arange(0, BLOCK)
        tl.store(table + CLOCKS + b, tl.zeros((BLOCK,), tl.int64) + begin, mask=b < B)


@triton.jit
def _there(stand_in, table, place):
    """The tensor whose address is in the table, of the stand-in's type; all lie at multiples of 16 bytes."""
    address = tl.load(table + 1 + place)
    return tl.multiple_of(address.to(tl.pointer_type(stand_in.dtype.element_ty)), 16)


# Rows of gates.


@triton.jit
def _units(BLOCK: tl.constexpr):
    """Four in a row to a thread, whatever the dtype: 8 of 16 bits, as the compiler likes, it would have to shuffle."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 4), 4)


@triton.jit
def _load_gates(at, j, ok, H: tl.constexpr, G: tl.constexpr):
    """As they lie in memory: half as many registers in half precision."""
    a = tl.load(at + j, mask=ok, other=0.0)
    b, c, d = a, a, a
    if G > 1:
        b = tl.load(at + H + j, mask=ok, other=0.0)
        c = tl.load(at + 2 * H + j, mask=ok, other=0.0)
    if G > 3:
        d = tl.load(at + 3 * H + j, mask=ok, other=0.0)
    return a, b, c, d


@triton.jit
def _floats(y):
    return y[0].to(tl.float32), y[1].to(tl.float32), y[2].to(tl.float32), y[3].to(tl.float32)


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
def _normalise(y, H: tl.constexpr, eps, G: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr):
    """Every group of gates with deviation 1, and each gate's 1/deviation.

    Their mean is 0 already: W~ is centred over the group, and so is the input side of a sum that is normed.
    """
    var = _group_means(_multiply(y, y), H, G, SPLIT)
    a, b = inverse_deviation(var[0], eps, STD), inverse_deviation(var[1], eps, STD)
    rstd = (a, b, inverse_deviation(var[2], eps, STD), inverse_deviation(var[3], eps, STD))
    return _multiply(y, rstd), rstd


@triton.jit
def _store_statistics(at, y, G: tl.constexpr, SPLIT: tl.constexpr):
    """One number for each gate, written once for each group."""
    tl.store(at, y[0])
    if SPLIT == APART:
        for gate in tl.static_range(1, G):
            tl.store(at + gate, y[gate])
    if SPLIT == PAIR:
        tl.store(at + 2, y[2])


@triton.jit
def _load_statistics(at, G: tl.constexpr, SPLIT: tl.constexpr):
    a = tl.load(at)
    b, c, d = a, a, a
    if SPLIT == APART:
        b, c, d = tl.load(at + 1), tl.load(at + 2), tl.load(at + G - 1)
    if SPLIT == PAIR:
        c = tl.load(at + 2)
    return a, b, c, d


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
def _kept(keep, step, j, ok, H: tl.constexpr, RATE: tl.constexpr):
    """Zoneout's weight of the old state: one number, or a mask [T, B, H]."""
    if RATE:
        return tl.load(keep).to(tl.float32)
    else:
        return tl.load(keep + step * H + j, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _seen(centred, gain_cell, bias_cell, j, ok):
    if gain_cell is not None:
        centred = centred * tl.load(gain_cell + j, mask=ok, other=0.0)
    if bias_cell is not None:
        centred = centred + tl.load(bias_cell + j, mask=ok, other=0.0)
    return centred


@triton.jit
def begin_kernel(
    h, c, drop,  # [B, H] of any dtype; None is 0
    hist, c_hist, carried, operand,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The initial state of one row, wherever forward's steps look for it."""
    j = tl.arange(0, BLOCK)
    ok, row = j < H, wide(tl.program_id(0)) * H
    start_h, start_c = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if h is not None:
        start_h = tl.load(h + row + j, mask=ok, other=0.0).to(tl.float32)
    rounded = start_h.to(hist.dtype.element_ty)
    tl.store(hist + row + j, rounded, mask=ok)
    if c_hist is not None:
        if c is not None:
            start_c = tl.load(c + row + j, mask=ok, other=0.0).to(tl.float32)
        tl.store(c_hist + row + j, start_c, mask=ok)
    if carried is not None:
        tl.store(carried + row + j, start_h, mask=ok)
    if drop is not None:
        rounded = (rounded.to(tl.float32) * tl.load(drop + row + j, mask=ok, other=0.0)).to(hist.dtype.element_ty)
    tl.store(operand + row + j, rounded, mask=ok)


@triton.jit(do_not_specialize=["B"])
def forward_kernel(
    B, eps,
    table,  # where T, t and the tensors from x to drop are, in the order in which they stand here, as stand-ins
    x,  # [T, B, G*H]: the input side
    hist, c_hist,  # [T+1, B, H], known up to step t; hist in the product's dtype, c_hist float32
    h_n, c_n,  # [B, H]: the last of them
    xhat,  # [T, B, G*H or (G+1)*H]: for backward, W~ h', or its sum with x, normalised; then the normalised c
    stats,  # [T, B, G+1]: for backward, 1/deviation of each gate's group and of the cell's norm
    gain, bias, gain_cell, bias_cell,  # [G*H], [G*H], [H], [H]
    lengths, resets, keep_h, keep_c, drop,  # [B], [T, B], [T, B, H] or one number, twice, [B, H]
    y,  # [B, G*H]: W~ h'
    operand,  # [B, H]: h' of the next product
    carried,  # [2, B, H] float32: the initial h, and the last one where its rounded form in hist would not do
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step t of one row: everything but the product."""
    b = wide(tl.program_id(0))
    T, t = tl.load(table), tl.load(table + CLOCKS + b)
    x, hist, h_n = _there(x, table, 0), _there(hist, table, 1), _there(h_n, table, 3)
    c_hist = _there(c_hist, table, 2) if c_hist is not None else None
    c_n = _there(c_n, table, 4) if c_n is not None else None
    xhat = _there(xhat, table, 5) if xhat is not None else None
    stats = _there(stats, table, 6) if stats is not None else None
    gain = _there(gain, table, 7) if gain is not None else None
    bias = _there(bias, table, 8) if bias is not None else None
    gain_cell = _there(gain_cell, table, 9) if gain_cell is not None else None
    bias_cell = _there(bias_cell, table, 10) if bias_cell is not None else None
    lengths = _there(lengths, table, 11) if lengths is not None else None
    resets = _there(resets, table, 12) if resets is not None else None
    keep_h = _there(keep_h, table, 13) if keep_h is not None else None
    keep_c = _there(keep_c, table, 14) if keep_c is not None else None
    drop = _there(drop, table, 15) if drop is not None else None
    j = _units(BLOCK)
    ok = j < H
    row, plane = b * H, wide(B) * H
    step = wide(t) * B + b
    KEPT: tl.constexpr = (G + 1) * H if CELL_NORM else G * H

    # Everything is fetched before the first sum makes the threads wait for each other.
    raw = _load_gates(y + b * (G * H), j, ok, H, G)
    inputs = _load_gates(x + step * (G * H), j, ok, H, G)
    source = wide(t)  # the entry of the histories that this step starts from
    if resets is not None:
        source = tl.where(tl.load(resets + step) != 0, 0, source)
    if CELL == LSTM:
        c_old = tl.load(c_hist + source * plane + row + j, mask=ok, other=0.0)
    if carried is not None:
        h_old = tl.load(carried + tl.where(source > 0, plane, 0) + row + j, mask=ok, other=0.0)
    if gain is not None:
        gains = _load_gates(gain, j, ok, H, G)
    if bias is not None:
        biases = _load_gates(bias, j, ok, H, G)
    if keep_h is not None:
        keeps_h = _kept(keep_h, step, j, ok, H, RATE_H)
    if keep_c is not None:
        keeps_c = _kept(keep_c, step, j, ok, H, RATE_C)

    a = _floats(raw)
    if SITE == ON_SUM:
        a = _add(a, inputs)
    if SITE != NOWHERE:
        a, rstd = _normalise(a, H, eps, G, SPLIT, STD)
        if stats is not None:
            _store_statistics(stats + step * (G + 1), rstd, G, SPLIT)
    if xhat is not None:
        _store_gates(xhat + step * KEPT, a, j, ok, H, G)
    if gain is not None:
        a = _multiply(a, _floats(gains))
    if bias is not None:
        a = _add(a, _floats(biases))
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
            seen = apart * cell_rstd
            if xhat is not None:
                tl.store(xhat + step * KEPT + G * H + j, seen.to(xhat.dtype.element_ty), mask=ok)
                tl.store(stats + step * (G + 1) + G, cell_rstd)
            seen = _seen(seen, gain_cell, bias_cell, j, ok)
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
        h = keeps_h * h_old + (1.0 - keeps_h) * h
    if keep_c is not None:
        c = keeps_c * c_old + (1.0 - keeps_c) * c
    if lengths is not None:
        going = t < tl.load(lengths + b)
        h = tl.where(going, h, h_old)
        if CELL == LSTM:
            c = tl.where(going, c, c_old)
    after, last = (wide(t) + 1) * plane + row, ok & (t + 1 == T)
    rounded = h.to(hist.dtype.element_ty)
    tl.store(hist + after + j, rounded, mask=ok)
    tl.store(h_n + row + j, rounded, mask=last)
    if CELL == LSTM:
        tl.store(c_hist + after + j, c, mask=ok)
        tl.store(c_n + row + j, c.to(c_n.dtype.element_ty), mask=last)
    if carried is not None:
        tl.store(carried + plane + row + j, h, mask=ok)
    if resets is not None:
        restarts = tl.load(resets + step + B, mask=t + 1 < T, other=0) != 0
        h = tl.where(restarts, tl.load(hist + row + j, mask=ok & restarts, other=0.0).to(tl.float32), h)
    if drop is not None:
        h *= tl.load(drop + row + j, mask=ok, other=0.0).to(tl.float32)
    tl.store(operand + row + j, h.to(operand.dtype.element_ty), mask=ok)
    tl.debug_barrier()  # every thread has read the clock
    tl.store(table + CLOCKS + b, t + 1)


@triton.jit(do_not_specialize=["B"])
def backward_kernel(
    B, eps,
    table,  # where T, t and the tensors from x to drop are, in the order in which they stand here, as stand-ins
    x, hist, c_hist, xhat, stats, gain, bias, gain_cell, bias_cell,  # as forward left them
    d_out,  # [T, B, H]
    d_h_n, d_c_n,  # [B, H]
    d_raw, d_x, d_y,  # [T, B, G*H]: to W~ h', to x, to the normalised product; None where another is the same
    d_cell,  # [T, B, H]: to the cell's norm, gain and bias included
    lengths, resets, keep_h, keep_c, drop,
    d_now,  # [B, G*H]: this step's part of d_raw
    d_h,  # [B, H]: W~' d_raw of the step after
    direct,  # [B, H] float32: what reaches the old h past the product
    d_c,  # [B, H] float32
    first,  # [2, B, H] float32: what restarted rows sent to the initial h and c
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step t of one row backwards, from the gradients of what it left to that of its product."""
    b = wide(tl.program_id(0))
    T, t = tl.load(table), tl.load(table + CLOCKS + b)
    x, hist, xhat, d_raw = (
        _there(x, table, 0), _there(hist, table, 1), _there(xhat, table, 3), _there(d_raw, table, 12)
    )  # fmt: skip
    c_hist = _there(c_hist, table, 2) if c_hist is not None else None
    stats = _there(stats, table, 4) if stats is not None else None
    gain = _there(gain, table, 5) if gain is not None else None
    bias = _there(bias, table, 6) if bias is not None else None
    gain_cell = _there(gain_cell, table, 7) if gain_cell is not None else None
    bias_cell = _there(bias_cell, table, 8) if bias_cell is not None else None
    d_out = _there(d_out, table, 9) if d_out is not None else None
    d_h_n = _there(d_h_n, table, 10) if d_h_n is not None else None
    d_c_n = _there(d_c_n, table, 11) if d_c_n is not None else None
    d_x = _there(d_x, table, 13) if d_x is not None else None
    d_y = _there(d_y, table, 14) if d_y is not None else None
    d_cell = _there(d_cell, table, 15) if d_cell is not None else None
    lengths = _there(lengths, table, 16) if lengths is not None else None
    resets = _there(resets, table, 17) if resets is not None else None
    keep_h = _there(keep_h, table, 18) if keep_h is not None else None
    keep_c = _there(keep_c, table, 19) if keep_c is not None else None
    drop = _there(drop, table, 20) if drop is not None else None
    j = _units(BLOCK)
    ok = j < H
    row, plane = b * H, wide(B) * H
    step = wide(t) * B + b
    inner, last = t + 1 < T, ok & (t + 1 == T)
    KEPT: tl.constexpr = (G + 1) * H if CELL_NORM else G * H

    # Everything is fetched before the first sum makes the threads wait for each other.
    raw = _load_gates(xhat + step * KEPT, j, ok, H, G)
    if SITE != ON_SUM:
        inputs = _load_gates(x + step * (G * H), j, ok, H, G)
    source = wide(t)
    if resets is not None:
        source = tl.where(tl.load(resets + step) != 0, 0, source)
    if CELL == LSTM:
        c_old = tl.load(c_hist + source * plane + row + j, mask=ok, other=0.0)
    if (CELL != LSTM) & (CELL != RNN):
        h_old = tl.load(hist + source * plane + row + j, mask=ok, other=0.0).to(tl.float32)
    if SITE != NOWHERE:
        rstd = _load_statistics(stats + step * (G + 1), G, SPLIT)
    if CELL_NORM:
        centred = tl.load(xhat + step * KEPT + G * H + j, mask=ok, other=0.0).to(tl.float32)
        cell_rstd = tl.load(stats + step * (G + 1) + G)

    # What arrives from the step after and from the outputs.
    dh = tl.load(d_h + row + j, mask=ok & inner, other=0.0).to(tl.float32)
    if drop is not None:
        dh *= tl.load(drop + row + j, mask=ok, other=0.0).to(tl.float32)
    if direct is not None:
        dh += tl.load(direct + row + j, mask=ok & inner, other=0.0)
    if CELL == LSTM:
        dc = tl.load(d_c + row + j, mask=ok & inner, other=0.0)
    if resets is not None:
        restarted = tl.load(resets + step + B, mask=inner, other=0) != 0
        gone = ok & restarted
        sent = tl.load(first + row + j, mask=gone, other=0.0) + dh
        tl.store(first + row + j, tl.where(gone, sent, 0.0), mask=gone | last)
        dh = tl.where(restarted, 0.0, dh)
        if CELL == LSTM:
            sent = tl.load(first + plane + row + j, mask=gone, other=0.0) + dc
            tl.store(first + plane + row + j, tl.where(gone, sent, 0.0), mask=gone | last)
            dc = tl.where(restarted, 0.0, dc)
    if d_out is not None:
        dh += tl.load(d_out + step * H + j, mask=ok, other=0.0).to(tl.float32)
    if d_h_n is not None:
        dh += tl.load(d_h_n + row + j, mask=last, other=0.0).to(tl.float32)
    if d_c_n is not None:
        dc += tl.load(d_c_n + row + j, mask=last, other=0.0).to(tl.float32)
    past, past_c = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if lengths is not None:
        going = t < tl.load(lengths + b)
        past = tl.where(going, 0.0, dh)
        dh = tl.where(going, dh, 0.0)
        if CELL == LSTM:
            past_c = tl.where(going, 0.0, dc)
            dc = tl.where(going, dc, 0.0)
    if keep_h is not None:
        keep = _kept(keep_h, step, j, ok, H, RATE_H)
        past += keep * dh
        dh = (1.0 - keep) * dh
    if keep_c is not None:
        keep = _kept(keep_c, step, j, ok, H, RATE_C)
        past_c += keep * dc
        dc = (1.0 - keep) * dc

    # The cell, made anew from what forward kept.
    a = _floats(raw)
    if gain is not None:
        a = _multiply(a, _floats(_load_gates(gain, j, ok, H, G)))
    if bias is not None:
        a = _add(a, _floats(_load_gates(bias, j, ok, H, G)))
    if (SITE != ON_SUM) & (CELL != GRU):
        a = _add(a, inputs)
    if CELL == LSTM:
        i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3])
        out = tanh(_seen(centred, gain_cell, bias_cell, j, ok) if CELL_NORM else f * c_old + i * g)
        d3, d_seen = lstm_output_backward(o, out, dh)
        if CELL_NORM:
            if CARRY:
                d_seen += dc
            tl.store(d_cell + step * H + j, d_seen.to(d_cell.dtype.element_ty), mask=ok)
            d_seen = _seen(d_seen, gain_cell, None, j, ok)
            mean, along = _two_sums(d_seen, d_seen * centred)
            along = along / H * std_correction(cell_rstd, eps, STD)
            d_seen = tl.where(ok, (d_seen - mean / H - centred * along) * cell_rstd, 0.0)
            if not CARRY:
                d_seen += dc
        else:
            d_seen += dc
        d0, d1, d2, dc = lstm_cell_backward(i, f, g, c_old, d_seen)
        tl.store(d_c + row + j, dc + past_c, mask=ok)
        d = (d0, d1, d2, d3)
    elif CELL == RNN:
        d0 = rnn_backward(rnn_forward(a[0], RELU), dh, RELU)
        d = (d0, d0, d0, d0)
    else:
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
        tl.store(direct + row + j, past, mask=ok)
    if d_x is not None:
        _store_gates(d_x + step * (G * H), d, j, ok, H, G)
    if (CELL != LSTM) & (CELL != RNN):
        d = (d0, d1, d2 * r, d2)

    # The norm.
    if d_y is not None:
        _store_gates(d_y + step * (G * H), d, j, ok, H, G)
    if SITE != NOWHERE:
        if gain is not None:
            d = _multiply(d, _floats(_load_gates(gain, j, ok, H, G)))
        if (CELL == LSTM) & (BLOCK > 2048):  # kept so long, it would not leave registers for the cell
            raw = _load_gates(xhat + step * KEPT, j, ok, H, G)
        d = _through_norm(d, _floats(raw), rstd, H, eps, G, SPLIT, STD)
    _store_gates(d_now + b * (G * H), d, j, ok, H, G)
    _store_gates(d_raw + step * (G * H), d, j, ok, H, G)
    tl.debug_barrier()  # every thread has read the clock
    tl.store(table + CLOCKS + b, t - 1)


@triton.jit(do_not_specialize=["B"])
def end_kernel(
    d_h, direct, d_c, first, drop,  # as backward's steps left them
    h_start, c_start,  # [B, H]
    B, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row's initial state: what left the first step and what restarted rows sent."""
    j = tl.arange(0, BLOCK)
    ok, row, plane = j < H, wide(tl.program_id(0)) * H, wide(B) * H
    dh = tl.load(d_h + row + j, mask=ok, other=0.0).to(tl.float32)
    if drop is not None:
        dh *= tl.load(drop + row + j, mask=ok, other=0.0).to(tl.float32)
    if direct is not None:
        dh += tl.load(direct + row + j, mask=ok, other=0.0)
    if first is not None:
        dh += tl.load(first + row + j, mask=ok, other=0.0)
    tl.store(h_start + row + j, dh, mask=ok)
    if c_start is not None:
        dc = tl.load(d_c + row + j, mask=ok, other=0.0)
        if first is not None:
            dc += tl.load(first + plane + row + j, mask=ok, other=0.0)
        tl.store(c_start + row + j, dc, mask=ok)


@triton.jit(do_not_specialize=["N", "per"])
def column_sums_kernel(
    d, d_cell, xhat, sums,  # [N, G*H], [N, H], [N, PARTS*H], [programs, 2, PARTS*H]
    N, H, per,
    G: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over this program's ``per`` rows of d and of d * x^, to be added up; the cell comes after the gates."""
    blocks = tl.cdiv(H, COLUMNS)
    gate, block = FIRST + tl.program_id(0) // blocks, tl.program_id(0) % blocks
    units = block * COLUMNS + tl.arange(0, COLUMNS)
    width, column = G * H, gate * H
    if d is None:
        d, width, column = d_cell, H, 0
    elif d_cell is not None:  # noqa: SIM102  (known when compiled, what follows is not)
        if gate == G:
            d, width, column = d_cell, H, 0
    begin = wide(tl.program_id(1)) * per
    end = tl.minimum(begin + per, N)
    total, along = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for skip in tl.range(0, per, ROWS):
        rows = (begin + skip + tl.arange(0, ROWS))[:, None]
        ok = (rows < end) & (units < H)[None, :]
        part = tl.load(d + rows * width + (column + units)[None, :], mask=ok, other=0.0).to(tl.float32)
        total += part
        if xhat is not None:
            at = rows * (PARTS * H) + (gate * H + units)[None, :]
            along += part * tl.load(xhat + at, mask=ok, other=0.0).to(tl.float32)
    out = sums + wide(tl.program_id(1)) * 2 * PARTS * H + gate * H + units
    tl.store(out, tl.sum(total, 0), mask=units < H)
    if xhat is not None:
        tl.store(out + PARTS * H, tl.sum(along, 0), mask=units < H)


class Stepper:
    """Starts one kernel once a step.

    Its arguments are always the same, so Triton is asked only once which compiled kernel serves them: every other
    launch costs a call of the driver and little else.
    """

    def __init__(self, kernel: Any, batch: int, warps: int, arguments: dict[str, Any]) -> None:
        self.kernel, self.grid = kernel, (batch, 1, 1)
        self.arguments = arguments
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


def _warps(block: int) -> int:
    """4 elements of each vector a thread; 8 in long rows: fewer instructions in all, few registers spilled."""
    return int(OVERRIDE.get("step_warps") or max(1, min(16, block // 128)))


def _constants(form: Form, hidden: int, tensors: Tensors) -> dict[str, Any]:
    return {
        **form.constants(),
        "RATE_H": _is_rate(tensors["keep_h"]),
        "RATE_C": _is_rate(tensors["keep_c"]),
        "H": hidden,
        "BLOCK": power(hidden),
    }


def _is_rate(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 0


def _masks(extras: Extras) -> Tensors:
    """Kernel arguments, in the kernels' order; a mask that is one number expanded, as that number."""

    def plain(mask: Tensor | None) -> Tensor | None:
        if mask is not None and not any(mask.stride()) and mask.numel():
            return mask[0, 0, 0]
        return None if mask is None else mask.contiguous()

    def whole(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.contiguous()

    return {
        "lengths": whole(extras.lengths), "resets": whole(extras.resets), "keep_h": plain(extras.keep_h),
        "keep_c": plain(extras.keep_c), "drop": whole(extras.drop),
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
    scratch: Callable[[Form, Tensor, int, Tensors], Tensors]
    factors: Callable[[Tensors, Tensor], tuple[Any, Any, Any]]  # of the product, and its result


def _needs_old_h(form: Form, tensors: Tensors) -> bool:
    """Whether h reaches the next h otherwise than through the product."""
    return form.cell in ("GRU", "DREAMER") or tensors["keep_h"] is not None or tensors["lengths"] is not None


def _forward_scratch(form: Form, weight: Tensor, batch: int, tensors: Tensors) -> Tensors:
    """What a step finds and leaves besides the histories."""
    width, hidden = weight.shape
    carries = _needs_old_h(form, tensors)
    return {
        "y": weight.new_empty((batch, width)),
        "operand": weight.new_empty((batch, hidden)),
        "carried": weight.new_empty((2, batch, hidden), dtype=torch.float32) if carries else None,
    }


def _backward_scratch(form: Form, weight: Tensor, batch: int, tensors: Tensors) -> Tensors:
    width, hidden = weight.shape
    in_float32 = partial(weight.new_empty, dtype=torch.float32)
    return {
        "d_now": weight.new_empty((batch, width)),
        "d_h": weight.new_empty((batch, hidden)),
        "direct": in_float32((batch, hidden)) if _needs_old_h(form, tensors) else None,
        "d_c": in_float32((batch, hidden)) if form.cell == "LSTM" else None,
        "first": in_float32((2, batch, hidden)) if tensors["resets"] is not None else None,
    }


FORWARD = Way(
    False, forward_kernel, _forward_scratch, lambda scratch, weight: (scratch["operand"], weight.t(), scratch["y"])
)
BACKWARD = Way(
    True, backward_kernel, _backward_scratch, lambda scratch, weight: (scratch["d_now"], weight, scratch["d_h"])
)


class Pass:
    """The steps of one direction: a product and a kernel each, always between the same scratch tensors.

    Calls differ in their tensors, of which only the dtypes matter here, and in the number of steps: ``prepare``.
    """

    def __init__(self, way: Way, form: Form, weight: Tensor, batch: int, tensors: Tensors) -> None:
        self.way, self.batch, hidden = way, batch, weight.shape[1]
        self.scratch = way.scratch(form, weight, batch, tensors)
        self.table = torch.empty(CLOCKS.value + batch, dtype=torch.int64, device=weight.device)
        stand_ins = {name: None if t is None else self.table[:1].view(t.dtype) for name, t in tensors.items()}
        arguments = {
            "B": batch, "eps": float(form.eps), "table": self.table, **stand_ins, **self.scratch,
            **_constants(form, hidden, tensors),
        }  # fmt: skip
        self.kernel = Stepper(way.kernel, batch, _warps(power(hidden)), arguments)
        left, right, out = way.factors(self.scratch, weight)
        self.multiply = partial(torch.mm, left, right, out=out)

    def prepare(self, tensors: Tensors, steps: int) -> None:
        """The table of a call."""
        arguments = {
            "table": self.table, "B": self.batch, "T": steps, "begin": steps - 1 if self.way.backward else 0,
            "BLOCK": 128, **dict(zip_longest(PLACES, tensors.values())),
        }  # fmt: skip
        start(table_kernel, (1,), arguments, {"num_warps": 4})

    def step(self) -> None:
        """Whichever is next."""
        if self.way.backward:
            self.kernel()
            self.multiply()
        else:
            self.multiply()
            self.kernel()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


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
    with torch.cuda.device_of(weight), as_cudnn_multiplies(weight.dtype):
        if not replay.serves(weight):
            _run(Pass(way, form, weight, batch, tensors), steps, tensors, beside)
            return
        with replay.LOCK:
            key = _key(way, form, weight, batch, tensors)
            held = replay.entry(key, lambda: Replayed(way, form, weight, batch, tensors))
            held.weight.hold(weight, again=way.backward)
            _run(held, steps, tensors, beside)


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
    return way.backward, form, batch, kinds, rates, matrix, _warps(power(weight.shape[1]))


def shapes(form: Form, x: Tensor, weight: Tensor, keep: bool) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of what ``forward`` gives."""
    (steps, batch, width), hidden, dtype = x.shape, weight.shape[1], weight.dtype
    lstm, normed = form.cell == "LSTM", form.site or form.cell_norm
    found: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((steps + 1, batch, hidden), dtype),
        ((batch, hidden), dtype),
        ((batch, hidden) if lstm else (0,), dtype),
        ((steps + 1 if lstm else 0, batch, hidden), torch.float32),
        ((steps, batch, width + (hidden if form.cell_norm else 0)), dtype),
        ((steps if normed else 0, batch, form.gates + 1), torch.float32),
    ]
    return found if keep else found[:4]


@torch.no_grad()
def forward(
    form: Form,
    x: Tensor,
    weight: Tensor,
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
    made = tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes(form, x, weight, keep))
    hist, h_n, c_n, c_hist, xhat, stats = (*map(_some, made), None, None)[:6]
    tensors = {
        "x": x, "hist": hist, "c_hist": c_hist, "h_n": h_n, "c_n": c_n, "xhat": xhat, "stats": stats, "gain": gain,
        "bias": bias, "gain_cell": gain_cell, "bias_cell": bias_cell, **_masks(extras),
    }  # fmt: skip
    around = {
        "h": h, "c": c, "drop": tensors["drop"], "hist": hist, "c_hist": c_hist, "H": weight.shape[1],
        "BLOCK": power(weight.shape[1]),
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
    weight: Tensor,
    h: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    gain_cell: Tensor | None,
    bias_cell: Tensor | None,
    extras: Extras,
    kept: tuple[Tensor, ...],
    d_out: Tensor | None,
    d_h: Tensor | None,
    d_c: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by name: x, weight, h, c, gain, bias, gain_cell, bias_cell; no bias where there is none to sum for."""
    hist, c_hist, xhat, stats = kept
    sides, states = _gradient_sides(form, x, weight), _gradient_states(form, hist)
    tensors = {
        "x": x, "hist": hist, "c_hist": _some(c_hist), "xhat": xhat, "stats": _some(stats), "gain": gain, "bias": bias,
        "gain_cell": gain_cell, "bias_cell": bias_cell, "d_out": d_out, "d_h_n": d_h,
        "d_c_n": d_c if form.cell == "LSTM" else None, **sides, **_masks(extras),
    }  # fmt: skip
    around = {
        "drop": tensors["drop"], "h_start": states["h"], "c_start": states.get("c"), "B": x.shape[1],
        "H": weight.shape[1], "BLOCK": power(weight.shape[1]),
    }  # fmt: skip

    def end(scratch: Tensors) -> None:
        places = {name: scratch[name] for name in ("d_h", "direct", "d_c", "first")}
        start(end_kernel, (x.shape[1],), {**around, **places}, {"num_warps": 4})

    _walk(BACKWARD, form, weight, x.shape[0], tensors, end)
    found = {"x": sides["d_raw"] if sides["d_x"] is None else sides["d_x"], **states}
    with as_cudnn_multiplies(weight.dtype):
        found["weight"] = torch.mm(sides["d_raw"].flatten(0, 1).t(), operands(hist, extras).flatten(0, 1))
    return found | _parameters(form, sides, xhat, (gain, bias, gain_cell, bias_cell))


def _gradient_sides(form: Form, x: Tensor, weight: Tensor) -> Tensors:
    """What the backward kernel writes for all steps; None where another tensor holds it."""
    apart = form.site == "hh" or form.cell == "GRU"  # else x and W~ h' are only ever seen as their sum
    own_d_y = form.site == "sum" or (form.site == "hh" and form.cell == "GRU")
    return {
        "d_raw": torch.empty_like(x, dtype=weight.dtype),
        "d_x": torch.empty_like(x, dtype=weight.dtype) if apart else None,
        "d_y": torch.empty_like(x, dtype=weight.dtype) if own_d_y else None,
        "d_cell": weight.new_empty((*x.shape[:2], weight.shape[1])) if form.cell_norm else None,
    }


def _gradient_states(form: Form, hist: Tensor) -> dict[str, Tensor]:
    """The initial states' own."""
    names = ("h", "c") if form.cell == "LSTM" else ("h",)
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
    found = (totals.to(kinds.pop()) if len(kinds) == 1 else totals).view(-1).split([gates, parts - gates] * 2)
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
