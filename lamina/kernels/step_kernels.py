"""Kernels of the stepwise path: all of a step but its product, one program for each row of the batch.

A row is whole in its program, so norms are exact and nobody waits for anybody. A table in memory tells a kernel where
the tensors of the call lie and which step it is: ``steps`` says why.

Vectors have powers of two as lengths, and a long row filled up to the next of them would be instructions for nothing,
up to half of all. So it comes in two PARTS, BLOCK units and then REST of them, where that is less
(``steps.row_parts``). Each stretch of a kernel is a loop over the parts and leaves a tuple with an entry for each; the
sums over the row lie between stretches, and the threads meet once for both parts. A stretch loads before it stores:
loads are not moved past stores, so the second part's would go out late.

Gates are ``gates``' tuples of four vectors. An argument that is None is a thing the recurrence does not have, and costs
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import (  # fmt: skip
    COMPILED,
    GRU,
    LSTM,
    NOWHERE,
    ON_SUM,
    RNN,
    dreamer_gates,
    fitting,
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
    STREAMED,
    add,
    centred_row,
    corrected,
    floats,
    inverse_deviations,
    joined,
    largest_gate,
    load_cell,
    load_gates,
    load_statistics,
    multiply,
    parts_of,
    projections,
    rounded_products,
    store_gates,
    store_statistics,
    through_norm,
    two_sums,
)

# The table of a pass: the number of steps, addresses of tensors, and from CLOCKS on each row's step.
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


@triton.jit
def _kept(keep, step, j, ok, H: tl.constexpr, RATE: tl.constexpr):
    """Zoneout's weight of the old state: one number, or a mask [T, B, H]."""
    if RATE:
        return tl.load(keep).to(tl.float32)
    else:
        return tl.load(keep + step * H + j, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _all_fetched(BLOCK: tl.constexpr):
    """0, once every load above is on its way; what is made of what they bring shall have it added.

    Left to itself, the assembler puts loads off until something made of the first ones is out of the way, and the
    program waits for memory twice or more. It moves arithmetic past a barrier, but not what needs the barrier's own
    result. The longest rows have no registers for all loads at once.
    """
    if COMPILED & (BLOCK <= 4096):
        zero = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $1, $1; bar.red.popc.u32 $0, 0, p; }", "=r,r",
            [tl.full((), 0, tl.int32)], tl.int32, False, 1)  # fmt: skip
        return zero.to(tl.float32, bitcast=True)
    else:
        return 0.0


@triton.jit
def _load_shares(d_h, row, plane, j, ok, SHARES: tl.constexpr):
    """A row of a product, whose shares lie in planes."""
    found = ()
    for part in tl.static_range(SHARES):
        found = found + (tl.load(d_h + part * plane + row + j, mask=ok, other=0.0),)
    return found


@triton.jit
def _added_up(shares):
    total = shares[0].to(tl.float32)
    for part in tl.static_range(1, len(shares)):
        total += shares[part].to(tl.float32)
    return total


@triton.jit
def _row_scale(reach, b):
    """What brings a row's h into float16's range, and its inverse; without a bound of its own it is at most 1."""
    bound = tl.full((), 1.0, tl.float32)
    if reach is not None:
        bound = tl.load(reach + b)
    return fitting(bound)


