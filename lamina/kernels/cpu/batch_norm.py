"""Batch-norm kernels on a CPU: all rows of the batch at each step, forward and backward.

Threads split the units, with all their gates: one thread owns a unit's statistics, its state and its part of the
product. There is one barrier per step, because the next product needs the states, or the gradients, of all units.
Where population statistics are known and nothing is saved for backward, threads split the rows of the batch instead,
without barriers. In arrays as wide as all gates a thread's part is contiguous: [threads, gates, units of a thread].

A site without a norm has the known mean 0 and deviation 1.
"""

from __future__ import annotations

import numpy as np

from . import columns, rows
from .backward import BLOCK, add_block
from .call_parts import DREAMER, GRU, LSTM, old_c, old_h, share_of
from .jit import apart, bytes_of, call_at, meet, numbers, part
from .matmul import product, row_times, row_times_transpose


@part
def _is_over(p, t, b):
    """Return whether a row's sequence has ended before step t."""
    return p.ends != 0 and t >= numbers(p.ends, p.batch, np.int64(0))[b]


@part
def _listed(p, t, begin, end, index):
    """List the rows from begin to end whose sequences have a step t; return their number."""
    apart()
    listed, count = numbers(index, p.batch, np.int64(0)), np.int64(0)
    for b in range(begin, end):
        if not _is_over(p, t, b):
            listed[count] = b
            count += 1
    return count


@part
def _factor_row(p, t, b, first, n, like):
    """Write some units of step t's left factor, where that is not the history."""
    size, H = bytes_of(like), p.hidden
    old, at = old_h(p, t, b, like) + first * size, (b * H + first) * size
    out = p.operand + (t % 2) * p.batch * H * size + at
    if p.drop != 0:
        rows.times(old, p.drop + at, out, n, like)
    else:
        rows.copy(old, out, n, like)


@part
def _factor(p, t, begin, end, first, n, like):
    apart()
    for b in range(begin, end):
        _factor_row(p, t, b, first, n, like)


# Forward.


@part
def _recurrent_sums(p, t, thread, begin, end, first, n, z, like):
    """Compute the recurrent product z of a thread's units and rows."""
    size, H = bytes_of(like), p.hidden
    left = p.hist + t * p.batch * H * size
    if p.operand != 0:
        left = p.operand + (t % 2) * p.batch * H * size
    if p.packed == 0:
        column = p.gates * first
        row_times_transpose(left, H, p.weight, column, column + p.gates * n, z - column * size, like)
    else:
        left, out = left + begin * H * size, z + begin * p.z_row * size
        product(left, H, end - begin, H, p.packed + thread * p.panel_step, p.vectors, out, p.z_row, like)


@part
def _statistics(p, t, first, n, z, index, count, spare, like):
    """Compute the moments of both sides of the gates, or of their sum, which overwrites z."""
    apart()
    size, W, w = bytes_of(like), p.gates * p.hidden, p.gates * n
    off, away = p.gates * first * size, p.z_row * size
    eps, std, listed = numbers(p.eps, 1, like)[0], p.std != 0, numbers(index, count, np.int64(0))
    x = p.summed + t * p.batch * W * size + off
    if p.norm_x == 0:
        for i in range(count):
            at = z + listed[i] * away
            rows.plus(at, x + listed[i] * W * size, at, w, like)
    if p.live_z:
        at = t * p.step_z + off
        columns.column_moments(
            z, away, index, count, w, p.mean_z + at, p.var_z + at, p.scale_z + at, eps, std, spare, like
        )
    if p.live_xs:
        at = t * p.step_xs + off
        columns.column_moments(
            x, W * size, index, count, w, p.mean_xs + at, p.var_xs + at, p.scale_xs + at, eps, std, spare, like
        )


