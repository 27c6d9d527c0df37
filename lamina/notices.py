"""Notices about an environment that makes lamina slow, each given once a process. Nothing heavy is imported here."""

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
        "numba is not installed, so lamina runs its recurrences on this CPU in plain PyTorch, one step after another, "
        "which is several times slower. Install numba (pip install numba), or pass backend='reference' if this is "
        "what you want."
    ),
    "triton": (
        "Triton is not installed, so lamina runs its recurrences on this GPU in plain PyTorch, one step after "
        "another, which is many times slower. Install Triton (pip install triton; on Windows pip install "
        "triton-windows), or pass backend='reference' if this is what you want."
    ),
    "cache": (
        "lamina cannot keep its compiled CPU kernels ({error}), so every process compiles them anew, which takes "
        "several seconds. Set the environment variable LAMINA_CACHE to a folder that can be written."
    ),
}
COMPILING = "lamina is compiling its CPU kernels for this machine (several seconds, the first time only)"
PATIENCE = 1.0  # seconds of compiling that pass in silence
OUTSIDE = (__package__, "torch")  # packages whose frames are not the caller's

_given: set[str] = set()
_compiled = 0.0  # seconds of compiling until now


def warn(name: str, **details: object) -> None:
    """Give a warning of ``WARNINGS`` the first time that it is asked for in this process."""
    if name not in _given:
        _given.add(name)
        warnings.warn(WARNINGS[name].format(**details), SlowPathWarning, stacklevel=_callers_level())


# torch.compile calls it while tracing and leaves nothing in the graph: torch.compiler.assume_constant_result, without
# the import of torch's compiler.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _callers_level() -> int:
    """Stack level, for a warning of the calling function, of the first frame outside this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in OUTSIDE:
        level, frame = level + 1, frame.f_back
    return level


@contextmanager
def compiling() -> Iterator[None]:
    """Log one line while kernels are compiled, once compiling has taken ``PATIENCE`` seconds in all."""
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
    """Without a handler of the user's, logging writes a warning to stderr."""
    if "compiling" not in _given:
        _given.add("compiling")
        logging.getLogger(__package__).warning(COMPILING)
