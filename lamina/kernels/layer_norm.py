"""Layer norm over rows on a GPU, at the speed of memory: act(gain (z - mean)/deviation + bias), z = x or x + residual.

A program walks over many rows and fetches the next while it works on one; gain and bias stay in registers. So do its
shares of their gradients, which are added up at the end in a fixed order. Rows that do not fit into registers are read
twice, in pieces. Statistics are float32 in every dtype. Needs Triton: import it where a kernel is certain to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .forms import power
from .formulas import inverse_deviation, over, rounded, std_correction, wide
from .formulas import sigmoid as quick_sigmoid
from .formulas import tanh as quick_tanh
from .plans import processors
from .prepared import Code, Launch

WIDEST, WIDEST_BACK = 32768, 8192  # numbers of a row that is held whole
PIECE = 4096  # of a wider row
INTERPRETED_PROGRAMS = 3  # on the interpreter: enough for shares to be added up
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu", "silu")
INVERSE_SQRT_2, INVERSE_SQRT_2PI = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)
PLAIN = tl.constexpr(False)


@triton.jit
def _activated(a, ACT: tl.constexpr):
    if ACT == "relu":
        return tl.where(a < 0.0, 0.0, a)
    elif ACT == "tanh":
        return quick_tanh(a, PLAIN)
    elif ACT == "sigmoid":
        return quick_sigmoid(a, PLAIN)
    elif ACT == "gelu":
        return 0.5 * a * (1.0 + tl.math.erf(a * INVERSE_SQRT_2))
    elif ACT == "silu":
        return a * quick_sigmoid(a, PLAIN)
    else:
        return a


@triton.jit
def _slope(a, ACT: tl.constexpr):
    """The activation's at a."""
    if ACT == "relu":
        return tl.where(a > 0.0, 1.0, 0.0)
    elif ACT == "tanh":
        y = quick_tanh(a, PLAIN)
        return 1.0 - y * y
    elif ACT == "sigmoid":
        y = quick_sigmoid(a, PLAIN)
        return y * (1.0 - y)
    elif ACT == "gelu":
        density = INVERSE_SQRT_2PI * tl.exp(-0.5 * a * a)
        return 0.5 * (1.0 + tl.math.erf(a * INVERSE_SQRT_2)) + a * density
    else:
        y = quick_sigmoid(a, PLAIN)
        return y * (1.0 + a * (1.0 - y))