@part
def _gates(p, t, b, first, n, z, xhat, candidate, like):
    """Replace z by a row's summed inputs of the gates; the input side of a GRU's candidate goes to ``candidate``."""
    apart()
    size, W, w, off = bytes_of(like), p.gates * p.hidden, p.gates * n, p.gates * first * bytes_of(like)
    x = p.summed + (t * p.batch + b) * W * size + off
    at, at_x = t * p.step_z + off, t * p.step_xs + off
    mean, scale, gain, bias = p.mean_z + at, p.scale_z + at, p.gain + off, p.bias_x + off
    mean_x, scale_x, gain_x = p.mean_xs + at_x, p.scale_xs + at_x, p.gain_x + off
    if p.norm_x == 0:
        columns.normed(z, z, xhat, mean, scale, gain, bias, w, like)
        return
    if p.cell == GRU:
        w = 2 * n
        on = w * size
        inner = p.bias + off + on
        columns.normed(z + on, z + on, xhat + on, mean + on, scale + on, gain + on, inner, n, like)
        columns.normed(x + on, candidate, x + on, mean_x + on, scale_x + on, gain_x + on, bias + on, n, like)
    columns.both_normed(z, x, xhat, mean, scale, gain, mean_x, scale_x, gain_x, bias, w, like)


@part
def _zoned_out(p, keep, keep_t, keep_b, t, b, first, old, new, n, like):
    """Apply zoneout to some units, in place."""
    if keep != 0:
        rows.mixed(keep + t * keep_t + b * keep_b + first * bytes_of(like), old, new, new, n, like)


@part
def _new_state(p, t, b, first, n, z, candidate, c_raw, like):
    """Compute h of a row from its gates; of an LSTM only c, before its norm."""
    size = bytes_of(like)
    step, at = n * size, (b * p.hidden + first) * size
    h_old, h_new = old_h(p, t, b, like) + first * size, p.hist + (t + 1) * p.batch * p.hidden * size + at
    if p.cell == LSTM:
        rows.lstm_cell(z, z + step, z + 2 * step, old_c(p, t, b, like) + first * size, c_raw, n, like)
        return
    if p.cell == GRU:
        rows.gru(z, z + step, candidate, z + 2 * step, h_old, h_new, n, like)
    elif p.cell == DREAMER:
        rows.dreamer(z, z + step, z + 2 * step, h_old, h_new, n, like)
    elif p.relu:
        rows.relu(z, h_new, n, like)
    else:
        rows.tanh(z, h_new, n, like)
    _zoned_out(p, p.keep_h, p.keep_h_t, p.keep_h_b, t, b, first, h_old, h_new, n, like)


@part
def _lstm_outputs(p, t, first, n, z, c_raw, index, count, spare, like):
    """Normalise c over the batch, and compute h of all rows."""
    apart()
    size, H, away, listed = bytes_of(like), p.hidden, n * bytes_of(like), numbers(index, count, np.int64(0))
    at = t * p.step_c + first * size
    mean, scale, gain, bias = p.mean_c + at, p.scale_c + at, p.gain_cell + first * size, p.bias_cell + first * size
    if p.live_c:
        eps = numbers(p.eps, 1, like)[0]
        columns.column_moments(c_raw, away, index, count, n, mean, p.var_c + at, scale, eps, p.std != 0, spare, like)
    for i in range(count):
        b = listed[i]
        row, o, c = (b * H + first) * size, z + (b * p.z_row + 3 * n) * size, c_raw + b * away
        h_old, h_new = old_h(p, t, b, like) + first * size, p.hist + ((t + 1) * p.batch * H) * size + row
        c_old, c_new = old_c(p, t, b, like) + first * size, p.c_hist + (t + 1) * p.c_step + row
        if p.carry:
            columns.carried_output(o, c, h_new, mean, scale, gain, bias, n, like)
        else:
            columns.output(o, c, h_new, mean, scale, gain, bias, n, like)
        _zoned_out(p, p.keep_c, p.keep_c_t, p.keep_c_b, t, b, first, c_old, c, n, like)
        rows.copy(c, c_new, n, like)
        _zoned_out(p, p.keep_h, p.keep_h_t, p.keep_h_b, t, b, first, h_old, h_new, n, like)


@part
def _stay(p, t, b, first, n, like):
    """Copy the state of a row whose sequence has ended."""
    size, H = bytes_of(like), p.hidden
    row = (b * H + first) * size
    rows.copy(old_h(p, t, b, like) + first * size, p.hist + (t + 1) * p.batch * H * size + row, n, like)
    if p.cell == LSTM:
        rows.copy(old_c(p, t, b, like) + first * size, p.c_hist + (t + 1) * p.c_step + row, n, like)