@triton.jit
def begin_kernel(
    h, c, drop,  # [B, H] of any dtype; None is 0
    resets, reset_h,  # [T, B], [B, H] float32
    most, reach,  # of scaled factors, as forward has them
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
    if resets is not None:
        restarts = tl.load(resets + tl.program_id(0)) != 0
        new_h = tl.load(reset_h + row + j, mask=ok & restarts, other=0.0).to(hist.dtype.element_ty)
        rounded = tl.where(restarts, new_h, rounded)
    if drop is not None:
        rounded = (rounded.to(tl.float32) * tl.load(drop + row + j, mask=ok, other=0.0)).to(hist.dtype.element_ty)
    if most is not None:
        rounded *= _row_scale(reach, tl.program_id(0))[0]
    if operand is not None:
        tl.store(operand + row + j, rounded.to(operand.dtype.element_ty), mask=ok)


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
    reset_h, reset_c,  # [B, H] float32: the state after a reset
    most, reach,  # [1], [B], where factors are scaled float16: bounds of the weights and of each row's h
    y,  # [SHARES, B, G*H]: W~ h', to be added up
    operand,  # [B, H]: h' of the next product; None where that finds it in hist
    carried,  # [2, B, H] float32: the initial h, and the last one where its rounded form in hist would not do
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, SHARES: tl.constexpr,
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
    reset_h = _there(reset_h, table, 16) if reset_h is not None else None
    reset_c = _there(reset_c, table, 17) if reset_c is not None else None
    most = _there(most, table, 18) if most is not None else None
    reach = _there(reach, table, 19) if reach is not None else None
    units, there = parts_of(H, BLOCK, REST)
    QUICK: tl.constexpr = quick_enough(hist.dtype.element_ty)
    PARTS: tl.constexpr = 2 if REST else 1
    row, plane = b * H, wide(B) * H
    step = wide(t) * B + b
    KEPT: tl.constexpr = (G + 1) * H if CELL_NORM else G * H

    # Everything is fetched before the first sum makes the threads wait for each other.
    before = wide(t) * plane + row  # where the histories have the state before this step
    if resets is not None:
        restarted = tl.load(resets + step) != 0
    fetched = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        c_old, h_old, gains, biases, keeps_h, keeps_c = 0, 0, 0, 0, 0, 0  # tuples take no None
        parameters, drops = 0, 0
        inputs = load_gates(x + step * (G * H), j, ok, H, G, STREAMED)
        if CELL == LSTM:
            c_old = tl.load(c_hist + before + j, mask=ok, other=0.0, eviction_policy=STREAMED)
        if carried is not None:
            h_old = tl.load(carried + tl.where(t > 0, plane, 0) + row + j, mask=ok, other=0.0)
        if resets is not None:
            if CELL == LSTM:
                c_old = tl.where(restarted, tl.load(reset_c + row + j, mask=ok & restarted, other=0.0), c_old)
            if carried is not None:
                h_old = tl.where(restarted, tl.load(reset_h + row + j, mask=ok & restarted, other=0.0), h_old)
        if gain is not None:
            gains = load_gates(gain, j, ok, H, G)
        if bias is not None:
            biases = load_gates(bias, j, ok, H, G)
        if keep_h is not None:
            keeps_h = _kept(keep_h, step, j, ok, H, RATE_H)
        if keep_c is not None:
            keeps_c = _kept(keep_c, step, j, ok, H, RATE_C)
        if CELL_NORM:
            parameters = load_cell(gain_cell, bias_cell, j, ok)
        if drop is not None:
            drops = tl.load(drop + row + j, mask=ok, other=0.0)
        fetched = fetched + ((inputs, c_old, h_old, gains, biases, keeps_h, keeps_c, parameters, drops),)
    raw = ()
    for p in tl.static_range(PARTS):
        a = load_gates(y + b * (G * H), units[p], there[p], H, G)
        for share in tl.static_range(1, SHARES):
            a = add(a, load_gates(y + (share * B + b) * (G * H), units[p], there[p], H, G))
        raw = raw + (a,)
    _all_fetched(BLOCK)

    # The product's norm.
    if most is not None:
        up, down = _row_scale(reach, b)
        down *= fitting(tl.load(most))[1]
    products, squares = (), ()
    for p in tl.static_range(PARTS):
        a = floats(raw[p])
        if most is not None:
            a = multiply(a, (down, down, down, down))
        if SITE == ON_SUM:
            a = add(a, fetched[p][0])
        products, squares = products + (a,), squares + (multiply(a, a),)
    if SITE != NOWHERE:
        rstd = inverse_deviations(squares, H, eps, G, SPLIT, STD)
        if stats is not None:
            store_statistics(stats + step * (G + 1), rstd, G, SPLIT)

    # The cell; what the outputs will need is fetched before anything is stored.
    if resets is not None:
        restarts = tl.load(resets + step + B, mask=t + 1 < T, other=0) != 0
    if lengths is not None:
        going = t < tl.load(lengths + b)
    needed = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        new_h = 0
        if resets is not None:
            new_h = tl.load(reset_h + row + j, mask=ok & restarts, other=0.0).to(hist.dtype.element_ty)
        needed = needed + (new_h,)
    cells, lets_out = (), ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        inputs, c_old, h_old, gains, biases, keeps_h, keeps_c, parameters, drops = fetched[p]
        a = products[p]
        if SITE != NOWHERE:
            a = multiply(a, rstd)
        if xhat is not None:
            store_gates(xhat + step * KEPT, a, j, ok, H, G, STREAMED)
        if gain is not None:
            a = multiply(a, floats(gains))
        if bias is not None:
            a = add(a, floats(biases))
        if (SITE != ON_SUM) & ((CELL == LSTM) | (CELL == RNN)):
            a = add(a, inputs)
        if CELL == LSTM:
            i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3], QUICK)
            cells, lets_out = cells + (f * c_old + i * g,), lets_out + (o,)
        elif CELL == RNN:
            cells = cells + (rnn_forward(a[0], RELU, QUICK),)
        else:
            if CELL == GRU:
                _, z, n = gru_gates(inputs[0], inputs[1], inputs[2], a[0], a[1], a[2], QUICK)
            else:
                _, z, n = dreamer_gates(a[0], a[1], a[2], QUICK)
            cells = cells + (gru_forward(z, n, h_old),)
    if CELL_NORM:
        apart, var = centred_row(cells, there, H)
        cell_rstd = inverse_deviation(var, eps, STD)
        if xhat is not None:
            tl.store(stats + step * (G + 1) + G, cell_rstd)

    # The outputs.
    states = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        inputs, c_old, h_old, gains, biases, keeps_h, keeps_c, parameters, drops = fetched[p]
        h, c = cells[p], cells[p]
        if CELL == LSTM:
            seen = c
            if CELL_NORM:
                seen = apart[p] * cell_rstd
                if xhat is not None:
                    normed = seen.to(xhat.dtype.element_ty)
                    tl.store(xhat + step * KEPT + G * H + j, normed, mask=ok, eviction_policy=STREAMED)
                seen = seen * parameters[0] + parameters[1]
            h = lets_out[p] * tanh(seen, QUICK)
            if CARRY:
                c = seen
        if keep_h is not None:
            h = keeps_h * h_old + (1.0 - keeps_h) * h
        if keep_c is not None:
            c = keeps_c * c_old + (1.0 - keeps_c) * c
        if lengths is not None:
            h = tl.where(going, h, h_old)
            if CELL == LSTM:
                c = tl.where(going, c, c_old)
        states = states + ((h, c),)
    after = (wide(t) + 1) * plane + row
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        h, c = states[p]
        new_h, drops = needed[p], fetched[p][8]
        last = ok & (t + 1 == T)
        rounded = h.to(hist.dtype.element_ty)
        tl.store(hist + after + j, rounded, mask=ok)
        tl.store(h_n + row + j, rounded, mask=last)
        if CELL == LSTM:
            tl.store(c_hist + after + j, c, mask=ok)
            tl.store(c_n + row + j, c.to(c_n.dtype.element_ty), mask=last)
        if carried is not None:
            tl.store(carried + plane + row + j, h, mask=ok)
        if operand is not None:
            if resets is not None:
                h = tl.where(restarts, new_h.to(tl.float32), h)
            if drop is not None:
                h *= drops.to(tl.float32)
            if most is not None:
                h *= up
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
    lengths, resets, keep_h, keep_c, drop, reset_h, reset_c,
    most,  # as forward has it
    d_now,  # [B, G*H]: this step's part of d_raw; None where the product finds it there
    d_h,  # [SHARES, B, H]: W~' d_raw of the step after, to be added up
    scale,  # [B], where factors are scaled float16: what d_h is to be multiplied by
    direct,  # [B, H] float32: what reaches the old h past the product
    d_c,  # [B, H] float32
    d_reset,  # [2, B, H] float32: gradients to h and c after a reset
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, RATE_H: tl.constexpr, RATE_C: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, SHARES: tl.constexpr,
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
    reset_h = _there(reset_h, table, 21) if reset_h is not None else None
    reset_c = _there(reset_c, table, 22) if reset_c is not None else None
    most = _there(most, table, 23) if most is not None else None
    units, there = parts_of(H, BLOCK, REST)
    QUICK: tl.constexpr = quick_enough(hist.dtype.element_ty)
    PARTS: tl.constexpr = 2 if REST else 1
    row, plane = b * H, wide(B) * H
    step = wide(t) * B + b
    inner = t + 1 < T
    KEPT: tl.constexpr = (G + 1) * H if CELL_NORM else G * H
    AGAIN: tl.constexpr = (CELL == LSTM) & (BLOCK > 2048)  # what is needed late is fetched again: registers are few

    # Everything is fetched before the first sum makes the threads wait for each other.
    before = wide(t) * plane + row
    if resets is not None:
        restarts = tl.load(resets + step) != 0
    fetched = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        inputs, c_old, h_old, centred, gains, biases, parameters = 0, 0, 0, 0, 0, 0, 0
        raw = load_gates(xhat + step * KEPT, j, ok, H, G, STREAMED)
        if SITE != ON_SUM:
            inputs = load_gates(x + step * (G * H), j, ok, H, G, STREAMED)
        if CELL == LSTM:
            c_old = tl.load(c_hist + before + j, mask=ok, other=0.0, eviction_policy=STREAMED)
            if resets is not None:
                c_old = tl.where(restarts, tl.load(reset_c + row + j, mask=ok & restarts, other=0.0), c_old)
        if (CELL != LSTM) & (CELL != RNN):
            h_old = tl.load(hist + before + j, mask=ok, other=0.0).to(tl.float32)
            if resets is not None:
                h_old = tl.where(restarts, tl.load(reset_h + row + j, mask=ok & restarts, other=0.0), h_old)
        if CELL_NORM:
            centred = tl.load(xhat + step * KEPT + G * H + j, mask=ok, other=0.0, eviction_policy=STREAMED)
            parameters = load_cell(gain_cell, bias_cell, j, ok)
        if gain is not None:
            gains = load_gates(gain, j, ok, H, G)
        if bias is not None:
            biases = load_gates(bias, j, ok, H, G)
        fetched = fetched + ((raw, inputs, c_old, h_old, centred, gains, biases, parameters),)
    if SITE != NOWHERE:
        rstd = load_statistics(stats + step * (G + 1), G, SPLIT)
    if CELL_NORM:
        cell_rstd = tl.load(stats + step * (G + 1) + G)

    # What arrives from the step after and from the outputs.
    if resets is not None:
        restarted = tl.load(resets + step + B, mask=inner, other=0) != 0
    if lengths is not None:
        going = t < tl.load(lengths + b)
    arriving = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        dc, drops, past_it, from_out = 0, 0, 0, 0
        through = _load_shares(d_h, row, plane, j, ok & inner, SHARES)
        if drop is not None:
            drops = tl.load(drop + row + j, mask=ok, other=0.0)
        if direct is not None:
            past_it = tl.load(direct + row + j, mask=ok & inner, other=0.0)
        if CELL == LSTM:
            dc = tl.load(d_c + row + j, mask=ok & inner, other=0.0)
        if d_out is not None:
            from_out = tl.load(d_out + step * H + j, mask=ok, other=0.0, eviction_policy=STREAMED)
        arriving = arriving + ((through, drops, past_it, dc, from_out),)
    if most is not None:
        unscaled = tl.load(scale + b, mask=inner, other=0.0)
    late = _all_fetched(BLOCK)
    arrived = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        last = ok & (t + 1 == T)
        through, drops, past_it, dc, from_out = arriving[p]
        dh = _added_up(through)
        if most is not None:
            dh *= unscaled
        if drop is not None:
            dh *= drops.to(tl.float32)
        if direct is not None:
            dh += past_it
        if resets is not None:
            gone = ok & restarted
            sent = tl.load(d_reset + row + j, mask=gone, other=0.0) + dh
            tl.store(d_reset + row + j, tl.where(gone, sent, 0.0), mask=gone | last)
            dh = tl.where(restarted, 0.0, dh)
            if CELL == LSTM:
                sent = tl.load(d_reset + plane + row + j, mask=gone, other=0.0) + dc
                tl.store(d_reset + plane + row + j, tl.where(gone, sent, 0.0), mask=gone | last)
                dc = tl.where(restarted, 0.0, dc)
        if d_out is not None:
            dh += from_out.to(tl.float32)
        if d_h_n is not None:
            dh += tl.load(d_h_n + row + j, mask=last, other=0.0).to(tl.float32)
        if d_c_n is not None:
            dc += tl.load(d_c_n + row + j, mask=last, other=0.0).to(tl.float32)
        past, past_c = tl.zeros_like(dh), tl.zeros_like(dh)
        if lengths is not None:
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
        arrived = arrived + ((dh, dc, past, past_c),)

    # The cell, made anew from what forward kept.
    cells, to_seen = (), ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        raw, inputs, c_old, h_old, centred, gains, biases, parameters = fetched[p]
        dh, dc, past, past_c = arrived[p]
        a = floats(raw)
        if gain is not None:
            a = multiply(a, floats(gains))
        if bias is not None:
            a = add(a, floats(biases))
        if (SITE != ON_SUM) & (CELL != GRU):
            a = add(a, inputs)
        a = add(a, (late, late, late, late))
        if CELL == LSTM:
            i, f, g, o = lstm_gates(a[0], a[1], a[2], a[3], QUICK)
            seen = f * c_old + i * g
            if CELL_NORM:
                seen = centred.to(tl.float32) * parameters[0] + parameters[1] + late
            d3, d_seen = lstm_output_backward(o, tanh(seen, QUICK), dh)
            cells = cells + ((i, f, g, d3),)
            if CARRY:
                d_seen += dc
            to_seen = to_seen + (d_seen,)
        elif CELL == RNN:
            cells = cells + (rnn_forward(a[0], RELU, QUICK),)
        else:
            if CELL == GRU:
                r, z, n = gru_gates(inputs[0], inputs[1], inputs[2], a[0], a[1], a[2], QUICK)
            else:
                r, z, n = dreamer_gates(a[0], a[1], a[2], QUICK)
            cells = cells + ((r, z, n, a[2]),)
    if CELL_NORM:
        to_centred, along_cell = (), ()
        for p in tl.static_range(PARTS):
            d_seen = to_seen[p].to(d_cell.dtype.element_ty)
            tl.store(d_cell + step * H + units[p], d_seen, mask=there[p], eviction_policy=STREAMED)
        for p in tl.static_range(PARTS):
            own_gain = fetched[p][7][0]
            if AGAIN:
                own_gain = load_cell(gain_cell, None, units[p], there[p])[0]
            d_seen = rounded(to_seen[p], own_gain.to(tl.float32))
            to_centred, along_cell = to_centred + (d_seen,), along_cell + (d_seen * fetched[p][4].to(tl.float32),)
        mean_cell, slope_cell = two_sums(joined(to_centred), joined(along_cell))
        mean_cell, slope_cell = mean_cell * (1.0 / H), slope_cell * (1.0 / H) * std_correction(cell_rstd, eps, STD)

    # Its gradients.
    to_gates = ()
    for p in tl.static_range(PARTS):
        j, ok = units[p], there[p]
        raw, inputs, c_old, h_old, centred, gains, biases, parameters = fetched[p]
        dh, dc, past, past_c = arrived[p]
        if CELL == LSTM:
            i, f, g, d3 = cells[p]
            d_seen = to_seen[p]
            if CELL_NORM:
                d_seen = (to_centred[p] - mean_cell - centred.to(tl.float32) * slope_cell) * cell_rstd
                d_seen = tl.where(ok, d_seen, 0.0)
            if not CARRY:
                d_seen += dc
            d0, d1, d2, dc = lstm_cell_backward(i, f, g, c_old, d_seen)
            tl.store(d_c + row + j, dc + past_c, mask=ok)
            d = (d0, d1, d2, d3)
        elif CELL == RNN:
            d0 = rnn_backward(cells[p], dh, RELU)
            d = (d0, d0, d0, d0)
        else:
            r, z, n, a_n = cells[p]
            d0, d1, d2, d3 = gru_backward(r, z, n, a_n, h_old, dh)
            past += d3
            if CELL != GRU:
                d1 = -d1  # z falls where dreamer's u rises
            d = (d0, d1, d2, d2)
        if direct is not None:
            tl.store(direct + row + j, past, mask=ok)
        if d_x is not None:
            store_gates(d_x + step * (G * H), d, j, ok, H, G, STREAMED)
        if (CELL != LSTM) & (CELL != RNN):
            d = (d0, d1, d2 * r, d2)
        if d_y is not None:
            store_gates(d_y + step * (G * H), d, j, ok, H, G, STREAMED)
        to_gates = to_gates + (d,)

    # The norm.
    if SITE != NOWHERE:
        to_normed, normed, along = (), (), ()
        for p in tl.static_range(PARTS):
            j, ok = units[p], there[p]
            raw, gains, d = fetched[p][0], fetched[p][5], to_gates[p]
            if AGAIN:
                raw = load_gates(xhat + step * KEPT, j, ok, H, G)
                if gain is not None:
                    gains = load_gates(gain, j, ok, H, G)
            if gain is not None:
                d = rounded_products(d, floats(gains))
            to_normed, normed = to_normed + (d,), normed + (floats(raw),)
            along = along + (multiply(d, normed[p]),)
        mean, slope = projections(to_normed, along, H, G, SPLIT)
        slope = corrected(slope, rstd, eps, STD)
        to_gates = ()
        for p in tl.static_range(PARTS):
            to_gates = to_gates + (through_norm(to_normed[p], normed[p], rstd, mean, slope),)
    for p in tl.static_range(PARTS):
        store_gates(d_raw + step * (G * H), to_gates[p], units[p], there[p], H, G)
    if most is not None:
        largest = ()
        for p in tl.static_range(PARTS):
            largest = largest + (largest_gate(to_gates[p], G),)
        up, down = fitting(tl.max(joined(largest, True), 0))
        tl.store(scale + b, down * fitting(tl.load(most))[1])
    if d_now is not None:
        for p in tl.static_range(PARTS):
            d = to_gates[p]
            if most is not None:
                d = multiply(d, (up, up, up, up))
            store_gates(d_now + b * (G * H), d, units[p], there[p], H, G)
    tl.debug_barrier()  # every thread has read the clock
    tl.store(table + CLOCKS + b, t - 1)


