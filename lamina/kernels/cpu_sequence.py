"""The CPU's kernels: one thread's part of a call each, by the address of what the call is about."""

from __future__ import annotations

import numpy as np
from numba import cfunc, types

from .cpu_backward import backward_rows
from .cpu_call import call_at, share_of
from .cpu_code import Code
from .cpu_forward import forward_rows
from .cpu_matrix import PANEL, bytes_of, multiply, pack
from .cpu_parts import part, thread_number

# Products of many rows.


@part
def many_rows(address, thread, like):
    """A thread's columns of out = left times a matrix, or its rows."""
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
def panels_of(address, thread, like):
    """A thread's panels of a matrix."""
    p = call_at(address)
    count = panels(p, like)
    first, last = count * thread // p.threads, count * (thread + 1) // p.threads
    pack(p.weight, p.depth, p.columns, p.turned, p.packed + first * p.depth * PANEL, first, last, like)


@part
def panels(p, like):
    """How many a matrix has."""
    return (p.columns * bytes_of(like) + PANEL - 1) // PANEL


# Entries: one thread's part of a call. A kernel is compiled when it is asked for: each takes seconds.


def forward_float32(address):
    forward_rows(address, np.int64(thread_number()), np.float32(0.0))


def forward_float64(address):
    forward_rows(address, np.int64(thread_number()), np.float64(0.0))


def backward_float32(address):
    backward_rows(address, np.int64(thread_number()), np.float32(0.0))


def backward_float64(address):
    backward_rows(address, np.int64(thread_number()), np.float64(0.0))


def products_float32(address):
    many_rows(address, np.int64(thread_number()), np.float32(0.0))


def products_float64(address):
    many_rows(address, np.int64(thread_number()), np.float64(0.0))


def packs_float32(address):
    panels_of(address, np.int64(thread_number()), np.float32(0.0))


def packs_float64(address):
    panels_of(address, np.int64(thread_number()), np.float64(0.0))


def compiled(name: str) -> Code:
    """An entry by its name."""
    made = cfunc(types.void(types.int64), error_model="numpy", _nrt=False)(globals()[name])
    library = made._library
    module = library._final_module
    needs = [x.name for some in (module.functions, module.global_variables) for x in some if x.is_declaration]
    needs = [name for name in needs if not name.startswith("llvm.")]
    return Code(made.native_name, needs, library._get_compiled_object())
