"""How the programs of a group speak: data that say themselves that they have come.

Nothing is fenced and nothing is counted. A reader loads what it waits for until it is there, one trip through L2:

- a *word* is 64 bits, a float32 and the number of its exchange;
- a *share* is 64 bits too: two float32 whose last 8 bits are the exchange's number (``tag``);
- h is its own sign: it is polled where it shall stay, which was filled with NOT_YET before.

Each thread repeats its own loads until all have come, in PTX (SPIN): Triton's loops end for all threads of a program
together, after a reduction and barriers every time. Those are the way of the interpreter.

The first try is Triton's own load: it goes out before anything is waited for, together with other loads, and it gives
the tensors their layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .formulas import wide

NOT_YET = tl.constexpr(-1)  # the bits of an h that has not come: a NaN that no h has


@triton.jit
def word(value, number):
    """A float32 and the number of the exchange it belongs to, in 64 bits: written and read as one."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return bits | (wide(number) << 32)


@triton.jit
def tag(number):
    """1 to 255: no share of two exchanges before has it, nor has one that was never written."""
    return number % 255 + 1


@triton.jit
def share(value, tag):
    """A float32 cut to its first 24 bits, and the tag: 32 bits."""
    return (value.to(tl.int32, bitcast=True) & -256) | tag


@triton.jit
def state_bits(h, like):
    """h in the dtype ``like``, as bits that are never NOT_YET."""
    h = h.to(like)
    if like.primitive_bitwidth == 32:
        bits = h.to(tl.int32, bitcast=True)
        return tl.where(bits == NOT_YET, 0x7FFFFFFF, bits)
    else:
        bits = h.to(tl.int16, bitcast=True)
        return tl.where(bits == NOT_YET, 0x7FFF, bits).to(tl.int16)


@triton.jit
def as_bits(pointer):
    """A pointer to the bits of what lies there."""
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        return pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def send(at, low, high, ok, SPIN: tl.constexpr):
    """Store pairs of 32 bits, where ``ok``. By each thread what it has: Triton would bring them into order first."""
    if SPIN:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 w; setp.ne.b32 p, $4, 0; mov.b64 w, {$2, $3}; "
            "@p st.relaxed.gpu.global.b64 [$1], w; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [at.to(tl.int64), low, high, ok.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=ok)


# The loops in PTX, for n loads a thread. Operands: results, what the first try gave, addresses, the number.


@triton.constexpr_function
def _lines(n, line, first=0):
    """``line`` for k = 0, 1, ..., n - 1 as @, and for the operand ``first`` + k as #."""
    return " ".join(line.replace("@", str(k)).replace("#", f"${first + k}") for k in range(n))


@triton.constexpr_function
def _loop(n, first, loads, test, results):
    """Repeats ``loads`` while ``test`` leaves a bit in ``bad``; bar.warp.sync makes the warp whole again."""
    registers = f".reg .pred come; .reg .b32 bad, x, a<{n}>, b<{n}>; .reg .b64 w<{n}>;"
    again = f"setp.eq.b32 come, bad, 0; @come bra done; {loads} bra poll; done: bar.warp.sync 0xffffffff;"
    return f"{{ {registers} {first} poll: mov.b32 bad, 0; {test} {again} {results} }}"


@triton.constexpr_function
def _loop64(n, halves, test, results):
    """The same for loads of 64 bits, of which one or both halves are results."""
    first = _lines(n, "mov.b64 {a@, b@}, #;", halves * n)
    loads = _lines(n, "ld.relaxed.gpu.global.b64 w@, [#]; mov.b64 {a@, b@}, w@;", (halves + 1) * n)
    return _loop(n, first, loads, test, results)


@triton.constexpr_function
def _word_code(n):
    test = _lines(n, "xor.b32 x, b@, NUMBER; or.b32 bad, bad, x;").replace("NUMBER", f"${3 * n}")
    return _loop64(n, 1, test, _lines(n, "mov.b32 #, a@;"))


