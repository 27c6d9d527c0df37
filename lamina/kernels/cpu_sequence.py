"""Whole sequences on a CPU: every step of some rows of the batch, forward and backward.

Threads take rows of the batch and never wait for each other; for one row they share the columns of the product, and
meet before and after it. What a call is about travels as one array of whole numbers, sizes, flags and addresses, in the
order of FIELDS.

Backward makes activations anew from what forward kept: W_x x as the product left it, and x^ of the recurrent product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from .cpu_matrix import (
    BARE,
    FAST,
    PANEL,
    apart,
    bytes_of,
    numbers,
    pack,
    product,
    project,
    row_times,
    row_times_transpose,
)
from .cpu_rows import constant, mean_and_inverse, sigmoid, tanh, through_norm

FIELDS = (
    "steps", "batch", "hidden", "gates", "cell", "site", "cell_norm", "carry", "relu", "std", "eps",
    "norm_x", "groups", "sizes",  # of the product's norm: how many groups, gates of each
    "groups_x", "sizes_x",
    "begin", "end",  # the steps of this call; backward walks from end - 1 down to begin
    "summed",  # [T, B, W]: W_x x
    "hist", "c_hist", "c_step",  # [T+1, B, H]; c_step: bytes from one step's c to the next's, 0: one place for all
    "xhat", "xhat_step", "rstd",  # [T, B, W], [T, B, groups]; xhat_step as c_step
    "gain", "bias", "gain_x", "bias_x", "gain_cell", "bias_cell",
    "lengths", "resets", "drop", "keep_h", "keep_h_t", "keep_h_b", "keep_c", "keep_c_t", "keep_c_b",  # 0: none
    "weight", "packed", "panels",  # of the product: as it is (one row) or packed
    "z", "z_row",  # where a product goes, [B, z_row]
    "operand",  # [B, H] for h' where it is not the history's
    "scratch", "scratch_size",  # of each thread, in numbers
    "d_out", "dh", "dc", "first_h", "first_c", "past",  # [T, B, H], then [B, H]
    "d_raw", "d_summed",  # [steps of this call, B, W]
    "shares",  # [threads, 4 W + 2 H]: gradients of bias, gain, bias_x, gain_x, bias_cell, gain_cell
    "threads", "shared",  # shared: threads take columns of a product, and the first of them all rows
    "left", "rows", "depth", "columns", "turned", "out",  # of a product with many rows, and of packing
    "weight_x", "packed_x",  # of a stream, whose input [B, D] is ``left``: the products are made here
)  # fmt: skip
(
    STEPS, BATCH, HIDDEN, GATES, CELL, SITE, CELL_NORM, CARRY, RELU, STD, EPS, NORM_X, GROUPS, SIZES, GROUPS_X,
    SIZES_X, BEGIN, END, SUMMED, HIST, C_HIST, C_STEP, XHAT, XHAT_STEP, RSTD, GAIN, BIAS, GAIN_X, BIAS_X, GAIN_CELL,
    BIAS_CELL, LENGTHS, RESETS, DROP, KEEP_H, KEEP_H_T, KEEP_H_B, KEEP_C, KEEP_C_T, KEEP_C_B, WEIGHT, PACKED, PANELS,
    Z, Z_ROW, OPERAND, SCRATCH, SCRATCH_SIZE, D_OUT, DH, DC, FIRST_H, FIRST_C, PAST, D_RAW, D_SUMMED, SHARES, THREADS,
    SHARED, LEFT, ROWS, DEPTH, COLUMNS, TURNED, OUT, WEIGHT_X, PACKED_X,
) = range(len(FIELDS))  # fmt: skip
RNN, LSTM, GRU, DREAMER = range(4)
NOWHERE, ON_HH, ON_SUM = range(3)

# Of the team, from ``cpu_team``: a thread's number in it, and a place where all its threads meet.
_thread = types.ExternalFunction("lamina_thread", types.int32())
_meet = types.ExternalFunction("lamina_meet", types.void())

_kernel = njit(**BARE)
_inlined = njit(**BARE, inline="always")
_loop = njit(**BARE, fastmath=FAST)


# Loops over rows.


@_loop
def _copy(x, out):
    apart()
    for j in range(len(x)):
        out[j] = x[j]


@_loop
def _fill(out, value):
    apart()
    for j in range(len(out)):
        out[j] = value


@_loop
def _sigmoid(x, like):
    apart()
    for j in range(len(x)):
        x[j] = sigmoid(x[j], like)


@_loop
def _tanh(x, like):
    apart()
    for j in range(len(x)):
        x[j] = tanh(x[j], like)


@_loop
def _affine(x, mean, rstd, gain, bias, out):
    apart()
    for j in range(len(x)):
        out[j] = (x[j] - mean) * rstd * gain[j] + bias[j]


@_loop
def _standardised(x, mean, rstd, out):
    apart()
    for j in range(len(x)):
        out[j] = (x[j] - mean) * rstd


@_loop
def _scaled(x, gain, bias, out):
    apart()
    for j in range(len(x)):
        out[j] = x[j] * gain[j] + bias[j]


@_loop
def _plus(x, y, out):
    apart()
    for j in range(len(x)):
        out[j] = x[j] + y[j]


@_loop
def _times(x, y, out):
    apart()
    for j in range(len(x)):
        out[j] = x[j] * y[j]


@_loop
def _gather(d, x, bias, gain):
    """Shares of the gradients of a bias and of the gain beside it."""
    apart()
    for j in range(len(d)):
        bias[j] += d[j]
        gain[j] += d[j] * x[j]


@_loop
def _gather_bias(d, bias):
    apart()
    for j in range(len(d)):
        bias[j] += d[j]


@_loop
def _new_cell(i, f, g, old, out):
    apart()
    for j in range(len(i)):
        out[j] = f[j] * old[j] + i[j] * g[j]


@_loop
def _mixed(keep, old, new, like):
    """Zoneout, in place of the new."""
    apart()
    one = constant(1.0, like)
    for j in range(len(new)):
        new[j] = keep[j] * old[j] + (one - keep[j]) * new[j]


@_loop
def _gru_candidate(ax, r, ah, n, like):
    apart()
    for j in range(len(n)):
        n[j] = tanh(ax[j] + r[j] * ah[j], like)


@_loop
def _gru_new(z, n, old, out, like):
    apart()
    one = constant(1.0, like)
    for j in range(len(n)):
        out[j] = (one - z[j]) * n[j] + z[j] * old[j]


@_loop
def _dreamer_weights(u, like):
    """The weight of the old h, 1 - sigmoid(u - 1)."""
    apart()
    one = constant(1.0, like)
    for j in range(len(u)):
        u[j] = sigmoid(one - u[j], like)


# A row of summed inputs.


@_kernel
def _input_side(p, t, b, out, normed, like):
    """gain (W_x x - mean)/deviation + bias, or W_x x + bias; ``normed`` gets x^ too where backward needs it."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    W = p[GATES] * H
    x, bias = p[SUMMED] + (t * p[BATCH] + b) * W * size, numbers(p[BIAS_X], W, like)
    if not p[NORM_X]:
        _plus(numbers(x, W, like), bias, numbers(out, W, like))
        return
    eps, std = numbers(p[EPS], 1, like)[0], p[STD] != 0
    sizes, at = numbers(p[SIZES_X], p[GROUPS_X], np.int64(0)), 0
    for group in range(p[GROUPS_X]):
        count, off = sizes[group] * H, at * size
        row = numbers(x + off, count, like)
        mean, rstd = mean_and_inverse(row, eps, std, like)
        gain, shift = numbers(p[GAIN_X] + off, count, like), numbers(p[BIAS_X] + off, count, like)
        _affine(row, mean, rstd, gain, shift, numbers(out + off, count, like))
        if normed != 0:
            _standardised(row, mean, rstd, numbers(normed + off, count, like))
        at += count