@part
def _forward_step(p, t, begin, end, first, n, z, scratch, like):
    """Run one step of a thread's rows and units.

    Scratch: the list of rows, 6 rows of sums, x^, a candidate, c of all rows.
    """
    apart()
    size, W, w = bytes_of(like), p.gates * p.hidden, p.gates * n
    index, sums = scratch, scratch + p.batch * 8
    spare = sums + 6 * w * size
    candidate = spare + w * size
    c_raw, count = candidate + n * size, _listed(p, t, begin, end, index)
    listed = numbers(index, count, np.int64(0))
    _statistics(p, t, first, n, z, index, count, sums, like)
    for i in range(count):
        b, xhat = listed[i], spare
        if p.xhat != 0:
            xhat = p.xhat + ((t * p.batch + b) * W + p.gates * first) * size
        row = z + b * p.z_row * size
        _gates(p, t, b, first, n, row, xhat, candidate, like)
        _new_state(p, t, b, first, n, row, candidate, c_raw + b * n * size, like)
    if p.cell == LSTM:
        _lstm_outputs(p, t, first, n, z, c_raw, index, count, sums, like)
    if count < end - begin:
        for b in range(begin, end):
            if _is_over(p, t, b):
                _stay(p, t, b, first, n, like)


@part
def forward_units(address, thread, like):
    """Run steps begin to end of a thread's units; or of its rows, without barriers, where statistics are known."""
    p, size = call_at(address), bytes_of(like)
    first, begin, end = min(p.hidden, thread * p.each), np.int64(0), p.batch
    n = min(p.hidden, first + p.each) - first
    if p.by_rows:
        first, n = np.int64(0), p.hidden
        begin, end = share_of(p.batch, thread, p.threads, np.int64(1))
    z, scratch = p.z + thread * p.z_step, p.scratch + thread * p.scratch_size * size
    meets = p.threads > 1 and p.by_rows == 0
    if p.operand != 0:
        _factor(p, p.begin, begin, end, first, n, like)
        if meets:
            meet()
    for t in range(p.begin, p.end):
        _recurrent_sums(p, t, thread, begin, end, first, n, z, like)
        _forward_step(p, t, begin, end, first, n, z, scratch, like)
        if p.operand != 0 and t + 1 < p.end:
            _factor(p, t + 1, begin, end, first, n, like)
        if meets:
            meet()


# Backward.


@part
def _gates_again(p, t, b, first, n, a, like):
    """Recompute the gates' summed inputs from x^; the recurrent side of a GRU's candidate follows them."""
    apart()
    size, W, w, off = bytes_of(like), p.gates * p.hidden, p.gates * n, p.gates * first * bytes_of(like)
    at = (t * p.batch + b) * W * size + off
    y, x = p.xhat + at, p.summed + at
    gain, bias, gain_x = p.gain + off, p.bias_x + off, p.gain_x + off
    if p.norm_x == 0:
        rows.scaled(y, gain, bias, a, w, like)
        return
    if p.cell == GRU:
        on, end = 2 * n * size, a + w * size
        w = 2 * n
        rows.scaled(y + on, gain + on, p.bias + off + on, end, n, like)
        rows.scaled(x + on, gain_x + on, bias + on, a + on, n, like)
    columns.both_again(y, gain, x, gain_x, bias, a, w, like)


@part
def _through_cell_norm(p, t, b, first, n, a, c, d, statistics, sums, like):
    """Propagate an LSTM's gradients of h to the normed c, in ``d``; x^ overwrites c."""
    apart()
    size = bytes_of(like)
    step, row, off = n * size, (b * p.hidden + first) * size, first * size
    dh, dc, o, gain, bias = p.dh + row, p.dc + row, a + 3 * step, p.gain_cell + off, p.bias_cell + off
    if p.carry:
        columns.through_carried(o, c, dh, d, statistics, statistics + step, gain, bias, sums, sums + step, dc, n, like)
    else:
        columns.through_output(o, c, dh, d, statistics, statistics + step, gain, bias, sums, sums + step, n, like)


