r"""The error function of an array; NumPy has none.

For z = |x| and t = 1 / (1 + z/2), which lies in [1/4, 1] for z up to 6, behind which erf is 1 to the last bit,

    erf(x) = sign(x) (1 - t exp(P(t) - z^2)),   P(t) = log(erfc(z) / t) + z^2

and P is so smooth that a Chebyshev series of few terms is exact to rounding (the form of Press et al., Numerical
Recipes, 6.2). The series is interpolated here, from the standard library's erfc. The absolute error is that of
rounding 1; near 0, where erf(x) is about x, that is not the relative one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module

LARGEST = 6.0  # erfc(6) is 2e-17
LEAST_T = 1.0 / (1.0 + LARGEST / 2.0)
TERMS = {np.dtype(np.float32): 10, np.dtype(np.float64): 20}


def erf(x: Array) -> Array:
    """The error function of every element, a new array."""
    xp = array_module(x)
    z = xp.minimum(xp.abs(x), LARGEST)
    t = 1.0 / (1.0 + 0.5 * z)
    exponent = _polynomial(xp, t, polynomial_of(TERMS.get(x.dtype, 10)))
    z *= z
    exponent -= z
    y = xp.exp(exponent, out=exponent)
    y *= t
    xp.subtract(1.0, y, out=y)
    y *= xp.sign(x)
    return y


def _polynomial(xp: Any, t: Array, coefficients: tuple[float, ...]) -> Array:
    """The polynomial in w, the place of t in [LEAST_T, 1] as one in [-1, 1]; lowest power first."""
    w = (t - LEAST_T) * (2.0 / (1.0 - LEAST_T)) - 1.0
    total = xp.full_like(t, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total *= w
        total += coefficient
    return total


@cache
def highest_first(dtype: Any) -> np.ndarray:
    """The coefficients for a dtype, as kernels take them."""
    return np.array(polynomial_of(TERMS[np.dtype(dtype)])[::-1], dtype)


@cache
def polynomial_of(terms: int) -> tuple[float, ...]:
    """P as a polynomial in w, by interpolation at Chebyshev's points."""
    w = np.cos((np.arange(terms) + 0.5) * np.pi / terms)
    t = LEAST_T + (1.0 - LEAST_T) * (1.0 + w) / 2.0
    z = 2.0 * (1.0 / t - 1.0)
    p = np.array([math.log(math.erfc(each)) for each in z]) - np.log(t) + z * z
    series = np.polynomial.chebyshev.chebfit(w, p, terms - 1)
    return tuple(map(float, np.polynomial.chebyshev.cheb2poly(series)))
