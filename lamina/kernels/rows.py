"""The input side of a recurrence in one operator: W_x x of all steps, normed, centred or as it is, plus a bias.

A row is W_x x of one step and case. It is cut into *parts*: the groups of gates that share statistics, or, where there
are none, tiles of columns. A program holds whole parts in registers, so forward is one read and one write. Backward
has few programs that walk over many rows, so each adds up its share of the parameters' gradients in registers; the
shares are summed at the end, in a fixed order. Needs Triton: import it where a kernel is certain to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import fail, one_of
from ..reference import EPS_MODES, affine, standardise
from .forms import power
from .formulas import inverse_deviation, std_correction, wide
from .plans import processors
from .start import start

MODES = ("norm", "centre", "plain")
PLAIN_BLOCK = 1024  # columns of a part that is a mere tile
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
    mean = tl.sum(x, 1) / n
    return mean + tl.sum(tl.where(ok, x - mean[:, None], 0.0), 1) / n


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    summed, gain, bias, out, statistics,  # [N, W], [W] or None, [W] or None, [N, W] float32, [2, N, parts]
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
        rstd = inverse_deviation(tl.sum(apart * apart, 1) / n, eps, STD)
        x = x * rstd[:, None]
        part, parts = tl.program_id(1), tl.num_programs(1)
        tl.store(statistics + rows * parts + part, mean, mask=row_ok)
        tl.store(statistics + (rows + N) * parts + part, rstd, mask=row_ok)
    if gain is not None:
        x = x * tl.load(gain + first + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        x = x + tl.load(bias + first + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, x, mask=ok)


@triton.jit
def _arriving(d_x, gain, at, inside, ok, column_ok):
    """dL/d(out), and that times the gain: what arrives at x^."""
    d = tl.load(d_x + at, mask=ok, other=0.0).to(tl.float32)
    if gain is not None:
        return d, d * tl.load(gain + inside, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    else:
        return d, d


@triton.jit
def _normed(summed, mean, rstd, at, ok):
    """x^, made anew."""
    x = tl.load(summed + at, mask=ok, other=0.0).to(tl.float32)
    return (x - mean[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["N", "turns"])
def backward_kernel(
    d_x, summed, gain, statistics, d_summed, shares,  # [N, W] twice, [W], [2, N, parts], [N, W], [0-2, programs, W]
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
            mean = tl.load(statistics + rows * parts + part, mask=row_ok, other=0.0)
            rstd = tl.load(statistics + (rows + N) * parts + part, mask=row_ok, other=0.0)
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
            across = (straight + tl.sum(d_normed, 1)) / n
            along = (skewed + tl.sum(d_normed * normed, 1)) / n * std_correction(rstd, eps, STD)
            d_normed = (d_normed - across[:, None] - normed * along[:, None]) * rstd[:, None]
        if MODE == "centre":
            d_normed = d - (tl.sum(d, 1) / n)[:, None]
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


def _constants(groups: Sequence[int], mode: str, eps_mode: str, how: Cut) -> dict[str, Any]:
    shared = () if mode == "plain" else tuple(groups)
    return {"GROUPS": shared, "MODE": mode, "STD": eps_mode == "std", "ROWS": how.rows, "BLOCK": how.block}


def _hidden(width: int, groups: Sequence[int]) -> int:
    return width // max(sum(groups), 1)


def _forward(
    summed: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    groups: Sequence[int],
    mode: str,
    eps: float,
    eps_mode: str,
) -> tuple[Tensor, Tensor]:
    """The result, and for "norm" the mean and rstd of each part, [2, ..., parts]."""
    out, statistics = _empty_results(summed, groups, mode)
    count, width = summed.numel() // max(summed.shape[-1], 1), summed.shape[-1]
    if count > 0:
        how = cut(width, tuple(groups), mode, False)
        arguments = {
            "summed": summed.contiguous(), "gain": _packed(gain), "bias": _packed(bias), "out": out,
            "statistics": statistics, "N": count, "W": width, "H": _hidden(width, groups), "eps": eps,
            **_constants(groups, mode, eps_mode, how),
        }  # fmt: skip
        start(forward_kernel, (-(-count // how.rows), how.parts), arguments, {"num_warps": how.warps})
    return out, statistics


_rows = torch.library.custom_op("lamina::rows", _forward, mutates_args=())


def _empty_results(summed: Tensor, groups: Sequence[int], mode: str) -> tuple[Tensor, Tensor]:
    kept = (2, *summed.shape[:-1], len(groups)) if mode == "norm" else (0,)
    return summed.new_empty(summed.shape, dtype=torch.float32), summed.new_empty(kept, dtype=torch.float32)


def _packed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@_rows.register_fake
def _(
    summed: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    groups: Sequence[int],
    mode: str,
    eps: float,
    eps_mode: str,
) -> tuple[Tensor, Tensor]:
    return _empty_results(summed, groups, mode)


def _backward(
    d_x: Tensor, summed: Tensor | None, gain: Tensor | None, statistics: Tensor | None,
    groups: Sequence[int], mode: str, eps: float, eps_mode: str, has_bias: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """d_summed in ``dtype``, and the gradients of the gain and the bias that are there, [0-2, W] float32."""
    count, width = d_x.numel() // max(d_x.shape[-1], 1), d_x.shape[-1]
    d_summed = d_x.new_empty(d_x.shape, dtype=dtype)
    parameters = (gain is not None) + has_bias
    if count == 0:
        return d_summed, d_x.new_zeros((parameters, width), dtype=torch.float32)
    how = cut(width, tuple(groups), mode, True)
    programs = _programs(d_x.device, how, -(-count // how.rows))
    shares = d_x.new_empty((parameters, programs, width), dtype=torch.float32)
    arguments = {
        "d_x": d_x.contiguous(), "summed": _packed(summed), "gain": _packed(gain), "statistics": statistics,
        "d_summed": d_summed, "shares": shares, "N": count, "W": width, "H": _hidden(width, groups), "eps": eps,
        "turns": -(-count // (how.rows * programs)), "HAS_BIAS": has_bias, "SLICES": how.slices,
        **_constants(groups, mode, eps_mode, how),
    }  # fmt: skip
    start(backward_kernel, (programs, how.parts * how.slices), arguments, {"num_warps": how.warps} | _two_at_once(how))
    return d_summed, shares.sum(1)


_rows_backward = torch.library.custom_op("lamina::rows_backward", _backward, mutates_args=())


def _programs(device: torch.device, how: Cut, tiles: int) -> int:
    """Programs for each part and slice: two a multiprocessor in all, one where they are of the largest kind."""
    if device.type != "cuda":
        return min(INTERPRETED_PROGRAMS, tiles)
    at_once = processors(device) * (2 if how.warps <= 8 else 1)
    return max(1, min(at_once // (how.parts * how.slices), tiles))


def _two_at_once(how: Cut) -> dict[str, Any]:
    """Keep the compiler from taking registers that the second program of a multiprocessor needs."""
    return {"maxnreg": 128} if how.warps == 8 else {}


@_rows_backward.register_fake
def _(
    d_x: Tensor, summed: Tensor | None, gain: Tensor | None, statistics: Tensor | None,
    groups: Sequence[int], mode: str, eps: float, eps_mode: str, has_bias: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parameters = (gain is not None) + has_bias
    return d_x.new_empty(d_x.shape, dtype=dtype), d_x.new_empty((parameters, d_x.shape[-1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    summed, gain, bias, *rest = inputs
    normed = rest[1] == "norm"  # the other modes are linear: nothing of the forward pass is needed
    ctx.save_for_backward(summed if normed else None, gain, output[1] if normed else None)
    ctx.rest, ctx.dtype, ctx.bias_dtype = rest, summed.dtype, None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_x: Tensor, backward: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
    summed, gain, statistics = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    d_summed, d_parameters = backward(d_x, summed, gain, statistics, *ctx.rest, has_bias, ctx.dtype)
    d_gain = None if gain is None else d_parameters[0].to(gain.dtype)
    d_bias = d_parameters[-1].to(ctx.bias_dtype) if has_bias else None
    return d_summed, d_gain, d_bias, None, None, None, None


def _operator_gradients(ctx: Any, d_x: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, d_x, _rows_backward)


_rows.register_autograd(_operator_gradients, setup_context=_keep)


class Rows(torch.autograd.Function):
    """The same without torch's dispatcher: there and back that costs the host some 100 us, often more than the work."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, d_x: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        # Recording (create_graph) is the operator's: it knows its own derivative.
        return _gradients(ctx, d_x, _rows_backward if torch.is_grad_enabled() else _backward)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    d_x, summed, gain, _, *rest = inputs
    ctx.save_for_backward(d_x, summed, gain)
    ctx.rest = rest


