"""Rows of gates in Triton: how kernels of one row a program load, sum, norm and store them.

Gates travel as tuples of four vectors; of RNN only the first is real, of GRU the first three. A long row may come in
two parts (``step_kernels`` says why); sums over the row take a tuple with an entry for each part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import APART, PAIR, TOGETHER, inverse_deviation, rounded, std_correction

# How L2 keeps things: what a step reads or leaves once shall not drive the matrix out.
NORMAL, STREAMED = tl.constexpr(""), tl.constexpr("evict_first")


@triton.jit
def units_of(BLOCK: tl.constexpr):
    """Four in a row to a thread, whatever the dtype: 8 of 16 bits, as the compiler likes, it would have to shuffle."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 4), 4)


@triton.jit
def parts_of(H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """The units of each part of a row, and which of them there are."""
    if REST:
        first, second = units_of(BLOCK), BLOCK + units_of(REST)
        return (first, second), (first < H, second < H)
    else:
        only = units_of(BLOCK)
        return (only,), (only < H,)


@triton.jit
def load_gates(at, j, ok, H: tl.constexpr, G: tl.constexpr, POLICY: tl.constexpr = NORMAL):
    """As they lie in memory: half as many registers in half precision."""
    a = tl.load(at + j, mask=ok, other=0.0, eviction_policy=POLICY)
    b, c, d = a, a, a
    if G > 1:
        b = tl.load(at + H + j, mask=ok, other=0.0, eviction_policy=POLICY)
        c = tl.load(at + 2 * H + j, mask=ok, other=0.0, eviction_policy=POLICY)
    if G > 3:
        d = tl.load(at + 3 * H + j, mask=ok, other=0.0, eviction_policy=POLICY)
    return a, b, c, d


@triton.jit
def floats(y):
    return y[0].to(tl.float32), y[1].to(tl.float32), y[2].to(tl.float32), y[3].to(tl.float32)


@triton.jit
def store_gates(at, y, j, ok, H: tl.constexpr, G: tl.constexpr, POLICY: tl.constexpr = NORMAL):
    dtype = at.dtype.element_ty
    tl.store(at + j, y[0].to(dtype), mask=ok, eviction_policy=POLICY)
    if G > 1:
        tl.store(at + H + j, y[1].to(dtype), mask=ok, eviction_policy=POLICY)
        tl.store(at + 2 * H + j, y[2].to(dtype), mask=ok, eviction_policy=POLICY)
    if G > 3:
        tl.store(at + 3 * H + j, y[3].to(dtype), mask=ok, eviction_policy=POLICY)


@triton.jit
def add(y, x):
    return y[0] + x[0], y[1] + x[1], y[2] + x[2], y[3] + x[3]


@triton.jit
def multiply(y, x):
    return y[0] * x[0], y[1] * x[1], y[2] * x[2], y[3] * x[3]


@triton.jit
def rounded_products(y, x):
    return rounded(y[0], x[0]), rounded(y[1], x[1]), rounded(y[2], x[2]), rounded(y[3], x[3])


@triton.constexpr_function
def _cut(block, rest):
    """How far the main part is folded across a thread's registers: 16 warps hold 2048 units, four in a row each."""
    return max(rest, min(block, 2048))


@triton.jit
def joined(y, LARGEST: tl.constexpr = False):
    """One vector with the sum (or the largest) of all parts of ``y``, so that the threads meet once for all of them.

    The main part is folded to the length of the rest. What is added up there belongs to one thread, and so does the
    element of the rest that it is added to: ``steps.row_parts`` makes the rest as long as that takes.
    """
    if len(y) == 1:
        return y[0]
    else:
        main, rest = y[0], y[1]
        REST: tl.constexpr = rest.shape[0]
        CUT: tl.constexpr = _cut(main.shape[0], REST)
        if main.shape[0] > CUT:
            main = tl.reshape(main, (main.shape[0] // CUT, CUT))
            main = tl.max(main, 0) if LARGEST else tl.sum(main, 0)
        if REST < CUT:
            main = tl.reshape(main, (REST, CUT // REST))
            main = tl.max(main, 1) if LARGEST else tl.sum(main, 1)
        return tl.maximum(main, rest) if LARGEST else main + rest


@triton.jit
def joined_gates(y):
    """The same for each gate."""
    if len(y) == 1:
        return y[0]
    else:
        a, b = joined((y[0][0], y[1][0])), joined((y[0][1], y[1][1]))
        return a, b, joined((y[0][2], y[1][2])), joined((y[0][3], y[1][3]))


@triton.jit
def two_sums(a, b):
    """Both in one reduction: the threads meet once."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def over_gates(y, G: tl.constexpr):
    total = y[0]
    if G > 1:
        total += y[1] + y[2]
    if G > 3:
        total += y[3]
    return total


@triton.jit
def largest_gate(y, G: tl.constexpr):
    """The largest absolute value of each unit's gates."""
    most = tl.abs(y[0])
    for gate in tl.static_range(1, G):
        most = tl.maximum(most, tl.abs(y[gate]))
    return most


@triton.jit
def group_means(y, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr):
    """The mean of each gate's statistics group; lanes past the row hold 0."""
    ONE: tl.constexpr = 1.0 / H
    if SPLIT == TOGETHER:
        mean = tl.sum(over_gates(y, G), 0) * (1.0 / (G * H))
        return mean, mean, mean, mean
    elif SPLIT == PAIR:
        pair, alone = two_sums(y[0] + y[1], y[2])
        pair, alone = pair * (0.5 / H), alone * ONE
        return pair, pair, alone, alone
    else:
        a, b = two_sums(y[0], y[1])
        c, d = two_sums(y[2], y[3])
        return a * ONE, b * ONE, c * ONE, d * ONE


@triton.jit
def projections(d, along, H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr):
    """The means of d and of ``along``, d * x^, over each gate's group."""
    d, along = joined_gates(d), joined_gates(along)
    if SPLIT == TOGETHER:
        mean, slope = two_sums(over_gates(d, G), over_gates(along, G))
        mean, slope = mean * (1.0 / (G * H)), slope * (1.0 / (G * H))
        return (mean, mean, mean, mean), (slope, slope, slope, slope)
    else:
        return group_means(d, H, G, SPLIT), group_means(along, H, G, SPLIT)


@triton.jit
def inverse_deviations(squares, H: tl.constexpr, eps, G: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr):
    """Each gate's 1/deviation, from the squares of a row.

    Means are 0 already: W~ is centred over the group, and so is the input side of a sum that is normed.
    """
    var = group_means(joined_gates(squares), H, G, SPLIT)
    a, b = inverse_deviation(var[0], eps, STD), inverse_deviation(var[1], eps, STD)
    return a, b, inverse_deviation(var[2], eps, STD), inverse_deviation(var[3], eps, STD)


@triton.jit
def centred_row(c, there, H: tl.constexpr):
    """c less its mean, 0 past the row, and its variance: in two passes, so that a large mean costs no digits."""
    mean = tl.sum(joined(c), 0) * (1.0 / H)  # past the row c is 0
    apart, squares = (), ()
    for p in tl.static_range(len(c)):
        away = tl.where(there[p], c[p] - mean, 0.0)
        apart, squares = apart + (away,), squares + (away * away,)
    return apart, tl.sum(joined(squares), 0) * (1.0 / H)


@triton.jit
def store_statistics(at, y, G: tl.constexpr, SPLIT: tl.constexpr):
    """One number for each gate, written once for each group."""
    tl.store(at, y[0])
    if SPLIT == APART:
        for gate in tl.static_range(1, G):
            tl.store(at + gate, y[gate])
    if SPLIT == PAIR:
        tl.store(at + 2, y[2])


@triton.jit
def load_statistics(at, G: tl.constexpr, SPLIT: tl.constexpr):
    a = tl.load(at)
    b, c, d = a, a, a
    if SPLIT == APART:
        b, c, d = tl.load(at + 1), tl.load(at + 2), tl.load(at + G - 1)
    if SPLIT == PAIR:
        c = tl.load(at + 2)
    return a, b, c, d


@triton.jit
def corrected(slope, rstd, eps, STD: tl.constexpr):
    """What x^ is multiplied by in ``_through_norm``."""
    a, b = std_correction(rstd[0], eps, STD), std_correction(rstd[1], eps, STD)
    return multiply(slope, (a, b, std_correction(rstd[2], eps, STD), std_correction(rstd[3], eps, STD)))


@triton.jit
def through_norm(d, normed, rstd, mean, slope):
    """rstd (d - mean(d) - x^ mean(d x^)) of each group of gates."""
    a, b = d[0] - mean[0] - normed[0] * slope[0], d[1] - mean[1] - normed[1] * slope[1]
    c = d[2] - mean[2] - normed[2] * slope[2]
    return multiply((a, b, c, d[3] - mean[3] - normed[3] * slope[3]), rstd)


@triton.jit
def load_cell(gain_cell, bias_cell, j, ok):
    """Gains and biases of the cell's norm; where there are none, numbers that do not matter."""
    gain, bias = 1.0, 0.0
    if gain_cell is not None:
        gain = tl.load(gain_cell + j, mask=ok, other=0.0)
    if bias_cell is not None:
        bias = tl.load(bias_cell + j, mask=ok, other=0.0)
    return gain, bias