@_kernel
def _normalise(p, t, b, z, xhat, like):
    """x^ of the recurrent product or of the sum, and its 1/deviation for backward."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    eps, std = numbers(p[EPS], 1, like)[0], p[STD] != 0
    sizes, at = numbers(p[SIZES], p[GROUPS], np.int64(0)), 0
    kept = numbers(p[RSTD], (t + 1) * p[BATCH] * p[GROUPS], like)
    for group in range(p[GROUPS]):
        count, off = sizes[group] * H, at * size
        row = numbers(z + off, count, like)
        mean, rstd = mean_and_inverse(row, eps, std, like)
        _standardised(row, mean, rstd, numbers(xhat + off, count, like))
        if p[XHAT_STEP] != 0:
            kept[(t * p[BATCH] + b) * p[GROUPS] + group] = rstd
        at += count


@_kernel
def _sides(p, t, b, ax, ah, z, normed, like):
    """The input's side in ``ax``, the recurrent side in ``ah``; forward (z != 0) makes x^, backward reads it."""
    apart()
    size = bytes_of(like)
    W = p[GATES] * p[HIDDEN]
    xhat = p[XHAT] + t * p[XHAT_STEP] + b * W * size
    if p[SITE] == ON_SUM:
        if z != 0:
            x = numbers(p[SUMMED] + (t * p[BATCH] + b) * W * size, W, like)
            _plus(x, numbers(z, W, like), numbers(z, W, like))
            _normalise(p, t, b, z, xhat, like)
        _copy(numbers(p[BIAS_X], W, like), numbers(ax, W, like))
    else:
        _input_side(p, t, b, ax, normed, like)
        if z != 0:
            if p[SITE] == ON_HH:
                _normalise(p, t, b, z, xhat, like)
            else:
                _copy(numbers(z, W, like), numbers(xhat, W, like))
    _scaled(numbers(xhat, W, like), numbers(p[GAIN], W, like), numbers(p[BIAS], W, like), numbers(ah, W, like))


