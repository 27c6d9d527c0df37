"""One step of a recurrence in Triton kernels: both its products in one, all else in another, one row after another.

The products W_x x and W_h h' of few rows are columns of their matrices to a program, each matrix read once
(``cell_product`` cuts them); of many rows they are the library's. The kernels for the rest take them from either. A row
is whole in its program, so norms are exact and nobody waits for anybody. Backward makes everything anew from the same
two rows: nothing else is kept. Its programs walk over rows and add up their shares of the gradients of gains and
biases, which are summed at the end in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import (  # fmt: skip
    COMPILED,
    GRU,
    LSTM,
    NOWHERE,
    ON_HH,
    ON_SUM,
    RNN,
    dreamer_gates,
    gru_backward,
    gru_forward,
    gru_gates,
    inverse_deviation,
    lstm_cell_backward,
    lstm_gates,
    lstm_output_backward,
    quick_enough,
    rnn_backward,
    rnn_forward,
    rounded,
    std_correction,
    tanh,
    wide,
)
from .gates import (  # fmt: skip
    add,
    corrected,
    floats,
    group_means,
    inverse_deviations,
    load_cell,
    load_gates,
    multiply,
    projections,
    rounded_products,
    store_gates,
    through_norm,
    units_of,
)

# Which share of the parameters' gradients lies where, in units of H: after those of the gates, the cell's.
BIAS_X, GAIN_X, BIAS_H, GAIN_H = (tl.constexpr(k) for k in range(4))


@triton.jit
def _operand(x):
    """As the matrix unit takes it: float32 rounded to TF32's digits, which the unit would cut off.

    The interpreter multiplies 16-bit numbers wrongly: it gets them in float32.
    """
    if not COMPILED:
        return x.to(tl.float32)
    elif x.dtype == tl.float32:
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit(do_not_specialize=["B"])
def products_kernel(
    x, h, weight_ih, weight_hh,  # [B, D], [B, H], [N, D], [N, H]; h is None where the state is 0
    from_x, from_h,  # [B, N]
    B,
    D: tl.constexpr, H: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of W_x x or, after all of those, of W_h h', for all rows; the contraction in blocks, in order."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tile, left, weight, out, K = tl.program_id(0), x, weight_ih, from_x, D
    if h is not None:  # chosen here and not in two loops, which would not share their shared memory
        first = tile < TILES
        left, out = tl.where(first, x, h), tl.where(first, from_x, from_h)
        weight = tl.where(first, weight_ih, weight_hh)
        tile = tl.where(first, tile, tile - TILES)
        if D != H:
            K = tl.where(first, D, H)
    columns, rows = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    column_ok, row_ok = (columns < N)[None, :], (rows < B)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(0, (K + DEPTH - 1) // DEPTH, num_stages=STAGES):
        k = block * DEPTH + tl.arange(0, DEPTH)
        a = tl.load(left + rows[:, None] * K + k[None, :], mask=row_ok & (k < K)[None, :], other=0.0)
        w = tl.load(weight + wide(columns)[None, :] * K + k[:, None], mask=column_ok & (k < K)[:, None], other=0.0)
        total = tl.dot(_operand(a), _operand(w), total, input_precision="tf32" if COMPILED else "ieee")
    at = out + rows[:, None] * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_ok & column_ok)


@triton.jit
def _gates_of(at, j, ok, H: tl.constexpr, G: tl.constexpr):
    """A row of gates in float32; what is not there is 0."""
    if at is None:
        zero = tl.zeros(j.shape, tl.float32)
        return zero, zero, zero, zero
    else:
        return floats(load_gates(at, j, ok, H, G))


@triton.jit
def _masked(y, ok):
    return tl.where(ok, y[0], 0.0), tl.where(ok, y[1], 0.0), tl.where(ok, y[2], 0.0), tl.where(ok, y[3], 0.0)


@triton.jit
def _normalised(y, ok, eps, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr):
    """x^ and 1/deviation of each gate; the mean first, then what rounding left in it: constant rows become 0."""
    for _ in tl.static_range(2):
        mean = group_means(y, H, G, SPLIT)
        y = _masked((y[0] - mean[0], y[1] - mean[1], y[2] - mean[2], y[3] - mean[3]), ok)
    rstd = inverse_deviations((rounded_products(y, y),), H, eps, G, SPLIT, STD)
    return multiply(y, rstd), rstd


@triton.jit
def _affine(y, gain, bias, j, ok, H: tl.constexpr, G: tl.constexpr):
    """y times the gain plus the bias, where they are."""
    if gain is not None:
        y = multiply(y, floats(load_gates(gain, j, ok, H, G)))
    if bias is not None:
        y = add(y, floats(load_gates(bias, j, ok, H, G)))
    return y


@triton.jit
def _summed_inputs(from_x, from_h, gain_x, gain_h, bias_x, bias_h, at, j, ok, eps, SITE: tl.constexpr,
                   SPLIT: tl.constexpr, STD: tl.constexpr, H: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Both sides of the gates as the cell sees them, their x^ and 1/deviation; of a normed sum the second is all."""
    x = _gates_of(from_x + at, j, ok, H, G)
    h = _gates_of(from_h + at if from_h is not None else None, j, ok, H, G)
    if SITE == ON_SUM:
        h, rstd_h = _normalised(add(x, h), ok, eps, H, G, SPLIT, STD)
        seen = _affine(_affine(h, gain_h, bias_h, j, ok, H, G), None, bias_x, j, ok, H, G)
        return x, rstd_h, h, rstd_h, seen, seen
    elif SITE == ON_HH:
        x, rstd_x = _normalised(x, ok, eps, H, G, SPLIT, STD)
        h, rstd_h = _normalised(h, ok, eps, H, G, SPLIT, STD)
        return x, rstd_x, h, rstd_h, _affine(x, gain_x, bias_x, j, ok, H, G), _affine(h, gain_h, bias_h, j, ok, H, G)
    else:
        one = (1.0, 1.0, 1.0, 1.0)
        return x, one, h, one, _affine(x, None, bias_x, j, ok, H, G), _affine(h, None, bias_h, j, ok, H, G)