@part
def _cell_again(p, t, b, first, n, a, c, past_c, like):
    """Recompute an LSTM's gates and c in ``a`` and ``c``; zoneout routes a part of dc past the step."""
    size = bytes_of(like)
    step = n * size
    rows.lstm_again(a, a + step, a + 2 * step, a + 3 * step, old_c(p, t, b, like) + first * size, c, n, like)
    if p.keep_c != 0:
        rows.fill(past_c, n, like, like)
        keep = p.keep_c + t * p.keep_c_t + b * p.keep_c_b + first * size
        rows.split(keep, p.dc + (b * p.hidden + first) * size, past_c, n, like)


@part
def _cell_statistics(p, t, first, n, c_raw, index, count, out, spare, like):
    """Write mean and 1/deviation of c; the batch's are those of the recomputed c, which rounds unlike forward's."""
    apart()
    size = bytes_of(like)
    step, at = n * size, t * p.step_c + first * size
    if p.live_c:
        eps, std = numbers(p.eps, 1, like)[0], p.std != 0
        columns.column_moments(c_raw, step, index, count, n, out, out + 2 * step, out + step, eps, std, spare, like)
    else:
        rows.copy(p.mean_c + at, out, n, like)
        rows.copy(p.scale_c + at, out + step, n, like)


@part
def _through_state(p, t, b, first, n, a, like):
    """Propagate gradients of h to the gates' summed inputs in ``a``, for cells other than LSTM."""
    size = bytes_of(like)
    step, row = n * size, (b * p.hidden + first) * size
    dh, past, h_old = p.dh + row, p.past + row, old_h(p, t, b, like) + first * size
    if p.cell == GRU:
        rows.through_gru(a, a + step, a + 2 * step, a + 3 * step, h_old, dh, past, n, like)
    elif p.cell == DREAMER:
        rows.through_dreamer(a, a + step, a + 2 * step, h_old, dh, past, n, like)
    elif p.relu:
        rows.through_relu(a, dh, n, like)
    else:
        rows.through_tanh(a, dh, n, like)


@part
def _arriving(p, t, b, first, n, like):
    """Write dh of a row after step t, without the part that zoneout routes past the step."""
    size = bytes_of(like)
    row = (b * p.hidden + first) * size
    dh, past = p.dh + row, p.past + row
    if p.d_out != 0:
        rows.plus(dh, p.d_out + (t * p.batch * p.hidden) * size + row, dh, n, like)
    rows.fill(past, n, like, like)
    if p.keep_h != 0:
        rows.split(p.keep_h + t * p.keep_h_t + b * p.keep_h_b + first * size, dh, past, n, like)


@part
def _through_cells(p, t, first, n, acts, index, count, sums, spare, c_raw, like):
    """Compute the gradients of the gates' summed inputs of all rows, in ``acts``.

    ``sums``: an LSTM's sums for the norm of c; ``spare``: 9 rows of units.
    """
    apart()
    size, listed = bytes_of(like), numbers(index, count, np.int64(0))
    step, away = n * size, (p.gates + 1) * n * size
    past_c = c_raw + 2 * p.batch * step
    for i in range(count):
        b = listed[i]
        a = acts + b * away
        _arriving(p, t, b, first, n, like)
        _gates_again(p, t, b, first, n, a, like)
        if p.cell == LSTM:
            _cell_again(p, t, b, first, n, a, c_raw + b * step, past_c + b * step, like)
        else:
            _through_state(p, t, b, first, n, a, like)
    if p.cell == LSTM:
        _cell_statistics(p, t, first, n, c_raw, index, count, spare, spare + 3 * step, like)
        _through_lstm(p, t, first, n, acts, index, count, sums, spare, c_raw, like)


