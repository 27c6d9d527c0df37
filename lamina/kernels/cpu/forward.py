"""Forward kernel on a CPU: all steps of some rows of the batch.

Threads split the rows of the batch and need no barrier. Where a batch is small and its matrix large they split the
columns of the product instead, with a barrier before and after it: each then reads a part of the matrix, not all.
"""

from __future__ import annotations

import numpy as np

from . import rows
from .call_parts import (
    DREAMER,
    GRU,
    LSTM,
    NOTES,
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
from .matmul import PANEL, pack_share, product, project, row_times_transpose
from .rows import moments


@part
def _keep_deviations(p, row, notes, like):
    """Save 1/deviation of each group for backward."""
    kept, counts = numbers(p.rstd, (row + 1) * p.groups, like), numbers(p.sizes, p.groups, np.int64(0))
    found, gate = numbers(notes, 2 * p.gates, like), 0
    for group in range(p.groups):
        kept[row * p.groups + group] = found[2 * gate + 1]
        gate += counts[group]


@part
def _sides(p, row, z, a, ah, spare, notes, like):
    """Write the sum of each gate's two normalised sides to ``a``, the recurrent side of a GRU's candidate to ``ah``.

    x^ of the recurrent side is saved for backward, or goes to ``spare``.
    """
    apart()
    size, H = bytes_of(like), p.hidden
    W = p.gates * H
    x, xhat = p.summed + row * W * size, spare
    if p.xhat != 0:
        xhat = p.xhat + row * W * size
    if p.site == ON_SUM:
        rows.plus(x, z, z, W, like)
    below = notes + NOTES // 2 * size
    norms(p, x, p.groups_x, p.sizes_x, notes, like)
    norms(p, z, p.groups, p.sizes, below, like)
    if p.xhat != 0:
        _keep_deviations(p, row, below, like)
    of_x, of_z = numbers(notes, 2 * p.gates, like), numbers(below, 2 * p.gates, like)
    gate = 0
    while gate < p.gates:
        alike = min(gates_alike(p, gate, p.groups, p.sizes), gates_alike(p, gate, p.groups_x, p.sizes_x))
        N = alike * H
        off, mean, rstd = gate * H * size, of_z[2 * gate], of_z[2 * gate + 1]
        gain, bias = p.gain + off, p.bias + off
        gain_x, bias_x, mean_x, rstd_x = p.gain_x + off, p.bias_x + off, of_x[2 * gate], of_x[2 * gate + 1]
        if p.cell == GRU and gate == 2:
            rows.side(z + off, gain, bias, ah, xhat + off, H, mean, rstd, like)
            if p.site == ON_SUM:
                rows.copy(bias_x, a + off, H, like)
            else:
                rows.affine(x + off, gain_x, bias_x, a + off, H, mean_x, rstd_x, like)
        elif p.site == ON_SUM:
            rows.side_and_bias(z + off, gain, bias, bias_x, a + off, xhat + off, N, mean, rstd, like)
        else:
            rows.sides(z + off, gain, bias, x + off, gain_x, bias_x, a + off, xhat + off, N, mean, rstd, mean_x, rstd_x,
                       like)  # fmt: skip
        gate += alike


@part
def _lstm(p, a, c_old, c, h, like):
    """Compute c and h from the summed inputs of the gates."""
    apart()
    size, H = bytes_of(like), p.hidden
    step = H * size
    total = rows.lstm_cell(a, a + step, a + 2 * step, c_old, c, H, like)
    if not p.cell_norm:
        rows.lstm_output(a + 3 * step, c, h, H, like)
        return
    mean, rstd = moments(c, H, total, numbers(p.eps, 1, like)[0], p.std != 0, like)
    if p.carry:
        rows.affine(c, p.gain_cell, p.bias_cell, c, H, mean, rstd, like)
        rows.lstm_output(a + 3 * step, c, h, H, like)
    else:
        rows.lstm_normed_output(a + 3 * step, c, p.gain_cell, p.bias_cell, h, H, mean, rstd, like)


@part
def _forward_row(p, t, b, row, z, scratch, like):
    """Run one step of a case; ``row``: its row in tensors without padding, ``z``: its recurrent product."""
    size, H = bytes_of(like), p.hidden
    W, at, plane = p.gates * H, b * H * size, p.batch * H * size
    h_old, h_new = old_h(p, t, b, like), p.hist + (t + 1) * plane + at
    c_old, c_new = h_old, h_new
    if p.cell == LSTM:
        c_new = p.c_hist + (t + 1) * p.c_step + at
        c_old = old_c(p, t, b, like)
    a = scratch + NOTES * size
    ah, spare = a + W * size, a + (W + H) * size
    _sides(p, row, z, a, ah, spare, scratch, like)
    if p.cell == LSTM:
        if p.keep_c != 0:
            _lstm(p, a, c_old, ah, h_new, like)
            rows.mixed(p.keep_c + t * p.keep_c_t + b * p.keep_c_b, c_old, ah, c_new, H, like)
        else:
            _lstm(p, a, c_old, c_new, h_new, like)
    elif p.cell == GRU:
        rows.gru(a, a + H * size, a + 2 * H * size, ah, h_old, h_new, H, like)
    elif p.cell == DREAMER:
        rows.dreamer(a, a + H * size, a + 2 * H * size, h_old, h_new, H, like)
    elif p.relu:
        rows.relu(a, h_new, H, like)
    else:
        rows.tanh(a, h_new, H, like)
    if p.keep_h != 0:
        rows.mixed(p.keep_h + t * p.keep_h_t + b * p.keep_h_b, h_old, h_new, h_new, H, like)


@part
def _factor(p, t, first, step, count, at, hop, like):
    """Return the address of step t's left factor: history, or ``operand`` with gathered, reset or dropped rows.

    A thread gathers the rows of its slots: row ``at`` for its first slot, then every ``hop``-th.
    """
    size, H = bytes_of(like), p.hidden
    shared = p.shared != 0
    if p.operand == 0:
        return p.hist + (t * p.batch + (np.int64(0) if shared else first)) * H * size
    for n in range(count):
        b, out = case_of(p, first + n * step), p.operand + (at + n * hop) * H * size
        old = old_h(p, t, b, like)
        if p.drop != 0:
            rows.times(old, p.drop + b * H * size, out, H, like)
        else:
            rows.copy(old, out, H, like)
    return p.operand + (np.int64(0) if shared else at) * H * size


@part
def _recurrent_product(p, left, rows_, thread, at, like):
    """Compute W_h h of a step: a thread's rows, or its columns of all rows where threads share the columns."""
    apart()
    size, H = bytes_of(like), p.hidden
    if p.packed == 0:  # one case
        begin, end = np.int64(0), p.gates * H
        if p.shared:  # multiples of 16: the bits do not depend on the split
            begin, end = share_of(end, thread, p.threads, np.int64(16))
        row_times_transpose(left, H, p.weight, begin, end, p.z, like)
    elif p.shared:
        begin, end = share_of(p.vectors, thread, p.threads, np.int64(2 * VECTORS))
        panel = begin // VECTORS
        packed, z = p.packed + panel * H * PANEL, p.z + panel * PANEL
        product(left, H, rows_, H, packed, end - begin, z, p.z_row, like)
    else:
        product(left, H, rows_, H, p.packed, p.vectors, p.z + at * p.z_row * size, p.z_row, like)


@part
def _pack_both(p, thread, like):
    """Pack the matrices of a single step, for products of several rows."""
    pack_share(p.weight_x, p.depth, p.gates * p.hidden, True, p.packed_x, thread, p.threads, like)
    pack_share(p.weight, p.hidden, p.gates * p.hidden, True, p.packed, thread, p.threads, like)
    if p.threads > 1:
        meet()


@part
def _project_frame(p, first, last, spare, like):
    """Compute W_x x of a single step."""
    W, size = p.gates * p.hidden, bytes_of(like)
    left, out = p.left + first * p.depth * size, p.summed + first * W * size
    if p.packed_x == 0:
        row_times_transpose(left, p.depth, p.weight_x, np.int64(0), W, out, like)
    else:
        project(left, last - first, p.depth, p.packed_x, W, out, W, spare, like)


@part
def forward_rows(address, thread, like):
    """Run steps begin to end of a thread's rows."""
    p, size = call_at(address), bytes_of(like)
    H, scratch = p.hidden, p.scratch + thread * p.scratch_size * size
    W = p.gates * H
    first, last, step, at, hop = slots_of(p, thread)
    if p.packs:
        _pack_both(p, thread, like)
    if p.packed_x != 0 or p.weight_x != 0:
        _project_frame(p, first, last, scratch + (2 * W + 6 * H + 64) * size, like)
    for t in range(p.begin, p.end):
        busy = alive(p, t)
        count = count_of(first, min(busy, last), step)
        left = _factor(p, t, first, step, count, at, hop, like)
        if p.shared:
            meet()  # the left factor of all rows is complete
        filled = busy if p.shared else count
        if filled > 0:
            _recurrent_product(p, left, filled, thread, at, like)
        if p.shared:
            meet()  # all columns of the product are complete
        for n in range(count):
            slot, z = first + n * step, p.z + (at + n * hop) * p.z_row * size
            _forward_row(p, t, case_of(p, slot), row_of(p, t, slot), z, scratch, like)
        for slot in range(first + count * step, last, step):
            b = case_of(p, slot)  # this case has ended: its output is 0
            rows.fill(p.hist + ((t + 1) * p.batch + b) * H * size, H, like, like)
    if p.streams:
        count = p.batch * H
        rows.copy(p.hist + count * size, p.hist, count, like)
        if p.out != 0:
            rows.copy(p.hist, p.out, count, like)