@triton.jit
def _state(at, row, j, ok):
    if at is None:
        return tl.zeros(j.shape, tl.float32)
    else:
        return tl.load(at + row + j, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _kept(keep, row, j, ok, RATE: tl.constexpr):
    """Zoneout's weight of the old state: one number, or a mask [B, H]."""
    if RATE:
        return tl.load(keep).to(tl.float32)
    else:
        return tl.load(keep + row + j, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _normed_cell(c, ok, eps, H: tl.constexpr, STD: tl.constexpr):
    """c^ and its 1/deviation."""
    for _ in tl.static_range(2):
        c = tl.where(ok, c - tl.sum(c, 0) * (1.0 / H), 0.0)
    rstd = inverse_deviation(tl.sum(rounded(c, c), 0) * (1.0 / H), eps, STD)
    return c * rstd, rstd


@triton.jit
def _lstm(a, c_old, gain_cell, bias_cell, j, ok, eps, CELL_NORM: tl.constexpr, STD: tl.constexpr, H: tl.constexpr,
          QUICK: tl.constexpr):  # fmt: skip
    """The gates, the new c, what of it the output gate sees; of the cell's norm c^, 1/deviation and gain."""
    i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3], QUICK)
    c = tl.where(ok, f * c_old + i * g, 0.0)
    if CELL_NORM:
        gain, bias = load_cell(gain_cell, bias_cell, j, ok)
        centred, rstd = _normed_cell(c, ok, eps, H, STD)
        return (i, f, g, o), c, centred * gain + bias, centred, rstd, gain
    else:
        return (i, f, g, o), c, c, c, 1.0, 1.0