@triton.constexpr_function
def _share_code(n):
    each = "xor.b32 x, a@, NUMBER; or.b32 bad, bad, x; xor.b32 x, b@, NUMBER; or.b32 bad, bad, x;"
    test = _lines(n, each).replace("NUMBER", f"${4 * n}") + " and.b32 bad, bad, 0xff;"
    cut = _lines(n, "and.b32 #, a@, 0xffffff00;") + _lines(n, "and.b32 #, b@, 0xffffff00;", n)
    return _loop64(n, 2, test, cut)


@triton.constexpr_function
def _state_code(n, bits):
    """16 bits are all ones where x & (~x - 1) has the first of them, for both halves of a register at once."""
    each, end = "max.u32 bad, bad, a@; max.u32 bad, bad, b@;", " set.eq.u32.u32 bad, bad, 0xffffffff;"
    if bits == 16:
        half = "sub.u32 x, 0xfffefffe, HALF; and.b32 x, x, HALF; or.b32 bad, bad, x;"
        each = half.replace("HALF", "a@") + half.replace("HALF", "b@")
        end = " and.b32 bad, bad, 0x80008000;"
    return _loop64(n, 2, _lines(n, each) + end, _lines(n, "mov.b32 #, a@;") + _lines(n, "mov.b32 #, b@;", n))


@triton.constexpr_function
def _single_code(n, bits):
    """The same for numbers one by one, with their sign in 32 bits."""
    load = "ld.relaxed.gpu.global." + ("b32" if bits == 32 else "s16") + " a@, [#];"
    test = _lines(n, "max.u32 bad, bad, a@;") + " set.eq.u32.u32 bad, bad, 0xffffffff;"
    return _loop(n, _lines(n, "mov.b32 a@, #;", n), _lines(n, load, 2 * n), test, _lines(n, "mov.b32 #, a@;"))


@triton.constexpr_function
def _constraints(results, loads, numbers, kind="l"):
    return ",".join(["=r"] * results + [kind] * loads + ["l"] * loads + ["r"] * numbers)


