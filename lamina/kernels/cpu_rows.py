"""Rows on a CPU: activations and norms. Loops over arrays that numba turns into vector instructions.

An index is always the loop's own variable: numba looks at any other for being negative, and nothing is vectorised.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_matrix import BARE, FAST, apart, bytes_of

LOG2E = 1.4426950408889634
# ln 2 in two parts, the first with few digits: n times it is exact.
LN2_HIGH, LN2_LOW = {4: 0.693359375, 8: 6.93145751953125e-1}, {4: -2.12194440e-4, 8: 1.42860682030941723212e-6}
H4, L4, H8, L8 = LN2_HIGH[4], LN2_LOW[4], LN2_HIGH[8], LN2_LOW[8]


@intrinsic
def _whole(typingctx: Any, x: Any) -> Any:
    """The nearest whole number, as a floating one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = f"llvm.rint.f{signature.args[0].bitwidth}"
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name), args)

    return x(x), codegen


@intrinsic
def _power_of_two(typingctx: Any, n: Any) -> Any:
    """2^n for a whole number in range, by its bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = signature.args[0].bitwidth == 64
        whole = ir.IntType(64 if wide else 32)
        bits = builder.add(builder.fptosi(args[0], whole), ir.Constant(whole, 1023 if wide else 127))
        return builder.bitcast(builder.shl(bits, ir.Constant(whole, 52 if wide else 23)), args[0].type)

    return n(n), codegen


@intrinsic
def constant(typingctx: Any, x: Any, like: Any) -> Any:
    """A constant as a number like another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[0], types.float64, signature.return_type)

    return like(types.float64, like), codegen


S2, S3, S4, S5, S6, S7 = (1 / math.factorial(k) for k in range(2, 8))
S8, S9, S10, S11, S12, S13 = (1 / math.factorial(k) for k in range(8, 14))


@njit(**BARE, fastmath=FAST)
def _parts_of_exp(x, like):
    """2^n and e^r - 1, with x = n ln 2 + r: the series' terms as far as the dtype has digits."""
    n = _whole(x * constant(LOG2E, like))
    if bytes_of(like) == 4:
        r = (x - n * constant(H4, like)) - n * constant(L4, like)
        p = r * (constant(S6, like) + r * constant(S7, like))
    else:
        r = (x - n * constant(H8, like)) - n * constant(L8, like)
        p = r * (constant(S12, like) + r * constant(S13, like))
        p = r * (
            constant(S8, like) + r * (constant(S9, like) + r * (constant(S10, like) + r * (constant(S11, like) + p)))
        )
        p = r * (constant(S6, like) + r * (constant(S7, like) + p))
    p = r * (constant(S2, like) + r * (constant(S3, like) + r * (constant(S4, like) + r * (constant(S5, like) + p))))
    return _power_of_two(n), r + r * p


@njit(**BARE, fastmath=FAST)
def sigmoid(x, like):
    one, most = constant(1.0, like), constant(87.0 if bytes_of(like) == 4 else 708.0, like)
    scale, rest = _parts_of_exp(min(max(-x, -most), most), like)
    return one / (one + scale + scale * rest)


@njit(**BARE, fastmath=FAST)
def tanh(x, like):
    """By e^2x - 1, which has all its digits where x is small."""
    one, two, most = constant(1.0, like), constant(2.0, like), constant(44.0, like)
    scale, rest = _parts_of_exp(min(max(two * x, -most), most), like)
    up = (scale - one) + scale * rest
    return up / (up + two)


@njit(**BARE, fastmath=FAST)
def mean_and_inverse(x, eps, std, like):
    """The mean of a row and 1/deviation; 0 for the latter where that is not finite, as the reference has it.

    What rounding left in the mean is taken out again: a constant row has deviation 0.
    """
    apart()
    count = constant(float(len(x)), like)
    total = like
    for j in range(len(x)):
        total += x[j]
    mean = total / count
    rest, squares = like, like
    for j in range(len(x)):
        away = x[j] - mean
        rest += away
        squares += away * away
    rest /= count
    var = max(squares / count - rest * rest, like)
    return mean + rest, inverse_deviation(var, eps, std, like)


@njit(**BARE)
def inverse_deviation(var, eps, std, like):
    one = constant(1.0, like)
    deviation = np.sqrt(var) + eps if std else np.sqrt(var + eps)
    if deviation > like and deviation < constant(np.inf, like):
        return one / deviation
    return var * like  # 0, or NaN


@njit(**BARE)
def correction(rstd, eps, std, like):
    """What the norm's projection term is multiplied by: 1, or (s + eps)/s when eps was added to s itself."""
    one = constant(1.0, like)
    if not std:
        return one
    apart = one - eps * rstd
    return one / apart if rstd > like and apart > like else like


@njit(**BARE, fastmath=FAST)
def through_norm(d, normed, rstd, eps, std, like):
    """In place: d to the normalised row becomes d to the row, rstd (d - mean(d) - x^ mean(d x^))."""
    apart()
    count = constant(float(len(d)), like)
    total, along = like, like
    for j in range(len(d)):
        total += d[j]
        along += d[j] * normed[j]
    mean, slope = total / count, along / count * correction(rstd, eps, std, like)
    for j in range(len(d)):
        d[j] = rstd * (d[j] - mean - normed[j] * slope)
