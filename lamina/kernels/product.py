"""The product of a step: our own with a matrix larger than the L2 cache, for few rows, and the library's in shares.

Our own takes as long as its matrix takes to come from memory. Every other step reads it backwards, so that what the
cache still holds of it from the step before is used: at H = 4096 a step's two products, each with a stand-in for the
step's kernel, took 64 us where the library's took 75.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forms import power
from .formulas import COMPILED, wide
from .plans import OVERRIDE, processors, shared_memory

LARGE = 48 * 2**20  # bytes of a matrix that the L2 cache does not keep from step to step
ROWS = 32  # more rows, and the library is faster: each byte of the matrix is used more often
DEPTH = 128  # of a block of the contraction
SHORTEST = 512  # contraction of a share


def serves(weight: Tensor, batch: int) -> bool:
    """Whether this kernel multiplies by a matrix; it has 16 bits then."""
    if weight.element_size() != 2 or batch > ROWS:
        return False
    if weight.device.type != "cuda" or "product" in OVERRIDE:
        return bool(OVERRIDE.get("product", False))
    return weight.numel() * 2 >= LARGE and shared_memory(weight.device) >= 180 * 1024


def shares(weight: Tensor, batch: int) -> int:
    """Into how many the library's product of a backward step is cut along its contraction; the step adds them up.

    The result is small and the contraction long, so the library cuts it too, but adds up in a launch of its own: at
    B = 128, H = 2400 23.6 us, and 17.1 as a batch of three products. Two to twelve were tried; three or four do well.
    """
    if "shares" in OVERRIDE:
        return int(OVERRIDE["shares"])
    contraction, width = weight.shape
    tiles = -(-batch // 128) * -(-width // 128)
    if weight.device.type != "cuda" or weight.element_size() != 2 or 2 * tiles > processors(weight.device):
        return 1
    even = [n for n in (3, 4, 2) if contraction % (8 * n) == 0 and contraction // n >= SHORTEST]
    return even[0] if even else 1


@triton.jit(do_not_specialize=["B"])
def product_kernel(
    left, weight, out,  # [B, K], [N, K] or, TURNED, [K, N], [PARTS, B, N] float32
    clock, B,  # clock: a number that is odd at every other step
    N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN columns of one part of the contraction for all rows."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    columns, rows = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    column_ok, row_ok = (columns < N)[:, None], (rows < B)[None, :]
    back = tl.load(clock) % 2 != 0
    first = part * EACH
    count = tl.minimum(BLOCKS - first, EACH)
    total = tl.zeros((BN, BM), tl.float32)
    for block in tl.range(0, count, num_stages=STAGES):
        k = (first + tl.where(back, count - 1 - block, block)) * BK + tl.arange(0, BK)
        at = wide(k)[None, :] * N + columns[:, None] if TURNED else wide(columns)[:, None] * K + k[None, :]
        w = tl.load(weight + at, mask=column_ok & (k < K)[None, :], other=0.0)
        x = tl.load(left + rows[None, :] * K + k[:, None], mask=row_ok & (k < K)[:, None], other=0.0)
        if COMPILED:
            total = tl.dot(w, x, total)
        else:  # the interpreter multiplies 16-bit numbers wrongly
            total = tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    tl.store(out + part * (B * N) + rows[None, :] * N + columns[:, None], total, mask=column_ok & row_ok)


def _tile(turned: bool) -> int:
    """Columns of a program."""
    return 128 if turned else 64


def parts(width: int, turned: bool, programs: int) -> int:
    """Into how many the contraction is cut, so that all multiprocessors have as much to read.

    Backward it is four times as long as the result is wide, and cut at least so often.
    """
    tiles = -(-width // _tile(turned))

    def unevenness(count: int) -> float:
        return -(-tiles * count // programs) / (tiles * count / programs)

    least = 4 if turned else 1
    return min(range(least, least + 3), key=lambda count: (unevenness(count) > 1.1, count))


def result(weight: Tensor, batch: int, turned: bool) -> Tensor:
    """Where the kernel leaves a product, [parts, batch, width] float32, to be added up."""
    width = weight.shape[1 if turned else 0]
    count = parts(width, turned, processors(weight.device))
    return weight.new_empty((count, batch, width), dtype=torch.float32)


def launch(
    left: Tensor, weight: Tensor, turned: bool, out: Tensor, clock: Tensor
) -> tuple[Any, tuple[int, ...], int, dict[str, Any]]:
    """Kernel, grid, warps and arguments for left times the matrix's transpose or, ``turned``, the matrix."""
    (batch, contraction), (count, _, width), tile = left.shape, out.shape, _tile(turned)
    programs, rows = -(-width // tile) * count, max(16, power(batch))
    at_once = -(-programs // processors(left.device))  # on one multiprocessor, if there is room
    stages = shared_memory(left.device) // min(at_once, 3) // (2 * DEPTH * (tile + rows))
    arguments = {
        "left": left, "weight": weight, "out": out, "clock": clock, "B": batch, "N": width, "K": contraction,
        "TURNED": turned, "PARTS": count, "BN": tile, "BK": DEPTH, "BM": rows,
        "STAGES": max(2, min(4, stages)),
    }  # fmt: skip
    return product_kernel, (programs, 1, 1), 4, arguments
