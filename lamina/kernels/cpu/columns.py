"""Loops over columns on a CPU: statistics of each feature over the rows of a batch, and the gradients of batch norm.

Loops run along a row, one number per feature; sums over rows are rows themselves. Four rows at a time are added where
possible, so that the sum is loaded and stored once for four.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import rows
from . import simd as v
from .backward import BLOCK
from .jit import apart, bytes_of, numbers, part
from .rows import constant
from .simd import Lanes, loop

divided = loop("divided", lambda x, n: x / n, 1, [0], 1)
_add = loop("add_row", lambda x, out: out + x, 2, [1])
_add_four = loop("add_rows", lambda a, b, c, d, out: out + ((a + b) + (c + d)), 5, [4])


def _carefully(x: Lanes, out: Lanes, lost: Lanes) -> tuple[Lanes, Lanes]:
    """Return out + x and its rounding error (Kahan): sums of 2^15 rows are as exact as torch's."""
    x = x - lost
    total = out + x
    return total, (total - out) - x


add_carefully = loop("add_carefully", _carefully, 3, [1, 2])


def _spread(x: Lanes, mean: Lanes, rest: Lanes, squares: Lanes) -> tuple[Lanes, Lanes]:
    x = x - mean
    return rest + x, squares + x * x


def _spread_four(a, b, c, d, mean, rest, squares):
    a, b, c, d = a - mean, b - mean, c - mean, d - mean
    return rest + ((a + b) + (c + d)), squares + ((a * a + b * b) + (c * c + d * d))


_around = loop("around_row", _spread, 4, [2, 3])
_around_four = loop("around_rows", _spread_four, 7, [5, 6])


def _settled(std: bool) -> Any:
    """Return a formula for mean, variance and 1/deviation from the sums of x - mean and of its squares.

    1/deviation is 0 where the deviation is 0 or infinite, as in the reference.
    """

    def settle(rest, squares, mean, var, scale, n, eps):
        rest = rest / n
        var = squares / n - rest * rest
        var = var.where("<", 0.0, 0.0, var)
        deviation = v.root(var) + eps if std else v.root(var + eps)
        nothing = var * 0.0  # or NaN
        inverse = deviation.where("<", math.inf, 1.0 / deviation, nothing)
        return mean + rest, var, deviation.where(">", 0.0, inverse, nothing)

    return settle


_settle_var = loop("settle_var", _settled(False), 5, [2, 3, 4], 2)
_settle_std = loop("settle_std", _settled(True), 5, [2, 3, 4], 2)


@part
def _total(place, away, index, count, width, total, spare, like):
    """Sum the listed rows, ``away`` bytes apart, in blocks; ``spare``: 2 rows of scratch."""
    listed, lost = numbers(index, count, np.int64(0)), spare + width * bytes_of(like)
    rows.fill(total, width, like, like)
    rows.fill(lost, width, like, like)
    for begin in range(0, count, BLOCK):
        last, n, to = min(begin + BLOCK, count), begin, total
        if begin > 0:
            to = spare
            rows.fill(to, width, like, like)
        while n + 4 <= last:
            _add_four(
                place + listed[n] * away,
                place + listed[n + 1] * away,
                place + listed[n + 2] * away,
                place + listed[n + 3] * away,
                to,
                width,
                like,
            )
            n += 4
        while n < last:
            _add(place + listed[n] * away, to, width, like)
            n += 1
        if begin > 0:
            add_carefully(spare, total, lost, width, like)


@part
def column_moments(place, away, index, count, width, mean, var, scale, eps, std, spare, like):
    """Write mean, biased variance and 1/deviation of each column over the listed rows; ``spare``: 6 rows of scratch."""
    apart()
    row, n = width * bytes_of(like), constant(float(max(count, np.int64(1))), like)
    listed = numbers(index, count, np.int64(0))
    _total(place, away, index, count, width, mean, spare, like)
    divided(mean, width, n, like)
    rest, squares, lost = spare, spare + row, spare + 4 * row
    rows.fill(spare, 2 * width, like, like)
    rows.fill(lost, 2 * width, like, like)
    for begin in range(0, count, BLOCK):
        last, i, to = min(begin + BLOCK, count), begin, spare
        if begin > 0:
            to = spare + 2 * row
            rows.fill(to, 2 * width, like, like)
        while i + 4 <= last:
            _around_four(
                place + listed[i] * away,
                place + listed[i + 1] * away,
                place + listed[i + 2] * away,
                place + listed[i + 3] * away,
                mean,
                to,
                to + row,
                width,
                like,
            )
            i += 4
        while i < last:
            _around(place + listed[i] * away, mean, to, to + row, width, like)
            i += 1
        if begin > 0:
            add_carefully(to, spare, lost, 2 * width, like)
    if std:
        _settle_std(rest, squares, mean, var, scale, width, n, eps, like)
    else:
        _settle_var(rest, squares, mean, var, scale, width, n, eps, like)


# Normalised rows. ``xhat`` may overwrite x.


def _normed(x, out, xhat, mean, scale, gain, bias):
    normed = (x - mean) * scale
    return normed * gain + bias, normed


def _both_normed(z, x, xhat, mean, scale, gain, mean_x, scale_x, gain_x, bias):
    """Normalise both sides of a gate: their sum overwrites z, x^ of the input's side overwrites x."""
    normed, normed_x = (z - mean) * scale, (x - mean_x) * scale_x
    return normed * gain + (normed_x * gain_x + bias), normed_x, normed


