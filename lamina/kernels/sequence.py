"""A whole recurrence in one launch, forward and backward: Triton kernels whose programs wait for each other.

Layout. Batch rows are cut into tiles of BM; a *group* of P programs serves one tile, and each of them, a *member*,
owns BU hidden units with all their gates, so gates and states never leave it. What travels between members each step
is the new h (backward: shares of dL/dh) and a few sums per row for the norms, as ``exchange`` has it. Weights stay in
shared memory for all steps; what does not fit there goes another way (``steps``).

Words and shares lie twice, by the parity of the step, and are 0 at first, which is no exchange's number. Twice is
enough: every step ends with something that each member reads from all (h, or shares and sums). A member writes to the
place of step t again in step t + 2; it has then read the end of step t + 1 from all, so all had begun t + 1 and had
read everything of t. A thread is never a step behind its program: each step has barriers for other reasons.

Tensors inside are [gates, units, rows], units x rows = BU x BM; the product is W [gates*units, K] times h' [K, rows],
which is the shape Hopper's matrix unit wants. GRU's three gates are padded to four.

W_h (and, where the norm stands on the sum, W_x x) come centred over each normalised group: their product has mean 0,
so the norm needs one sum per row, of squares (the paper's re-centring invariance).

STACKED: several recurrences of one form share a launch, each a *side*: the directions of a layer, or layers one above
another. Sides wait for nobody but themselves. Their tensors lie stacked on a first axis, of which side k has the place
``place + k * place_step``. A launch may walk a part of the steps, ``span`` of them, for side k from
``begin - k * lag`` on, so that layers can follow each other at a distance. A part begins with what the one before has
left: the states in hist, c_hist and, unrounded, h_last; backward what is in d_first and shares. Exchanges go on
counting in the same words, of which each of the ``sides`` places has its own.

Backward. dL/dh' = W~' (rstd (dy - x^ s)): the row's scalar s is known only after all members met, so it is applied
after the product, with Q = W~' x^ prepared for all steps at once; the mean term dies because W~ is centred.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .exchange import as_bits, come_shares, come_states, come_words, send, share, state_bits, tag, word
from .formulas import (  # fmt: skip
    GRU,
    LSTM,
    NOWHERE,
    ON_SUM,
    PAIR,
    RNN,
    TOGETHER,
    added,
    dreamer_gates,
    fitting,
    gru_backward,
    gru_forward,
    gru_gates,
    inverse_deviation,
    lstm_cell_backward,
    lstm_gates,
    lstm_output_backward,
    not_before,
    over,
    quick_enough,
    rnn_backward,
    rnn_forward,
    rounded,
    std_correction,
    tanh,
    wide,
)

# A new batch size, length or stride compiles nothing.
COUNTS = [
    "T", "B", "groups", "first", "keep_h_t", "keep_h_b", "keep_h_u", "keep_c_t", "keep_c_b", "keep_c_u",
    "keep_h_s", "keep_c_s", "sides", "place", "place_step", "begin", "lag", "span",
]  # fmt: skip


@triton.jit
def _as_operand(x, like, PRECISION: tl.constexpr):
    """x in the dtype of the product; for TF32 rounded to nearest, where the matrix unit would cut off (seen: 3x).

    PRECISION "ieee" is the interpreter's, which multiplies 16-bit numbers wrongly: it gets them in float32.
    """
    x = x.to(like)
    if PRECISION == "ieee":
        x = x.to(tl.float32)
    if (like == tl.float32) & (PRECISION == "tf32"):
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _split(a, GP: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr):
    """[4, BU, BM] as four [BU, BM]."""
    pairs = tl.reshape(tl.permute(a, (1, 2, 0)), (BU, BM, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _join(first, second, third, fourth):
    """The inverse of ``_split``."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [BU, BM, (0 2 | 1 3) -> 2, 2]
    flat = tl.reshape(pairs, (first.shape[0], first.shape[1], 4))  # gates 0, 1, 2, 3: the last axis is even/odd
    return tl.permute(flat, (2, 0, 1))


@triton.jit
def _row_sums(a, b, SPLIT: tl.constexpr, GP: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr):
    """Sums of a b [GP, BU, BM] over the units and over gates that share statistics: [NS * BM]."""
    if SPLIT == TOGETHER:
        return tl.sum(tl.reshape(rounded(a, b), (GP * BU, BM)), 0)
    elif SPLIT == PAIR:  # gates 0 and 1 together, 2 (and 3, which is padding and 0) apart
        return tl.reshape(tl.sum(tl.reshape(rounded(a, b), (2, 2 * BU, BM)), 1), (2 * BM,))
    else:
        return tl.reshape(tl.sum(rounded(a, b), 1), (GP * BM,))


@triton.jit
def _for_gates(rows, SPLIT: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr):
    """What each gate's group has [NS, BM] as [GP, BM] or, where all gates share it, [1, BM]."""
    if SPLIT == PAIR:
        return tl.reshape(tl.broadcast_to(rows[:, None, :], (2, 2, BM)), (GP, BM))
    else:
        return rows


@triton.jit
def _one_entry(H: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr, NS: tl.constexpr):
    """An entry's part in the mean of its group, [NS, 1]: sums are multiplied by it, divided they would be less exact."""
    if SPLIT == PAIR:
        return tl.where(tl.arange(0, NS)[:, None] == 0, 0.5 / H, 1.0 / H)
    else:
        return tl.zeros((NS, 1), tl.float32) + (1.0 / (G * H) if SPLIT == TOGETHER else 1.0 / H)


@triton.jit
def _from_members(words, number, P: tl.constexpr, P2: tl.constexpr, N: tl.constexpr, SPIN: tl.constexpr,
                  WARPS: tl.constexpr):  # fmt: skip
    """What every member has published in words [P, N], [P2, N]; 0 beyond the last member."""
    p = tl.arange(0, P2)
    at = words + tl.minimum(p, P - 1)[:, None] * N + tl.arange(0, N)[None, :]
    values = come_words(tl.load(at, volatile=True), at, number, SPIN, WARPS)
    return values if P == P2 else tl.where((p < P)[:, None], values, 0.0)


