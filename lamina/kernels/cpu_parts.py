"""Functions that are only ever called by kernels.

numba optimises each function, with all that it calls, and makes machine code of it; a kernel of twenty functions is
optimised five times over. Here only the kernel is: its parts are lowered and handed on as they are. That halves the
time of a first call, and is all that is done with numba's inner workings.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _HandedOn(JITCodeLibrary):  # type: ignore[misc]
    """A library that becomes part of others, and no code of its own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self) -> Any:
        return _Silent(self._codegen)


class _Silent:
    """numba's code generator. What a function would need to raise errors is set in its code, and there is none."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, env: Any) -> None:
        pass


class Part(Compiler):  # type: ignore[misc]
    """numba's compiler, but for the library."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *others: Any) -> None:
        if library is None:
            library = _HandedOn(targetctx.codegen(), "part")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, *others)


# What Python would need to call a part takes longer to compile than the part does; nor does it own memory.
# A constant whole number as an argument is np.int64(n): for a plain one numba compiles anew.
BARE: dict[str, Any] = {
    "error_model": "numpy", "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False,
    "pipeline_class": Part,
}  # fmt: skip
part = njit(**BARE)
# Of the team, from ``cpu_team``: a thread's number in it, and a place where all its threads meet.
thread_number = types.ExternalFunction("lamina_thread", types.int32())
meet = types.ExternalFunction("lamina_meet", types.void())
