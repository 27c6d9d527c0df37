"""Products of a few rows with a matrix on a CPU.

torch is slow there: at 32 rows of 256 it reaches 70 billion operations a second, this 105, at 4 rows
28 and these 99 (one Zen 4 core). The matrix is packed once per call into panels two vectors wide, stored in the order
of reading. A tile of rows times one panel stays in registers for the whole contraction. A single row is bound by
memory: a recurrence of one case takes the matrix unpacked.

In a packed product every number is one sum in the order of the contraction, whatever tile it falls into: a frame's
numbers have the same bits alone (``lamina.stream``), in a sequence, in any batch and on any number of threads.

Functions take addresses instead of arrays: bounds are known here, and nothing is checked twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .jit import BARE, apart, bytes_of, cgutils, numbers, part
from .machine import DEPTH, LEFTS, STRETCH, VECTORS, vector_bytes
from .simd import spread, whole

PANEL = VECTORS * vector_bytes()  # bytes of a panel's row
BLOCK = 512  # length of the contraction per pass: a panel's part of it stays in the L1 cache
ROWS = 8 if vector_bytes() == 64 else 4  # rows of the largest tile
FAST = {"reassoc", "contract", "arcp", "nsz"}  # never nnan or ninf: numbers that are not finite must propagate


def _tile(rows: int, panels: int, turned: bool = False, vectors: int = VECTORS) -> Any:
    """Return an intrinsic for c[rows, panels] = or += a[rows, depth] b[panels, depth].

    ``apart``: bytes from one panel of b to the next. Tiles of few rows take several panels at once: each addition waits
    for the one before in its sum, so more sums hide the latency.
    turned: ``a`` is part of a packed panel, so its rows lie side by side. vectors: how many of a panel are computed.
    """

    @intrinsic
    def tile(
        typingctx: Any, a: Any, lda: Any, b: Any, apart: Any, depth: Any, c: Any, ldc: Any, add: Any, like: Any
    ) -> Any:
        signature = types.void(*[types.int64] * 7, types.boolean, like)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tile(builder, signature.args[8].bitwidth // 8, rows, panels, turned, vectors).emit(*args[:8])
            return context.get_dummy_value()

        return signature, codegen

    return tile


class _Tile:
    """Emitter of the instructions of one tile."""

    def __init__(
        self, builder: Any, size: int, rows: int = 1, panels: int = 1, turned: bool = False, vectors: int = VECTORS
    ) -> None:
        self.builder, self.size, self.rows, self.panels, self.turned = builder, size, rows, panels, turned
        self.vectors = vectors
        self.lanes = vector_bytes() // size
        self.number = ir.FloatType() if size == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.number, self.lanes)
        name = f"llvm.fma.v{self.lanes}f{8 * size}"
        self.fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(self.vector, [self.vector] * 3), name)

    def emit(self, a: Any, lda: Any, b: Any, apart: Any, depth: Any, c: Any, ldc: Any, add: Any) -> None:
        build, span = self.builder, self.lanes * self.size
        step = whole(1) if self.turned else lda
        rows = [build.add(a, build.mul(step, whole(r * self.size))) for r in range(self.rows)]
        panels = [build.add(b, build.mul(apart, whole(p))) for p in range(self.panels)]
        outs = [
            build.add(build.add(c, build.mul(ldc, whole(r * self.size))), whole(v * span))
            for r in range(self.rows)
            for v in range(self.panels * self.vectors)
        ]
        zero = ir.Constant(self.vector, [0.0] * self.lanes)
        sums = [cgutils.alloca_once_value(build, zero) for _ in outs]
        with build.if_then(add):
            for place, out in zip(sums, outs):
                build.store(self.load(out), place)
        with cgutils.for_range(build, depth) as loop:
            self.step(loop.index, rows, panels, sums)
        for place, out in zip(sums, outs):
            build.store(build.load(place), self.pointer(out, self.vector), align=self.size)

    def step(self, k: Any, rows: list[Any], panels: list[Any], sums: list[Any]) -> None:
        build, span = self.builder, self.lanes * self.size
        off = build.mul(k, whole(VECTORS * span))
        places = [build.add(panel, off) for panel in panels]
        columns = [self.load(build.add(at, whole(v * span))) for at in places for v in range(self.vectors)]
        along = build.mul(k, whole(VECTORS * span if self.turned else self.size))
        for r, row in enumerate(rows):
            x = self.spread(build.add(row, along))
            for v, column in enumerate(columns):
                place = sums[r * len(columns) + v]
                build.store(build.call(self.fma, [x, column, build.load(place)]), place)

    def pointer(self, address: Any, kind: Any) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any) -> Any:
        return self.builder.load(self.pointer(address, self.vector), align=self.size)

    def spread(self, address: Any) -> Any:
        """Load one number into all lanes."""
        one = self.builder.load(self.pointer(address, self.number), align=self.size)
        return spread(self.builder, one, self.lanes)


_full, _full_turned = _tile(ROWS, 1), _tile(ROWS, 1, turned=True)
_one, _two, _three, _four = (_tile(rows, 1) for rows in (1, 2, 3, 4))
_five, _six, _seven = (_tile(rows, 1) for rows in (5, 6, 7))
_one_wide, _two_wide, _three_wide, _four_wide = _tile(1, 4), _tile(2, 2), _tile(3, 2), _tile(4, 2)
_half_full, _half_turned = _tile(ROWS, 1, vectors=1), _tile(ROWS, 1, turned=True, vectors=1)
_half_five, _half_six, _half_seven = (_tile(rows, 1, vectors=1) for rows in (5, 6, 7))
WIDE = ROWS // 2  # rows of the largest tile of two panels: its sums fill the registers


@part
def product(a, lda, rows, depth, packed, vectors, c, ldc, like):
    """Compute ``vectors`` columns of vectors of c = a[rows, depth] times a packed matrix; c has room for whole panels.

    The second half of the last panel is left out where it is padding, unless the rows are too few to gain by it.
    """
    apart()
    panels = (vectors + VECTORS - 1) // VECTORS
    if rows == 1:
        _product_of_one(a, depth, packed, panels, c, like)
        return
    size, away = bytes_of(like), depth * PANEL
    half = vectors % VECTORS != 0 and rows > WIDE
    if half:
        panels -= 1
    whole = rows // ROWS * ROWS if rows % ROWS == 0 else max(rows // ROWS - 1, 0) * ROWS
    for begin in range(0, depth, BLOCK):
        length, more, at = min(BLOCK, depth - begin), begin > 0, a + begin * size
        for p in range(0, panels, 2):
            b, out, wide = packed + p * away + begin * PANEL, c + p * PANEL, p + 1 < panels
            for panel in range(2 if wide else 1):
                for r in range(0, whole, ROWS):
                    left, to = at + r * lda * size, out + panel * PANEL + r * ldc * size
                    _full(left, lda, b + panel * away, away, length, to, ldc, more, like)
            left, to = at + whole * lda * size, out + whole * ldc * size
            _rest(left, lda, rows - whole, b, away, length, to, ldc, more, wide, like)
        if half:
            b, out = packed + panels * away + begin * PANEL, c + panels * PANEL
            _half_panel(at, lda, rows, whole, b, length, out, ldc, more, like)


@part
def _half_panel(a, lda, rows, whole, b, length, c, ldc, more, like):
    """All rows of the first half of a panel: ``whole`` of them in full tiles."""
    apart()
    size = bytes_of(like)
    for r in range(0, whole, ROWS):
        _half_full(a + r * lda * size, lda, b, length, length, c + r * ldc * size, ldc, more, like)
    left = rows - whole
    first = left if left <= ROWS else (left + 1) // 2
    to, out = a + whole * lda * size, c + whole * ldc * size
    _narrow(to, lda, first, b, length, out, ldc, more, True, like)
    to, out = to + first * lda * size, out + first * ldc * size
    _narrow(to, lda, left - first, b, length, out, ldc, more, True, like)


@part
def _rest(a, lda, rows, b, away, length, c, ldc, more, wide, like):
    """The last rows, fewer than two full tiles: as one wide tile, or as one tile or two of nearly equal height.

    A tile of one row would take as long as one of four: each of its two sums waits for the one before.
    """
    size = bytes_of(like)
    if rows <= WIDE and wide:
        if rows == 4:
            _four_wide(a, lda, b, away, length, c, ldc, more, like)
        elif rows == 3:
            _three_wide(a, lda, b, away, length, c, ldc, more, like)
        elif rows == 2:
            _two_wide(a, lda, b, away, length, c, ldc, more, like)
        elif rows == 1:
            for panel in range(2):
                _one(a, lda, b + panel * away, away, length, c + panel * PANEL, ldc, more, like)
        return
    first = rows if rows <= ROWS else (rows + 1) // 2
    for panel in range(2 if wide else 1):
        at, to = b + panel * away, c + panel * PANEL
        _narrow(a, lda, first, at, length, to, ldc, more, False, like)
        _narrow(a + first * lda * size, lda, rows - first, at, length, to + first * ldc * size, ldc, more, False, like)


@part
def _narrow(a, lda, rows, b, length, c, ldc, more, half, like):
    """One tile of up to ROWS rows and one panel, or its first half; few rows gain nothing by that."""
    apart()
    if half and rows > 4:
        if rows == ROWS:
            _half_full(a, lda, b, length, length, c, ldc, more, like)
        elif rows == 7:
            _half_seven(a, lda, b, length, length, c, ldc, more, like)
        elif rows == 6:
            _half_six(a, lda, b, length, length, c, ldc, more, like)
        elif rows == 5:
            _half_five(a, lda, b, length, length, c, ldc, more, like)
    elif rows == ROWS:
        _full(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 7:
        _seven(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 6:
        _six(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 5:
        _five(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 4:
        _four(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 3:
        _three(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 2:
        _two(a, lda, b, length, length, c, ldc, more, like)
    elif rows == 1:
        _one(a, lda, b, length, length, c, ldc, more, like)


@part
def _product_of_one(a, depth, packed, panels, c, like):
    """Multiply one row: nothing is read twice, and four panels at once keep loads in flight."""
    away, p = depth * PANEL, 0
    while p + 4 <= panels:
        _one_wide(a, depth, packed + p * away, away, depth, c + p * PANEL, depth, False, like)
        p += 4
    while p < panels:
        _one(a, depth, packed + p * away, away, depth, c + p * PANEL, depth, False, like)
        p += 1


@intrinsic
def _transpose(typingctx: Any, a: Any, lda: Any, b: Any, ldb: Any, like: Any) -> Any:
    """Transpose a square as wide as a vector in registers: b[k, n] = a[n, k]."""
    signature = types.void(*[types.int64] * 4, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(builder, signature.args[4].bitwidth // 8)
        source, step, out, across = args[:4]
        rows = [tile.load(builder.add(source, builder.mul(step, whole(r * tile.size)))) for r in range(tile.lanes)]
        for r, row in enumerate(_transposed(builder, rows)):
            at = builder.add(out, builder.mul(across, whole(r * tile.size)))
            builder.store(row, tile.pointer(at, tile.vector), align=tile.size)
        return context.get_dummy_value()

    return signature, codegen


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose rows by zipping the halves of the list log2(n) times."""
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
    """Pack panels first to last of a matrix [depth, columns], or of the transpose of one [columns, depth].

    The padding of the last panel is 0.
    """
    apart()
    size = bytes_of(like)
    across, lanes = PANEL // size, PANEL // VECTORS // size
    for p in range(first, last):
        begin, out = p * across, packed + (p - first) * depth * PANEL
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
def pack_share(weight, depth, columns, turned, packed, thread, threads, like):
    """Pack a thread's panels of a matrix."""
    count = (columns * bytes_of(like) + PANEL - 1) // PANEL
    first, last = count * thread // threads, count * (thread + 1) // threads
    pack(weight, depth, columns, turned, packed + first * depth * PANEL, first, last, like)


