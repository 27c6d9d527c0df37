"""Warnings about environments that make lamina slow, once per process. This module must stay cheap to import."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import SlowPathWarning

WARNINGS = {
    "numba": (
        "numba is not installed, so lamina runs its recurrences on this CPU in plain PyTorch, one step at a time, "
        "which is several times slower. Install numba (pip install numba), or pass backend='reference' to keep the "
        "slow path without this warning."
    ),
    "triton": (
        "Triton is not installed, so lamina runs its recurrences on this GPU in plain PyTorch, one step at a time, "
        "which is many times slower. Install Triton (pip install triton; on Windows pip install triton-windows), or "
        "pass backend='reference' to keep the slow path without this warning."
    ),
    "cache": (
        "lamina cannot store its compiled CPU kernels ({error}), so every process recompiles them, which takes "
        "several seconds. Set the environment variable LAMINA_CACHE to a writable folder."
    ),
}
COMPILING = "lamina is compiling its CPU kernels for this machine (several seconds, the first time only)"
PATIENCE = 1.0  # seconds of compilation before the log line
OUTSIDE = (__package__, "torch")  # packages whose frames are skipped when a warning names the caller

_given: set[str] = set()
_compiled = 0.0  # seconds spent compiling so far


def warn(name: str, **details: object) -> None:
    """Emit a warning of ``WARNINGS``, once per process."""
    if name not in _given:
        _given.add(name)
        warnings.warn(WARNINGS[name].format(**details), SlowPathWarning, stacklevel=callers_level())


# torch.compile runs ``warn`` while tracing and records nothing in the graph. This is what
# torch.compiler.assume_constant_result sets, without importing torch's compiler.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def callers_level() -> int:
    """Return the stacklevel that makes the calling function's warning point outside this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in OUTSIDE:
        level, frame = level + 1, frame.f_back
    return level


@contextmanager
def compiling() -> Iterator[None]:
    """Log one line as soon as compilation has taken ``PATIENCE`` seconds in this process."""
    global _compiled
    timer = threading.Timer(max(PATIENCE - _compiled, 0.0), _say_compiling)
    timer.daemon = True
    timer.start()
    begin = time.monotonic()
    try:
        yield
    finally:
        timer.cancel()
        _compiled += time.monotonic() - begin


def _say_compiling() -> None:
    """Log the line; without a handler, logging prints warnings to stderr."""
    if "compiling" not in _given:
        _given.add("compiling")
        logging.getLogger(__package__).warning(COMPILING)
