"""What the kernels compute, elementwise on any shape: non-linearities, the norm's scalars, and the cells.

Both ways to run a recurrence (``sequence``, ``steps``) are made of these. Gates enter the cells before their
non-linearities; what backward takes was activated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import interpreted

# Compiled code takes the GPU's own exponential and inverse, 2 and 1 units in the last place off: a third of the
# instructions. The interpreter has no such thing.
COMPILED = tl.constexpr(not interpreted())
LOG2E = tl.constexpr(1.4426950408889634)

# Values of CELL.
RNN, LSTM, GRU, DREAMER = (tl.constexpr(k) for k in range(4))
# Values of SITE: where the product's norm stands.
NOWHERE, ON_HH, ON_SUM = (tl.constexpr(k) for k in range(3))
# Values of SPLIT: which gates share statistics.
TOGETHER, APART, PAIR = (tl.constexpr(k) for k in range(3))


@triton.jit
def wide(n):
    """A count in 64 bits: offsets of long sequences pass 2^31."""
    return tl.full((), 0, tl.int64) + n


@triton.jit
def rounded(a, b):
    """a b, never part of a fused multiply-add.

    A sum over threads would be one otherwise: own product, unrounded, plus the other's. Threads that should all hold
    the sum would then differ in its last bit, and which of them is stored is a race (compute-sanitizer found it). And
    a product less the mean of such products would not be 0 where all are the same: at one unit, that rounding over
    sqrt(eps) was all the gradient (errors 30 to 300 times the reference's).
    """
    if COMPILED:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        return a * b


@triton.jit
def added(a, b):
    """a + b, never part of a matrix product before it."""
    if COMPILED:
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        return a + b


@triton.jit
def not_before(x):
    """16-bit numbers, which the compiler may not bring to shared memory before what stands above this is done."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
    else:
        return x


@triton.jit
def fitting(most):
    """The power of two that brings ``most`` to between 2^14 and 2^15, as float16 likes it, and its inverse.

    0 may be multiplied by anything; infinities and NaN stay what they are.
    """
    exponent = tl.maximum((most.to(tl.int32, bitcast=True) >> 23) & 255, 20)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exp2(x):
    if COMPILED:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(tl.where(x > 127.0, 127.0, x))  # no warning of an overflow that is meant


@triton.jit
def _inverse(x):
    if COMPILED:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.constexpr_function
def quick_enough(dtype):
    """Whether the GPU's own tanh is good enough for states of a dtype, here and for sigmoids.

    Its error is 2^-11 of the result, a quarter of bfloat16's rounding but all of float16's; a step is 3% to 4% shorter.
    """
    return COMPILED.value and dtype == tl.bfloat16


@triton.jit
def sigmoid(x, QUICK: tl.constexpr):
    """Where the exponential overflows its inverse is 0, as it should be."""
    if QUICK:
        return 0.5 + 0.5 * tanh(0.5 * x, QUICK)
    else:
        return _inverse(1.0 + _exp2(x * -LOG2E))


@triton.jit
def tanh(x, QUICK: tl.constexpr):
    """By the exponential, and near 0, where that would cancel, by the series."""
    if QUICK:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return _exact_tanh(x)


@triton.jit
def _exact_tanh(x):
    far = 1.0 - 2.0 * _inverse(1.0 + _exp2(x * (2 * LOG2E)))
    close = tl.abs(x) < 0.25
    small = tl.where(close, x, 0.0)
    s = small * small
    near = small * (1.0 - s * (1.0 / 3 - s * (2.0 / 15 - s * (17.0 / 315 - s * (62.0 / 2835)))))
    return tl.where(close, near, far)


@triton.jit
def over(x, n):
    """x / n for a count n. The GPU's quick division may be off even by n = 1, where a mean is the number itself.

    Where n is known when the kernel is compiled, x * (1 / n) will do: exact for 1, and fewer instructions.
    """
    return tl.div_rn(x, tl.zeros_like(x) + n)


@triton.jit
def inverse_deviation(var, eps, STD: tl.constexpr):
    """1/sqrt(var + eps), or 1/(sqrt(var) + eps); 0 where that is not finite, as the reference has it.

    The GPU's quick inverse root and one of Newton's steps: fewer instructions than a root and a division, and right.
    """
    if STD:
        deviation = tl.sqrt_rn(var) + eps
        return tl.where(
            deviation > 0, tl.div_rn(tl.zeros_like(var) + 1.0, tl.where(deviation > 0, deviation, 1.0)), 0.0
        )
    else:
        ok = (var + eps > 1.2e-38) & (var + eps < float("inf"))  # below its normal numbers float32 is 0 to the GPU
        v = tl.where(ok, var + eps, 1.0)
        inverse = tl.rsqrt(v)
        return tl.where(ok, inverse * (1.5 - (0.5 * v * inverse) * inverse), 0.0)


@triton.jit
def std_correction(rstd, eps, STD: tl.constexpr):
    """What the norm's projection term is multiplied with: 1, or (s + eps)/s when eps was added to s itself."""
    if STD:
        apart = 1.0 - eps * rstd  # s / (s + eps)
        return tl.where((rstd > 0) & (apart > 0), 1.0 / tl.where(apart > 0, apart, 1.0), 0.0)
    else:
        return 1.0


# The cells.


@triton.jit
def lstm_gates(i, f, g, o, QUICK: tl.constexpr):
    return sigmoid(i, QUICK), sigmoid(f, QUICK), tanh(g, QUICK), sigmoid(o, QUICK)


@triton.jit
def lstm_output_backward(o, out, dh):
    """Gradients to the gate o and to what it lets out as h = o * out, out = tanh(.)."""
    return dh * out * o * (1.0 - o), dh * o * (1.0 - out * out)


@triton.jit
def lstm_cell_backward(i, f, g, c_old, dc):
    """Gradients to the gates i, f, g and to the old c."""
    return dc * g * i * (1.0 - i), dc * c_old * f * (1.0 - f), dc * i * (1.0 - g * g), dc * f


@triton.jit
def gru_gates(x_r, x_z, x_n, h_r, h_z, h_n, QUICK: tl.constexpr):
    r = sigmoid(x_r + h_r, QUICK)
    return r, sigmoid(x_z + h_z, QUICK), tanh(x_n + r * h_n, QUICK)


@triton.jit
def dreamer_gates(r, u, n, QUICK: tl.constexpr):
    """As GRU has them: z, the weight of the old h, is 1 - sigmoid(u - 1), so that all that follows is GRU's."""
    r = sigmoid(r, QUICK)
    return r, sigmoid(1.0 - u, QUICK), tanh(r * n, QUICK)


@triton.jit
def gru_forward(z, n, h_old):
    return (1.0 - z) * n + z * h_old


@triton.jit
def gru_backward(r, z, n, h_n, h_old, dh):
    """Gradients to r, z and n, and to the old h past the product; h_n is what r multiplied."""
    dn = dh * (1.0 - z) * (1.0 - n * n)
    return dn * h_n * r * (1.0 - r), dh * (h_old - n) * z * (1.0 - z), dn, dh * z


@triton.jit
def rnn_forward(a, RELU: tl.constexpr, QUICK: tl.constexpr):
    return tl.maximum(a, 0.0) if RELU else tanh(a, QUICK)


@triton.jit
def rnn_backward(out, dh, RELU: tl.constexpr):
    return tl.where(out > 0, dh, 0.0) if RELU else dh * (1.0 - out * out)
