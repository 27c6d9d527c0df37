"""Threads: torch's own.

torch's operators run on the threads of the OpenMP library that torch brings along. A second team beside it would wait,
spinning, on the same cores while torch works between our kernels, so kernels run in torch's: GOMP_parallel is asked
to call them. Where that library is not found, one thread does the work.
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

_forked = False  # the team of a parent is not there in a forked child, and waiting for it would be for ever


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


@cache
def library() -> Any:
    """The OpenMP library that torch has loaded; None where there is none of GNU's kind."""
    for place in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            found = ctypes.CDLL(str(place))
            found.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            found.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return found
    return None


def threads() -> int:
    """How many may work on a call."""
    return 1 if _forked or library() is None else torch.get_num_threads()


@cache
def entry(name: str) -> tuple[int, Callable[[int], None]]:
    """A kernel's address, and the kernel for one thread."""
    address = code_cache.address(name)
    return address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)  # read sooner than c_int64


def run(name: str, call: int, count: int) -> None:
    """Let ``count`` threads run a kernel on the call whose numbers lie at that address."""
    address, alone = entry(name)
    if count == 1:
        alone(call)
    else:
        library().GOMP_parallel(address, call, count, 0)
