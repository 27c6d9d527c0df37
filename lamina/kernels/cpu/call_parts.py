"""Functions that the forward and backward kernels share: norm statistics, old states, slots and thread ranges.

``p`` is the call record, with its fields in the order of ``call_record``.
"""

from __future__ import annotations

import numpy as np

from .jit import apart, bytes_of, numbers, part
from .rows import constant, moments_at_once

RNN, LSTM, GRU, DREAMER = range(4)
NOWHERE, ON_HH, ON_SUM = range(3)
NOTES = 64  # numbers at the start of a thread's scratch: mean and 1/deviation of each gate's two sides


@part
def norms(p, x, groups, sizes, out, like):
    """Write mean and 1/deviation of every gate's group to ``out``, two numbers per gate; 0 and 1 without a norm."""
    apart()
    size, H = bytes_of(like), p.hidden
    found, counts = numbers(out, 2 * p.gates, like), numbers(sizes, groups, np.int64(0))
    eps, std, gate = numbers(p.eps, 1, like)[0], p.std != 0, 0
    for group in range(groups):
        span = counts[group] * H
        mean, rstd = moments_at_once(x + gate * H * size, span, eps, std, like)
        for _ in range(counts[group]):
            found[2 * gate], found[2 * gate + 1] = mean, rstd
            gate += 1
    while gate < p.gates:
        found[2 * gate], found[2 * gate + 1] = like, constant(1.0, like)
        gate += 1


@part
def gates_alike(p, gate, groups, sizes):
    """Count the gates from ``gate`` on that share statistics, so that one loop serves them; not a GRU's candidate."""
    count, until = p.gates - gate, np.int64(0)
    if groups > 1:
        members = numbers(sizes, groups, np.int64(0))
        for group in range(groups):
            until += members[group]
            if until > gate:
                count = until - gate
                break
    if p.cell == GRU and gate < 2:
        count = min(count, 2 - gate)
    return count


@part
def old_state(p, place, step, reset_state, t, b, like):
    """Return the address of a row's state before step t: in the history (``step`` bytes a step) or the reset state."""
    row = b * p.hidden * bytes_of(like)
    if p.resets != 0 and numbers(p.resets, (t + 1) * p.batch, np.uint8(0))[t * p.batch + b]:
        return reset_state + row
    return place + t * step + row


@part
def old_h(p, t, b, like):
    """Return the address of a row's h before step t."""
    return old_state(p, p.hist, p.batch * p.hidden * bytes_of(like), p.reset_h, t, b, like)


@part
def old_c(p, t, b, like):
    """Return the address of a row's c before step t."""
    return old_state(p, p.c_hist, p.c_step, p.reset_c, t, b, like)


@part
def alive(p, t):
    """Return the number of cases that have a step t."""
    return p.batch if p.order == 0 else numbers(p.counts, p.steps, np.int64(0))[t]


@part
def case_of(p, slot):
    """Return the case in a slot; cases that still have steps occupy the first slots."""
    return slot if p.order == 0 else numbers(p.order, p.batch, np.int64(0))[slot]


@part
def row_of(p, t, slot):
    """Return the row of a step and slot in tensors without padding."""
    return (t * p.batch if p.order == 0 else numbers(p.starts, p.steps + 1, np.int64(0))[t]) + slot


@part
def slots_of(p, thread):
    """Return a thread's first slot, end of its slots, stride between them, its first row of a product, and its stride.

    Threads take contiguous slots. With lengths they take slots in turn, since the first slots hold the longest cases.
    Rows of a product are slots where threads share its columns; elsewhere a thread's rows are neighbours.
    """
    if p.order == 0:
        first, last = share_of(p.batch, thread, p.threads, np.int64(1))
        return first, last, np.int64(1), first, np.int64(1)
    if p.shared:
        return thread, p.batch, p.threads, thread, p.threads
    return thread, p.batch, p.threads, thread * ((p.batch + p.threads - 1) // p.threads), np.int64(1)


@part
def count_of(first, last, step):
    """Return the number of slots from ``first`` to ``last``, exclusive."""
    return max((last - first + step - 1) // step, np.int64(0))


@part
def share_of(count, thread, threads, unit):
    """Return a thread's range of ``count`` items, in multiples of ``unit``."""
    each = (count + unit * threads - 1) // (unit * threads) * unit
    return min(count, thread * each), min(count, (thread + 1) * each)