@triton.jit
def _read(place, at, ok):
    return tl.load(place + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _sum(x, residual, total, at, at_residual, at_total, ok):
    """x, or x + residual as it is rounded and given back."""
    z = _read(x, at, ok)
    if residual is not None:
        z = (z + _read(residual, at_residual, ok)).to(total.dtype.element_ty)
        tl.store(total + at_total, z, mask=ok)
        z = z.to(tl.float32)
    return z


@triton.jit
def _inside(x, ok, WHOLE: tl.constexpr):
    """0 past a row's end, where it has one before the block's."""
    if WHOLE:
        return x
    else:
        return tl.where(ok, x, 0.0)


@triton.jit
def _parameters(gain, bias, columns, ok):
    """Gain and bias of whole rows; 0 stands for what there is not."""
    g, b = 0.0, 0.0
    if gain is not None:
        g = _read(gain, columns, ok)[None, :]
    if bias is not None:
        b = _read(bias, columns, ok)[None, :]
    return g, b


@triton.jit
def _affine(normed, g, b, gain, bias):
    if gain is not None:
        normed = normed * g
    if bias is not None:
        normed = normed + b
    return normed


@triton.jit(do_not_specialize=["N", "turns"])
def forward_kernel(
    x, residual, gain, bias, out, total, statistics,  # [N, W] with x_row, r_row; [W] or None; [N, W] twice; [2, N]
    N, x_row, r_row, eps, turns,
    W: tl.constexpr, ACT: tl.constexpr, STD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a turn. W is a constant: nothing is masked where it is a power of two."""
    columns = tl.arange(0, BLOCK)
    column_ok = columns < W
    g, b = _parameters(gain, bias, columns, column_ok)
    for turn in tl.range(0, turns, num_stages=STAGES):
        rows = (wide(tl.num_programs(0)) * turn + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        row_ok = rows < N
        ok = row_ok[:, None] & column_ok[None, :]
        at = rows[:, None] * W + columns[None, :]
        z = _sum(x, residual, total, rows[:, None] * x_row + columns[None, :],
                 rows[:, None] * r_row + columns[None, :], at, ok)  # fmt: skip
        mean = over(tl.sum(z, 1), W)
        # What rounding left in the mean is taken out again: a constant row has deviation 0.
        apart = _inside(z - mean[:, None], ok, BLOCK == W)
        rest = over(tl.sum(apart, 1), W)
        squares = over(tl.sum(rounded(apart, apart), 1), W)
        rstd = inverse_deviation(tl.maximum(squares - rest * rest, 0.0, tl.PropagateNan.ALL), eps, STD)
        tl.store(statistics + rows, mean + rest, mask=row_ok)
        tl.store(statistics + N + rows, rstd, mask=row_ok)
        y = _activated(_affine((apart - rest[:, None]) * rstd[:, None], g, b, gain, bias), ACT)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "turns"])
def backward_kernel(
    d_out, z, gain, bias, statistics,
    d_total, d_z, shares,  # d_total: of x + residual itself, or None; [2, programs, W]
    N, z_row, eps, turns,
    W: tl.constexpr, ACT: tl.constexpr, STD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    column_ok = columns < W
    g, b = _parameters(gain, bias, columns, column_ok)
    sum_gain, sum_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for turn in tl.range(0, turns, num_stages=STAGES):
        rows = (wide(tl.num_programs(0)) * turn + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        row_ok = rows < N
        ok = row_ok[:, None] & column_ok[None, :]
        at = rows[:, None] * W + columns[None, :]
        mean = tl.load(statistics + rows, mask=row_ok, other=0.0)
        rstd = tl.load(statistics + N + rows, mask=row_ok, other=0.0)
        d = _read(d_out, at, ok)
        normed = (_read(z, rows[:, None] * z_row + columns[None, :], ok) - mean[:, None]) * rstd[:, None]
        normed = _inside(normed, ok, BLOCK == W)
        if ACT is not None:
            d = rounded(d, _slope(_affine(normed, g, b, gain, bias), ACT))
        arriving = d
        if gain is not None:
            sum_gain += d * normed
            arriving = rounded(d, tl.broadcast_to(g, (ROWS, BLOCK)))
        if bias is not None:
            sum_bias += d
        across = over(tl.sum(arriving, 1), W)
        along = over(tl.sum(rounded(arriving, normed), 1), W) * std_correction(rstd, eps, STD)
        found = (arriving - across[:, None] - normed * along[:, None]) * rstd[:, None]
        if d_total is not None:
            found += _read(d_total, at, ok)
        tl.store(d_z + at, found.to(d_z.dtype.element_ty), mask=ok)
    mine = shares + tl.program_id(0) * W + columns
    if gain is not None:
        tl.store(mine, tl.sum(sum_gain, 0), mask=column_ok)
    if bias is not None:
        tl.store(mine + tl.num_programs(0) * W, tl.sum(sum_bias, 0), mask=column_ok)


# Rows in pieces.


@triton.jit(do_not_specialize=["N"])
def wide_forward_kernel(
    x, residual, gain, bias, out, total, statistics, N, W, x_row, r_row, eps,
    ACT: tl.constexpr, STD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. Each piece's own mean and squares are merged, so that a large mean cancels nothing."""
    row = wide(tl.program_id(0))
    columns = tl.arange(0, BLOCK)
    mean, squares = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for begin in tl.range(0, W, BLOCK, num_stages=1):
        inside = begin + columns
        ok = inside < W
        z = _sum(x, residual, total, row * x_row + inside, row * r_row + inside, row * W + inside, ok)
        count = tl.minimum(W - begin, BLOCK).to(tl.float32)
        own = over(tl.sum(z, 0), count)
        apart = tl.where(ok, z - own, 0.0)
        rest = over(tl.sum(apart, 0), count)
        own += rest
        apart = tl.where(ok, apart - rest, 0.0)
        away, share = own - mean, over(count, count + begin)
        squares += tl.sum(apart * apart, 0) + away * away * share * begin
        mean += away * share
    rstd = inverse_deviation(over(squares, W), eps, STD)
    tl.store(statistics + row, mean)
    tl.store(statistics + N + row, rstd)
    tl.debug_barrier()  # the sum is read again, perhaps by other threads
    for begin in tl.range(0, W, BLOCK, num_stages=1):
        inside = begin + columns
        ok = inside < W
        g, b = 0.0, 0.0
        if gain is not None:
            g = _read(gain, inside, ok)
        if bias is not None:
            b = _read(bias, inside, ok)
        z = _read(x, row * x_row + inside, ok) if residual is None else _read(total, row * W + inside, ok)
        y = _activated(_affine((z - mean) * rstd, g, b, gain, bias), ACT)
        tl.store(out + row * W + inside, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _piece(d_out, z, gain, bias, mean, rstd, row, W, z_row, inside, ok, ACT: tl.constexpr):
    """What arrives at the affine's result and at x^, and x^ itself."""
    d = _read(d_out, row * W + inside, ok)
    normed = tl.where(ok, (_read(z, row * z_row + inside, ok) - mean) * rstd, 0.0)
    g, b = 0.0, 0.0
    if gain is not None:
        g = _read(gain, inside, ok)
    if bias is not None:
        b = _read(bias, inside, ok)
    if ACT is not None:
        d = rounded(d, _slope(_affine(normed, g, b, gain, bias), ACT))
    arriving = d
    if gain is not None:
        arriving = rounded(d, g)
    return d, arriving, normed


@triton.jit(do_not_specialize=["N"])
def wide_sums_kernel(
    d_out, z, gain, bias, statistics, sums, N, W, z_row, eps,
    ACT: tl.constexpr, STD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The two means of one row that its gradient needs."""
    row = wide(tl.program_id(0))
    mean, rstd = tl.load(statistics + row), tl.load(statistics + N + row)
    across, along = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(0, W, BLOCK, num_stages=1):
        inside = begin + tl.arange(0, BLOCK)
        _, arriving, normed = _piece(d_out, z, gain, bias, mean, rstd, row, W, z_row, inside, inside < W, ACT)
        across += arriving
        along += rounded(arriving, normed)
    tl.store(sums + row, over(tl.sum(across, 0), W))
    tl.store(sums + N + row, over(tl.sum(along, 0), W) * std_correction(rstd, eps, STD))


@triton.jit(do_not_specialize=["N", "turns"])
def wide_backward_kernel(
    d_out, z, gain, bias, statistics, sums, d_total, d_z, shares, N, W, z_row, turns,
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of some rows, one after another; the piece's shares of the parameters' gradients in registers."""
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = inside < W
    sum_gain, sum_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for turn in tl.range(0, turns, num_stages=1):
        row = wide(tl.num_programs(0)) * turn + tl.program_id(0)
        if row < N:
            mean, rstd = tl.load(statistics + row), tl.load(statistics + N + row)
            d, arriving, normed = _piece(d_out, z, gain, bias, mean, rstd, row, W, z_row, inside, ok, ACT)
            sum_gain += d * normed
            sum_bias += d
            found = (arriving - tl.load(sums + row) - normed * tl.load(sums + N + row)) * rstd
            if d_total is not None:
                found += _read(d_total, row * W + inside, ok)
            tl.store(d_z + row * W + inside, found.to(d_z.dtype.element_ty), mask=ok)
    mine = shares + wide(tl.program_id(0)) * W + inside
    if gain is not None:
        tl.store(mine, sum_gain, mask=ok)
    if bias is not None:
        tl.store(mine + wide(tl.num_programs(0)) * W, sum_bias, mask=ok)


@triton.jit(do_not_specialize=["programs"])
def added_up_kernel(
    shares, d_gain, d_bias,  # [2, programs, W], [W], [W]
    programs, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one parameter's gradient, in its dtype: the sum of all programs' shares, in a fixed order."""
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok, which = columns < W, tl.program_id(1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in tl.range(0, programs, ROWS):
        there = (begin + rows < programs)[:, None] & ok[None, :]
        at = (wide(which) * programs + begin + rows)[:, None] * W + columns[None, :]
        total += tl.load(shares + at, mask=there, other=0.0)
    found = tl.sum(total, 0)
    if d_gain is not None:
        tl.store(d_gain + columns, found.to(d_gain.dtype.element_ty), mask=ok & (which == 0))
    if d_bias is not None:
        tl.store(d_bias + columns, found.to(d_bias.dtype.element_ty), mask=ok & (which == 1))


class Cut(NamedTuple):
    """How rows are cut; ``block`` less than the width: into pieces."""

    rows: int
    block: int
    warps: int
    stages: int
    at_once: int  # programs of a multiprocessor that share the rows


ALL = 2**20  # programs: one for each tile


@cache
def cut(width: int, size: int, backward: bool) -> Cut:
    """For rows of ``width`` numbers of ``size`` bytes; a new number of rows compiles nothing.

    Timed on an H200 (docs/kernels.md): forward 32 numbers a thread, in 32 bits with as many programs as there are
    tiles; backward 16, beside which the shares stay in registers.
    """
    block = power(width)
    if block > (WIDEST_BACK if backward else WIDEST):
        return Cut(1, PIECE, 8, 1, 8)
    if backward:
        tile = max(block, 2048)
        warps = tile // 512
        return Cut(tile // block, block, warps, 3, max(1, (8 if size == 4 else 16) // warps))
    if size == 4:
        tile = max(block, 2048 if block >= 512 else 1024)
        return Cut(tile // block, block, max(2, tile // 1024), 1, ALL)
    tile = 8192 if block == 4096 else max(block, 2048)
    warps = max(2, tile // 1024)
    return Cut(tile // block, block, warps, 3, max(1, 16 // warps))


def _programs(device: torch.device, how: Cut, tiles: int) -> int:
    most = INTERPRETED_PROGRAMS if device.type != "cuda" else processors(device) * how.at_once
    return max(1, min(most, tiles))


class Look(NamedTuple):
    """All that a call's launches depend on, but which gradients are wanted."""

    count: int  # rows
    width: int
    x_row: int  # from one row of x to the next, and of the residual
    r_row: int
    dtypes: tuple[torch.dtype | None, ...]  # of x, residual, gain and bias; None for what there is not
    device: torch.device
    eps: float
    std: bool
    activation: str | None


CODES = 4096  # that are kept
FREE = ("N", "turns", "programs")  # what no kernel here is specialised on


@lru_cache(CODES)
def _code(*specialised: Any) -> Code:
    """One for all numbers of rows."""
    return Code()


def _launch(
    kernel: Any, programs: tuple[int, int], constants: Mapping[str, Any], look: Look, warps: int, *absent: bool
) -> Launch:
    """``absent``: whether those tensors are None that may be in one call and not in another of the same look."""
    kept = (value for name, value in constants.items() if name not in FREE)
    code = _code(kernel, warps, look.dtypes, look.device, look.count >= 2**31, *absent, *kept)
    return Launch(kernel, programs[0], constants, {"num_warps": warps}, look.device, programs[1], code)


def forward_launch(look: Look) -> Launch:
    """With x, residual, gain, bias, out, x + residual (else out again) and the statistics [2, N]."""
    how = cut(look.width, _size(look), False)
    constants: dict[str, Any] = {
        "N": look.count, "W": look.width, "x_row": look.x_row, "r_row": look.r_row, "eps": look.eps,
        "ACT": look.activation, "STD": look.std, "BLOCK": how.block,
    }  # fmt: skip
    if how.block < look.width:
        return _launch(wide_forward_kernel, (look.count, 1), constants, look, how.warps)
    programs = _programs(look.device, how, -(-look.count // how.rows))
    constants |= _walk(look, how, programs)
    return _launch(forward_kernel, (programs, 1), constants, look, how.warps)


def sums_launch(look: Look, bias: bool) -> Launch | None:
    """With d_out, z, gain, bias, statistics and the sums [2, N] for ``backward_launch``; None for rows held whole.

    bias: whether it is there.
    """
    how = cut(look.width, _size(look), True)
    if how.block >= look.width:
        return None
    constants = {**_backward_constants(look, how), "eps": look.eps, "STD": look.std}
    return _launch(wide_sums_kernel, (look.count, 1), constants, look, how.warps, bias)


def backward_launch(look: Look, bias: bool, d_total: bool) -> Launch:
    """With d_out, z, gain, bias, statistics, the sums of rows in pieces, d_total, d_z and the programs' shares.

    bias, d_total: whether they are there.
    """
    how = cut(look.width, _size(look), True)
    pieces = -(-look.width // how.block)
    programs = max(1, min(look.count, _programs(look.device, how, -(-look.count // how.rows) * pieces) // pieces))
    constants = _backward_constants(look, how)
    if pieces > 1:
        constants["turns"] = -(-look.count // programs)
        return _launch(wide_backward_kernel, (programs, pieces), constants, look, how.warps, bias, d_total)
    constants |= {"eps": look.eps, "STD": look.std, **_walk(look, how, programs)}
    return _launch(backward_kernel, (programs, 1), constants, look, how.warps, bias, d_total)


def added_up_launch(look: Look, programs: int, gain: bool, bias: bool) -> Launch:
    """With the programs' shares [2, programs, W] and both gradients, or None for the one that is not wanted.

    One launch for sums and casts: torch's three are a third of a backward pass of 16,384 x 1,024 in bfloat16.
    """
    columns = 16 if look.width < 4096 else 64
    constants = {"programs": programs, "W": look.width, "ROWS": 1024 // columns, "COLUMNS": columns}
    grid = -(-look.width // columns), 2 if bias else 1
    return _launch(added_up_kernel, grid, constants, look, 4, gain, bias)


def _size(look: Look) -> int:
    return 4 if look.dtypes[0] is torch.float32 else 2


def _walk(look: Look, how: Cut, programs: int) -> dict[str, int]:
    """Of programs that walk over whole rows."""
    return {"turns": -(-look.count // (programs * how.rows)), "ROWS": how.rows, "STAGES": how.stages}


def _backward_constants(look: Look, how: Cut) -> dict[str, Any]:
    z_row = look.x_row if look.dtypes[1] is None else look.width  # x + residual lies side by side
    return {"N": look.count, "W": look.width, "z_row": z_row, "ACT": look.activation, "BLOCK": how.block}