@_kernel
def _old(p, place, t, b, like):
    """Where a row's state before step t is: in the history, or the first one if it starts anew."""
    size = bytes_of(like)
    row = b * p[HIDDEN] * size
    if p[RESETS] != 0 and numbers(p[RESETS], (t + 1) * p[BATCH], np.uint8(0))[t * p[BATCH] + b]:
        t = 0
    return place + t * p[BATCH] * p[HIDDEN] * size + row


@_kernel
def _over(p, t, b):
    """Whether a row's sequence has ended before step t."""
    return p[LENGTHS] != 0 and t >= numbers(p[LENGTHS], p[BATCH], np.int64(0))[b]


@_kernel
def _share(count, thread, threads):
    """A thread's part of so many, in fours."""
    each = (count + 4 * threads - 1) // (4 * threads) * 4 if count > threads else 1
    return min(count, thread * each), min(count, (thread + 1) * each)


# Forward.


@_kernel
def _lstm(p, t, b, a, c_old, c_new, h, seen, like):
    """From the summed inputs of the gates, which become the gates, to c and h."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    step = H * size
    _sigmoid(numbers(a, 2 * H, like), like)
    _tanh(numbers(a + 2 * step, H, like), like)
    _sigmoid(numbers(a + 3 * step, H, like), like)
    i, f, g = numbers(a, H, like), numbers(a + step, H, like), numbers(a + 2 * step, H, like)
    raw, out = numbers(c_new, H, like), numbers(seen, H, like)
    _new_cell(i, f, g, numbers(c_old, H, like), raw)
    if p[CELL_NORM]:
        eps = numbers(p[EPS], 1, like)[0]
        mean, rstd = mean_and_inverse(raw, eps, p[STD] != 0, like)
        _affine(raw, mean, rstd, numbers(p[GAIN_CELL], H, like), numbers(p[BIAS_CELL], H, like), out)
        if p[CARRY]:
            _copy(out, raw)
    else:
        _copy(raw, out)
    _tanh(out, like)
    _times(numbers(a + 3 * step, H, like), out, numbers(h, H, like))


@_kernel
def _gru(p, ax, ah, h_old, h, like):
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    step = H * size
    n = numbers(ax + 2 * step, H, like)
    if p[CELL] == GRU:
        rz = numbers(ax, 2 * H, like)
        _plus(rz, numbers(ah, 2 * H, like), rz)
        _sigmoid(rz, like)
        _gru_candidate(n, numbers(ax, H, like), numbers(ah + 2 * step, H, like), n, like)
    else:
        whole = numbers(ax, 3 * H, like)
        _plus(whole, numbers(ah, 3 * H, like), whole)
        _sigmoid(numbers(ax, H, like), like)
        _dreamer_weights(numbers(ax + step, H, like), like)
        _times(numbers(ax, H, like), n, n)
        _tanh(n, like)
    _gru_new(numbers(ax + step, H, like), n, numbers(h_old, H, like), numbers(h, H, like), like)


@_kernel
def _rnn(p, ax, ah, h, like):
    apart()
    H = p[HIDDEN]
    out = numbers(h, H, like)
    _plus(numbers(ax, H, like), numbers(ah, H, like), out)
    if p[RELU]:
        for j in range(H):
            out[j] = max(out[j], like)
    else:
        _tanh(out, like)


@_inlined
def _forward_row(p, t, b, scratch, like):
    size, H = bytes_of(like), p[HIDDEN]
    row, plane = b * H * size, p[BATCH] * H * size
    h_old, h_new = _old(p, p[HIST], t, b, like), p[HIST] + (t + 1) * plane + row
    c_old, c_new = h_old, h_new
    if p[CELL] == LSTM:
        c_new = p[C_HIST] + (t + 1) * p[C_STEP] + row
        c_old = _old(p, p[C_HIST], t, b, like) if p[C_STEP] != 0 else p[C_HIST] + row
    if _over(p, t, b):
        _copy(numbers(h_old, H, like), numbers(h_new, H, like))
        _copy(numbers(c_old, H, like), numbers(c_new, H, like))
        return
    W = p[GATES] * H
    ax, ah, seen = scratch, scratch + W * size, scratch + 2 * W * size
    _sides(p, t, b, ax, ah, p[Z] + b * p[Z_ROW] * size, np.int64(0), like)
    if p[CELL] == LSTM:
        whole, fresh = numbers(ax, W, like), seen + H * size
        _plus(whole, numbers(ah, W, like), whole)
        _lstm(p, t, b, ax, c_old, fresh, h_new, seen, like)
        if p[KEEP_C] != 0:
            keep = numbers(p[KEEP_C] + t * p[KEEP_C_T] + b * p[KEEP_C_B], H, like)
            _mixed(keep, numbers(c_old, H, like), numbers(fresh, H, like), like)
        _copy(numbers(fresh, H, like), numbers(c_new, H, like))
    elif p[CELL] == RNN:
        _rnn(p, ax, ah, h_new, like)
    else:
        _gru(p, ax, ah, h_old, h_new, like)
    if p[KEEP_H] != 0:
        keep = numbers(p[KEEP_H] + t * p[KEEP_H_T] + b * p[KEEP_H_B], H, like)
        _mixed(keep, numbers(h_old, H, like), numbers(h_new, H, like), like)


@_inlined
def _factor(p, t, first, last, like):
    """Where the product's left factor of step t lies: the history, or rows that start anew or drop units."""
    size, H = bytes_of(like), p[HIDDEN]
    if p[OPERAND] == 0:
        return p[HIST] + t * p[BATCH] * H * size
    for b in range(first, last):
        out, old = numbers(p[OPERAND] + b * H * size, H, like), numbers(_old(p, p[HIST], t, b, like), H, like)
        if p[DROP] != 0:
            _times(old, numbers(p[DROP] + b * H * size, H, like), out)
        else:
            _copy(old, out)
    return p[OPERAND]


