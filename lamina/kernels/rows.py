"""The input side of a recurrence: W_x x of all steps, normed, centred or as it is, plus biases. And W_h, centred.

A row is W_x x of one step and case. It is cut into *parts*: the groups of gates that share statistics, or, where there
are none, tiles of columns. A program holds whole parts in registers, so forward is one read and one write. Backward
has few programs that walk over many rows, so each adds up its share of the parameters' gradients in registers; the
shares are summed at the end, in a fixed order. Needs Triton: import it where a kernel is certain to run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forms import kept_dtype, power, statistics_shape
from .formulas import fitting, inverse_deviation, over, rounded, std_correction, wide
from .plans import processors
from .precision import Matrix
from .start import start

MODES = ("norm", "centre", "plain")
PLAIN_BLOCK = 1024  # columns of a part that is a mere tile
LARGE = 8 * 2**20  # numbers of a matrix that is centred tile by tile, after its sums; others column by column
INTERPRETED_PROGRAMS = 3  # of a backward launch on the interpreter: enough for shares to be added up


@triton.jit
def _part(W, H, GROUPS: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr):
    """First column and number of columns of this program's part; GROUPS is empty where parts are mere tiles."""
    part = tl.program_id(1) // SLICES
    if len(GROUPS) == 0:
        return part * BLOCK, W - part * BLOCK
    elif len(GROUPS) == 1:
        return 0, W  # W may be known to be a multiple of 16 where H is not
    else:
        first, gates = 0, 0
        for g in tl.static_range(len(GROUPS)):
            first += tl.where(g < part, GROUPS[g], 0)
            gates += tl.where(g == part, GROUPS[g], 0)
        return first * H, gates * H


