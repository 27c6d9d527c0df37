"""Loops over rows on a CPU: norms, gates and their gradients.

Each loop is defined by its formula for one number. Its arguments are the addresses of rows, their length, and scalars
that hold for the whole row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from . import simd as v
from .jit import apart, numbers, part
from .simd import Lanes, loop


@intrinsic
def constant(typingctx: Any, x: Any, like: Any) -> Any:
    """Return a constant as a number of the type of ``like``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[0], types.float64, signature.return_type)

    return like(types.float64, like), codegen


copy = loop("copy", lambda x, out: x, 2, [1])
fill = loop("fill", lambda out, value: value, 1, [0], 1)
plus = loop("plus", lambda x, y, out: x + y, 3, [2])
times = loop("times", lambda x, y, out: x * y, 3, [2])
tanh = loop("tanh", lambda x, out: v.tanh(x), 2, [1])
relu = loop("relu", lambda x, out: v.relu(x), 2, [1])
mixed = loop("mixed", lambda keep, old, new, out: keep * old + (1.0 - keep) * new, 4, [3])  # zoneout

# Norms.

total = loop("total", lambda x: x, 1, [], sums=1, at_once=4)
_around = loop("around", lambda x, mean: ((x - mean), (x - mean) * (x - mean)), 1, [], 1, 2, 4)
scaled = loop("scaled", lambda x, gain, bias, out: x * gain + bias, 4, [3])
scaled_and_bias = loop("scaled_and_bias", lambda x, gain, bias, more, out: x * gain + bias + more, 5, [4])
affine = loop("affine", lambda x, gain, bias, out, mean, rstd: (x - mean) * rstd * gain + bias, 4, [3], 2)


@part
def moments(x, count, total, eps, std, like):
    """Return mean and 1/deviation of a row with sum ``total``; 1/deviation is 0 where not finite, as in the reference.

    The rounding error of the mean is corrected, so that a constant row has deviation 0.
    """
    apart()
    mean = total / constant(float(count), like)
    rest, squares = _around(x, count, mean, like)
    rest /= constant(float(count), like)
    return _with_deviation(mean, rest, squares / constant(float(count), like) - rest * rest, eps, std, like)


FAR = 8.0  # times the variance: a shift farther from the mean than this (squared distance) costs digits


@part
def moments_at_once(x, count, eps, std, like):
    """Return mean and 1/deviation of a row in one pass, shifted by its first number if that is near the mean."""
    apart()
    shift = numbers(x, 1, like)[0]
    rest, squares = _around(x, count, shift, like)
    rest /= constant(float(count), like)
    var = squares / constant(float(count), like) - rest * rest
    if rest * rest > constant(FAR, like) * var:
        return moments(x, count, total(x, count, like), eps, std, like)
    return _with_deviation(shift, rest, var, eps, std, like)


@part
def _with_deviation(mean, rest, var, eps, std, like):
    """Return mean and 1/deviation from moments around a number near the mean."""
    var = max(var, like)
    deviation = np.sqrt(var) + eps if std else np.sqrt(var + eps)
    if deviation > like and deviation < constant(np.inf, like):
        return mean + rest, constant(1.0, like) / deviation
    return mean + rest, var * like  # 0, or NaN


@part
def slopes(total, along, count, rstd, eps, std, like):
    """Return mean(d) and mean(d x^) of the norm's gradient rstd (d - mean(d) - x^ mean(d x^)), from their sums.

    Where eps was added to the deviation s itself, mean(d x^) is multiplied by (s + eps)/s.
    """
    n, one = constant(float(count), like), constant(1.0, like)
    level, slope = total / n, along / n
    if std:
        share = one - eps * rstd
        slope = slope / share if rstd > like and share > like else like
    return level, slope


def _side(x: Lanes, gain: Lanes, bias: Lanes, mean: Lanes, rstd: Lanes) -> tuple[Lanes, Lanes]:
    """Return a normalised side, and its x^."""
    normed = (x - mean) * rstd
    return normed * gain + bias, normed


def _with_bias(z, gain, bias, more, a, xhat, mean, rstd):
    out, normed = _side(z, gain, bias, mean, rstd)
    return out + more, normed


def _two_sides(z, gain, bias, x, gain_x, bias_x, a, xhat, mean, rstd, mean_x, rstd_x):
    out, normed = _side(z, gain, bias, mean, rstd)
    return out + _side(x, gain_x, bias_x, mean_x, rstd_x)[0], normed


def _two_sides_again(y, gain, bias, x, gain_x, bias_x, a, mean_x, rstd_x):
    return y * gain + bias + _side(x, gain_x, bias_x, mean_x, rstd_x)[0]


side = loop("side", lambda z, gain, bias, a, xhat, mean, rstd: _side(z, gain, bias, mean, rstd), 5, [3, 4], 2)
side_and_bias = loop("side_and_bias", _with_bias, 6, [4, 5], 2)
sides = loop("sides", _two_sides, 8, [6, 7], 4)
sides_again = loop("sides_again", _two_sides_again, 7, [6], 2)

# Cells. A division costs as much as eight products, so a tanh and a sigmoid beside it share one.


def _lstm_cell(i, f, g, old, c):
    up, down = v.tanh_parts(g)
    new = v.sigmoid(f) * old + up / (v.one_plus_exp(i) * down)
    return new, new