@part
def _through_lstm(p, t, first, n, acts, index, count, sums, statistics, c_raw, like):
    """Propagate gradients through an LSTM's cells.

    ``statistics``: mean and 1/deviation of c; 7 rows of scratch follow them.
    """
    apart()
    size, listed, eps = bytes_of(like), numbers(index, count, np.int64(0)), numbers(p.eps, 1, like)[0]
    step, away = n * size, (p.gates + 1) * n * size
    block, d_seen, past_c = statistics + 3 * step, c_raw + p.batch * step, c_raw + 2 * p.batch * step
    lost, factors = block + 2 * step, block
    rows.fill(sums, 2 * n, like, like)
    rows.fill(block, 4 * n, like, like)
    for i in range(count):
        b = listed[i]
        _through_cell_norm(
            p, t, b, first, n, acts + b * away, c_raw + b * step, d_seen + b * step, statistics, block, like
        )
        if i % BLOCK == BLOCK - 1 or i + 1 == count:
            columns.add_carefully(block, sums, lost, 2 * n, like)
            rows.fill(block, 2 * n, like, like)
    gain = p.gain_cell + first * size
    columns.factors(sums, step, statistics + step, gain, p.live_c, count, eps, p.std != 0, n, factors, step, like)
    for i in range(count):
        b = listed[i]
        a, dc, old = acts + b * away, p.dc + (b * p.hidden + first) * size, old_c(p, t, b, like) + first * size
        columns.through_cell(
            a,
            a + step,
            a + 2 * step,
            old,
            d_seen + b * step,
            c_raw + b * step,
            factors,
            factors + step,
            factors + 2 * step,
            dc,
            n,
            like,
        )
        if p.keep_c != 0:
            rows.plus(dc, past_c + b * step, dc, n, like)


@part
def _through_side(
    p, t, first, n, d, y, y_away, index, count, sums, gain, scale, live, begin, width, out, factors, like
):
    """Propagate gradients of one side's gates, from ``begin`` on, to its product; ``factors``: 4 rows of scratch."""
    apart()
    size, W, w = bytes_of(like), p.gates * p.hidden, p.gates * n
    span, d_away, on = w * size, (w + n) * size, begin * size
    eps, listed = numbers(p.eps, 1, like)[0], numbers(index, count, np.int64(0))
    columns.gather(d, d_away, y + on, y_away, index, count, width, sums + on, span, factors, like)
    columns.factors(sums + on, span, scale + on, gain + on, live, count, eps, p.std != 0, width, factors, span, like)
    for i in range(count):
        b = listed[i]
        columns.through(
            d + b * d_away,
            y + on + b * y_away,
            factors,
            factors + span,
            factors + 2 * span,
            out + on + b * W * size,
            width,
            like,
        )


@part
def _through_sides(p, t, first, n, acts, index, count, sums, factors, like):
    """Propagate gradients of the gates' summed inputs, in ``acts``, to the products.

    ``sums``: of bias, gain, bias_x and gain_x; a bias that both sides share is bias_x.
    """
    apart()
    size, W, w = bytes_of(like), p.gates * p.hidden, p.gates * n
    off, span = p.gates * first * size, p.gates * n * size
    at = (t - p.begin) * p.batch * W * size + off
    here, away = t * p.batch * W * size + off, W * size
    y, x = p.xhat + here, p.summed + here
    scale, scale_x = p.scale_z + t * p.step_z + off, p.scale_xs + t * p.step_xs + off
    gain, gain_x, raw, summed = p.gain + off, p.gain_x + off, p.d_raw + at, p.d_summed + at
    begin, to = np.int64(0), w
    if p.cell == GRU:
        begin, to = 2 * n, 2 * n
        _through_side(
            p,
            t,
            first,
            n,
            acts + w * size,
            y,
            away,
            index,
            count,
            sums,
            gain,
            scale,
            p.live_z,
            begin,
            n,
            raw,
            factors,
            like,
        )
        begin = np.int64(0)
    _through_side(
        p, t, first, n, acts, y, away, index, count, sums, gain, scale, p.live_z, begin, to, raw, factors, like
    )
    if p.norm_x:
        _through_side(
            p,
            t,
            first,
            n,
            acts,
            x,
            away,
            index,
            count,
            sums + 2 * span,
            gain_x,
            scale_x,
            p.live_xs,
            begin,
            w,
            summed,
            factors,
            like,
        )


@part
def _over(p, t, b, first, n, like):
    """Pass on the state gradient of a row whose sequence has ended; those of its products are 0."""
    size, W = bytes_of(like), p.gates * p.hidden
    row, at = (b * p.hidden + first) * size, (((t - p.begin) * p.batch + b) * W + p.gates * first) * size
    rows.copy(p.dh + row, p.past + row, n, like)
    rows.fill(p.d_raw + at, p.gates * n, like, like)
    if p.norm_x:
        rows.fill(p.d_summed + at, p.gates * n, like, like)


