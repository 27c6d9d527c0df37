"""Features of the CPU that numba compiles for, block sizes of the products, and the folder of the cache files.

Compiled kernels depend on several source files, on versions and on the CPU. A digest of all of them names the folder,
so its cache files were compiled from exactly these sources for exactly this machine.
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

HUGE = 2**22  # bytes from which a tensor's memory is requested in huge pages
PAGE = 2**21  # bytes of a huge page
VECTORS = 2  # vectors in a row of a packed panel
DEPTH = 256  # rows that the product for a matrix's gradient takes at once
LEFTS = 16  # panels of its left factor that it takes at once
TILE = 8  # largest number of rows of a tile
STRETCH = 128  # rows per block of a product of many rows: they stay in the L2 cache
SOURCES = (
    "machine.py", "jit.py", "matmul.py", "simd.py", "rows.py", "call_record.py", "call_parts.py",
    "forward.py", "backward.py", "columns.py", "batch_norm.py", "entries.py",
)  # fmt: skip


@cache
def features() -> tuple[str, str]:
    """Return name and features of the target CPU; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may restrict them."""
    from llvmlite import binding

    name, asked = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name not in (None, "", "host"):
        return str(name), asked or ""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten() if asked is None else asked


@cache
def _madvise() -> Any:
    """Return the system's madvise; None where it or huge pages are not supported."""
    try:
        function = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None
    except (OSError, AttributeError, TypeError):
        return None
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def use_huge_pages(start: int, size: int) -> None:
    """Request huge pages, because thousands of page faults of 4 KiB take a noticeable share of a training step."""
    if function := _madvise():
        first = -(-start // PAGE) * PAGE
        function(first, (start + size - first) // PAGE * PAGE, mmap.MADV_HUGEPAGE)


@cache
def vector_bytes() -> int:
    """Return the width of the widest vector registers in bytes."""
    known = set(features()[1].split(","))
    return 64 if "+avx512f" in known else 32 if "+avx2" in known else 16


def panel_width(size: int) -> int:
    """Return the columns of a panel, for numbers of ``size`` bytes."""
    return VECTORS * vector_bytes() // size


def vectors(columns: int, size: int) -> int:
    """Return the number of vectors that hold so many numbers of ``size`` bytes."""
    return -(-columns * size // vector_bytes())


@cache
def digest() -> str:
    """Return a digest of everything that compiled code depends on."""
    parts = [*features(), platform.python_version(), *(metadata.version(name) for name in ("numba", "llvmlite"))]
    here = Path(__file__).parent
    sources = [(here / name).read_bytes() for name in SOURCES if (here / name).exists()]
    return hashlib.sha256(b"\0".join([*(p.encode() for p in parts), *sources])).hexdigest()[:20]


def folder() -> Path:
    """Return the cache folder, in LAMINA_CACHE or the user's cache folder; raise OSError where the user has no home."""
    given = os.environ.get("LAMINA_CACHE")
    return (Path(given) if given else _users_cache() / "lamina") / digest()


def _users_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a container's user may have no home
        raise OSError(str(error)) from error