@triton.jit
def _summed_over_members(words, mine, member, number, P: tl.constexpr, P2: tl.constexpr, N: tl.constexpr,
                         SOLO: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """The sum over members of ``mine`` [N], always in the same order."""
    if SOLO:
        return mine
    else:
        tl.store(words + member * N + tl.arange(0, N), word(mine, number))
        return tl.sum(_from_members(words, number, P, P2, N, SPIN, WARPS), 0)


@triton.jit
def _moments(words, c, own, one, member, number, H: tl.constexpr, P: tl.constexpr, P2: tl.constexpr,
             BU: tl.constexpr, BM: tl.constexpr, SOLO: tl.constexpr, SPIN: tl.constexpr,
             WARPS: tl.constexpr):  # fmt: skip
    """Mean and variance of each row of c over all members' units, from one exchange.

    Members publish their own mean (of 1 / ``one`` units) and squared deviations; merged as Chan et al. do, nothing cancels.
    """
    mean = tl.sum(tl.where(own, c, 0.0), 0) * one
    apart = tl.where(own, c - mean[None, :], 0.0)
    squares = tl.sum(rounded(apart, apart), 0)
    if SOLO:
        return mean, squares * (1.0 / H)
    else:
        both = tl.reshape(tl.join(mean, squares), (2 * BM,))
        tl.store(words + member * (2 * BM) + tl.arange(0, 2 * BM), word(both, number))
        got = _from_members(words, number, P, P2, 2 * BM, SPIN, WARPS)
        means, within = tl.split(tl.reshape(got, (P2, BM, 2)))
        p = tl.arange(0, P2)
        counts = 1.0 * tl.where(p < P, tl.minimum(H - p * BU, BU), 0)[:, None]
        total = tl.sum(rounded(means, counts), 0) * (1.0 / H)
        away = means - total[None, :]
        return total, tl.sum(within + rounded(away * away, counts), 0) * (1.0 / H)


@triton.jit
def _operand(h, reset_h, drop, restart, rows, row_ok, k, H: tl.constexpr, HAS_RESETS: tl.constexpr,
             HAS_DROP: tl.constexpr):  # fmt: skip
    """h' for the product, [BM, K], from h as it has come, or ``reset_h`` where a row restarts."""
    ok = row_ok[:, None] & (k < H)[None, :]
    at = rows[:, None] * H + k[None, :]
    if HAS_RESETS:
        h = tl.where(restart[:, None], tl.load(reset_h + at, mask=ok, other=0.0).to(h.dtype), h)
    if HAS_DROP:
        h = (h * tl.load(drop + at, mask=ok, other=0.0)).to(h.dtype)
    return h


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    x, weight, gain, bias, gain_cell, bias_cell,  # [T, B, G*H], [G*H, H], [G*H], [G*H], [H], [H]
    h_first, c_first,  # [B, H]
    hist, c_hist,  # [T+1, B, H]; hist in the product's dtype, NOT_YET where members wait for it; c_hist float32
    h_last, c_last,  # [B, H]; stacked, h_last is float32
    xhat, stats,  # kept for backward: [T, B, G*H], [T, NS (2 more for a cell norm), B]
    most, reach,  # [1], [B]: bounds of the weights' and of h's absolute values; that of h is 1 without reach
    exchange,  # words, all 0 at first: of sums [2, groups, P, NS*BM], of moments [2, groups, P, 2*BM]
    lengths, resets, keep_h, keep_c, drop,  # [B], [T, B], [T, B, H] or strides 0, [B, H]
    reset_h, reset_c,  # [B, H]: the state after a reset
    keep_h_t, keep_h_b, keep_h_u, keep_c_t, keep_c_b, keep_c_u, keep_h_s, keep_c_s,  # strides; of sides the last
    T, B, groups, first, eps,  # groups of a side; first: the tile of rows that this launch's first group serves
    sides, place, place_step, begin, lag, span,  # see above
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, TRAIN: tl.constexpr, HAS_H: tl.constexpr, HAS_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BIAS_CELL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_RESETS: tl.constexpr,
    HAS_KEEP_H: tl.constexpr, HAS_KEEP_C: tl.constexpr, HAS_DROP: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr,
    K: tl.constexpr, NK: tl.constexpr, P2: tl.constexpr, SOLO: tl.constexpr, PRECISION: tl.constexpr,
    HALF: tl.constexpr, HAS_REACH: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr, STACKED: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """One group of programs walks its tile of rows through all T steps, or through a part of them.

    NARROW: the parts of the product are formed one after another, so that their operands share one part's memory.
    """
    group, member = tl.program_id(0) // P, tl.program_id(0) % P
    NS: tl.constexpr = 1 if SPLIT == TOGETHER else (2 if SPLIT == PAIR else GP)
    QUICK: tl.constexpr = quick_enough(hist.dtype.element_ty)
    tile = first + (group % groups if STACKED else group)
    rows = tile * BM + tl.arange(0, BM)
    units = member * BU + tl.arange(0, BU)
    gates = tl.arange(0, GP)
    row_ok, unit_ok = rows < B, units < H
    own = unit_ok[:, None] & row_ok[None, :]
    own_gates = (gates < G)[:, None, None] & own[None, :, :]
    columns = gates[:, None, None] * H + units[None, :, None]
    at_gates = rows[None, None, :] * (G * H) + columns
    at = rows[None, :] * H + units[:, None]
    groups_of = tl.arange(0, NS)[:, None]
    step_gates, step_units = wide(B) * G * H, wide(B) * H
    seen_rows = tl.minimum(rows, B - 1)  # rows beyond the batch wait for what comes
    NSTAT: tl.constexpr = (NS if SITE != NOWHERE else 0) + (2 if CELL_NORM else 0)
    all_groups, seat = groups, group
    start, end = 0, T
    if STACKED:
        start = begin - (group // groups) * lag
        end = tl.minimum(start + span, T)
        at_side = wide(place + (group // groups) * place_step)
        all_groups, seat = groups * sides, (place + (group // groups) * place_step) * groups + group % groups
    sums_turn, moments_turn = all_groups * P * NS * BM, all_groups * P * 2 * BM
    sums = exchange + seat * P * NS * BM
    moments = exchange + 2 * sums_turn + seat * P * 2 * BM
    if STACKED:
        x, xhat, stats = x + at_side * T * step_gates, xhat + at_side * T * step_gates, stats + at_side * T * NSTAT * B
        hist, c_hist = hist + at_side * (T + 1) * step_units, c_hist + at_side * (T + 1) * step_units
        weight, gain, bias = weight + at_side * G * H * H, gain + at_side * G * H, bias + at_side * G * H
        gain_cell, bias_cell = gain_cell + at_side * H, bias_cell + at_side * H
        h_first, c_first = h_first + at_side * step_units, c_first + at_side * step_units
        h_last, c_last, drop = h_last + at_side * step_units, c_last + at_side * step_units, drop + at_side * step_units
        most, reach = most + at_side, reach + at_side * B
        lengths, resets = lengths + at_side * B, resets + at_side * T * B
        reset_h, reset_c = reset_h + at_side * step_units, reset_c + at_side * step_units
        keep_h, keep_c = keep_h + at_side * keep_h_s, keep_c + at_side * keep_c_s

    # Row r of this member's weights is gate r // BU of unit r % BU.
    r = tl.arange(0, GP * BU)
    k = tl.arange(0, K)
    r_unit = member * BU + r % BU
    r_ok = (r // BU < G) & (r_unit < H)
    at_weight = weight + ((r // BU) * H + r_unit).to(tl.int64) * H
    w = ()
    for part in tl.static_range(NK):
        ok = r_ok[:, None] & (part * K + k < H)[None, :]
        piece = tl.load(at_weight[:, None] + (part * K + k)[None, :], mask=ok, other=0.0)
        w = w + (_as_operand(piece, weight.dtype.element_ty, PRECISION),)

    gate_ok = (gates < G)[:, None, None] & unit_ok[None, :, None]
    if SITE != NOWHERE:
        gain3 = tl.load(gain + columns, mask=gate_ok, other=0.0).to(tl.float32)
        one = _one_entry(H, G, SPLIT, NS)
    if HAS_BIAS:
        bias3 = tl.load(bias + columns, mask=gate_ok, other=0.0).to(tl.float32)
    if CELL_NORM:
        own_gain = tl.load(gain_cell + units, mask=unit_ok, other=0.0).to(tl.float32)[:, None]
        own_bias = tl.zeros((BU, 1), tl.float32)
        if HAS_BIAS_CELL:
            own_bias = tl.load(bias_cell + units, mask=unit_ok, other=0.0).to(tl.float32)[:, None]
    h, c = tl.zeros((BU, BM), tl.float32), tl.zeros((BU, BM), tl.float32)
    if HAS_H:
        h = tl.load(h_first + at, mask=own, other=0.0).to(tl.float32)
    if HAS_C:
        c = tl.load(c_first + at, mask=own, other=0.0).to(tl.float32)
    if HAS_RESETS:
        new_h = tl.load(reset_h + at, mask=own, other=0.0).to(tl.float32)
        if CELL == LSTM:
            new_c = tl.load(reset_c + at, mask=own, other=0.0).to(tl.float32)
    first_part = own
    if STACKED:
        first_part = own & (start == 0)
        goes_on = own & (start > 0)
        h = tl.where(start > 0, tl.load(h_last + at, mask=goes_on, other=0.0), h)
        if CELL == LSTM:
            c = tl.where(start > 0, tl.load(c_hist + start * step_units + at, mask=goes_on, other=0.0), c)
    if HALF:
        largest = tl.full((BM,), 1.0, tl.float32)
        if HAS_REACH:
            largest = tl.load(reach + seen_rows)
        up, down = fitting(largest)
        down *= fitting(tl.load(most))[1]
    tl.store(as_bits(hist) + at, state_bits(h, hist.dtype.element_ty), mask=first_part)
    if CELL == LSTM:
        tl.store(c_hist + at, c, mask=first_part)
    own_one = over(tl.full((), 1.0, tl.float32), tl.minimum(H - member * BU, BU))
    if HAS_LENGTHS:
        length = tl.load(lengths + rows, mask=row_ok, other=0)
    x3 = tl.load(x + start * step_gates + at_gates, mask=own_gates, other=0.0).to(tl.float32)

    for t in tl.range(start, end, num_stages=1):
        turn = t % 2
        restart = row_ok
        if HAS_RESETS:
            restart = tl.load(resets + t * B + rows, mask=row_ok, other=0) != 0
            h = tl.where(restart[None, :], new_h, h)
            if CELL == LSTM:
                c = tl.where(restart[None, :], new_c, c)

        # The product.
        hist_t = hist + t * step_units
        y = tl.zeros((GP * BU, BM), tl.float32)
        if SOLO:
            tl.debug_barrier()  # what other threads of this program have stored is there
        come = come_states(hist_t, seen_rows, H - 1, H, K, NK, H // K, SOLO, SPIN, WARPS)
        for part in tl.static_range(NK):
            old = _operand(come[part], reset_h, drop, restart, rows, row_ok, part * K + k, H, HAS_RESETS, HAS_DROP)
            old = old * up[:, None] if HALF else old
            old = _as_operand(old, weight.dtype.element_ty, PRECISION)
            if NARROW and part > 0:
                old = not_before(old)
            # The matrix unit cuts sums of TF32 off: it gets short ones, which are added rightly.
            if PRECISION == "tf32x3" or NARROW:
                y = added(y, tl.dot(w[part], tl.trans(old), input_precision=PRECISION))
            else:
                y = tl.dot(w[part], tl.trans(old), y, input_precision=PRECISION)
        y = y * down[None, :] if HALF else y
        y3 = tl.reshape(y, (GP, BU, BM))

        # Its norm: one sum of squares per row and group of gates.
        if SITE == ON_SUM:
            y3 += x3
        if SITE != NOWHERE:
            mine = _row_sums(y3, y3, SPLIT, GP, BU, BM)
            total = _summed_over_members(sums + turn * sums_turn, mine, member, t + 1, P, P2, NS * BM, SOLO,
                                         SPIN, WARPS)  # fmt: skip
            inverse = inverse_deviation(tl.reshape(total, (NS, BM)) * one, eps, STD)
            y3 = y3 * _for_gates(inverse, SPLIT, GP, BM)[:, None, :]
        normed = y3
        if SITE != NOWHERE:
            y3 = y3 * gain3
        if HAS_BIAS:
            y3 += bias3

        # The cell.
        h_old, c_old = h, c
        if CELL == LSTM:
            if SITE != ON_SUM:
                y3 += x3
            i, f, g, o = _split(y3, GP, BU, BM)
            i, f, g, o = lstm_gates(i, f, g, o, QUICK)
            c = f * c_old + i * g
            seen = c
            if CELL_NORM:
                mean, var = _moments(moments + turn * moments_turn, c, own, own_one, member, t + 1, H, P, P2, BU, BM,
                                     SOLO, SPIN, WARPS)  # fmt: skip
                rstd = inverse_deviation(var, eps, STD)
                seen = (c - mean[None, :]) * rstd[None, :] * own_gain + own_bias
            h = o * tanh(seen, QUICK)
            if CARRY:
                c = seen
        else:
            if CELL == RNN:
                if SITE != ON_SUM:
                    y3 += x3
                pre = tl.reshape(y3, (BU, BM))
                h = rnn_forward(pre, RELU, QUICK)
            else:
                h_r, h_z, h_n, _ = _split(y3, GP, BU, BM)
                if CELL == GRU:
                    x_r, x_z, x_n, _ = _split(x3, GP, BU, BM)
                    _, z, n = gru_gates(x_r, x_z, x_n, h_r, h_z, h_n, QUICK)
                else:
                    _, z, n = dreamer_gates(h_r, h_z, h_n, QUICK)
                h = gru_forward(z, n, h_old)

        # What the row keeps.
        if HAS_KEEP_H:
            keep = tl.load(keep_h + wide(t) * keep_h_t + rows[None, :] * keep_h_b + units[:, None] * keep_h_u,
                           mask=own, other=0.0).to(tl.float32)  # fmt: skip
            h = keep * h_old + (1.0 - keep) * h
        if HAS_KEEP_C:
            keep = tl.load(keep_c + wide(t) * keep_c_t + rows[None, :] * keep_c_b + units[:, None] * keep_c_u,
                           mask=own, other=0.0).to(tl.float32)  # fmt: skip
            c = keep * c_old + (1.0 - keep) * c
        if HAS_LENGTHS:
            going = (t < length)[None, :]
            h = tl.where(going, h, h_old)
            c = tl.where(going, c, c_old)
        tl.store(as_bits(hist) + (t + 1) * step_units + at, state_bits(h, hist.dtype.element_ty), mask=own)
        # What nobody waits for comes after: stores for backward, and the next step's input.
        x3 = tl.load(x + (t + 1) * step_gates + at_gates, mask=own_gates & (t + 1 < end), other=0.0).to(tl.float32)
        if CELL == LSTM:
            tl.store(c_hist + (t + 1) * step_units + at, c, mask=own)
        if TRAIN:
            tl.store(xhat + t * step_gates + at_gates, normed.to(xhat.dtype.element_ty), mask=own_gates)
            if member == 0:
                kept = stats + wide(t) * NSTAT * B + rows
                if SITE != NOWHERE:
                    tl.store(kept[None, :] + groups_of * B, inverse, mask=row_ok[None, :])
                if CELL_NORM:
                    tl.store(kept + (NSTAT - 2) * B, mean, mask=row_ok)
                    tl.store(kept + (NSTAT - 1) * B, rstd, mask=row_ok)
    tl.store(h_last + at, h.to(h_last.dtype.element_ty), mask=own)
    if CELL == LSTM:
        tl.store(c_last + at, tl.where(own, c, 0.0).to(c_last.dtype.element_ty), mask=own)


@triton.jit
def _recalled(
    t, x, xhat, stats, hist, c_hist, d_out, resets, gain3, bias3, own_gain, own_bias, new_h, new_c, at, at_gates,
    own, own_gates, rows, row_ok, B, step_gates, step_units,
    CELL: tl.constexpr, SITE: tl.constexpr, CELL_NORM: tl.constexpr, RAW_C: tl.constexpr, RELU: tl.constexpr,
    HAS_RESETS: tl.constexpr, HAS_D_OUT: tl.constexpr, GP: tl.constexpr, NS: tl.constexpr, NSTAT: tl.constexpr,
    BU: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A step's activations, made anew from what forward kept; none of it waits for another program.

    Gives seven tensors [BU, BM] (LSTM: i, f, g, o, c', c^, tanh of what the output gate lets out; GRU: r, z, n, the
    candidate's recurrent part, h'; RNN: h), the normalised product, its rstd and that of the cell,
    the output's gradient, and which rows start anew.
    """
    QUICK: tl.constexpr = quick_enough(hist.dtype.element_ty)
    normed = tl.load(xhat + t * step_gates + at_gates, mask=own_gates, other=0.0).to(tl.float32)
    x3 = tl.load(x + t * step_gates + at_gates, mask=own_gates, other=0.0).to(tl.float32)
    inverse, rstd = tl.zeros((NS, BM), tl.float32), tl.zeros((BM,), tl.float32)
    restart = row_ok & False
    zero = tl.zeros((BU, BM), tl.float32)
    dh_here = zero
    if HAS_D_OUT:
        dh_here = tl.load(d_out + t * step_units + at, mask=own, other=0.0).to(tl.float32)
    kept = stats + wide(t) * NSTAT * B + rows
    if SITE != NOWHERE:
        inverse = tl.load(kept[None, :] + tl.arange(0, NS)[:, None] * B, mask=row_ok[None, :], other=0.0)
    if HAS_RESETS:
        restart = tl.load(resets + t * B + rows, mask=row_ok, other=0) != 0
    y3 = normed
    if SITE != NOWHERE:
        y3 = y3 * gain3
    y3 += bias3
    if CELL == LSTM:
        c_old = tl.load(c_hist + t * step_units + at, mask=own, other=0.0)
        if HAS_RESETS:
            c_old = tl.where(restart[None, :], new_c, c_old)
        if SITE != ON_SUM:
            y3 += x3
        i, f, g, o = _split(y3, GP, BU, BM)
        i, f, g, o = lstm_gates(i, f, g, o, QUICK)
        centred = f * c_old + i * g
        if RAW_C:  # c itself, whose mean and deviation the norm took; made anew from rounded x^ it is another
            centred = tl.load(c_hist + (t + 1) * step_units + at, mask=own, other=0.0)
        seen = centred
        if CELL_NORM:
            mean = tl.load(kept + (NSTAT - 2) * B, mask=row_ok, other=0.0)
            rstd = tl.load(kept + (NSTAT - 1) * B, mask=row_ok, other=0.0)
            centred = (centred - mean[None, :]) * rstd[None, :]
            seen = centred * own_gain + own_bias
        return i, f, g, o, c_old, centred, tanh(seen, QUICK), normed, inverse, rstd, dh_here, restart
    elif CELL == RNN:
        if SITE != ON_SUM:
            y3 += x3
        pre = tl.reshape(y3, (BU, BM))
        return (
            rnn_forward(pre, RELU, QUICK),
            zero,
            zero,
            zero,
            zero,
            zero,
            zero,
            normed,
            inverse,
            rstd,
            dh_here,
            restart,
        )
    else:
        h_old = tl.load(hist + t * step_units + at, mask=own, other=0.0).to(tl.float32)
        if HAS_RESETS:
            h_old = tl.where(restart[None, :], new_h, h_old)
        h_r, h_z, h_n, _ = _split(y3, GP, BU, BM)
        if CELL == GRU:
            x_r, x_z, x_n, _ = _split(x3, GP, BU, BM)
            r, z, n = gru_gates(x_r, x_z, x_n, h_r, h_z, h_n, QUICK)
        else:
            r, z, n = dreamer_gates(h_r, h_z, h_n, QUICK)
        return r, z, n, h_n, h_old, zero, zero, normed, inverse, rstd, dh_here, restart


@triton.jit
def _send_shares(place, result, down, number, begin, K: tl.constexpr, P: tl.constexpr, BU: tl.constexpr,
                 BM: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, SPIN: tl.constexpr):  # fmt: skip
    """This member's shares of dL/dh' of K units [K, BM] to the units' members, at [reader, writer, unit, row].

    Scaled last: a product that is multiplied by anything else would go through shared memory first.
    """
    NB: tl.constexpr = BM if WIDE else BM // 2  # 64 bits each
    unit = begin + tl.arange(0, K)
    at = place + (unit // BU * (P * BU * NB) + unit % BU * NB)[:, None] + tl.arange(0, NB)[None, :]
    ok = (unit < P * BU)[:, None] & (tl.arange(0, NB) >= 0)[None, :]
    if WIDE:
        send(at, result.to(tl.int32, bitcast=True), number + tl.zeros((K, NB), tl.int32), ok, SPIN)
    else:
        low, high = tl.split(tl.reshape(result, (K, NB, 2)))
        if HALF:
            even, odd = tl.split(tl.reshape(down, (NB, 2)))
            low, high = low * even[None, :], high * odd[None, :]
        send(at, share(low, tag(number)), share(high, tag(number)), ok, SPIN)


@triton.jit
def _shares_for(place, number, P: tl.constexpr, PC: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr,
                WIDE: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """The sum of all members' shares of the own units, [BU, BM]."""
    NP: tl.constexpr = (P + PC - 1) // PC
    SIZE: tl.constexpr = BU * BM if WIDE else BU * BM // 2  # 64 bits each
    p, n = tl.arange(0, PC), tl.arange(0, SIZE)
    got, at = (), ()
    for part in tl.static_range(NP):
        member = part * PC + p if (part + 1) * PC <= P else tl.minimum(part * PC + p, P - 1)
        here = place + member[:, None] * SIZE + n[None, :]
        got, at = got + (tl.load(here, volatile=True),), at + (here,)
    total = tl.zeros((BU * BM,), tl.float32)
    for part in tl.static_range(NP):
        if WIDE:
            values = come_words(got[part], at[part], number, SPIN, WARPS)
        else:
            low, high = come_shares(got[part], at[part], tag(number), SPIN, WARPS)
            values = tl.reshape(tl.join(low, high), (PC, BU * BM))
        if (part + 1) * PC > P:
            values = tl.where((part * PC + p < P)[:, None], values, 0.0)
        total += tl.sum(values, 0)
    return tl.reshape(total, (BU, BM))


@triton.jit
def _gathered(shares, sums, q, q_turn, scale, drop, rows, units, own, number, H: tl.constexpr, P: tl.constexpr,
              DEFER: tl.constexpr, SPLIT: tl.constexpr, HAS_DROP: tl.constexpr, NS: tl.constexpr,
              NQ: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr, P2: tl.constexpr, PC: tl.constexpr,
              WIDE: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """dL/dh' of the own units [BU, BM]: every member's share of W~' dy, less s Q for each statistics group (DEFER)."""
    dh = _shares_for(shares, number, P, PC, BU, BM, WIDE, SPIN, WARPS)
    if DEFER:
        s = tl.sum(_from_members(sums, number, P, P2, NS * BM, SPIN, WARPS), 0)
        s = tl.reshape(s, (NS, BM)) * scale
        if SPLIT == TOGETHER:
            q2 = tl.load(q + rows[None, :] * H + units[:, None], mask=own, other=0.0).to(tl.float32)
            dh -= q2 * s
        else:
            each = tl.arange(0, NS)[:, None, None]
            at = each * q_turn + rows[None, None, :] * H + units[None, :, None]
            q3 = tl.load(q + at, mask=(each < NQ) & own[None, :, :], other=0.0).to(tl.float32)
            dh -= tl.sum(rounded(q3, s[:, None, :]), 0)
    if HAS_DROP:
        dh *= tl.load(drop + rows[None, :] * H + units[:, None], mask=own, other=0.0).to(tl.float32)
    return tl.where(own, dh, 0.0)


@triton.jit
def _leave(at, value, ok, more, STACKED: tl.constexpr):
    """Store a part's share of a gradient, added to those of the parts behind, if there are ``more``."""
    if STACKED:
        value += tl.load(at, mask=ok & more, other=0.0)
    tl.store(at, value, mask=ok)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    x, weight, gain, bias, gain_cell, bias_cell,  # as forward has them
    hist, c_hist, xhat, stats,
    q,  # [groups of gates, T, B, H]
    d_out, d_h, d_c,  # [T, B, H], [B, H], [B, H]
    d_x, d_y,  # [T, B, G*H]: to x and to the normalised product; one tensor where they are alike
    d_first,  # [2, B, H]: to the first h and c; with resets [4, B, H], those of the state after a reset last
    most,  # [1]: a bound of the weights' absolute values
    shares,  # [tiles, 2*G*H + 2*H]: of the gradients of bias, gain, bias_cell and gain_cell
    exchange,  # all 0 at first: words [2, groups, P, 2*BM] and [2, groups, P, NS*BM], shares [2, groups, P, P, BU*BM]
    lengths, resets, keep_h, keep_c, drop, reset_h, reset_c,
    keep_h_t, keep_h_b, keep_h_u, keep_c_t, keep_c_b, keep_c_u, keep_h_s, keep_c_s,
    T, B, groups, first, eps,  # groups of a side; first: the tile of rows that this launch's first group serves
    sides, place, place_step, begin, lag, span,
    CELL: tl.constexpr, SITE: tl.constexpr, SPLIT: tl.constexpr, CELL_NORM: tl.constexpr, CARRY: tl.constexpr,
    RELU: tl.constexpr, STD: tl.constexpr, HAS_D_OUT: tl.constexpr, HAS_D_H: tl.constexpr,
    HAS_D_C: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BIAS_CELL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_RESETS: tl.constexpr, HAS_KEEP_H: tl.constexpr, HAS_KEEP_C: tl.constexpr, HAS_DROP: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr,
    K: tl.constexpr, NK: tl.constexpr, P2: tl.constexpr, PC: tl.constexpr, SOLO: tl.constexpr,
    PRECISION: tl.constexpr, HALF: tl.constexpr, DEFER: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr,
    STACKED: tl.constexpr,
):  # fmt: skip
    """The same walk from the last step to the first."""
    group, member = tl.program_id(0) // P, tl.program_id(0) % P
    NS: tl.constexpr = 1 if SPLIT == TOGETHER else (2 if SPLIT == PAIR else GP)
    NQ: tl.constexpr = 1 if SPLIT == TOGETHER else (2 if SPLIT == PAIR else G)
    tile = first + (group % groups if STACKED else group)
    rows = tile * BM + tl.arange(0, BM)
    units = member * BU + tl.arange(0, BU)
    gates = tl.arange(0, GP)
    row_ok, unit_ok = rows < B, units < H
    own = unit_ok[:, None] & row_ok[None, :]
    own_gates = (gates < G)[:, None, None] & own[None, :, :]
    columns = gates[:, None, None] * H + units[None, :, None]
    at_gates = rows[None, None, :] * (G * H) + columns
    at = rows[None, :] * H + units[:, None]
    step_gates, step_units = wide(B) * G * H, wide(B) * H
    NSTAT: tl.constexpr = (NS if SITE != NOWHERE else 0) + (2 if CELL_NORM else 0)
    RAW_C: tl.constexpr = (not CARRY) and (not HAS_KEEP_C)  # what c_hist holds is the cell's c
    WIDE: tl.constexpr = (weight.dtype.element_ty == tl.float32) & (PRECISION != "tf32")  # float32 is kept whole
    TILE: tl.constexpr = BU * BM if WIDE else BU * BM // 2  # 64 bits each
    all_groups, seat = groups, group
    start, end = 0, T
    FIRSTS: tl.constexpr = (2 if CELL == LSTM else 1) * (2 if HAS_RESETS else 1)
    if STACKED:
        start = begin - (group // groups) * lag
        end = tl.minimum(start + span, T)
        at_side = wide(place + (group // groups) * place_step)
        all_groups, seat = groups * sides, (place + (group // groups) * place_step) * groups + group % groups
    cell_turn, sums_turn = all_groups * P * 2 * BM, all_groups * P * NS * BM
    shares_turn = wide(all_groups) * P * P * TILE
    cell_sums = exchange + seat * P * 2 * BM
    sums = exchange + 2 * cell_turn + seat * P * NS * BM
    # This member's share for member m lies at [m, member]; what is meant for it, at [member, *].
    travelling = exchange + 2 * (cell_turn + sums_turn) + wide(seat) * P * P * TILE
    if STACKED:
        x, xhat, stats = x + at_side * T * step_gates, xhat + at_side * T * step_gates, stats + at_side * T * NSTAT * B
        hist, c_hist = hist + at_side * (T + 1) * step_units, c_hist + at_side * (T + 1) * step_units
        weight, gain, bias = weight + at_side * G * H * H, gain + at_side * G * H, bias + at_side * G * H
        gain_cell, bias_cell = gain_cell + at_side * H, bias_cell + at_side * H
        d_h, d_c = d_h + at_side * step_units, d_c + at_side * step_units
        reset_h, reset_c = reset_h + at_side * step_units, reset_c + at_side * step_units
        d_out, q = d_out + at_side * T * step_units, q + at_side * NQ * T * step_units
        d_x, d_y = d_x + at_side * T * step_gates, d_y + at_side * T * step_gates
        d_first += at_side * FIRSTS * step_units
        shares += at_side * ((B + BM - 1) // BM) * (2 * G * H + 2 * H)
        most, lengths, resets = most + at_side, lengths + at_side * B, resets + at_side * T * B
        keep_h, keep_c, drop = keep_h + at_side * keep_h_s, keep_c + at_side * keep_c_s, drop + at_side * step_units

    r, k = tl.arange(0, GP * BU), tl.arange(0, K)
    w = ()
    r_unit = member * BU + r % BU
    at_rows = weight + ((r // BU) * H + r_unit).to(tl.int64) * H
    r_ok = (r // BU < G) & (r_unit < H)
    for part in tl.static_range(NK):
        ok = r_ok[None, :] & (part * K + k < H)[:, None]
        piece = tl.load(at_rows[None, :] + (part * K + k)[:, None], mask=ok, other=0.0)
        w = w + (_as_operand(piece, weight.dtype.element_ty, PRECISION),)

    gate_ok = (gates < G)[:, None, None] & unit_ok[None, :, None]
    unscaled = fitting(tl.load(most))[1] if HALF else 1.0
    one = _one_entry(H, G, SPLIT, NS)
    zero = tl.zeros((BU, BM), tl.float32)
    gain3 = tl.zeros((GP, BU, 1), tl.float32)
    own_gain, own_bias = tl.zeros((BU, 1), tl.float32), tl.zeros((BU, 1), tl.float32)
    if SITE != NOWHERE:
        gain3 = tl.load(gain + columns, mask=gate_ok, other=0.0).to(tl.float32)
    bias3 = tl.zeros((GP, BU, 1), tl.float32)
    if HAS_BIAS:
        bias3 = tl.load(bias + columns, mask=gate_ok, other=0.0).to(tl.float32)
    if CELL_NORM:
        own_gain = tl.load(gain_cell + units, mask=unit_ok, other=0.0).to(tl.float32)[:, None]
        if HAS_BIAS_CELL:
            own_bias = tl.load(bias_cell + units, mask=unit_ok, other=0.0).to(tl.float32)[:, None]
    if HAS_LENGTHS:
        length = tl.load(lengths + rows, mask=row_ok, other=0)
    new_h, new_c, dc = zero, zero, zero
    if HAS_RESETS:
        new_h = tl.load(reset_h + at, mask=own, other=0.0).to(tl.float32)
    if CELL == LSTM:
        if HAS_RESETS:
            new_c = tl.load(reset_c + at, mask=own, other=0.0).to(tl.float32)
        if HAS_D_C:
            dc = tl.load(d_c + at, mask=own, other=0.0).to(tl.float32)
    dh, d_new_h, d_new_c, sum_gain_cell, sum_bias_cell = zero, zero, zero, zero, zero
    if HAS_D_H:
        dh = tl.load(d_h + at, mask=own, other=0.0).to(tl.float32)
    if STACKED:  # what the part behind has left
        goes_on = own & (end < T)
        dh = tl.where(end < T, tl.load(d_first + at, mask=goes_on, other=0.0), dh)
        if CELL == LSTM:
            dc = tl.where(end < T, tl.load(d_first + step_units + at, mask=goes_on, other=0.0), dc)
        if HAS_RESETS:
            d_new_h = tl.load(d_first + (FIRSTS // 2) * step_units + at, mask=goes_on, other=0.0)
            if CELL == LSTM:
                d_new_c = tl.load(d_first + 3 * step_units + at, mask=goes_on, other=0.0)
    sum_gain, sum_bias = tl.zeros((GP, BU, BM), tl.float32), tl.zeros((GP, BU, BM), tl.float32)
    a0, a1, a2, a3, a4, a5, a6, normed, inverse, rstd, dh_here, restart = _recalled(
        end - 1, x, xhat, stats, hist, c_hist, d_out, resets, gain3, bias3, own_gain, own_bias, new_h, new_c, at,
        at_gates, own, own_gates, rows, row_ok, B, step_gates, step_units, CELL, SITE, CELL_NORM, RAW_C, RELU,
        HAS_RESETS, HAS_D_OUT, GP, NS, NSTAT, BU, BM)  # fmt: skip

    earlier = T - end if STACKED else 0  # steps of the parts behind: exchanges go on counting
    for done in tl.range(0, end - start, num_stages=1):
        t = end - 1 - done
        turn = (done + earlier) % 2
        dh += dh_here
        direct, direct_c = zero, zero
        if HAS_LENGTHS:
            going = (t < length)[None, :]
            direct, direct_c = tl.where(going, 0.0, dh), tl.where(going, 0.0, dc)
            dh, dc = tl.where(going, dh, 0.0), tl.where(going, dc, 0.0)
        if HAS_KEEP_H:
            keep = tl.load(keep_h + wide(t) * keep_h_t + rows[None, :] * keep_h_b + units[:, None] * keep_h_u,
                           mask=own, other=0.0).to(tl.float32)  # fmt: skip
            direct += keep * dh
            dh = (1.0 - keep) * dh
        if HAS_KEEP_C:
            keep = tl.load(keep_c + wide(t) * keep_c_t + rows[None, :] * keep_c_b + units[:, None] * keep_c_u,
                           mask=own, other=0.0).to(tl.float32)  # fmt: skip
            direct_c += keep * dc
            dc = (1.0 - keep) * dc

        # The cell.
        if CELL == LSTM:
            i, f, g, o, c_old, centred, out = a0, a1, a2, a3, a4, a5, a6
            d_o, d_seen = lstm_output_backward(o, out, dh)
            if CELL_NORM:
                if CARRY:
                    d_seen += dc
                sum_gain_cell += d_seen * centred
                sum_bias_cell += d_seen
                d_centred = rounded(d_seen, own_gain)
                mine = tl.reshape(tl.sum(tl.join(d_centred, rounded(d_centred, centred)), 0), (2 * BM,))
                total = _summed_over_members(cell_sums + turn * cell_turn, mine, member, done + 1 + earlier, P, P2, 2 * BM,
                                             SOLO, SPIN, WARPS)  # fmt: skip
                plain, along = tl.split(tl.reshape(total * (1.0 / H), (BM, 2)))
                along = along * std_correction(rstd, eps, STD)
                d_seen = (d_centred - plain[None, :] - centred * along[None, :]) * rstd[None, :]
                if not CARRY:
                    d_seen += dc
                d_seen = tl.where(own, d_seen, 0.0)
            else:
                d_seen += dc
            d_i, d_f, d_g, dc = lstm_cell_backward(i, f, g, c_old, d_seen)
            dc += direct_c
            dy3 = _join(d_i, d_f, d_g, d_o)
        elif CELL == RNN:
            dy3 = tl.reshape(rnn_backward(a0, dh, RELU), (GP, BU, BM))
        else:
            r_gate, z, n, h_n, h_old = a0, a1, a2, a3, a4
            dr, dz, dn, past = gru_backward(r_gate, z, n, h_n, h_old, dh)
            direct += past
            if CELL == GRU:
                dx3 = _join(dr, dz, dn, zero)
            else:  # z was made of 1 - u
                dz = -dz
            dy3 = _join(dr, dz, dn * r_gate, zero)
        d_step = dy3

        # The norm, but for its scalars, and this member's share of W~' dy for everyone.
        scale = inverse
        if SITE != NOWHERE:
            sum_gain += dy3 * normed
            dy3 = rounded(dy3, gain3)
            s = _row_sums(dy3, normed, SPLIT, GP, BU, BM)
            scale = std_correction(inverse, eps, STD) * one
            if DEFER:
                tl.store(
                    sums + turn * sums_turn + member * (NS * BM) + tl.arange(0, NS * BM), word(s, done + 1 + earlier)
                )
            else:  # a member that is alone has the sums: nothing is left for after the product, where terms may cancel
                along = _for_gates(tl.reshape(s, (NS, BM)) * scale, SPLIT, GP, BM)
                each = tl.where((gates < G)[:, None, None] & unit_ok[None, :, None], 1.0, 0.0)
                flat = tl.reshape(_row_sums(dy3, each, SPLIT, GP, BU, BM), (NS, BM)) * one
                flat = _for_gates(flat, SPLIT, GP, BM)[:, None, :]
                dy3 = tl.where(own_gates, dy3 - flat - normed * along[:, None, :], 0.0)
            scale = scale * inverse * unscaled  # q is W~' x^ as the weights are given
            dy3 = dy3 * _for_gates(inverse, SPLIT, GP, BM)[:, None, :]
        dy2 = tl.reshape(dy3, (GP * BU, BM))
        if HALF:  # this member's part of each row in float16's range
            up, down = fitting(tl.max(tl.abs(dy2), 0))
            dy2, down = dy2 * up[None, :], down * unscaled
        else:
            down = scale
        operand = _as_operand(dy2, weight.dtype.element_ty, PRECISION)
        to = travelling + turn * shares_turn + member * TILE
        for part in tl.static_range(NK):
            result = tl.dot(w[part], operand, input_precision=PRECISION)
            _send_shares(to, result, down, done + 1 + earlier, part * K, K, P, BU, BM, WIDE, HALF, SPIN)

        # While the others arrive: what nobody waits for, and the step before.
        tl.store(d_y + t * step_gates + at_gates, d_step.to(d_y.dtype.element_ty), mask=own_gates)
        if CELL == GRU:
            tl.store(d_x + t * step_gates + at_gates, dx3.to(d_x.dtype.element_ty), mask=own_gates)
        if HAS_BIAS:
            sum_bias += d_step
        restarts = restart
        a0, a1, a2, a3, a4, a5, a6, normed, inverse, rstd, dh_here, restart = _recalled(
            tl.maximum(t - 1, start), x, xhat, stats, hist, c_hist, d_out, resets, gain3, bias3, own_gain, own_bias,
            new_h, new_c, at, at_gates, own, own_gates, rows, row_ok, B, step_gates, step_units, CELL, SITE, CELL_NORM,
            RAW_C, RELU, HAS_RESETS, HAS_D_OUT, GP, NS, NSTAT, BU, BM)  # fmt: skip
        if SOLO:
            tl.debug_barrier()  # what other threads of this program have stored is there
        dh = _gathered(travelling + turn * shares_turn + wide(member) * P * TILE, sums + turn * sums_turn,
                       q + t * step_units, T * step_units, scale, drop, rows, units, own, done + 1 + earlier, H, P, DEFER, SPLIT,
                       HAS_DROP, NS, NQ, BU, BM, P2, PC, WIDE, SPIN, WARPS)  # fmt: skip
        dh += direct
        if HAS_RESETS:
            d_new_h += tl.where(restarts[None, :], dh, 0.0)
            d_new_c += tl.where(restarts[None, :], dc, 0.0)
            dh = tl.where(restarts[None, :], 0.0, dh)
            dc = tl.where(restarts[None, :], 0.0, dc)

    if HAS_RESETS:
        tl.store(d_first + (FIRSTS // 2) * step_units + at, d_new_h, mask=own)
        if CELL == LSTM:
            tl.store(d_first + 3 * step_units + at, d_new_c, mask=own)
    tl.store(d_first + at, dh, mask=own)
    if CELL == LSTM:
        tl.store(d_first + step_units + at, dc, mask=own)
    shares += tile * (2 * G * H + 2 * H)
    at_sums = gates[:, None] * H + units[None, :]
    sums_ok = (gates < G)[:, None] & unit_ok[None, :]
    if HAS_BIAS:
        _leave(shares + at_sums, tl.sum(sum_bias, 2), sums_ok, end < T, STACKED)
    if SITE != NOWHERE:
        _leave(shares + G * H + at_sums, tl.sum(sum_gain, 2), sums_ok, end < T, STACKED)
    if CELL_NORM:
        _leave(shares + 2 * G * H + units, tl.sum(sum_bias_cell, 1), unit_ok, end < T, STACKED)
        _leave(shares + 2 * G * H + H + units, tl.sum(sum_gain_cell, 1), unit_ok, end < T, STACKED)


@triton.jit(do_not_specialize=["B"])
def norm_backward_kernel(
    d_y, xhat, gain, stats, out,  # [N, G*H] twice, [G*H], [T, NSTAT, B], [N, G*H]
    B, eps,
    H: tl.constexpr, G: tl.constexpr, NSTAT: tl.constexpr, SPLIT: tl.constexpr, STD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the norm passes on to the product, rstd (dy - mean(dy) - x^ mean(dy x^)), one group of gates a program."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SPLIT == TOGETHER:
        first, last = 0, G
    elif SPLIT == PAIR:
        first, last = 2 * part, 2 + part  # gates 0 and 1, gate 2
    else:
        first, last = part, part + 1
    n = (last - first) * H
    j = tl.arange(0, BLOCK)
    ok = j < n
    at = row * (G * H) + first * H + j
    normed = tl.load(xhat + at, mask=ok, other=0.0).to(tl.float32)
    dy = tl.load(d_y + at, mask=ok, other=0.0).to(tl.float32)
    dy = rounded(dy, tl.load(gain + first * H + j, mask=ok, other=0.0).to(tl.float32))
    inverse = tl.load(stats + ((row // B) * NSTAT + part) * B + row % B)
    mean = over(tl.sum(dy, 0), n)
    s = over(tl.sum(dy * normed, 0), n) * std_correction(inverse, eps, STD)
    tl.store(out + at, ((dy - mean - normed * s) * inverse).to(out.dtype.element_ty), mask=ok)
