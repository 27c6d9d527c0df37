"""Backward kernel on a CPU: all steps of some rows of the batch, from the last step to the first.

Activations are recomputed from what forward saved: W_x x before its norm, and x^ of the recurrent product.
"""

from __future__ import annotations

import numpy as np

from . import rows
from .call_parts import (
    DREAMER,
    GRU,
    LSTM,
    NOTES,
    NOWHERE,
    ON_SUM,
    alive,
    case_of,
    count_of,
    gates_alike,
    norms,
    old_c,
    old_h,
    row_of,
    share_of,
    slots_of,
)  # fmt: skip
from .jit import apart, bytes_of, call_at, meet, numbers, part
from .machine import VECTORS
from .matmul import PANEL, outer, pack_share, product, project, row_times
from .rows import moments, slopes

BLOCK = 64  # rows of one float32 sum: a single sum over two million rows is off by 7e-4 of its value


@part
def _lstm_back(p, a, dh, dc, c_old, seen, share, like):
    """Replace the gates' summed inputs in ``a`` by their gradients, and dc by that of the old c; dh: gradient of h."""
    apart()
    size, H = bytes_of(like), p.hidden
    step = H * size
    i, f, g, o, c, d = a, a + step, a + 2 * step, a + 3 * step, seen, seen + step
    total = rows.lstm_again(i, f, g, o, c_old, c, H, like)
    if not p.cell_norm:
        rows.through_output(o, c, dh, d, H, like)
        rows.through_cell(i, f, g, c_old, d, dc, H, like)
        return
    eps, std = numbers(p.eps, 1, like)[0], p.std != 0
    mean, rstd = moments(c, H, total, eps, std, like)
    gain, bias, to_bias = p.gain_cell, p.bias_cell, share + 4 * p.gates * step
    if p.carry:
        sums = rows.through_carried_output(o, c, gain, bias, dh, d, to_bias, to_bias + step, dc, H, mean, rstd, like)
        rows.fill(dc, H, like, like)
    else:
        sums = rows.through_normed_output(o, c, gain, bias, dh, d, to_bias, to_bias + step, H, mean, rstd, like)
    level, slope = slopes(sums[0], sums[1], H, rstd, eps, std, like)
    rows.through_norm(d, c, H, mean, rstd, rstd, level, slope, like)
    rows.through_cell(i, f, g, c_old, d, dc, H, like)


@part
def _through_side(p, d, candidate, y, gain, groups, sizes, given, rstds, share, out, like):
    """Propagate gradients of a normalised side to its product; ``candidate``: those of a GRU's candidate.

    ``given``: mean and 1/deviation that turn y into x^, two numbers per gate; ``rstds``: 1/deviation of each group,
    0: take them from ``given``.
    """
    apart()
    size, H = bytes_of(like), p.hidden
    span, gate = p.gates * H * size, 0
    eps, std, counts = numbers(p.eps, 1, like)[0], p.std != 0, numbers(sizes, groups, np.int64(0))
    known = numbers(given, 2 * p.gates, like)
    for group in range(groups):
        begin, along, total = gate * H * size, like, like
        mean, rstd = known[2 * gate], known[2 * gate + 1]
        until = gate + counts[group]
        while gate < until:
            alike = gates_alike(p, gate, groups, sizes)
            off, source = gate * H * size, d + gate * H * size
            if p.cell == GRU and gate == 2:
                source = candidate
            sums = rows.gathered(source, y + off, gain + off, share + off, share + span + off, out + off, alike * H,
                                 mean, rstd, like)  # fmt: skip
            total, along = total + sums[0], along + sums[1]
            gate += alike
        deviation = rstd if rstds == 0 else numbers(rstds, groups, like)[group]
        level, slope = slopes(total, along, counts[group] * H, deviation, eps, std, like)
        rows.through_norm(out + begin, y + begin, counts[group] * H, mean, rstd, deviation, level, slope, like)


@part
def _passed(p, d, candidate, share, out, like):
    """Propagate gradients of a side without a norm, and add those of its bias."""
    apart()
    size, H = bytes_of(like), p.hidden
    gate = 0
    while gate < p.gates:
        alike = gates_alike(p, gate, np.int64(0), p.sizes)
        off, source = gate * H * size, d + gate * H * size
        if p.cell == GRU and gate == 2:
            source = candidate
        rows.passed(source, share + off, out + off, alike * H, like)
        gate += alike


