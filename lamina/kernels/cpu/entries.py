"""Entry points of the kernels: each runs one thread's part of a call, given the address of its call record."""

from __future__ import annotations

import numpy as np

from .backward import backward_rows
from .batch_norm import backward_units, forward_units
from .call_parts import share_of
from .code_cache import Code
from .forward import forward_rows
from .jit import bytes_of, call_at, machine_code, part, thread_number
from .matmul import PANEL, multiply, outer, pack_share

# Products of many rows.


@part
def many_rows(address, thread, like):
    """Compute a thread's columns, or its rows, of out = left times a matrix."""
    p, size = call_at(address), bytes_of(like)
    spare = p.scratch + thread * p.scratch_size * size
    first, last, begin, end = np.int64(0), p.rows, np.int64(0), panels(p, like)
    if p.shared:
        begin, end = end * thread // p.threads, end * (thread + 1) // p.threads
    else:
        first, last = share_of(p.rows, thread, p.threads, np.int64(4))
    left, out = p.left + first * p.depth * size, p.out + first * p.columns * size
    multiply(left, last - first, p.depth, p.weight, p.columns, p.turned, out, begin, end, spare, like)


@part
def gradient(address, thread, like):
    """Compute a thread's rows of out = or += left^T times a matrix."""
    p, size = call_at(address), bytes_of(like)
    count = (p.depth * size + PANEL - 1) // PANEL
    first, last = count * thread // p.threads, count * (thread + 1) // p.threads
    spare = p.scratch + thread * p.scratch_size * size
    outer(p.left, p.weight, p.rows, p.depth, p.columns, p.out, first, last, p.turned != 0, spare, like)


@part
def panels_of(address, thread, like):
    """Pack a thread's panels of a matrix."""
    p = call_at(address)
    pack_share(p.weight, p.depth, p.columns, p.turned, p.packed, thread, p.threads, like)


@part
def panels(p, like):
    """Return the number of panels of a matrix."""
    return (p.columns * bytes_of(like) + PANEL - 1) // PANEL


# Entry points: one thread's part of a call. Each is compiled on first use, because compiling takes seconds.


def forward_float32(address):
    forward_rows(address, np.int64(thread_number()), np.float32(0.0))


def forward_float64(address):
    forward_rows(address, np.int64(thread_number()), np.float64(0.0))


def backward_float32(address):
    backward_rows(address, np.int64(thread_number()), np.float32(0.0))


def backward_float64(address):
    backward_rows(address, np.int64(thread_number()), np.float64(0.0))


def batch_forward_float32(address):
    forward_units(address, np.int64(thread_number()), np.float32(0.0))


def batch_forward_float64(address):
    forward_units(address, np.int64(thread_number()), np.float64(0.0))


def batch_backward_float32(address):
    backward_units(address, np.int64(thread_number()), np.float32(0.0))


def batch_backward_float64(address):
    backward_units(address, np.int64(thread_number()), np.float64(0.0))


def products_float32(address):
    many_rows(address, np.int64(thread_number()), np.float32(0.0))


def products_float64(address):
    many_rows(address, np.int64(thread_number()), np.float64(0.0))


def gradients_float32(address):
    gradient(address, np.int64(thread_number()), np.float32(0.0))


def gradients_float64(address):
    gradient(address, np.int64(thread_number()), np.float64(0.0))


def packs_float32(address):
    panels_of(address, np.int64(thread_number()), np.float32(0.0))


def packs_float64(address):
    panels_of(address, np.int64(thread_number()), np.float64(0.0))


def compiled(name: str) -> Code:
    """Compile the entry point ``name`` and return its machine code."""
    return Code(*machine_code(globals()[name]))
