"""Everything that uses numba beyond its documented interface.

numba optimises each function together with all its callees, and generates machine code for it: a kernel of twenty
functions is optimised five times over. Here only the entry point is optimised: its parts are lowered to LLVM IR and
linked in unoptimised. This halves the time of a first call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.core import cgutils as cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from .call_record import FIELDS


class _HandedOn(JITCodeLibrary):  # type: ignore[misc]
    """Library that is linked into others and has no machine code of its own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    @property
    def codegen(self) -> Any:
        return _Silent(self._codegen)


class _Silent:
    """numba's code generator without environments: they serve to raise errors, and a part has no code to hold one."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, env: Any) -> None:
        pass


class Part(Compiler):  # type: ignore[misc]
    """numba's compiler, with a library that is linked into others."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *others: Any) -> None:
        if library is None:
            library = _HandedOn(targetctx.codegen(), "part")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, *others)


# No Python wrappers: they take longer to compile than the part itself. No NRT: parts own no memory.
# Pass integer constants as np.int64(n): for each literal int numba compiles the callee again.
BARE: dict[str, Any] = {
    "error_model": "numpy", "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False,
    "pipeline_class": Part,
}  # fmt: skip
part = njit(**BARE)
# The thread's number in its team, and the team's barrier: ``code_cache`` resolves these symbols.
thread_number = types.ExternalFunction("lamina_thread", types.int32())
meet = types.ExternalFunction("lamina_meet", types.void())


@intrinsic
def apart(typingctx: Any) -> Any:
    """Forbid inlining of the calling function: every inlined copy of its loops would be compiled again."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def bytes_of(typingctx: Any, like: Any) -> Any:
    """Return the size of a number in bytes, as a compile-time constant."""
    size = like.bitwidth // 8
    return types.int64(like), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), size)


@intrinsic
def numbers(typingctx: Any, address: Any, count: Any, like: Any) -> Any:
    """Return an array over ``count`` numbers like ``like`` at an address; numba's ``carray`` is slow to compile."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        array = context.make_array(kind)(context, builder)
        size = ir.Constant(ir.IntType(64), context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        populate_array(
            array, data=builder.inttoptr(args[0], array.data.type), shape=cgutils.pack_array(builder, [args[1]]),
            strides=cgutils.pack_array(builder, [size]), itemsize=size, meminfo=None,
        )  # fmt: skip
        return array._getvalue()

    return types.Array(like, 1, "C")(types.int64, types.int64, like), codegen


@intrinsic
def call_at(typingctx: Any, address: Any) -> Any:
    """Return the call record at an address, with fields p.batch and so on."""
    record = from_dtype(np.dtype([(name, np.int64) for name in FIELDS]))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64), codegen


def machine_code(function: Any) -> tuple[str, list[str], bytes]:
    """Compile an entry point; return its symbol, the symbols it refers to, and its machine code."""
    library = cfunc(types.void(types.int64), error_model="numpy", _nrt=False)(function)
    native, module = library.native_name, library._library._final_module
    referred = [x.name for some in (module.functions, module.global_variables) for x in some if x.is_declaration]
    return native, [name for name in referred if not name.startswith("llvm.")], library._library._get_compiled_object()