@triton.jit
def forward_kernel(
    from_x, from_h,  # [B, G*H]; from_h is None where the state is 0
    gain_x, gain_h, bias_x, bias_h, gain_cell, bias_cell,  # [G*H] four times, [H] twice
    h, c,  # [B, H]; None is 0
    keep_h, keep_c,  # [B, H] or one number
    h_new, c_new,  # [B, H]
    eps,
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    b, j = wide(tl.program_id(0)), units_of(BLOCK)
    ok, row = j < H, b * H
    QUICK: tl.constexpr = quick_enough(h_new.dtype.element_ty)
    h_old, c_old = _state(h, row, j, ok), _state(c, row, j, ok)
    _, _, _, _, x, a = _summed_inputs(from_x, from_h, gain_x, gain_h, bias_x, bias_h, b * (G * H), j, ok, eps, SITE,
                                      SPLIT, STD, H, G)  # fmt: skip
    if (SITE != ON_SUM) & (CELL != GRU):
        a = add(x, a)
    if CELL == LSTM:
        gates, new_c, seen, _, _, _ = _lstm(a, c_old, gain_cell, bias_cell, j, ok, eps, CELL_NORM, STD, H, QUICK)
        new_h = gates[3] * tanh(seen, QUICK)
        if CARRY:
            new_c = seen
        if keep_c is not None:
            keep = _kept(keep_c, row, j, ok, RATE_C)
            new_c = keep * c_old + (1.0 - keep) * new_c
        tl.store(c_new + row + j, new_c.to(c_new.dtype.element_ty), mask=ok)
    elif CELL == RNN:
        new_h = rnn_forward(a[0], RELU, QUICK)
    else:
        if CELL == GRU:
            _, z, n = gru_gates(x[0], x[1], x[2], a[0], a[1], a[2], QUICK)
        else:
            _, z, n = dreamer_gates(a[0], a[1], a[2], QUICK)
        new_h = gru_forward(z, n, h_old)
    if keep_h is not None:
        keep = _kept(keep_h, row, j, ok, RATE_H)
        new_h = keep * h_old + (1.0 - keep) * new_h
    tl.store(h_new + row + j, new_h.to(h_new.dtype.element_ty), mask=ok)


@triton.jit
def _add_share(shares, place, value, j, ok, FIRST):
    """To this program's share of a parameter's gradient; each number is one thread's own."""
    before = tl.load(shares + place + j, mask=ok & (not FIRST), other=0.0)
    tl.store(shares + place + j, before + value, mask=ok)


@triton.jit
def _add_shares(shares, place, value, j, ok, first, H: tl.constexpr, G: tl.constexpr):
    for gate in tl.static_range(G):
        _add_share(shares, place + gate * H, value[gate], j, ok, first)


@triton.jit
def _back_through(d, normed, rstd, gain, j, ok, eps, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr,
                  STD: tl.constexpr):  # fmt: skip
    """From the gradient of a norm's output to that of its input."""
    if gain is not None:
        d = rounded_products(d, floats(load_gates(gain, j, ok, H, G)))
    mean, slope = projections((d,), (rounded_products(d, normed),), H, G, SPLIT)
    return through_norm(d, normed, rstd, mean, corrected(slope, rstd, eps, STD))


@triton.jit(do_not_specialize=["B"])
def backward_kernel(
    from_x, from_h, gain_x, gain_h, bias_x, bias_h, gain_cell, bias_cell, h, c, keep_h, keep_c,  # as forward has them
    d_h, d_c,  # [B, H]: of the new state; None is 0
    d_from_x, d_from_h,  # [B, G*H]: one tensor where they are alike
    d_h_old, d_c_old,  # [B, H]: what reaches the old h past the product (None where nothing does), and the old c
    shares,  # [programs, 4*G*H + 2*H] float32; None where no gain and no bias is trained
    B, eps,
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every so many-th row."""
    j = units_of(BLOCK)
    ok = j < H
    QUICK: tl.constexpr = quick_enough(d_from_x.dtype.element_ty)
    if shares is not None:
        shares += wide(tl.program_id(0)) * (4 * G * H + 2 * H)
    for at in tl.range(tl.program_id(0), B, tl.num_programs(0), num_stages=1):
        b, first = wide(at), at == tl.program_id(0)
        row = b * H
        h_old, c_old = _state(h, row, j, ok), _state(c, row, j, ok)
        dh, dc = _state(d_h, row, j, ok), _state(d_c, row, j, ok)
        past, past_c = tl.zeros_like(dh), tl.zeros_like(dh)
        if keep_h is not None:
            keep = _kept(keep_h, row, j, ok, RATE_H)
            past, dh = keep * dh, (1.0 - keep) * dh
        if keep_c is not None:
            keep = _kept(keep_c, row, j, ok, RATE_C)
            past_c, dc = keep * dc, (1.0 - keep) * dc

        # The cell, made anew.
        normed_x, rstd_x, normed_h, rstd_h, x, a = _summed_inputs(
            from_x, from_h, gain_x, gain_h, bias_x, bias_h, b * (G * H), j, ok, eps, SITE, SPLIT, STD, H, G
        )
        if (SITE != ON_SUM) & (CELL != GRU):
            a = add(x, a)
        if CELL == LSTM:
            gates, _, seen, centred, rstd, gain = _lstm(
                a, c_old, gain_cell, bias_cell, j, ok, eps, CELL_NORM, STD, H, QUICK
            )
            i, f, g, o = gates
            d_o, d_seen = lstm_output_backward(o, tanh(seen, QUICK), dh)
            if CARRY:
                d_seen += dc
            if CELL_NORM:
                if shares is not None:
                    _add_share(shares, 4 * G * H, d_seen, j, ok, first)
                    _add_share(shares, 4 * G * H + H, d_seen * centred, j, ok, first)
                d_seen = tl.where(ok, rounded(d_seen, tl.zeros_like(d_seen) + gain), 0.0)
                mean = tl.sum(d_seen, 0) * (1.0 / H)
                slope = tl.sum(rounded(d_seen, centred), 0) * (1.0 / H) * std_correction(rstd, eps, STD)
                d_seen = tl.where(ok, (d_seen - mean - centred * slope) * rstd, 0.0)
            if not CARRY:
                d_seen += dc
            d_i, d_f, d_g, dc = lstm_cell_backward(i, f, g, c_old, d_seen)
            tl.store(d_c_old + row + j, (dc + past_c).to(d_c_old.dtype.element_ty), mask=ok)
            d_x = (d_i, d_f, d_g, d_o)
        elif CELL == RNN:
            d = rnn_backward(rnn_forward(a[0], RELU, QUICK), dh, RELU)
            d_x = (d, d, d, d)
        else:
            if CELL == GRU:
                r, z, n = gru_gates(x[0], x[1], x[2], a[0], a[1], a[2], QUICK)
            else:
                r, z, n = dreamer_gates(a[0], a[1], a[2], QUICK)
            d_r, d_z, d_n, over = gru_backward(r, z, n, a[2], h_old, dh)
            past += over
            if CELL != GRU:
                d_z = -d_z  # z falls where dreamer's u rises
            d_x = (d_r, d_z, d_n, d_n)
        d_x = _masked(d_x, ok)
        d = d_x  # the recurrent side's
        if (CELL != LSTM) & (CELL != RNN):
            d = (d_x[0], d_x[1], d_x[2] * r, d_x[2])
        if (CELL != LSTM) & (CELL != RNN) & (CELL != GRU):
            d_x = d
        if d_h_old is not None:
            tl.store(d_h_old + row + j, past.to(d_h_old.dtype.element_ty), mask=ok)
        if shares is not None:
            _add_shares(shares, BIAS_X * G * H, d_x, j, ok, first, H, G)
            if CELL == GRU:
                _add_shares(shares, BIAS_H * G * H, d, j, ok, first, H, G)
            if SITE == ON_HH:
                _add_shares(shares, GAIN_X * G * H, multiply(d_x, normed_x), j, ok, first, H, G)
            if SITE != NOWHERE:
                _add_shares(shares, GAIN_H * G * H, multiply(d, normed_h), j, ok, first, H, G)

        # The norms.
        if SITE != NOWHERE:
            d = _back_through(d, normed_h, rstd_h, gain_h, j, ok, eps, H, G, SPLIT, STD)
        if SITE == ON_HH:
            d_x = _back_through(d_x, normed_x, rstd_x, gain_x, j, ok, eps, H, G, SPLIT, STD)
        if SITE == ON_SUM:
            d_x = d
        store_gates(d_from_x + b * (G * H), d_x, j, ok, H, G)
        if d_from_h is not None:
            store_gates(d_from_h + b * (G * H), d, j, ok, H, G)