@part
def project(a, rows, depth, packed, columns, c, ldc, spare, like):
    """Compute c[rows, columns] = a[rows, depth] times a packed matrix; ``spare``: one panel of STRETCH rows."""
    apart()
    size = bytes_of(like)
    across = PANEL // size
    whole = columns // across
    left = columns - whole * across
    vectors = (left * VECTORS + across - 1) // across
    for r in range(0, rows, STRETCH):
        count = min(STRETCH, rows - r)
        at, out = a + r * depth * size, c + r * ldc * size
        product(at, depth, count, depth, packed, whole * VECTORS, out, ldc, like)
        if left > 0:
            product(at, depth, count, depth, packed + whole * depth * PANEL, vectors, spare, across, like)
            for i in range(count):
                from_ = numbers(spare + i * PANEL, left, like)
                to = numbers(out + (i * ldc + whole * across) * size, left, like)
                for n in range(left):
                    to[n] = from_[n]


@part
def multiply(a, rows, depth, weight, columns, turned, c, first, last, spare, like):
    """Compute panels first to last of c[rows, columns] = a[rows, depth] times a matrix that ``pack`` accepts.

    Two panels are packed at a time and used at once, for all rows: never slower than packing the whole matrix first.
    """
    apart()
    size = bytes_of(like)
    across, packed = PANEL // size, spare + STRETCH * PANEL
    for p in range(first, last, 2):
        until, begin = min(p + 2, last), p * across
        pack(weight, depth, columns, turned, packed, p, until, like)
        count = min(columns, until * across) - begin
        project(a, rows, depth, packed, count, c + begin * size, columns, spare, like)