@_kernel
def _project_frame(p, spare, like):
    """W_x x of one frame."""
    W = p[GATES] * p[HIDDEN]
    if p[PACKED_X] == 0:
        row_times_transpose(p[LEFT], p[DEPTH], p[WEIGHT_X], np.int64(0), W, p[SUMMED], like)
    else:
        project(p[LEFT], p[BATCH], p[DEPTH], p[PACKED_X], W, p[SUMMED], spare, like)


@_inlined
def forward_rows(address, thread, like):
    """Steps begin to end of a thread's rows."""
    p, size = numbers(address, len(FIELDS), np.int64(0)), bytes_of(like)
    H, scratch = p[HIDDEN], p[SCRATCH] + thread * p[SCRATCH_SIZE] * size
    W, begin, end = p[GATES] * H, np.int64(0), p[GATES] * H
    first, last = _share(p[BATCH], thread, p[THREADS])
    if p[SHARED]:
        begin, end = _share(W, thread, p[THREADS])
        first, last = 0, p[BATCH] if thread == 0 else 0
    if p[WEIGHT_X] != 0:
        _project_frame(p, scratch + (2 * W + 6 * H + 64) * size, like)
    for t in range(p[BEGIN], p[END]):
        left = _factor(p, t, first, last, like)
        if p[PACKED] == 0:
            for b in range(first, p[BATCH] if p[SHARED] else last):
                row_times_transpose(left + b * H * size, H, p[WEIGHT], begin, end, p[Z] + b * p[Z_ROW] * size, like)
            if p[SHARED]:
                _meet()
        else:
            at = p[Z] + first * p[Z_ROW] * size
            product(left + first * H * size, H, last - first, H, p[PACKED], p[PANELS], at, p[Z_ROW], like)
        for b in range(first, last):
            _forward_row(p, t, b, scratch, like)
        if p[SHARED]:
            _meet()
    if p[WEIGHT_X] != 0:
        count = p[BATCH] * H
        _copy(numbers(p[HIST] + count * size, count, like), numbers(p[HIST], count, like))