@triton.constexpr_function
def _a_thread(elements, warps):
    """How many of a tensor's elements one thread has."""
    return max(1, min(32, elements // (32 * warps)))


@triton.jit
def _any(flags):
    return tl.max(tl.reshape(flags.to(tl.int32), (flags.numel,))) > 0


# Waiting. ``got`` is the first try, what ``at`` held when it was loaded.


@triton.jit
def come_words(got, at, number, SPIN: tl.constexpr, WARPS: tl.constexpr):
    """The values of words once all of them belong to exchange ``number``."""
    if SPIN:
        N: tl.constexpr = _a_thread(at.numel, WARPS)
        return tl.inline_asm_elementwise(
            _word_code(N), _constraints(N, N, N), [got, at.to(tl.int64), number], tl.float32, is_pure=False, pack=N
        )  # fmt: skip
    else:
        while _any((got >> 32) != number):
            got = tl.load(at, volatile=True)
        return got.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def come_shares(got, at, tag, SPIN: tl.constexpr, WARPS: tl.constexpr):
    """The two values of each pair of shares once all of them have ``tag``."""
    if SPIN:
        N: tl.constexpr = _a_thread(at.numel, WARPS)
        return tl.inline_asm_elementwise(
            _share_code(N), _constraints(2 * N, N, N), [got, at.to(tl.int64), tag], (tl.float32, tl.float32),
            is_pure=False, pack=N,
        )  # fmt: skip
    else:
        while _any(((got ^ tag) | ((got >> 32) ^ tag)) & 255 != 0):
            got = tl.load(at, volatile=True)
        low, high = got.to(tl.int32) & -256, (got >> 32).to(tl.int32) & -256
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


# h, [rows, K] for each of NK parts of the units. ``last`` is the last unit there is: beyond it, any unit's h is given.


@triton.constexpr_function
def _int32s(n):
    return (tl.int32,) * n


@triton.constexpr_function
def aligned(hidden, dtype, bits):
    """Whether rows of h begin at multiples of so many bits."""
    return hidden * dtype.primitive_bitwidth % bits == 0


@triton.jit
def come_states(hist, rows, last, H: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, FULL: tl.constexpr,
                SOLO: tl.constexpr, SPIN: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """h once all have come. FULL: how many parts have no unit beyond the last."""
    if (not SPIN) or SOLO:
        return _looped_states(hist, rows, last, H, K, NK, FULL, SOLO)
    elif aligned(H, hist.dtype.element_ty, 64):
        return _spun_states(hist, rows, last, H, K, NK, FULL, WARPS)
    else:
        return _spun_singles(hist, rows, last, H, K, NK, FULL, WARPS)


@triton.jit
def _units(part: tl.constexpr, K: tl.constexpr, last, FULL: tl.constexpr):
    unit = part * K + tl.arange(0, K)
    return unit if part < FULL else tl.minimum(unit, last)


@triton.jit
def _spun_states(hist, rows, last, H: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, FULL: tl.constexpr,
                 WARPS: tl.constexpr):  # fmt: skip
    BITS: tl.constexpr = hist.dtype.element_ty.primitive_bitwidth
    EACH: tl.constexpr = 64 // BITS  # numbers in 64 bits
    N: tl.constexpr = _a_thread(rows.numel * K // EACH, WARPS)
    first = hist.to(tl.pointer_type(tl.int64), bitcast=True) + rows[:, None] * (H // EACH)
    got, at = (), ()
    for part in tl.static_range(NK):
        place = first + _units(part, K // EACH, last // EACH, FULL)[None, :]
        got, at = got + (tl.load(place, volatile=True),), at + (place.to(tl.int64),)
    halves = tl.inline_asm_elementwise(
        _state_code(N * NK, BITS), _constraints(2 * N * NK, N * NK, 0), got + at, _int32s(2 * NK), is_pure=False,
        pack=N,
    )  # fmt: skip
    found = ()
    for part in tl.static_range(NK):
        found = found + (_numbers(halves[part], halves[NK + part], hist.dtype.element_ty, K),)
    return found


@triton.jit
def _numbers(low, high, like, K: tl.constexpr):
    """[rows, K] numbers of dtype ``like`` from 64 bits that hold two or four of them.

    Bits become numbers last: Triton 3.6 fails on a reshaped tensor that goes straight into a product.
    """
    if like.primitive_bitwidth == 32:
        bits = tl.join(low, high)
    else:
        first, third = low.to(tl.int16), high.to(tl.int16)
        second, fourth = (low >> 16).to(tl.int16), (high >> 16).to(tl.int16)
        bits = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(bits, (low.shape[0], K)).to(like, bitcast=True)


@triton.jit
def _spun_singles(hist, rows, last, H: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, FULL: tl.constexpr,
                  WARPS: tl.constexpr):  # fmt: skip
    like = hist.dtype.element_ty
    N: tl.constexpr = _a_thread(rows.numel * K, WARPS)
    found = ()
    for part in tl.static_range(NK):
        at = as_bits(hist) + rows[:, None] * H + _units(part, K, last, FULL)[None, :]
        got = tl.load(at, volatile=True).to(tl.int32)
        bits = tl.inline_asm_elementwise(
            _single_code(N, like.primitive_bitwidth), _constraints(N, N, 0, "r"), [got, at.to(tl.int64)], tl.int32,
            is_pure=False, pack=N,
        )  # fmt: skip
        bits = bits if like.primitive_bitwidth == 32 else bits.to(tl.int16)
        found = found + (bits.to(like, bitcast=True),)
    return found


@triton.jit
def _looped_states(hist, rows, last, H: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, FULL: tl.constexpr,
                   SOLO: tl.constexpr):  # fmt: skip
    found = ()
    for part in tl.static_range(NK):
        at = as_bits(hist) + rows[:, None] * H + _units(part, K, last, FULL)[None, :]
        got = tl.load(at, volatile=True)
        if not SOLO:
            while _any(got == NOT_YET):
                got = tl.load(at, volatile=True)
        found = found + (got.to(hist.dtype.element_ty, bitcast=True),)
    return found
