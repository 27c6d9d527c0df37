"""Products of a few rows with a matrix on a CPU.

The library is slow there: at 32 rows of 256 it does 70 billion operations a second where this does 105, at 4 rows 28
where this does 99 (one Zen 4 core). The matrix is packed once a call into panels of two vectors' width, which lie in
memory as they are read; a tile of rows times one panel stays in registers for the whole contraction. One row alone is
bound by memory: it takes the matrix as it is.

Addresses and not arrays: what is read is known here, and nothing is checked twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from .cpu_parts import BARE, part
from .cpu_target import STRETCH, VECTORS, vector_bytes
from .cpu_vectors import spread, whole

PANEL = VECTORS * vector_bytes()  # bytes of a panel's width
BLOCK = 512  # of the contraction: a panel's part of that length stays in the first cache
TILES = ((8, 1), (4, 2), (2, 4), (1, 4)) if vector_bytes() == 64 else ((4, 1), (2, 2), (1, 4))  # rows, steps at once
ROWS = TILES[0][0]
FAST = {"reassoc", "contract", "arcp", "nsz"}  # never nnan or ninf: what is not finite must be seen


def _tile(rows: int, steps: int) -> Any:
    """c[rows, panel] = or += a[rows, depth] b[depth, panel]; ``steps`` of the contraction have sums of their own.

    Few rows have few sums, and each would wait for the one before.
    """

    @intrinsic
    def tile(typingctx: Any, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, add: Any, like: Any) -> Any:
        signature = types.void(*[types.int64] * 6, types.boolean, like)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tile(builder, signature.args[7].bitwidth // 8, rows, steps).emit(*args[:7])
            return context.get_dummy_value()

        return signature, codegen

    return tile


class _Tile:
    """Writes the instructions of one tile."""

    def __init__(self, builder: Any, size: int, rows: int, steps: int) -> None:
        self.builder, self.size, self.rows, self.steps = builder, size, rows, steps
        self.lanes = vector_bytes() // size
        self.number = ir.FloatType() if size == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.number, self.lanes)
        name = f"llvm.fma.v{self.lanes}f{8 * size}"
        self.fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.vector, [self.vector] * 3), name)

    def emit(self, a: Any, lda: Any, b: Any, depth: Any, c: Any, ldc: Any, add: Any) -> None:
        build, span = self.builder, self.lanes * self.size
        rows = [build.add(a, build.mul(lda, whole(r * self.size))) for r in range(self.rows)]
        outs = [
            build.add(build.add(c, build.mul(ldc, whole(r * self.size))), whole(v * span))
            for r in range(self.rows)
            for v in range(VECTORS)
        ]
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        sums = [[cgutils.alloca_once_value(build, zero) for _ in outs] for _ in range(self.steps)]
        with build.if_then(add):
            for place, out in zip(sums[0], outs):
                build.store(self.load(out), place)
        turns = build.udiv(depth, whole(self.steps))
        with cgutils.for_range(build, turns) as loop:
            for step in range(self.steps):
                self.step(build.add(build.mul(loop.index, whole(self.steps)), whole(step)), rows, b, sums[step])
        done = build.mul(turns, whole(self.steps))
        with cgutils.for_range(build, build.sub(depth, done)) as loop:
            self.step(build.add(done, loop.index), rows, b, sums[0])
        for n, out in enumerate(outs):
            total = build.load(sums[0][n])
            for other in sums[1:]:
                total = build.fadd(total, build.load(other[n]))
            build.store(total, self.pointer(out, self.vector), align=self.size)

    def step(self, k: Any, rows: list[Any], b: Any, sums: list[Any]) -> None:
        build, span = self.builder, self.lanes * self.size
        at = build.add(b, build.mul(k, whole(VECTORS * span)))
        columns = [self.load(build.add(at, whole(v * span))) for v in range(VECTORS)]
        for r, row in enumerate(rows):
            x = self.spread(build.add(row, build.mul(k, whole(self.size))))
            for v, column in enumerate(columns):
                place = sums[r * VECTORS + v]
                build.store(build.call(self.fma, [x, column, build.load(place)]), place)

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any) -> Any:
        return self.builder.load(self.pointer(address, self.vector), align=self.size)

    def spread(self, address: Any) -> Any:
        """One number in all lanes."""
        one = self.builder.load(self.pointer(address, self.number), align=self.size)
        return spread(self.builder, one, self.lanes)


_tiles = [_tile(rows, steps) for rows, steps in TILES]
_most, _middle, _least, _one = _tiles[0], _tiles[-3], _tiles[-2], _tiles[-1]


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
    return types.int64(like), lambda context, builder, signature, args: whole(size)


@part
def product(a, lda, rows, depth, packed, panels, c, ldc, like):
    """c[rows, panels] = a[rows, depth] times a packed matrix; c has room for whole panels."""
    apart()
    size, span = bytes_of(like), PANEL
    for begin in range(0, depth, BLOCK):
        length, more = min(BLOCK, depth - begin), begin > 0
        for p in range(panels):
            b, out, r = packed + (p * depth + begin) * span, c + p * span, 0
            at = a + begin * size
            while r + ROWS <= rows:
                _most(at + r * lda * size, lda, b, length, out + r * ldc * size, ldc, more, like)
                r += ROWS
            if ROWS > 4 and r + 4 <= rows:
                _middle(at + r * lda * size, lda, b, length, out + r * ldc * size, ldc, more, like)
                r += 4
            if r + 2 <= rows:
                _least(at + r * lda * size, lda, b, length, out + r * ldc * size, ldc, more, like)
                r += 2
            if r < rows:
                _one(at + r * lda * size, lda, b, length, out + r * ldc * size, ldc, more, like)


@intrinsic
def numbers(typingctx: Any, address: Any, count: Any, like: Any) -> Any:
    """An array of what lies there, of numbers like ``like``. numba's own ``carray`` takes long to compile."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        array = context.make_array(kind)(context, builder)
        size = whole(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        populate_array(
            array, data=builder.inttoptr(args[0], array.data.type), shape=cgutils.pack_array(builder, [args[1]]),
            strides=cgutils.pack_array(builder, [size]), itemsize=size, meminfo=None,
        )  # fmt: skip
        return array._getvalue()

    return types.Array(like, 1, "C")(types.int64, types.int64, like), codegen


@intrinsic
def _transpose(typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, like: Any) -> Any:
    """b[k, n] = a[n, k] for a square of as many numbers as a vector has, in registers."""
    signature = types.void(*[types.int64] * 4, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(builder, signature.args[4].bitwidth // 8, 1, 1)
        source, step, out, across = args[:4]
        rows = [tile.load(builder.add(source, builder.mul(step, whole(r * tile.size)))) for r in range(tile.lanes)]
        for r, row in enumerate(_transposed(builder, rows)):
            at = builder.add(out, builder.mul(across, whole(r * tile.size)))
            builder.store(row, tile.pointer(at, tile.vector), align=tile.size)
        return context.get_dummy_value()

    return signature, codegen


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Rows become columns by zipping the halves of the list, as often as it can be halved."""
    n, half = len(rows), len(rows) // 2
    zipped = [lane for pair in zip(range(n), range(n, 2 * n)) for lane in pair]
    kind = ir.VectorType(ir.IntType(32), n)
    low, high = ir.Constant(kind, zipped[:n]), ir.Constant(kind, zipped[n:])
    for _ in range(n.bit_length() - 1):
        pairs = list(zip(rows[:half], rows[half:]))
        rows = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in (low, high)]
    return rows


@part
def pack(weight, depth, columns, turned, packed, first, last, like):
    """Some panels of a matrix [depth, columns], or of the transpose of one [columns, depth]; what is past it is 0."""
    apart()
    size = bytes_of(like)
    across, lanes = PANEL // size, PANEL // VECTORS // size
    for p in range(first, last):
        begin, out = p * across, packed + p * depth * PANEL
        count, k = min(across, columns - p * across), 0
        if turned and count == across:
            while k + lanes <= depth:
                for v in range(VECTORS):
                    at = weight + ((begin + v * lanes) * depth + k) * size
                    _transpose(at, depth, out + (k * across + v * lanes) * size, across, like)
                k += lanes
        while k < depth:
            to = numbers(out + k * PANEL, across, like)
            if turned:
                for n in range(count):
                    to[n] = numbers(weight + ((begin + n) * depth + k) * size, 1, like)[0]
            else:
                row = numbers(weight + (k * columns + begin) * size, count, like)
                for n in range(count):
                    to[n] = row[n]
            for n in range(count, across):
                to[n] = like
            k += 1


@part
def project(a, rows, depth, packed, columns, c, spare, like):
    """c[rows, columns] = a[rows, depth] times a packed matrix; ``spare`` has room for one panel of STRETCH rows."""
    apart()
    size = bytes_of(like)
    across = PANEL // size
    whole = columns // across
    for r in range(0, rows, STRETCH):
        count = min(STRETCH, rows - r)
        at = a + r * depth * size
        product(at, depth, count, depth, packed, whole, c + r * columns * size, columns, like)
        if whole * across < columns:
            product(at, depth, count, depth, packed + whole * depth * PANEL, np.int64(1), spare, across, like)
            for i in range(count):
                left = columns - whole * across
                from_, to = (
                    numbers(spare + i * PANEL, left, like),
                    numbers(c + ((r + i) * columns + whole * across) * size, left, like),
                )
                for n in range(left):
                    to[n] = from_[n]


@intrinsic
def _dots(typingctx: Any, a: Any, depth: Any, weight: Any, c: Any, like: Any) -> Any:
    """c[n] = weight[n] . a for as many rows n as a vector has lanes, of a depth of whole vectors.

    Each row has a vector of sums; turned round, they are added up all at once.
    """
    signature = types.void(*[types.int64] * 4, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(builder, signature.args[4].bitwidth // 8, 1, 1)
        left, depth, weight, out = args[:4]
        span, step = tile.lanes * tile.size, builder.mul(depth, whole(tile.size))
        zero = ir.Constant(tile.vector, [0.0] * tile.lanes)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(tile.lanes)]
        with cgutils.for_range(builder, builder.udiv(depth, whole(tile.lanes))) as loop:
            off = builder.mul(loop.index, whole(span))
            x, at = tile.load(builder.add(left, off)), builder.add(weight, off)
            for place in sums:
                builder.store(builder.call(tile.fma, [x, tile.load(at), builder.load(place)]), place)
                at = builder.add(at, step)
        rows = _transposed(builder, [builder.load(place) for place in sums])
        while len(rows) > 1:
            rows = [builder.fadd(a, b) for a, b in zip(rows[::2], rows[1::2])]
        builder.store(rows[0], tile.pointer(out, tile.vector), align=tile.size)
        return context.get_dummy_value()

    return signature, codegen


@njit(**BARE, fastmath=FAST)
def row_times_transpose(a, depth, weight, first, last, c, like):
    """c[n] = weight[n] . a for some rows n of a matrix [., depth]."""
    apart()
    size = bytes_of(like)
    x, out = numbers(a, depth, like), numbers(c, last, like)
    n, lanes = first, PANEL // VECTORS // size
    while depth % lanes == 0 and n + lanes <= last:
        _dots(a, depth, weight + n * depth * size, c + n * size, like)
        n += lanes
    while n + 4 <= last:
        w0, w1 = numbers(weight + n * depth * size, depth, like), numbers(weight + (n + 1) * depth * size, depth, like)
        w2 = numbers(weight + (n + 2) * depth * size, depth, like)
        w3 = numbers(weight + (n + 3) * depth * size, depth, like)
        s0, s1, s2, s3 = like, like, like, like
        for k in range(depth):
            s0 += w0[k] * x[k]
            s1 += w1[k] * x[k]
            s2 += w2[k] * x[k]
            s3 += w3[k] * x[k]
        out[n], out[n + 1], out[n + 2], out[n + 3] = s0, s1, s2, s3
        n += 4
    while n < last:
        w0, s0 = numbers(weight + n * depth * size, depth, like), like
        for k in range(depth):
            s0 += w0[k] * x[k]
        out[n] = s0
        n += 1


@njit(**BARE, fastmath=FAST)
def row_times(a, depth, weight, across, first, last, c, like):
    """c = a times some columns of a matrix [depth, across]."""
    apart()
    size, count = bytes_of(like), last - first
    x, out = numbers(a, depth, like), numbers(c + first * size, count, like)
    for n in range(count):
        out[n] = like
    k = 0
    while k + 4 <= depth:
        at = weight + (k * across + first) * size
        w0, w1 = numbers(at, count, like), numbers(at + across * size, count, like)
        w2, w3 = numbers(at + 2 * across * size, count, like), numbers(at + 3 * across * size, count, like)
        x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        for n in range(count):
            out[n] += x0 * w0[n] + x1 * w1[n] + x2 * w2[n] + x3 * w3[n]
        k += 4
    while k < depth:
        w0, x0 = numbers(weight + (k * across + first) * size, count, like), x[k]
        for n in range(count):
            out[n] += x0 * w0[n]
        k += 1