def _lstm_output(o: Lanes, c: Lanes) -> Lanes:
    up, down = v.tanh_parts(c)
    return up / (v.one_plus_exp(o) * down)


def _gru(r, z, n, hidden, old, h):
    keep = v.sigmoid(z)
    return (1.0 - keep) * v.tanh(n + v.sigmoid(r) * hidden) + keep * old


def _dreamer(r, u, n, old, h):
    keep = v.sigmoid(1.0 - u)
    return (1.0 - keep) * v.tanh(v.sigmoid(r) * n) + keep * old


lstm_cell = loop("lstm_cell", _lstm_cell, 5, [4], sums=1)
lstm_output = loop("lstm_output", lambda o, c, h: _lstm_output(o, c), 3, [2])
lstm_normed_output = loop(
    "lstm_normed_output",
    lambda o, c, gain, bias, h, mean, rstd: _lstm_output(o, _side(c, gain, bias, mean, rstd)[0]), 5, [4], 2,
)  # fmt: skip
gru = loop("gru", _gru, 6, [5])
dreamer = loop("dreamer", _dreamer, 5, [4])

# Backward. Gradients overwrite the summed inputs in place.


def _lstm_again(i, f, g, o, old, c):
    i, f, g, o = v.sigmoid(i), v.sigmoid(f), v.tanh(g), v.sigmoid(o)
    c = f * old + i * g
    return i, f, g, o, c, c


def _through_output(o: Lanes, seen: Lanes, dh: Lanes) -> tuple[Lanes, Lanes]:
    seen = v.tanh(seen)
    return dh * seen * o * (1.0 - o), dh * o * (1.0 - seen * seen)


def _through_normed_output(o, c, gain, bias, dh, d, to_bias, to_gain, *more):
    """Return the gradients of o and of x^ of c, and add those of the cell norm's gain and bias.

    ``more``: where c is carried normalised, first the upstream gradient of c; then mean and 1/deviation.
    """
    *later, mean, rstd = more
    seen, normed = _side(c, gain, bias, mean, rstd)
    d_o, d_seen = _through_output(o, seen, dh)
    d_seen = d_seen + later[0] if later else d_seen
    d = d_seen * gain
    return d_o, d, to_bias + d_seen, to_gain + d_seen * normed, d, d * normed


def _through_cell(i, f, g, old, d, dc):
    d = d + dc
    return d * g * i * (1.0 - i), d * old * f * (1.0 - f), d * i * (1.0 - g * g), d * f


def _through_gru(r, z, n, hidden, old, dh, past):
    r, z = v.sigmoid(r), v.sigmoid(z)
    n = v.tanh(n + r * hidden)
    dn = dh * (1.0 - z) * (1.0 - n * n)
    return dn * hidden * r * (1.0 - r), dh * (old - n) * z * (1.0 - z), dn, dn * r, past + dh * z


def _through_dreamer(r, u, n, old, dh, past):
    r, z = v.sigmoid(r), v.sigmoid(1.0 - u)  # z decreases as u increases
    new = v.tanh(r * n)
    dn = dh * (1.0 - z) * (1.0 - new * new)
    return dn * n * r * (1.0 - r), dh * (new - old) * z * (1.0 - z), dn * r, past + dh * z


def _through_tanh(a: Lanes, dh: Lanes) -> Lanes:
    h = v.tanh(a)
    return dh * (1.0 - h * h)


def _gathered(d, y, gain, to_bias, to_gain, out, mean, rstd):
    """Add the gradients of bias and gain; return also the gradient of x^, and its two sums for the norm."""
    normed, on = (y - mean) * rstd, d * gain
    return to_bias + d, to_gain + d * normed, on, on, on * normed


lstm_again = loop("lstm_again", _lstm_again, 6, [0, 1, 2, 3, 5], sums=1)
through_output = loop("through_output", lambda o, c, dh, d: _through_output(o, c, dh), 4, [0, 3])
through_normed_output = loop("through_normed_output", _through_normed_output, 8, [0, 5, 6, 7], 2, 2)
through_carried_output = loop("through_carried_output", _through_normed_output, 9, [0, 5, 6, 7], 2, 2)
through_cell = loop("through_cell", _through_cell, 6, [0, 1, 2, 5])
through_gru = loop("through_gru", _through_gru, 7, [0, 1, 2, 3, 6])
through_dreamer = loop("through_dreamer", _through_dreamer, 6, [0, 1, 2, 5])
through_tanh = loop("through_tanh", _through_tanh, 2, [0])
through_relu = loop("through_relu", lambda a, dh: a.where(">", 0.0, dh, 0.0), 2, [0])
through_norm = loop(
    "through_norm",
    lambda d, y, mean, rstd, deviation, level, slope: deviation * (d - level - (y - mean) * rstd * slope), 2, [0], 5,
)  # fmt: skip
gathered = loop("gathered", _gathered, 6, [3, 4, 5], 2, 2)
passed = loop("passed", lambda d, to_bias, out: (to_bias + d, d), 3, [1, 2])
split = loop("split", lambda keep, d, past: ((1.0 - keep) * d, past + keep * d), 3, [1, 2])  # zoneout