@triton.jit(do_not_specialize=["B"])
def end_kernel(
    d_h, scale, direct, d_c, d_reset, drop, resets,  # as backward's steps left them
    h_start, c_start, new_h, new_c,  # [B, H]
    B, H: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Gradients of one row's initial state and of its state after a reset."""
    j = tl.arange(0, BLOCK)
    ok, row, plane = j < H, wide(tl.program_id(0)) * H, wide(B) * H
    dh = _added_up(_load_shares(d_h, row, plane, j, ok, SHARES))
    if scale is not None:
        dh *= tl.load(scale + tl.program_id(0))
    if drop is not None:
        dh *= tl.load(drop + row + j, mask=ok, other=0.0).to(tl.float32)
    if direct is not None:
        dh += tl.load(direct + row + j, mask=ok, other=0.0)
    if resets is not None:
        restarts = tl.load(resets + tl.program_id(0)) != 0
        tl.store(new_h + row + j, tl.load(d_reset + row + j, mask=ok, other=0.0) + tl.where(restarts, dh, 0.0), mask=ok)
        dh = tl.where(restarts, 0.0, dh)
    tl.store(h_start + row + j, dh, mask=ok)
    if c_start is not None:
        dc = tl.load(d_c + row + j, mask=ok, other=0.0)
        if resets is not None:
            sent = tl.load(d_reset + plane + row + j, mask=ok, other=0.0)
            tl.store(new_c + row + j, sent + tl.where(restarts, dc, 0.0), mask=ok)
            dc = tl.where(restarts, 0.0, dc)
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