normed = loop("batch_normed", _normed, 7, [1, 2])
both_normed = loop("batch_normed_both", _both_normed, 10, [0, 1, 2])
both_again = loop("batch_both_again", lambda y, gain, x, gain_x, bias, out: y * gain + (x * gain_x + bias), 6, [5])


def _output(o, c, h, mean, scale, gain, bias):
    up, down = v.tanh_parts((c - mean) * scale * gain + bias)
    return up / (v.one_plus_exp(o) * down)


def _carried_output(o, c, h, mean, scale, gain, bias):
    """Return the normalised c, which is carried on, and h."""
    seen = (c - mean) * scale * gain + bias
    up, down = v.tanh_parts(seen)
    return seen, up / (v.one_plus_exp(o) * down)


output = loop("batch_output", _output, 7, [2])
carried_output = loop("batch_carried_output", _carried_output, 7, [1, 2])

# Backward.


def _through_output(o, c, dh, d, mean, scale, gain, bias, to_bias, to_gain, *later):
    """Return gradients of o, the normed c and its bias and gain; x^ overwrites c. ``later``: dc of a carried c."""
    normed = (c - mean) * scale
    seen = v.tanh(normed * gain + bias)
    d_o, d = dh * seen * o * (1.0 - o), dh * o * (1.0 - seen * seen)
    d = d + later[0] if later else d
    found = d_o, normed, d, to_bias + d, to_gain + d * normed
    return (*found, later[0] * 0.0) if later else found


def _through_cell(i, f, g, old, d, xhat, factor, level, slope, dc):
    d = factor * (d - level - xhat * slope) + dc
    return d * g * i * (1.0 - i), d * old * f * (1.0 - f), d * i * (1.0 - g * g), d * f


def _gather(d, y, to_bias, to_gain):
    return to_bias + d, to_gain + d * y


def _gather_four(a, b, c, d, ya, yb, yc, yd, to_bias, to_gain):
    return to_bias + ((a + b) + (c + d)), to_gain + ((a * ya + b * yb) + (c * yc + d * yd))


through_output = loop("batch_through_output", _through_output, 10, [0, 1, 3, 8, 9])
through_carried = loop("batch_through_carried", _through_output, 11, [0, 1, 3, 8, 9, 10])
through_cell = loop("batch_through_cell", _through_cell, 10, [0, 1, 2, 9])
_gathered = loop("batch_gathered", _gather, 4, [2, 3])
_gathered_four = loop("batch_gathered_four", _gather_four, 10, [8, 9])
_factor = loop("batch_factor", lambda scale, gain, factor: scale * gain, 3, [2])


def _slopes(to_bias, to_gain, scale, level, slope, n):
    return to_bias / n, to_gain / n


def _slopes_std(to_bias, to_gain, scale, level, slope, n, eps):
    """Return level and slope where eps was added to the deviation s: the slope is multiplied by (s + eps)/s."""
    share = 1.0 - scale * eps
    steep = scale.where(">", 0.0, share.where(">", 0.0, to_gain / n / share, 0.0), 0.0)
    return to_bias / n, steep


_level = loop("batch_slopes", _slopes, 5, [3, 4], 1)
_level_std = loop("batch_slopes_std", _slopes_std, 5, [3, 4], 2)
through = loop("batch_through", lambda d, y, factor, level, slope, out: factor * (d - level - y * slope), 6, [5])


@part
def gather(d, d_away, y, y_away, index, count, width, sums, sums_away, spare, like):
    """Sum d and d y over the listed rows, in blocks, to ``sums`` and ``sums_away`` bytes after it.

    ``spare``: 4 rows of scratch.
    """
    apart()
    listed, row = numbers(index, count, np.int64(0)), width * bytes_of(like)
    lost = spare + 2 * row
    rows.fill(sums, width, like, like)
    rows.fill(sums + sums_away, width, like, like)
    rows.fill(lost, 2 * width, like, like)
    for begin in range(0, count, BLOCK):
        last, n, to, on = min(begin + BLOCK, count), begin, sums, sums + sums_away
        if begin > 0:
            to, on = spare, spare + row
            rows.fill(spare, 2 * width, like, like)
        while n + 4 <= last:
            b0, b1, b2, b3 = listed[n], listed[n + 1], listed[n + 2], listed[n + 3]
            _gathered_four(
                d + b0 * d_away,
                d + b1 * d_away,
                d + b2 * d_away,
                d + b3 * d_away,
                y + b0 * y_away,
                y + b1 * y_away,
                y + b2 * y_away,
                y + b3 * y_away,
                to,
                on,
                width,
                like,
            )
            n += 4
        while n < last:
            _gathered(d + listed[n] * d_away, y + listed[n] * y_away, to, on, width, like)
            n += 1
        if begin > 0:
            add_carefully(spare, sums, lost, width, like)
            add_carefully(spare + row, sums + sums_away, lost + row, width, like)


@part
def factors(sums, sums_away, scale, gain, live, count, eps, std, width, out, out_away, like):
    """Write the rows factor, level and slope of the norm's gradient factor (d - level - x^ slope).

    Level and slope are 0 where the statistics were known beforehand.
    """
    apart()
    n = constant(float(max(count, np.int64(1))), like)
    _factor(scale, gain, out, width, like)
    level, slope = out + out_away, out + 2 * out_away
    if live == 0:
        rows.fill(level, width, like, like)
        rows.fill(slope, width, like, like)
    elif std:
        _level_std(sums, sums + sums_away, scale, level, slope, width, n, eps, like)
    else:
        _level(sums, sums + sums_away, scale, level, slope, width, n, like)