@part
def _through_norms(p, row, d, candidate, notes, d_raw, d_summed, share, like):
    """Propagate gradients of the summed inputs to the products, and to gains and biases.

    ``candidate``: gradient of the recurrent side of a GRU's candidate; that of its input side is in ``d``.
    """
    apart()
    size, W = bytes_of(like), p.gates * p.hidden
    xhat, x = p.xhat + row * W * size, p.summed + row * W * size
    if p.site == NOWHERE:
        _passed(p, d, candidate, share, d_raw, like)
    else:
        rstds = p.rstd + row * p.groups * size
        kept = notes + NOTES // 2 * size  # xhat is normalised already: mean 0, 1/deviation 1
        norms(p, xhat, np.int64(0), p.sizes, kept, like)
        _through_side(p, d, candidate, xhat, p.gain, p.groups, p.sizes, kept, rstds, share, d_raw, like)
    candidate = d + 2 * p.hidden * size
    if p.site == ON_SUM:
        rows.copy(d_raw, d_summed, W, like)
    elif p.norm_x:
        there, none = share + 2 * W * size, np.int64(0)
        _through_side(p, d, candidate, x, p.gain_x, p.groups_x, p.sizes_x, notes, none, there, d_summed, like)
    else:
        _passed(p, d, candidate, share + 2 * W * size, d_summed, like)


@part
def _sides_again(p, row, a, ah, notes, like):
    """Recompute the result of ``_sides`` from the saved x^."""
    apart()
    size, H = bytes_of(like), p.hidden
    W = p.gates * H
    x, xhat = p.summed + row * W * size, p.xhat + row * W * size
    norms(p, x, p.groups_x, p.sizes_x, notes, like)
    of_x = numbers(notes, 2 * p.gates, like)
    gate = 0
    while gate < p.gates:
        alike, off = gates_alike(p, gate, p.groups_x, p.sizes_x), gate * H * size
        N = alike * H
        y, gain, bias, out = xhat + off, p.gain + off, p.bias + off, a + off
        if p.cell == GRU and gate == 2:
            rows.scaled(y, gain, bias, ah, H, like)
            if p.site == ON_SUM:
                rows.copy(p.bias_x + off, out, H, like)
            else:
                rows.affine(x + off, p.gain_x + off, p.bias_x + off, out, H, of_x[2 * gate], of_x[2 * gate + 1], like)
        elif p.site == ON_SUM:
            rows.scaled_and_bias(y, gain, bias, p.bias_x + off, out, N, like)
        else:
            rows.sides_again(y, gain, bias, x + off, p.gain_x + off, p.bias_x + off, out, N, of_x[2 * gate],
                             of_x[2 * gate + 1], like)  # fmt: skip
        gate += alike


@part
def _backward_row(p, t, b, row, scratch, share, like):
    """Turn dh and dc of a case's state after step t into those before it, except for the part through the product."""
    size, H = bytes_of(like), p.hidden
    W, place, at = p.gates * H, b * H * size, (row - row_of(p, p.begin, np.int64(0))) * p.gates * H * size
    d_raw, d_summed, dh, dc, past = p.d_raw + at, p.d_summed + at, p.dh + place, p.dc + place, p.past + place
    if p.d_out != 0:
        rows.plus(dh, p.d_out + (t * p.batch + b) * H * size, dh, H, like)
    rows.fill(past, H, like, like)
    a = scratch + NOTES * size
    ah, seen, past_c = a + W * size, a + (W + H) * size, a + (W + 3 * H) * size
    if p.keep_h != 0:
        rows.split(p.keep_h + t * p.keep_h_t + b * p.keep_h_b, dh, past, H, like)
    _sides_again(p, row, a, ah, scratch, like)
    h_old = old_h(p, t, b, like)
    if p.cell == LSTM:
        if p.keep_c != 0:
            rows.fill(past_c, H, like, like)
            rows.split(p.keep_c + t * p.keep_c_t + b * p.keep_c_b, dc, past_c, H, like)
        _lstm_back(p, a, dh, dc, old_c(p, t, b, like), seen, share, like)
        if p.keep_c != 0:
            rows.plus(dc, past_c, dc, H, like)
    elif p.cell == GRU:
        rows.through_gru(a, a + H * size, a + 2 * H * size, ah, h_old, dh, past, H, like)
    elif p.cell == DREAMER:
        rows.through_dreamer(a, a + H * size, a + 2 * H * size, h_old, dh, past, H, like)
    elif p.relu:
        rows.through_relu(a, dh, H, like)
    else:
        rows.through_tanh(a, dh, H, like)
    _through_norms(p, row, a, ah, scratch, d_raw, d_summed, share, like)


@part
def _arrived(p, t, b, through, like):
    """Write dh of the state before a step: the part through the product, masked by dropout, and the part past it."""
    row, H = b * p.hidden * bytes_of(like), p.hidden
    dh, dc = p.dh + row, p.dc + row
    if p.drop != 0:
        rows.times(through, p.drop + row, through, H, like)
    rows.plus(through, p.past + row, dh, H, like)
    if p.resets != 0 and numbers(p.resets, (t + 1) * p.batch, np.uint8(0))[t * p.batch + b]:
        rows.plus(p.d_reset_h + row, dh, p.d_reset_h + row, H, like)
        rows.fill(dh, H, like, like)
        if p.cell == LSTM:
            rows.plus(p.d_reset_c + row, dc, p.d_reset_c + row, H, like)
            rows.fill(dc, H, like, like)