def _backward_again(ctx: Any, dd_summed: Tensor, dd_parameters: Tensor) -> tuple[Tensor | None, ...]:
    """Second derivatives, which nobody needs fast: autograd's, of the same function written in torch."""
    groups, mode, eps, eps_mode, has_bias, dtype = ctx.rest
    d_x, summed, gain = ctx.saved_tensors
    with torch.enable_grad():
        d, x = _leaf(d_x), _leaf(torch.zeros_like(d_x, dtype=dtype) if summed is None else summed)
        gain = None if gain is None else _leaf(gain)
        bias = _leaf(d.new_zeros(d.shape[-1])) if has_bias else None
        out = _composed(x, gain, bias, groups, mode, eps, eps_mode)
        given = [t for t in (x, gain, bias) if t is not None]
        found = torch.autograd.grad(out, given, d.float(), create_graph=True)
        wanted = [t for t in (d, x, gain) if t is not None]
        again = torch.autograd.grad(found, wanted, [dd_summed, *dd_parameters], allow_unused=True, create_graph=True)
    return again[0], None if summed is None else again[1], None if gain is None else again[2], *[None] * 7


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor as a point where gradients end, whatever it was made from; it can still be differentiated."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _composed(
    summed: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    groups: Sequence[int],
    mode: str,
    eps: float,
    eps_mode: str,
) -> Tensor:
    x = summed.float()
    if mode != "plain":
        parts = torch.split(x, [g * _hidden(x.shape[-1], groups) for g in groups], -1)
        x = torch.cat(
            [standardise(p, (-1,), eps, eps_mode) if mode == "norm" else p - p.mean(-1, True) for p in parts], -1
        )
    return affine(x, gain, bias)


_rows_backward.register_autograd(_backward_again, setup_context=_keep_backward)


def prepare(
    summed: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    groups: tuple[int, ...],
    mode: str,
    eps: float,
    eps_mode: str,
) -> Tensor:
    """What the sequence kernels take as x, [T, B, G*H] float32, from W_x x of all steps, [T, B, G*H] in any dtype.

    "norm" is LN over each group of gates times the gain plus the bias, "centre" takes the mean of each group away,
    "plain" adds the bias.
    """
    one_of("mode", mode, MODES)
    one_of("eps_mode", eps_mode, EPS_MODES)
    if (gain is not None and mode != "norm") or (bias is not None and mode == "centre"):
        raise fail(f"mode {mode!r} has no use for it", "a gain or a bias", "Pass None, or choose mode 'norm'.")
    if mode == "plain" and bias is None:
        return summed.float()  # nothing to fuse
    run = _rows if torch.compiler.is_compiling() else Rows.apply
    out: Tensor = run(summed, gain, bias, groups, mode, eps, eps_mode)[0]
    return out