@triton.jit
def _mean(x, ok, n):
    """Means of rows, with the rounding of the sum taken out again: a constant row's is its constant, exactly.

    Without that a constant row would have a tiny variance, which eps = 0 would blow up.
    """
    mean = over(tl.sum(x, 1), n)
    return mean + over(tl.sum(tl.where(ok, x - mean[:, None], 0.0), 1), n)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    summed, gain, bias, bias_too, out, statistics,  # [N, W], [W] or None thrice, [N, W], [N, 2, parts]
    N, W, H, eps,
    GROUPS: tl.constexpr, MODE: tl.constexpr, STD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of ROWS rows."""
    first, n = _part(W, H, GROUPS, BLOCK, 1)
    rows = wide(tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    row_ok, column_ok = rows < N, columns < n
    ok = row_ok[:, None] & column_ok[None, :]
    at = rows[:, None] * W + (first + columns)[None, :]
    x = tl.load(summed + at, mask=ok, other=0.0).to(tl.float32)
    if MODE != "plain":
        mean = _mean(x, ok, n)
        x = x - mean[:, None]
    if MODE == "norm":
        apart = tl.where(ok, x, 0.0)
        rstd = inverse_deviation(over(tl.sum(apart * apart, 1), n), eps, STD)
        x = x * rstd[:, None]
        part, parts = tl.program_id(1), tl.num_programs(1)
        tl.store(statistics + 2 * rows * parts + part, mean, mask=row_ok)
        tl.store(statistics + (2 * rows + 1) * parts + part, rstd, mask=row_ok)
    if gain is not None:
        x = x * tl.load(gain + first + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        x = x + tl.load(bias + first + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if bias_too is not None:
        x = x + tl.load(bias_too + first + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _arriving(d_x, gain, at, inside, ok, column_ok):
    """dL/d(out), and that times the gain: what arrives at x^."""
    d = tl.load(d_x + at, mask=ok, other=0.0).to(tl.float32)
    if gain is not None:
        return d, rounded(d, tl.load(gain + inside, mask=column_ok, other=0.0).to(tl.float32)[None, :])
    else:
        return d, d


@triton.jit
def _normed(summed, mean, rstd, at, ok):
    """x^, made anew."""
    x = tl.load(summed + at, mask=ok, other=0.0).to(tl.float32)
    return (x - mean[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["N", "turns"])
def backward_kernel(
    d_x, summed, gain, statistics, d_summed, shares,  # [N, W] twice, [W], [N, 2, parts], [N, W], [0-2, programs, W]
    N, W, H, eps, turns,
    GROUPS: tl.constexpr, MODE: tl.constexpr, STD: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """One part of ROWS rows a turn; the shares of the parameters' gradients stay in registers for all turns.

    The widest parts do not fit beside their shares. Each of SLICES programs then owns BLOCK columns of the part and
    reads the others' only for the sums over the row; the owners come by at about the same time, so that is L2's work.
    """
    first, n = _part(W, H, GROUPS, BLOCK, SLICES)
    program, programs = tl.program_id(0), tl.num_programs(0)
    part, parts, own = tl.program_id(1) // SLICES, tl.num_programs(1) // SLICES, tl.program_id(1) % SLICES
    inside = own * BLOCK + tl.arange(0, BLOCK)
    column_ok = inside < n
    if gain is not None:
        gain += first
    sum_gain, sum_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for turn in tl.range(0, turns, num_stages=1):
        rows = (wide(programs) * turn + program) * ROWS + tl.arange(0, ROWS)
        row_ok = rows < N
        ok = row_ok[:, None] & column_ok[None, :]
        row_at = (rows * W + first)[:, None]
        if MODE == "norm":
            mean = tl.load(statistics + 2 * rows * parts + part, mask=row_ok, other=0.0)
            rstd = tl.load(statistics + (2 * rows + 1) * parts + part, mask=row_ok, other=0.0)
        straight, skewed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
        if SLICES > 1:
            for begin in tl.range(0, n, BLOCK // 2, num_stages=1):
                other = begin + tl.arange(0, BLOCK // 2)
                other_ok = (other < n) & (other // BLOCK != own)
                theirs = row_ok[:, None] & other_ok[None, :]
                _, d_normed = _arriving(d_x, gain, row_at + other[None, :], other, theirs, other_ok)
                normed = _normed(summed, mean, rstd, row_at + other[None, :], theirs)
                straight += tl.sum(d_normed, 1)
                skewed += tl.sum(d_normed * normed, 1)
        at = row_at + inside[None, :]
        d, d_normed = _arriving(d_x, gain, at, inside, ok, column_ok)
        if HAS_BIAS:
            sum_bias += d
        if MODE == "norm":
            normed = _normed(summed, mean, rstd, at, ok)
            if gain is not None:
                sum_gain += d * normed
            across = over(straight + tl.sum(d_normed, 1), n)
            along = over(skewed + tl.sum(d_normed * normed, 1), n) * std_correction(rstd, eps, STD)
            d_normed = (d_normed - across[:, None] - normed * along[:, None]) * rstd[:, None]
        if MODE == "centre":
            d_normed = d - over(tl.sum(d, 1), n)[:, None]
        tl.store(d_summed + at, d_normed.to(d_summed.dtype.element_ty), mask=ok)
    mine = shares + program * W + first + inside
    if gain is not None:
        tl.store(mine, tl.sum(sum_gain, 0), mask=column_ok)
        mine += programs * W
    if HAS_BIAS:
        tl.store(mine, tl.sum(sum_bias, 0), mask=column_ok)


class Cut(NamedTuple):
    """How rows are cut: into parts, wide parts of a backward pass into slices of ``block`` columns."""

    parts: int
    slices: int
    block: int
    rows: int  # of a program at a time
    warps: int


@cache
def cut(width: int, groups: tuple[int, ...], mode: str, backward: bool) -> Cut:
    """The cut of rows of ``width``; it depends on no count of rows, so a new batch size compiles nothing."""
    if mode == "plain":
        block = min(power(width), PLAIN_BLOCK)
        parts = -(-width // block)
    else:
        block, parts = power(width // sum(groups) * max(groups)), len(groups)
    vectors = (width if parts == 1 or mode == "plain" else width // sum(groups)) % 16 == 0
    each = 16 if vectors else 8  # elements of a thread: without vector loads, addresses need registers too
    slices = max(1, block // (512 * each)) if backward and mode == "norm" else 1
    block //= slices
    rows = max(1, (256 if backward else 128) * each // block)
    return Cut(parts, slices, block, rows, max(4, min(16 if backward else 32, block * rows // (32 * each))))


@cache
def _constants(groups: tuple[int, ...], mode: str, eps_mode: str, how: Cut) -> dict[str, Any]:
    shared = () if mode == "plain" else groups
    return {"GROUPS": shared, "MODE": mode, "STD": eps_mode == "std", "ROWS": how.rows, "BLOCK": how.block}


def _hidden(width: int, groups: tuple[int, ...]) -> int:
    return width // max(sum(groups), 1)


def forward(
    summed: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    bias_too: Tensor | None,
    groups: tuple[int, ...],
    mode: str,
    eps: float,
    eps_mode: str,
    out: Tensor | None = None,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the sequence kernels take as x, [T, B, G*H], from W_x x of all steps, [T, B, G*H]: in the same dtype.

    "norm" is LN over each group of gates times the gain plus the biases, "centre" takes the mean of each group away,
    "plain" adds the biases. Beside it the statistics of "norm". Both are written to where a caller wants them.
    """
    if statistics is None:
        statistics = summed.new_empty(statistics_shape(summed, groups, mode), dtype=torch.float32)
    width = summed.shape[-1]
    dtype = kept_dtype(summed.dtype, _hidden(width, groups))
    if mode == "plain" and bias is None and bias_too is None:  # nothing to fuse
        return summed.to(dtype) if out is None else out.copy_(summed), statistics
    out = torch.empty_like(summed, dtype=dtype) if out is None else out
    how, count = cut(width, groups, mode, False), summed.shape[0] * summed.shape[1]
    arguments = {
        "summed": summed, "gain": gain, "bias": bias, "bias_too": bias_too, "out": out, "statistics": statistics,
        "N": count, "W": width, "H": _hidden(width, groups), "eps": eps, **_constants(groups, mode, eps_mode, how),
    }  # fmt: skip
    start(forward_kernel, (-(-count // how.rows), how.parts), arguments, {"num_warps": how.warps})
    return out, statistics


def backward(
    d_x: Tensor,
    summed: Tensor,
    gain: Tensor | None,
    statistics: Tensor,
    groups: tuple[int, ...],
    mode: str,
    eps: float,
    eps_mode: str,
    has_bias: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """d_summed in the dtype of ``summed``, and the gradients of gain and bias that are there, [0-2, W] float32.

    ``summed`` is read in mode "norm" only; the others are linear. d_summed is ``out`` where a caller wants it there.
    """
    count, width, parameters = d_x.shape[0] * d_x.shape[1], d_x.shape[-1], (gain is not None) + has_bias
    if mode == "plain" and not has_bias:
        same = d_x.to(summed.dtype) if out is None else out.copy_(d_x)
        return same, d_x.new_empty((0, width), dtype=torch.float32)
    how = cut(width, groups, mode, True)
    programs = _programs(d_x.device, how, -(-count // how.rows))
    d_summed = torch.empty_like(d_x, dtype=summed.dtype) if out is None else out
    shares = d_x.new_empty((parameters, programs, width), dtype=torch.float32)
    arguments = {
        "d_x": d_x, "summed": summed, "gain": gain, "statistics": statistics, "d_summed": d_summed, "shares": shares,
        "N": count, "W": width, "H": _hidden(width, groups), "eps": eps,
        "turns": -(-count // (how.rows * programs)), "HAS_BIAS": has_bias, "SLICES": how.slices,
        **_constants(groups, mode, eps_mode, how),
    }  # fmt: skip
    start(backward_kernel, (programs, how.parts * how.slices), arguments, _options(how))
    return d_summed, shares.sum(1)


def in_place(width: int, groups: tuple[int, ...]) -> bool:
    """Whether d_summed may take the place of W_x x: a program alone reads what it writes, before it does."""
    return cut(width, groups, "norm", True).slices == 1


def _programs(device: torch.device, how: Cut, tiles: int) -> int:
    """Programs for each part and slice: two a multiprocessor in all, one where they are of the largest kind."""
    if device.type != "cuda":
        return min(INTERPRETED_PROGRAMS, tiles)
    at_once = processors(device) * (2 if how.warps <= 8 else 1)
    return max(1, min(at_once // (how.parts * how.slices), tiles))


@cache
def _options(how: Cut) -> dict[str, Any]:
    """With 8 warps, keep the compiler from taking registers that the second program of a multiprocessor needs."""
    return {"num_warps": how.warps} | ({"maxnreg": 128} if how.warps == 8 else {})


@triton.jit
def matrix_kernel(
    weight, out,  # [G*H, H] twice
    sums,  # [groups, H] of the columns, float32; None: they are formed here
    most,  # [1]: a bound of what is written; None: it is not scaled
    W, H, stretch,
    GROUPS: tl.constexpr, CENTRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of a stretch of one group's rows, less their means (for which all are read first) or as they are."""
    first, n = _part(W, H, GROUPS, COLUMNS, 1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    at = wide(first + rows)[:, None] * H + columns[None, :]
    mean = tl.zeros((1, COLUMNS), tl.float32)
    if sums is not None:
        total = tl.load(sums + tl.program_id(1) * H + columns, mask=columns < H, other=0.0)
        mean = over(total, n)[None, :]
    elif CENTRE:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, n, ROWS):
            ok = (begin + rows < n)[:, None] & (columns < H)[None, :]
            total += tl.load(weight + wide(begin) * H + at, mask=ok, other=0.0).to(tl.float32)
        mean = over(tl.sum(total, 0), n)[None, :]
    scale = 1.0
    if most is not None:
        scale = fitting(tl.load(most))[0]
    start = tl.program_id(2) * stretch
    for begin in range(start, tl.minimum(start + stretch, n), ROWS):
        ok = (begin + rows < n)[:, None] & (columns < H)[None, :]
        x = tl.load(weight + wide(begin) * H + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + wide(begin) * H + at, ((x - mean) * scale).to(out.dtype.element_ty), mask=ok)


def matrix(weight: Tensor, groups: tuple[int, ...], half: bool) -> Matrix:
    """Rows less the mean of their normalised group, so that W h has mean 0; without groups as they are.

    No gradient is centred in turn: that of the product has mean 0 over the group, so W's has it too.
    """
    if not half and not groups:
        return Matrix(weight, weight.dtype)
    # No difference from a mean is more than twice the largest.
    most = torch.linalg.vector_norm(weight, torch.inf).view(1) * 2 if half else None
    out = torch.empty_like(weight, dtype=torch.float16 if half else None)
    (width, hidden), large = weight.shape, weight.numel() >= LARGE
    columns, rows, stretch = (64, 64, 512) if large else (16, 256, width)
    arguments = {
        "weight": weight, "out": out, "sums": _column_sums(weight, groups) if large and groups else None, "most": most,
        "W": width, "H": hidden, "stretch": stretch, "GROUPS": groups or (width // hidden,), "CENTRE": bool(groups),
        "ROWS": rows, "COLUMNS": columns,
    }  # fmt: skip
    grid = (-(-hidden // columns), max(1, len(groups)), -(-width // stretch))
    start(matrix_kernel, grid, arguments, {"num_warps": 8})
    return Matrix(out, weight.dtype, most)


def _column_sums(weight: Tensor, groups: tuple[int, ...]) -> Tensor:
    """[groups, H] float32."""
    hidden = weight.shape[1]
    sums = torch.empty(len(groups), hidden, dtype=torch.float32, device=weight.device)
    for out, rows in zip(sums, torch.split(weight, [hidden * g for g in groups])):
        torch.sum(rows, 0, dtype=torch.float32, out=out)
    return sums