@part
def add_block(share, total, count, like):
    """Add a block's sums to the float64 totals, and clear them for the next block."""
    apart()
    block, sums = numbers(share, count, like), numbers(total, count, np.float64(0.0))
    for n in range(count):
        sums[n] += block[n]
        block[n] = like


@part
def _pack_both(p, thread, like):
    """Pack the matrices of a single step, for products of several rows."""
    W = p.gates * p.hidden
    pack_share(p.weight, W, p.hidden, False, p.packed, thread, p.threads, like)
    if p.dx != 0:
        pack_share(p.weight_x, W, p.depth, False, p.packed_dx, thread, p.threads, like)
    if p.threads > 1:
        meet()


@part
def _single_step(p, thread, first, last, spare, like):
    """Compute the gradients of a single step's input and matrices."""
    W, size = p.gates * p.hidden, bytes_of(like)
    if p.dx != 0:
        left, out = p.d_summed + first * W * size, p.dx + first * p.depth * size
        if p.packed_dx == 0:
            row_times(left, W, p.weight_x, p.depth, np.int64(0), p.depth, out, like)
        else:
            project(left, last - first, W, p.packed_dx, p.depth, out, p.depth, spare, like)
    if p.d_weight == 0 and p.d_weight_x == 0:
        return
    if p.threads > 1:
        meet()
    count = (W * size + PANEL - 1) // PANEL
    begin, end = count * thread // p.threads, count * (thread + 1) // p.threads
    if p.d_weight != 0:
        outer(p.d_raw, p.reset_h, p.batch, W, p.hidden, p.d_weight, begin, end, False, spare, like)
    if p.d_weight_x != 0:
        outer(p.d_summed, p.left, p.batch, W, p.depth, p.d_weight_x, begin, end, False, spare, like)


@part
def _product_of_columns(p, left, count, thread, like):
    """Compute a thread's columns of the gradients that reach the old states of all rows."""
    apart()
    H, W = p.hidden, p.gates * p.hidden
    if p.packed == 0:  # one case
        begin, end = share_of(H, thread, p.threads, np.int64(16))
        row_times(left, W, p.weight, H, begin, end, p.z, like)
    else:
        begin, end = share_of(p.vectors, thread, p.threads, np.int64(VECTORS))
        panel = begin // VECTORS
        packed, z = p.packed + panel * W * PANEL, p.z + panel * PANEL
        product(left, W, count, W, packed, end - begin, z, p.z_row, like)


@part
def backward_rows(address, thread, like):
    """Run steps end - 1 down to begin of a thread's rows."""
    p, size = call_at(address), bytes_of(like)
    H, scratch = p.hidden, p.scratch + thread * p.scratch_size * size
    W = p.gates * H
    first, last, step, at, hop = slots_of(p, thread)
    if p.packs:
        _pack_both(p, thread, like)
    sums, rows_in_block = (4 * p.gates + 2) * H, 0
    share, total = p.shares + thread * sums * size, p.totals + thread * sums * 8
    before = row_of(p, p.begin, np.int64(0))
    for back in range(p.end - p.begin):
        t = p.end - 1 - back
        busy = alive(p, t)
        count = count_of(first, min(busy, last), step)
        for n in range(count):
            slot = first + n * step
            _backward_row(p, t, case_of(p, slot), row_of(p, t, slot), scratch, share, like)
            rows_in_block += 1
            if rows_in_block == BLOCK:
                add_block(share, total, sums, like)
                rows_in_block = 0
        if p.shared:
            meet()  # the gradients of all rows are complete
            if busy > 0:
                left = p.d_raw + (row_of(p, t, np.int64(0)) - before) * W * size
                _product_of_columns(p, left, busy, thread, like)
            meet()  # all columns of the product are complete
        elif count > 0:
            left = p.d_raw + (row_of(p, t, first) - before) * W * size
            if p.packed == 0:  # one case
                row_times(left, W, p.weight, H, np.int64(0), H, p.z, like)
            else:
                product(left, W * step, count, W, p.packed, p.vectors, p.z + at * p.z_row * size, p.z_row, like)
        for n in range(count):
            _arrived(p, t, case_of(p, first + n * step), p.z + (at + n * hop) * p.z_row * size, like)
    if p.left != 0:
        _single_step(p, thread, first, last, scratch + (W + 6 * H + 64) * size, like)
    add_block(share, total, sums, like)