# Backward.


@_loop
def _split_keep(keep, d, past, like):
    """What passes the step by, and what is left."""
    apart()
    one = constant(1.0, like)
    for j in range(len(d)):
        past[j] += keep[j] * d[j]
        d[j] = (one - keep[j]) * d[j]


@_loop
def _through_output(o, out, dh, like):
    """In place: the gate o becomes the gradient of its summed input, what it lets out becomes its own."""
    apart()
    one = constant(1.0, like)
    for j in range(len(o)):
        gate, seen = o[j], out[j]
        o[j] = dh[j] * seen * gate * (one - gate)
        out[j] = dh[j] * gate * (one - seen * seen)


@_loop
def _through_cell(i, f, g, old, dc, like):
    """In place: gates become the gradients of their summed inputs, dc becomes the old c's."""
    apart()
    one = constant(1.0, like)
    for j in range(len(i)):
        d = dc[j]
        a, b, c = i[j], f[j], g[j]
        i[j] = d * c * a * (one - a)
        f[j] = d * old[j] * b * (one - b)
        g[j] = d * a * (one - c * c)
        dc[j] = d * b


@_kernel
def _lstm_back(p, t, b, a, dh, dc, c_old, seen, share, like):
    """The gates' summed inputs in ``a`` become their gradients, dc the old c's; dh is that of h."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    step = H * size
    _sigmoid(numbers(a, 2 * H, like), like)
    _tanh(numbers(a + 2 * step, H, like), like)
    _sigmoid(numbers(a + 3 * step, H, like), like)
    i, f, g, o = (
        numbers(a, H, like), numbers(a + step, H, like), numbers(a + 2 * step, H, like), numbers(a + 3 * step, H, like)
    )  # fmt: skip
    old, later = numbers(c_old, H, like), numbers(dc, H, like)
    raw, d_seen = numbers(seen, H, like), numbers(seen + step, H, like)
    _new_cell(i, f, g, old, raw)
    rstd, eps, std = constant(1.0, like), numbers(p[EPS], 1, like)[0], p[STD] != 0
    if p[CELL_NORM]:
        mean, rstd = mean_and_inverse(raw, eps, std, like)
        _standardised(raw, mean, rstd, raw)
        _scaled(raw, numbers(p[GAIN_CELL], H, like), numbers(p[BIAS_CELL], H, like), d_seen)
    else:
        _copy(raw, d_seen)
    _tanh(d_seen, like)
    _through_output(o, d_seen, numbers(dh, H, like), like)
    if p[CARRY]:
        _plus(d_seen, later, d_seen)
    if p[CELL_NORM]:
        W = p[GATES] * H
        bias, gain = numbers(share + 4 * W * size, H, like), numbers(share + (4 * W + H) * size, H, like)
        _gather(d_seen, raw, bias, gain)
        _times(d_seen, numbers(p[GAIN_CELL], H, like), d_seen)
        through_norm(d_seen, raw, rstd, eps, std, like)
    if p[CARRY]:
        _copy(d_seen, later)
    else:
        _plus(d_seen, later, later)
    _through_cell(i, f, g, old, later, like)


@_loop
def _through_gru(r, z, n, hidden, old, dh, past, d_n, like):
    """Gates become gradients of the input's side in r, z, n; the recurrent side's differs in d_n; past gets z dh."""
    apart()
    one = constant(1.0, like)
    for j in range(len(r)):
        a, b, c, d = r[j], z[j], n[j], dh[j]
        dn = d * (one - b) * (one - c * c)
        past[j] += d * b
        r[j] = dn * hidden[j] * a * (one - a)
        z[j] = d * (old[j] - c) * b * (one - b)
        n[j] = dn
        d_n[j] = dn * a


@_kernel
def _gru_back(p, ax, ah, dh, h_old, past, extra, like):
    """``ax`` becomes the gradient of the input's side, ``ah`` that of the recurrent side."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    step = H * size
    r, z, n = numbers(ax, H, like), numbers(ax + step, H, like), numbers(ax + 2 * step, H, like)
    hidden, d_n = numbers(ah + 2 * step, H, like), numbers(extra, H, like)
    if p[CELL] == GRU:
        rz = numbers(ax, 2 * H, like)
        _plus(rz, numbers(ah, 2 * H, like), rz)
        _sigmoid(rz, like)
        _gru_candidate(n, r, hidden, n, like)
    else:
        whole = numbers(ax, 3 * H, like)
        _plus(whole, numbers(ah, 3 * H, like), whole)
        _copy(n, hidden)
        _sigmoid(r, like)
        _dreamer_weights(z, like)
        _times(r, n, n)
        _tanh(n, like)
    _through_gru(r, z, n, hidden, numbers(h_old, H, like), numbers(dh, H, like), numbers(past, H, like), d_n, like)
    _copy(numbers(ax, 2 * H, like), numbers(ah, 2 * H, like))
    _copy(d_n, hidden)
    if p[CELL] == DREAMER:  # z falls where u rises
        d_u = numbers(ah + step, H, like)
        for j in range(H):
            d_u[j] = -d_u[j]


