"""What the CPU can do, as numba will compile for it, and where compiled code is kept.

Kernels are made of several files and of constants: all of them, the versions and the CPU name a folder of their own.
What lies there was made from exactly this, for exactly this machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

HUGE = 2**22  # bytes from which memory is asked for in huge pages
PAGE = 2**21  # bytes of a huge page
VECTORS = 2  # of a panel of a packed matrix
DEPTH = 256  # rows that a product for a matrix's gradient takes at once
LEFTS = 16  # panels of its left factor that it takes at once
TILE = 8  # rows of a tile at most
STRETCH = 128  # rows of a product that many rows are cut into: they stay in the second cache
SOURCES = (
    "machine.py", "jit.py", "matmul.py", "simd.py", "rows.py", "call_record.py", "call_parts.py",
    "forward.py", "backward.py", "columns.py", "batch_norm.py", "entries.py",
)  # fmt: skip


@cache
def features() -> tuple[str, str]:
    """Name and features of the CPU that code is made for; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may restrict them."""
    from llvmlite import binding

    name, asked = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name not in (None, "", "host"):
        return str(name), asked or ""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten() if asked is None else asked


@cache
def _madvise() -> Any:
    """The system's madvise; None where there is none, or no huge pages."""
    try:
        function = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None
    except (OSError, AttributeError, TypeError):
        return None
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def use_huge_pages(start: int, size: int) -> None:
    """Ask for huge pages: 2,000 page faults of 4 KiB cost as much as a tenth of a training step."""
    if function := _madvise():
        first = -(-start // PAGE) * PAGE
        function(first, (start + size - first) // PAGE * PAGE, mmap.MADV_HUGEPAGE)


@cache
def vector_bytes() -> int:
    """Of the widest registers."""
    known = set(features()[1].split(","))
    return 64 if "+avx512f" in known else 32 if "+avx2" in known else 16


def panel_width(size: int) -> int:
    """Columns of a panel, for numbers of that many bytes."""
    return VECTORS * vector_bytes() // size


@cache
def digest() -> str:
    """Of everything that compiled code depends on."""
    parts = [*features(), platform.python_version(), *(metadata.version(name) for name in ("numba", "llvmlite"))]
    here = Path(__file__).parent
    sources = [(here / name).read_bytes() for name in SOURCES if (here / name).exists()]
    return hashlib.sha256(b"\0".join([*(p.encode() for p in parts), *sources])).hexdigest()[:20]


def folder() -> Path:
    """LAMINA_CACHE, or lamina in the user's cache folder; an OSError where nobody knows the user's home."""
    given = os.environ.get("LAMINA_CACHE")
    return (Path(given) if given else _users_cache() / "lamina") / digest()


def _users_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a container's user may have no home
        raise OSError(str(error)) from error
