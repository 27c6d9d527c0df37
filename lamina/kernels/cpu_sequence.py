"""The CPU's kernels: one thread's part of a call each, by the address of what the call is about."""

from __future__ import annotations

import numpy as np
from numba import cfunc, types

from .cpu_backward import backward_rows
from .cpu_call import call_at, share_of
from .cpu_code import Code
from .cpu_forward import forward_rows
from .cpu_matrix import PANEL, bytes_of, pack, project
from .cpu_parts import part, thread_number

# Products of many rows.


@part
def many_rows(address, thread, like):
    """A thread's rows of out = left times a packed matrix."""
    p, size = call_at(address), bytes_of(like)
    first, last = share_of(p.rows, thread, p.threads)
    left, out = p.left + first * p.depth * size, p.out + first * p.columns * size
    spare = p.scratch + thread * p.scratch_size * size
    project(left, last - first, p.depth, p.packed, p.columns, out, spare, like)


@part
def panels_of(address, thread, like):
    """A thread's panels of a matrix."""
    p = call_at(address)
    panels = (p.columns * bytes_of(like) + PANEL - 1) // PANEL
    first, last = panels * thread // p.threads, panels * (thread + 1) // p.threads
    pack(p.weight, p.depth, p.columns, p.turned, p.packed, first, last, like)


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