@_kernel
def _rnn_back(p, ax, ah, dh, like):
    apart()
    H = p[HIDDEN]
    out, d = numbers(ax, H, like), numbers(dh, H, like)
    one = constant(1.0, like)
    _plus(out, numbers(ah, H, like), out)
    if p[RELU]:
        for j in range(H):
            out[j] = d[j] if out[j] > like else like
    else:
        _tanh(out, like)
        for j in range(H):
            out[j] = d[j] * (one - out[j] * out[j])


@_kernel
def _through_norms(p, t, b, d_x, d_h, normed, d_raw, d_summed, share, like):
    """Gradients of the two sides of the summed inputs to those of the products, and to gains and biases."""
    apart()
    size, H = bytes_of(like), p[HIDDEN]
    W = p[GATES] * H
    span, eps, std = W * size, numbers(p[EPS], 1, like)[0], p[STD] != 0
    xhat = p[XHAT] + t * p[XHAT_STEP] + b * span
    raw, summed = numbers(d_raw, W, like), numbers(d_summed, W, like)
    if p[SITE] == NOWHERE:
        _copy(numbers(d_h, W, like), raw)
        _gather_bias(raw, numbers(share, W, like))
    else:
        _gather(numbers(d_h, W, like), numbers(xhat, W, like), numbers(share, W, like),
                numbers(share + span, W, like))  # fmt: skip
        _times(numbers(d_h, W, like), numbers(p[GAIN], W, like), raw)
        sizes, at = numbers(p[SIZES], p[GROUPS], np.int64(0)), 0
        kept = numbers(p[RSTD], (t + 1) * p[BATCH] * p[GROUPS], like)
        for group in range(p[GROUPS]):
            count, off = sizes[group] * H, at * size
            rstd = kept[(t * p[BATCH] + b) * p[GROUPS] + group]
            through_norm(numbers(d_raw + off, count, like), numbers(xhat + off, count, like), rstd, eps, std, like)
            at += count
    if p[SITE] == ON_SUM:
        _copy(raw, summed)
        return
    bias_x, gain_x = numbers(share + 2 * span, W, like), numbers(share + 3 * span, W, like)
    if not p[NORM_X]:
        _copy(numbers(d_x, W, like), summed)
        _gather_bias(summed, bias_x)
        return
    _gather(numbers(d_x, W, like), numbers(normed, W, like), bias_x, gain_x)
    _times(numbers(d_x, W, like), numbers(p[GAIN_X], W, like), summed)
    sizes, at = numbers(p[SIZES_X], p[GROUPS_X], np.int64(0)), 0
    x = p[SUMMED] + (t * p[BATCH] + b) * span
    for group in range(p[GROUPS_X]):
        count, off = sizes[group] * H, at * size
        rstd = mean_and_inverse(numbers(x + off, count, like), eps, std, like)[1]
        through_norm(numbers(d_summed + off, count, like), numbers(normed + off, count, like), rstd, eps, std, like)
        at += count


