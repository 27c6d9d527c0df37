"""Loops over rows of numbers on a CPU, written as vector instructions.

A formula computes the results at one position of its rows. ``loop`` turns it into a function on whole vectors, and on
the remainder under a mask. Nothing is left to the compiler's vectoriser, which takes seconds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import cgutils
from .machine import vector_bytes

# Never nnan or ninf: numbers that are not finite must propagate. Nor reassoc: exp rounds by adding a large number.
FLAGS = ("contract", "nsz", "arcp")
LOG2E = 1.4426950408889634
# Keys are bytes of a number. ln 2 in two parts, the first with few digits, so that n times it is exact.
LN2 = {4: (0.693359375, -2.12194440e-4), 8: (6.93145751953125e-1, 1.42860682030941723212e-6)}
# Number whose addition rounds to an integer in the last bits; bits of the mantissa; bias of the exponent.
SHIFTER, MANTISSA, BIAS = {4: 1.5 * 2**23, 8: 1.5 * 2**52}, {4: 23, 8: 52}, {4: 127, 8: 1023}
# Terms of e^r - 1 that the precision needs, and the largest argument.
TERMS, LARGEST = {4: 7, 8: 13}, {4: 87.0, 8: 708.0}


def whole(n: int) -> Any:
    return ir.Constant(ir.IntType(64), n)


class Lanes:
    """Vector of numbers, with arithmetic."""

    def __init__(self, build: Any, value: Any, size: int) -> None:
        self.build, self.value, self.size = build, value, size

    def like(self, value: Any) -> Lanes:
        return Lanes(self.build, value, self.size)

    def _other(self, x: Any) -> Any:
        return x.value if isinstance(x, Lanes) else ir.Constant(self.value.type, [float(x)] * self.value.type.count)

    def __add__(self, x: Any) -> Lanes:
        return self.like(self.build.fadd(self.value, self._other(x), flags=FLAGS))

    def __sub__(self, x: Any) -> Lanes:
        return self.like(self.build.fsub(self.value, self._other(x), flags=FLAGS))

    def __mul__(self, x: Any) -> Lanes:
        return self.like(self.build.fmul(self.value, self._other(x), flags=FLAGS))

    def __rsub__(self, x: Any) -> Lanes:
        return self.like(self.build.fsub(self._other(x), self.value, flags=FLAGS))

    def __rmul__(self, x: Any) -> Lanes:
        return self.like(self.build.fmul(self.value, self._other(x), flags=FLAGS))

    def __truediv__(self, x: Any) -> Lanes:
        return self.like(self.build.fdiv(self.value, self._other(x), flags=FLAGS))

    def __rtruediv__(self, x: Any) -> Lanes:
        return self.like(self.build.fdiv(self._other(x), self.value, flags=FLAGS))

    def where(self, sign: str, bound: Any, then: Any, otherwise: Any) -> Lanes:
        """Return ``then`` where the comparison holds, else ``otherwise``; comparisons with NaN never hold."""
        holds = self.build.fcmp_ordered(sign, self.value, self._other(bound))
        return self.like(self.build.select(holds, self._other(then), self._other(otherwise)))

    def within(self, bound: float) -> Lanes:
        """Clamp to plus and minus a bound; NaN stays NaN."""
        below = self.where(">", bound, bound, self)
        return below.where("<", -bound, -bound, below)


def _exp(x: Lanes) -> tuple[Lanes, Lanes]:
    """Return 2^n and e^r - 1, with x = n ln 2 + r, by as many terms of the series as the precision needs."""
    size, high, low = x.size, *LN2[x.size]
    shifted = x * LOG2E + SHIFTER[size]
    n = shifted - SHIFTER[size]
    r = (x - n * high) - n * low
    series = x.like(ir.Constant(x.value.type, [1 / math.factorial(TERMS[size])] * x.value.type.count))
    for term in range(TERMS[size] - 1, 1, -1):
        series = series * r + 1 / math.factorial(term)
    build, kind = x.build, ir.VectorType(ir.IntType(8 * size), x.value.type.count)
    bits = build.shl(build.bitcast(shifted.value, kind), _all(kind, MANTISSA[size]))
    bits = build.add(bits, _all(kind, BIAS[size] << MANTISSA[size]))
    return x.like(build.bitcast(bits, x.value.type)), r + r * (r * series)


def _all(kind: Any, n: int) -> Any:
    return ir.Constant(kind, [n] * kind.count)


def root(x: Lanes) -> Lanes:
    """Return the square root; NaN below 0."""
    kind = x.value.type
    name = f"llvm.sqrt.v{kind.count}f{8 * x.size}"
    sqrt = cgutils.get_or_insert_function(x.build.module, ir.FunctionType(kind, [kind]), name)
    return x.like(x.build.call(sqrt, [x.value]))


def one_plus_exp(x: Lanes) -> Lanes:
    """Return 1 + e^-x, the reciprocal of a sigmoid."""
    scale, rest = _exp((0.0 - x).within(LARGEST[x.size]))
    return (scale + 1.0) + scale * rest


def tanh_parts(x: Lanes) -> tuple[Lanes, Lanes]:
    """Return tanh as numerator and denominator, by e^2x - 1, which keeps all digits where x is small."""
    scale, rest = _exp((x + x).within(44.0))
    up = (scale - 1.0) + scale * rest
    return up, up + 2.0


def sigmoid(x: Lanes) -> Lanes:
    return 1.0 / one_plus_exp(x)


def tanh(x: Lanes) -> Lanes:
    up, down = tanh_parts(x)
    return up / down


def relu(x: Lanes) -> Lanes:
    return x.where("<", 0.0, 0.0, x)


def loop(
    name: str, formula: Callable[..., Any], arrays: int, writes: Sequence[int], scalars: int = 0, sums: int = 0,
    at_once: int = 1,
) -> Any:  # fmt: skip
    """Return a function f(addresses of arrays, count, scalars, like) that applies formula(numbers, scalars).

    ``writes``: arrays that the first results of the formula are written to; its ``sums`` last ones are added up and
    returned. ``at_once``: number of vectors with sums of their own, as an addition waits for the one before in its sum.
    """
    made = _Loop(name, formula, arrays, tuple(writes), scalars, sums, at_once)

    def run(typingctx: Any, *kinds: Any) -> Any:
        like = kinds[-1]
        given = [types.int64] * (arrays + 1) + [like] * (scalars + 1)
        result = types.UniTuple(like, sums) if sums > 1 else like if sums else types.void

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.call(made.function(builder.module, like.bitwidth // 8), args[:-1])
            if not sums:
                return context.get_dummy_value()
            parts = [builder.extract_value(found, n) for n in range(sums)]
            return parts[0] if sums == 1 else context.make_tuple(builder, signature.return_type, parts)

        return result(*given), codegen

    # numba inspects the number of arguments.
    names = ["typingctx", *(f"given_{n}" for n in range(arrays + 1 + scalars + 1))]
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(run)


class _Loop:
    """Emitter of one loop's function, once in each module that calls it."""

    def __init__(
        self, name: str, formula: Callable[..., Any], arrays: int, writes: tuple[int, ...], scalars: int, sums: int,
        at_once: int,
    ) -> None:  # fmt: skip
        self.name, self.formula, self.arrays, self.writes = name, formula, arrays, writes
        self.scalars, self.sums, self.at_once = scalars, sums, at_once

    def function(self, module: Any, size: int) -> Any:
        name = f"lamina_{self.name}_{size}"
        if name in module.globals:
            return module.globals[name]
        number = ir.FloatType() if size == 4 else ir.DoubleType()
        result = ir.LiteralStructType([number] * self.sums) if self.sums else ir.VoidType()
        given = [ir.IntType(64)] * (self.arrays + 1) + [number] * self.scalars
        made = ir.Function(module, ir.FunctionType(result, given), name)
        made.linkage = "linkonce_odr"
        made.attributes.add("noinline")
        self._body(ir.IRBuilder(made.append_basic_block()), made.args, size, number)
        return made

    def _body(self, build: Any, args: Sequence[Any], size: int, number: Any) -> None:
        lanes = vector_bytes() // size
        vector = ir.VectorType(number, lanes)
        starts = [build.inttoptr(a, number.as_pointer()) for a in args[: self.arrays]]
        count, scalars = (
            args[self.arrays],
            [Lanes(build, spread(build, s, lanes), size) for s in args[self.arrays + 1 :]],
        )
        zero = ir.Constant(vector, [0.0] * lanes)
        sums = [[cgutils.alloca_once_value(build, zero) for _ in range(self.sums)] for _ in range(self.at_once)]

        def step(at: Any, mask: Any, kept: list[Any]) -> None:
            places = [build.bitcast(build.gep(p, [at]), vector.as_pointer()) for p in starts]
            found = self.formula(*(Lanes(build, _load(build, p, size, mask), size) for p in places), *scalars)
            found = found if isinstance(found, tuple) else (found,)
            for n, value in zip(self.writes, found):
                _store(build, value.value, places[n], size, mask)
            for place, term in zip(kept, found[len(self.writes) :]):
                value = term.value if mask is None else build.select(mask, term.value, zero)
                build.store(build.fadd(build.load(place), value), place)

        span = lanes * self.at_once
        done = build.and_(count, whole(-span))
        with cgutils.for_range_slice(build, whole(0), done, whole(span)) as (at, _):
            for n in range(self.at_once):
                step(build.add(at, whole(n * lanes)), None, sums[n])
        full = build.and_(count, whole(-lanes))
        if self.at_once > 1:
            with cgutils.for_range_slice(build, done, full, whole(lanes)) as (at, _):
                step(at, None, sums[0])
        with build.if_then(build.icmp_unsigned("<", full, count)):
            left = build.trunc(build.sub(count, full), ir.IntType(32))
            step(full, build.icmp_unsigned("<", _places(lanes), spread(build, left, lanes)), sums[0])
        self._finish(build, sums, number, lanes, size)

    def _finish(self, build: Any, sums: list[list[Any]], number: Any, lanes: int, size: int) -> None:
        if not self.sums:
            build.ret_void()
            return
        vector = ir.VectorType(number, lanes)
        name = f"llvm.vector.reduce.fadd.v{lanes}f{8 * size}"
        add_up = cgutils.get_or_insert_function(build.module, ir.FunctionType(number, [number, vector]), name)
        totals = []
        for apart in zip(*sums):
            total = build.load(apart[0])
            for place in apart[1:]:
                total = build.fadd(total, build.load(place))
            totals.append(build.call(add_up, [ir.Constant(number, 0.0), total], fastmath=("reassoc",)))
        result = ir.Constant(ir.LiteralStructType([number] * self.sums), ir.Undefined)
        for n, total in enumerate(totals):
            result = build.insert_value(result, total, n)
        build.ret(result)


