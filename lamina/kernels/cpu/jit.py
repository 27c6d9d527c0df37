"""All that the kernels use of numba beyond its documented interface.

numba optimises each function, with all that it calls, and makes machine code of it; a kernel of twenty functions is
optimised five times over. Here only the kernel is: its parts are lowered and handed on as they are. That halves the
time of a first call.
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
# Of the team, from ``team``: a thread's number in it, and a place where all its threads meet.
thread_number = types.ExternalFunction("lamina_thread", types.int32())
meet = types.ExternalFunction("lamina_meet", types.void())


@intrinsic
def apart(typingctx: Any) -> Any:
    """The function that says so stays one: copies of a loop wherever it is called would be compiled again and again."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def bytes_of(typingctx: Any, like: Any) -> Any:
    """Known when compiled."""
    size = like.bitwidth // 8
    return types.int64(like), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), size)


@intrinsic
def numbers(typingctx: Any, address: Any, count: Any, like: Any) -> Any:
    """An array of what lies there, of numbers like ``like``. numba's own ``carray`` takes long to compile."""

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
    """The call whose numbers lie there: p.batch and so on."""
    record = from_dtype(np.dtype([(name, np.int64) for name in FIELDS]))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64), codegen


def machine_code(function: Any) -> tuple[str, list[str], bytes]:
    """Compile an entry; return its symbol, the symbols it refers to, and its machine code."""
    library = cfunc(types.void(types.int64), error_model="numpy", _nrt=False)(function)
    native, module = library.native_name, library._library._final_module
    referred = [x.name for some in (module.functions, module.global_variables) for x in some if x.is_declaration]
    return native, [name for name in referred if not name.startswith("llvm.")], library._library._get_compiled_object()
