"""exp of one number, in a form that loops over rows vectorise; the error is below 2 units in the last place.

exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2, where Taylor's polynomial does. ln 2 is subtracted
in two pieces (Cody and Waite 1980). `exp` applies 2^n in two factors: results below the smallest normal number come out
rounded once, those too large as inf and those too small as 0. `exp_flushed` is shorter: the softmax's. NaN stays NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mpitp.backend.accelerator import compiled
from mpitp.ops.compiled.primitives import bits, fma

F4, I4, F8, I8 = np.float32, np.int32, np.float64, np.int64
LN2_TAIL = 2.319046813846299558e-17  # ln 2 - float64(ln 2)

LOG2E_4, HIGH_4 = F4(1.0 / math.log(2.0)), F4(math.log(2.0))
LOW_4 = F4(math.log(2.0) - float(HIGH_4))
ROUND_4 = F4(1.5 * 2**23)  # x + ROUND - ROUND rounds x to an integer, and the sum's low bits hold it
LEAST_4, MOST_4, FLUSHED_4 = F4(-104.0), F4(89.0), F4(-87.0)  # beyond them exp is 0, inf, and hardly a normal number
BIAS_4, MANTISSA_4, ONE_4 = I4(127), I4(23), I4(1)
T7, T6, T5, T4, T3, T2 = (F4(1.0 / math.factorial(k)) for k in (7, 6, 5, 4, 3, 2))
UNIT_4, ZERO_4, UNIT_BITS_4 = F4(1.0), F4(0.0), I4(127 << 23)

LOG2E_8, HIGH_8, LOW_8 = F8(1.0 / math.log(2.0)), F8(math.log(2.0)), F8(LN2_TAIL)
ROUND_8 = F8(1.5 * 2**52)
LEAST_8, MOST_8, FLUSHED_8 = F8(-746.0), F8(710.0), F8(-708.0)
BIAS_8, MANTISSA_8, ONE_8 = I8(1023), I8(52), I8(1)
D13, D12, D11, D10, D9, D8, D7, D6, D5, D4, D3, D2 = (F8(1.0 / math.factorial(k)) for k in range(13, 1, -1))
UNIT_8, ZERO_8, UNIT_BITS_8 = F8(1.0), F8(0.0), I8(1023 << 52)


def exp(x: Any) -> Any:
    """The exponential of a float32 or a float64, as kernels call it."""
    return np.exp(x)


def exp_flushed(x: Any) -> Any:
    """The same for x below 88 (708 in float64); 0 where it would be no normal number."""
    return np.exp(x) if x > np.log(np.finfo(x.dtype).tiny) else x.dtype.type(0.0)


@overload(exp)
def _choose(x: Any) -> Any:
    return {types.float32: _exp32, types.float64: _exp64}.get(x)


@overload(exp_flushed)
def _choose_flushed(x: Any) -> Any:
    return {types.float32: _flushed32, types.float64: _flushed64}.get(x)


def _exp32(x: Any) -> Any:
    x = LEAST_4 if x < LEAST_4 else x  # comparisons with NaN are false: it stays
    x = MOST_4 if x > MOST_4 else x
    shifted = fma(x, LOG2E_4, ROUND_4)
    power = I4(bits(shifted) - bits(ROUND_4))
    half = I4(power >> ONE_4)
    rest = I4(power - half)
    p = _taylor32(x, shifted - ROUND_4)
    return p * bits(I4(I4(half + BIAS_4) << MANTISSA_4)) * bits(I4(I4(rest + BIAS_4) << MANTISSA_4))


def _flushed32(x: Any) -> Any:
    shifted = fma(x, LOG2E_4, ROUND_4)
    power = bits(I4(I4(bits(shifted) << MANTISSA_4) + UNIT_BITS_4))  # what ROUND adds to the bits is shifted out
    y = _taylor32(x, shifted - ROUND_4) * power
    return ZERO_4 if x < FLUSHED_4 else y


@compiled(inline=True)
def _taylor32(x: Any, n: Any) -> Any:
    r = fma(-n, LOW_4, fma(-n, HIGH_4, x))
    p = fma(T7, r, T6)
    p = fma(p, r, T5)
    p = fma(p, r, T4)
    p = fma(p, r, T3)
    p = fma(p, r, T2)
    p = fma(p, r, UNIT_4)
    return fma(p, r, UNIT_4)


def _exp64(x: Any) -> Any:
    x = LEAST_8 if x < LEAST_8 else x
    x = MOST_8 if x > MOST_8 else x
    shifted = fma(x, LOG2E_8, ROUND_8)
    power = bits(shifted) - bits(ROUND_8)
    half = power >> ONE_8
    rest = power - half
    return _taylor64(x, shifted - ROUND_8) * bits((half + BIAS_8) << MANTISSA_8) * bits((rest + BIAS_8) << MANTISSA_8)


def _flushed64(x: Any) -> Any:
    shifted = fma(x, LOG2E_8, ROUND_8)
    y = _taylor64(x, shifted - ROUND_8) * bits((bits(shifted) << MANTISSA_8) + UNIT_BITS_8)
    return ZERO_8 if x < FLUSHED_8 else y


@compiled(inline=True)
def _taylor64(x: Any, n: Any) -> Any:
    r = fma(-n, LOW_8, fma(-n, HIGH_8, x))
    p = fma(D13, r, D12)
    p = fma(p, r, D11)
    p = fma(p, r, D10)
    p = fma(p, r, D9)
    p = fma(p, r, D8)
    p = fma(p, r, D7)
    p = fma(p, r, D6)
    p = fma(p, r, D5)
    p = fma(p, r, D4)
    p = fma(p, r, D3)
    p = fma(p, r, D2)
    p = fma(p, r, UNIT_8)
    return fma(p, r, UNIT_8)