def spread(build: Any, one: Any, lanes: int) -> Any:
    """Return a vector with one number in all lanes."""
    nothing = ir.Constant(ir.VectorType(one.type, lanes), ir.Undefined)
    first = build.insert_element(nothing, one, ir.Constant(ir.IntType(32), 0))
    return build.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), lanes), None))


def _places(lanes: int) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))


def _load(build: Any, place: Any, size: int, mask: Any) -> Any:
    vector = place.type.pointee
    if mask is None:
        return build.load(place, align=size)
    name = f"llvm.masked.load.v{vector.count}f{8 * size}.p0"
    kinds = [place.type, ir.IntType(32), mask.type, vector]
    read = cgutils.get_or_insert_function(build.module, ir.FunctionType(vector, kinds), name)
    nothing = ir.Constant(vector, [0.0] * vector.count)
    return build.call(read, [place, ir.Constant(ir.IntType(32), size), mask, nothing])


def _store(build: Any, value: Any, place: Any, size: int, mask: Any) -> None:
    if mask is None:
        build.store(value, place, align=size)
        return
    name = f"llvm.masked.store.v{value.type.count}f{8 * size}.p0"
    kinds = [value.type, place.type, ir.IntType(32), mask.type]
    write = cgutils.get_or_insert_function(build.module, ir.FunctionType(ir.VoidType(), kinds), name)
    build.call(write, [value, place, ir.Constant(ir.IntType(32), size), mask])