@part
def _backward_step(p, t, first, n, scratch, like):
    """Run one step back, for all rows of a thread's units."""
    apart()
    size, w = bytes_of(like), p.gates * n
    index, sums = scratch, scratch + p.batch * 8
    factors = sums + (4 * w + 2 * n) * size
    acts = factors + (4 * w + 9 * n) * size
    c_raw, count = acts + p.batch * (w + n) * size, _listed(p, t, np.int64(0), p.batch, index)
    cell_sums, spare = sums + 4 * w * size, factors + 4 * w * size
    _through_cells(p, t, first, n, acts, index, count, cell_sums, spare, c_raw, like)
    _through_sides(p, t, first, n, acts, index, count, sums, factors, like)
    if count < p.batch:
        for b in range(p.batch):
            if _is_over(p, t, b):
                _over(p, t, b, first, n, like)


@part
def _each_sum(p, first, n, sums, flush, like):
    """Add a step's sums for gains and biases to the block's, or with ``flush`` the block's to the totals."""
    apart()
    size, H, w = bytes_of(like), p.hidden, p.gates * n
    at, from_ = p.gates * first, sums
    for k in range(6):
        width = w if k < 4 else n
        if ((k == 2 or k == 3) and p.norm_x == 0) or (k > 3 and p.cell != LSTM):
            width = np.int64(0)
        if flush:
            add_block(p.shares + at * size, p.totals + at * 8, width, like)
        else:
            rows.plus(p.shares + at * size, from_, p.shares + at * size, width, like)
        from_ += (w if k < 4 else n) * size
        at += p.gates * H if k < 3 else p.gates * (H - first) + first if k == 3 else H


@part
def _arrived(p, t, b, first, n, through, like):
    """Write dh of the state before a step: the part through the product, masked by dropout, and the part past it."""
    size, H = bytes_of(like), p.hidden
    row = (b * H + first) * size
    dh, dc = p.dh + row, p.dc + row
    if p.drop != 0:
        rows.times(through, p.drop + row, through, n, like)
    rows.plus(through, p.past + row, dh, n, like)
    if p.resets != 0 and numbers(p.resets, (t + 1) * p.batch, np.uint8(0))[t * p.batch + b]:
        rows.plus(p.d_reset_h + row, dh, p.d_reset_h + row, n, like)
        rows.fill(dh, n, like, like)
        if p.cell == LSTM:
            rows.plus(p.d_reset_c + row, dc, p.d_reset_c + row, n, like)
            rows.fill(dc, n, like, like)


@part
def _through_product(p, t, thread, first, n, z, like):
    size, W = bytes_of(like), p.gates * p.hidden
    left = p.d_raw + (t - p.begin) * p.batch * W * size
    if p.packed == 0:
        row_times(left, W, p.weight, p.hidden, first, first + n, z - first * size, like)
    else:
        product(left, W, p.batch, W, p.packed + thread * p.panel_step, p.vectors, z, p.z_row, like)


@part
def backward_units(address, thread, like):
    """Run steps end - 1 down to begin of a thread's units."""
    p, size = call_at(address), bytes_of(like)
    first = min(p.hidden, thread * p.each)
    n = min(p.hidden, first + p.each) - first
    z, scratch = p.z + thread * p.z_step, p.scratch + thread * p.scratch_size * size
    sums, rows_in_block = scratch + p.batch * 8, np.int64(0)
    for back in range(p.end - p.begin):
        t = p.end - 1 - back
        _backward_step(p, t, first, n, scratch, like)
        _each_sum(p, first, n, sums, False, like)
        rows_in_block += p.batch
        if rows_in_block >= BLOCK:
            _each_sum(p, first, n, sums, True, like)
            rows_in_block = np.int64(0)
        if p.threads > 1:
            meet()
        _through_product(p, t, thread, first, n, z, like)
        for b in range(p.batch):
            _arrived(p, t, b, first, n, z + b * p.z_row * size, like)
    _each_sum(p, first, n, sums, True, like)