@_inlined
def _backward_row(p, t, b, scratch, share, like):
    """dh and dc of a row's state after step t become, but for the product, those of its state before."""
    size, H, B = bytes_of(like), p[HIDDEN], p[BATCH]
    W, row = p[GATES] * H, b * H * size
    span = W * size
    d_raw, d_summed = (
        p[D_RAW] + ((t - p[BEGIN]) * B + b) * span, p[D_SUMMED] + ((t - p[BEGIN]) * B + b) * span
    )  # fmt: skip
    dh, past = numbers(p[DH] + row, H, like), numbers(p[PAST] + row, H, like)
    if p[D_OUT] != 0:
        _plus(dh, numbers(p[D_OUT] + (t * B + b) * H * size, H, like), dh)
    if _over(p, t, b):
        _copy(dh, past)
        _fill(numbers(d_raw, W, like), like)
        _fill(numbers(d_summed, W, like), like)
        return
    _fill(past, like)
    ax, ah, normed, extra = scratch, scratch + span, scratch + 2 * span, scratch + 3 * span
    past_c = extra + 3 * H * size
    if p[KEEP_H] != 0:
        _split_keep(numbers(p[KEEP_H] + t * p[KEEP_H_T] + b * p[KEEP_H_B], H, like), dh, past, like)
    _sides(p, t, b, ax, ah, np.int64(0), normed, like)
    h_old = _old(p, p[HIST], t, b, like)
    if p[CELL] == LSTM:
        dc, held = numbers(p[DC] + row, H, like), numbers(past_c, H, like)
        if p[KEEP_C] != 0:
            _fill(held, like)
            _split_keep(numbers(p[KEEP_C] + t * p[KEEP_C_T] + b * p[KEEP_C_B], H, like), dc, held, like)
        whole = numbers(ax, W, like)
        _plus(whole, numbers(ah, W, like), whole)
        _lstm_back(p, t, b, ax, p[DH] + row, p[DC] + row, _old(p, p[C_HIST], t, b, like), extra, share, like)
        if p[KEEP_C] != 0:
            _plus(dc, held, dc)
        _through_norms(p, t, b, ax, ax, normed, d_raw, d_summed, share, like)
    elif p[CELL] == RNN:
        _rnn_back(p, ax, ah, p[DH] + row, like)
        _through_norms(p, t, b, ax, ax, normed, d_raw, d_summed, share, like)
    else:
        _gru_back(p, ax, ah, p[DH] + row, h_old, p[PAST] + row, extra, like)
        _through_norms(p, t, b, ax, ah, normed, d_raw, d_summed, share, like)


