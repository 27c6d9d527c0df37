"""The product of a step with a matrix larger than the L2 cache, for few rows.

Such a product takes as long as its matrix takes to come from memory. Two things make it shorter than the library's:
every other step reads the matrix backwards, so that what the cache still holds of it from the step before is used
(measured at H = 4096: 5 us of 36), and the kernel and the step's own wait for one another on the device instead of
being launched one after the other (programmatic dependent launch, 1 us a launch).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import interpreted
from .forms import power
from .formulas import COMPILED, wide
from .plans import OVERRIDE, shared_memory

LARGE = 48 * 2**20  # bytes of a matrix that the L2 cache does not keep from step to step
ROWS = 32  # more rows, and the library is faster: each byte of the matrix is used more often
SHARES = 4  # parts of a contraction that is longer than the result is wide; the reader adds them up


def serves(weight: Tensor, batch: int) -> bool:
    """Whether this kernel multiplies by a matrix; it has 16 bits then."""
    if weight.element_size() != 2 or batch > ROWS:
        return False
    if weight.device.type != "cuda" or "product" in OVERRIDE:
        return bool(OVERRIDE.get("product", False))
    return weight.numel() * 2 >= LARGE and shared_memory(weight.device) >= 180 * 1024


def early() -> bool:
    """Whether a pass with this product launches its kernels before the ones before have ended."""
    return not interpreted() and bool(OVERRIDE.get("early", True))


@triton.jit
def start_early(PDL: tl.constexpr):
    """Let the next kernel be launched; it waits for the end of this one where it has to."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Until the kernel before this one has ended."""
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["B"])
def product_kernel(
    left, weight, out,  # [B, K], [N, K] or, TURNED, [K, N], [PARTS, B, N] float32
    clock, B,  # clock: a number that is odd at every other step
    N: tl.constexpr, K: tl.constexpr, TURNED: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of one part of the contraction for all rows."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (BLOCKS + PARTS - 1) // PARTS
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    columns, rows = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    column_ok, row_ok = (columns < N)[:, None], (rows < B)[None, :]
    wait_for_last(PDL)
    start_early(PDL)  # not before: the next kernel takes for granted that the one before this has ended
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


def launch(
    left: Tensor, weight: Tensor, turned: bool, out: Tensor, clock: Tensor
) -> tuple[Any, tuple[int, ...], int, dict[str, Any]]:
    """Kernel, grid, warps and arguments for left times the matrix's transpose or, ``turned``, the matrix."""
    batch, contraction = left.shape
    parts, width = out.shape[0], out.shape[-1]
    tile = 128 if turned else 64
    arguments = {
        "left": left, "weight": weight, "out": out, "clock": clock, "B": batch, "N": width, "K": contraction,
        "TURNED": turned, "PARTS": parts, "BN": tile, "BK": 128, "BM": max(16, power(batch)),
        "STAGES": 3 if turned else 4, "PDL": early(),
    }  # fmt: skip
    return product_kernel, (-(-width // tile) * parts, 1, 1), 4, arguments


def result(weight: Tensor, batch: int, turned: bool) -> Tensor:
    """Where the kernel leaves a product, [parts, batch, width] float32."""
    parts = SHARES if turned else 1
    return weight.new_empty((parts, batch, weight.shape[1 if turned else 0]), dtype=torch.float32)
