"""Thread team of the kernels: torch's own threads.

torch's operators run on the threads of the OpenMP library that torch ships. A second team would spin on the same cores
while torch works between our kernels, so kernels run in torch's team, called by its GOMP_parallel. Where that library
is not found, one thread does the work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import code_cache

_forked = False  # OpenMP teams do not survive fork; calling into one would deadlock


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@cache
def library() -> Any:
    """Return the OpenMP library that torch has loaded; None where it is not GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            openmp = ctypes.CDLL(str(path))
            openmp.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            openmp.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return openmp
    return None


def threads() -> int:
    """Return the number of threads that a call may use."""
    return 1 if _forked or library() is None else torch.get_num_threads()


@cache
def entry(name: str) -> tuple[int, Callable[[int], None]]:
    """Return a kernel's address, and the kernel as a function for one thread."""
    address = code_cache.address(name)
    return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)  # converted faster than c_int64


def run(name: str, call: int, count: int) -> None:
    """Run a kernel in ``count`` threads, on the call record at the address ``call``."""
    address, kernel = entry(name)
    if count == 1:
        kernel(call)
    else:
        library().GOMP_parallel(address, call, count, 0)