@_inlined
def _arrived(p, t, b, like):
    """dh of the state before a step: through the product, dropped units aside, and past it."""
    size, H = bytes_of(like), p[HIDDEN]
    row = b * H * size
    dh, through = numbers(p[DH] + row, H, like), numbers(p[Z] + b * p[Z_ROW] * size, H, like)
    if p[DROP] != 0:
        _times(through, numbers(p[DROP] + row, H, like), through)
    _plus(through, numbers(p[PAST] + row, H, like), dh)
    if p[RESETS] != 0 and numbers(p[RESETS], (t + 1) * p[BATCH], np.uint8(0))[t * p[BATCH] + b]:
        first = numbers(p[FIRST_H] + row, H, like)
        _plus(first, dh, first)
        _fill(dh, like)
        if p[CELL] == LSTM:
            dc, first_c = numbers(p[DC] + row, H, like), numbers(p[FIRST_C] + row, H, like)
            _plus(first_c, dc, first_c)
            _fill(dc, like)


@_inlined
def backward_rows(address, thread, like):
    """The same rows from step end - 1 down to begin."""
    p, size = numbers(address, len(FIELDS), np.int64(0)), bytes_of(like)
    H, scratch = p[HIDDEN], p[SCRATCH] + thread * p[SCRATCH_SIZE] * size
    W, begin, end = p[GATES] * H, np.int64(0), H
    first, last = _share(p[BATCH], thread, p[THREADS])
    if p[SHARED]:
        begin, end = _share(H, thread, p[THREADS])
        first, last = 0, p[BATCH] if thread == 0 else 0
    share = p[SHARES] + thread * (4 * p[GATES] + 2) * H * size
    for back in range(p[END] - p[BEGIN]):
        t = p[END] - 1 - back
        for b in range(first, last):
            _backward_row(p, t, b, scratch, share, like)
        left, out = p[D_RAW] + (t - p[BEGIN]) * p[BATCH] * W * size, p[Z]
        if p[PACKED] == 0:
            if p[SHARED]:
                _meet()
            for b in range(first, p[BATCH] if p[SHARED] else last):
                row_times(left + b * W * size, W, p[WEIGHT], H, begin, end, out + b * p[Z_ROW] * size, like)
            if p[SHARED]:
                _meet()
        else:
            at = out + first * p[Z_ROW] * size
            product(left + first * W * size, W, last - first, W, p[PACKED], p[PANELS], at, p[Z_ROW], like)
        for b in range(first, last):
            _arrived(p, t, b, like)


# Products of many rows.


@_inlined
def many_rows(address, thread, like):
    """A thread's rows of out = left times a packed matrix."""
    p, size = numbers(address, len(FIELDS), np.int64(0)), bytes_of(like)
    first, last = _share(p[ROWS], thread, p[THREADS])
    left, out = p[LEFT] + first * p[DEPTH] * size, p[OUT] + first * p[COLUMNS] * size
    spare = p[SCRATCH] + thread * p[SCRATCH_SIZE] * size
    project(left, last - first, p[DEPTH], p[PACKED], p[COLUMNS], out, spare, like)


@_inlined
def panels_of(address, thread, like):
    """A thread's panels of a matrix."""
    p = numbers(address, len(FIELDS), np.int64(0))
    panels = (p[COLUMNS] * bytes_of(like) + PANEL - 1) // PANEL
    first, last = panels * thread // p[THREADS], panels * (thread + 1) // p[THREADS]
    pack(p[WEIGHT], p[DEPTH], p[COLUMNS], p[TURNED], p[PACKED], first, last, like)


# Entries: one thread's part of a call. A kernel is compiled when it is asked for: each takes seconds.


def forward_float32(address):
    forward_rows(address, np.int64(_thread()), np.float32(0.0))


def forward_float64(address):
    forward_rows(address, np.int64(_thread()), np.float64(0.0))


def backward_float32(address):
    backward_rows(address, np.int64(_thread()), np.float32(0.0))


def backward_float64(address):
    backward_rows(address, np.int64(_thread()), np.float64(0.0))


def products_float32(address):
    many_rows(address, np.int64(_thread()), np.float32(0.0))


def products_float64(address):
    many_rows(address, np.int64(_thread()), np.float64(0.0))


def packs_float32(address):
    panels_of(address, np.int64(_thread()), np.float32(0.0))


def packs_float64(address):
    panels_of(address, np.int64(_thread()), np.float64(0.0))


def compiled(name: str) -> Any:
    """An entry by its name."""
    return cfunc(types.void(types.int64), cache=True, error_model="numpy", _nrt=False)(globals()[name])