@part
def outer(left, right, rows, height, width, c, first, last, add, spare, like):
    """Compute panels first to last of c[height, width] = or += left[rows, height]^T right[rows, width].

    Both factors are packed, DEPTH rows at a time: the right one whole, of the left one LEFTS panels. Those stay in the
    L2 cache while they are multiplied by every panel of the right one, which is in the L1 cache.
    """
    apart()
    size = bytes_of(like)
    across, panels = PANEL // size, (width * size + PANEL - 1) // PANEL
    right_packed = spare + ROWS * PANEL
    left_packed = right_packed + panels * min(DEPTH, rows) * PANEL
    for begin in range(0, rows, DEPTH):
        depth, more = min(DEPTH, rows - begin), add or begin > 0
        pack(right + begin * width * size, depth, width, False, right_packed, np.int64(0), panels, like)
        for p in range(first, last, LEFTS):
            until = min(p + LEFTS, last)
            pack(left + begin * height * size, depth, height, False, left_packed, p, until, like)
            tall = min(height, until * across) - p * across
            for q in range(panels):
                to, wide = c + (p * width + q) * across * size, min(across, width - q * across)
                at = right_packed + q * depth * PANEL
                _outer_panel(left_packed, at, depth, tall, wide, to, width, more, spare, like)


@part
def _outer_panel(left, right, depth, rows, columns, c, ldc, more, spare, like):
    """Compute columns of at most one panel; a tile that crosses the edge of c is written to ``spare`` first."""
    apart()
    size = bytes_of(like)
    across = PANEL // size
    for r in range(0, rows, ROWS):
        at, to = left + r // across * depth * PANEL + r % across * size, c + r * ldc * size
        count = min(np.int64(ROWS), rows - r)
        if count == ROWS and columns == across:
            _full_turned(at, depth, right, depth, depth, to, ldc, more, like)
        elif count == ROWS and columns * VECTORS == across:
            _half_turned(at, depth, right, depth, depth, to, ldc, more, like)
        else:
            if columns * VECTORS <= across:
                _half_turned(at, depth, right, depth, depth, spare, across, False, like)
            else:
                _full_turned(at, depth, right, depth, depth, spare, across, False, like)
            for i in range(count):
                out, new = numbers(to + i * ldc * size, columns, like), numbers(spare + i * PANEL, columns, like)
                for n in range(columns):
                    out[n] = out[n] + new[n] if more else new[n]


@intrinsic
def _dots(typingctx: Any, a: Any, depth: Any, weight: Any, c: Any, like: Any) -> Any:
    """Compute c[n] = weight[n] . a for as many rows n as a vector has lanes; depth is a multiple of the lanes.

    Each row has a vector of sums; these are transposed and added all at once.
    """
    signature = types.void(*[types.int64] * 4, like)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile = _Tile(builder, signature.args[4].bitwidth // 8)
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
    """Compute c[n] = weight[n] . a for rows first to last of a matrix [., depth]."""
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
    """Compute c = a times columns first to last of a matrix [depth, across]."""
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
