"""Compiled kernels: loaded from their cache files, or compiled and written there.

A cache file holds machine code, loaded without numba: numba's import and its own cache take longer than a warm start
may. The file lists the symbols that the code needs and carries a digest: a truncated or altered one is replaced.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ... import notices
from . import machine

_lock = threading.RLock()
_KEPT: list[Any] = []  # engines: their machine code is freed with them
_stub = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)


@dataclass(frozen=True)
class Code:
    """Machine code, the name of its entry point and the symbols that it refers to."""

    entry: str
    needs: Sequence[str]
    code: bytes

    def to_bytes(self) -> bytes:
        header = {**asdict(self), "code": hashlib.sha256(self.code).hexdigest()}
        return json.dumps(header).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(data: bytes) -> Code | None:
        """Return the code of a cache file's content; None where that is truncated or altered."""
        first_line, _, code = data.partition(b"\n")
        try:
            header = json.loads(first_line)
        except ValueError:
            return None
        intact = isinstance(header, dict) and header.get("code") == hashlib.sha256(code).hexdigest()
        return Code(header["entry"], header["needs"], code) if intact else None


@cache
def address(name: str) -> int:
    """Return the address of a kernel's entry point; compile the kernel where it has no intact cache file."""
    with _lock:
        _ready()
        code = _read(name)
        if code is None:
            with notices.compiling():
                code = _compiled(name)
            _keep(name, code)
        return _loaded(code)


def _read(name: str) -> Code | None:
    """Return a kernel's code from its cache file; None where that is missing, unreadable, truncated or altered."""
    try:
        return Code.from_bytes((machine.folder() / f"{name}.code").read_bytes())
    except OSError:
        return None


def _compiled(name: str) -> Code:
    from . import entries

    return entries.compiled(name)


def _keep(name: str, code: Code) -> None:
    """Write a kernel's cache file; where that fails, warn that later processes will compile the kernel again."""
    try:
        _write(machine.folder() / f"{name}.code", code.to_bytes())
    except OSError as error:
        notices.warn("cache", error=error)


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, since several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _loaded(code: Code) -> int:
    """Load code and return its entry point's address; an engine per kernel keeps their symbols from clashing."""
    from llvmlite import binding

    for name in code.needs:
        if binding.address_of_symbol(name) is None:  # symbols of numba's errors, which these kernels never raise
            _symbol(name, _stub)
    target_machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code.code))
    engine.finalize_object()
    _KEPT.append(engine)
    return int(engine.get_function_address(code.entry))


@cache
def _ready() -> None:
    """Initialise LLVM, and register the symbols of the thread team that kernels call."""
    from llvmlite import binding

    from . import team

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = team.library()
    _symbol("lamina_thread", _stub if library is None else library.omp_get_thread_num)
    _symbol("lamina_meet", _stub if library is None else library.GOMP_barrier)


def _symbol(name: str, function: Any) -> None:
    from llvmlite import binding

    binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
