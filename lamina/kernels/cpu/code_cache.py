"""Compiled kernels: read from their folder, or compiled now and put there.

Machine code alone is kept, and loaded without numba, whose import and own cache take longer than a warm start may.
A file says what it must find in the process and carries its digest: one that is cut off or altered is made anew.
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
_KEPT: list[Any] = []  # engines: code goes when they do
_stub = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)


@dataclass(frozen=True)
class Code:
    """Machine code, the name of its entry and those of what it refers to."""

    entry: str
    needs: Sequence[str]
    code: bytes

    def to_bytes(self) -> bytes:
        told = {**asdict(self), "code": hashlib.sha256(self.code).hexdigest()}
        return json.dumps(told).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(data: bytes) -> Code | None:
        """None where it is not whole."""
        head, _, code = data.partition(b"\n")
        try:
            told = json.loads(head)
        except ValueError:
            return None
        whole = isinstance(told, dict) and told.get("code") == hashlib.sha256(code).hexdigest()
        return Code(told["entry"], told["needs"], code) if whole else None


@cache
def address(name: str) -> int:
    """Of a kernel's entry."""
    with _lock:
        _ready()
        found = _read(name)
        if found is None:
            with notices.compiling():
                found = _compiled(name)
            _keep(name, found)
        return _loaded(found)


def _read(name: str) -> Code | None:
    """Return a kernel from its file; None where there is none, or none that is whole and can be read."""
    try:
        return Code.from_bytes((machine.folder() / f"{name}.code").read_bytes())
    except OSError:
        return None


def _compiled(name: str) -> Code:
    from . import entries

    return entries.compiled(name)


def _keep(name: str, code: Code) -> None:
    """Write a kernel to its file, or warn that later processes will compile it again."""
    try:
        _write(machine.folder() / f"{name}.code", code.to_bytes())
    except OSError as error:
        notices.warn("cache", error=error)


def _write(place: Path, data: bytes) -> None:
    """Whole or not at all; several processes may do so at once."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, place)


def _loaded(found: Code) -> int:
    """In an engine of its own: no code meets another's names."""
    from llvmlite import binding

    for name in found.needs:
        if binding.address_of_symbol(name) is None:  # of numba's errors, which these kernels never make
            _symbol(name, _stub)
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(found.code))
    engine.finalize_object()
    _KEPT.append(engine)
    return int(engine.get_function_address(found.entry))


@cache
def _ready() -> None:
    """LLVM, and what kernels know of their team."""
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
