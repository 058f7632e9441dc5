"""Activations with their slopes, a row at a time; what they are stands in `ops/elementwise.py`.

`kind`: GELU (by erf), TANH_GELU or SIGMOID_LINEAR, which is x s(c x). `coefficients`: of erf's polynomial
(`ops/erf.py`), highest power first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp
from mpitp.ops.compiled.primitives import row

GELU, TANH_GELU, SIGMOID_LINEAR = 0, 1, 2
LARGEST, LEAST_T = 6.0, 0.25  # as in ops/erf.py
A = math.sqrt(2.0 / math.pi)
B = 0.044715 * A


@compiled()
def values(kind: int, c: float, coefficients: Array, x: Array, y: Array) -> None:
    """y = f(x); both [t, f]."""
    one, p = x.dtype.type(1.0), np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        x_row, y_row = row(x, i), row(y, i)
        if kind == GELU:
            _normal(x_row, p, y_row, coefficients)
            for j in range(x_row.shape[0]):
                y_row[j] = x_row[j] * p[j]
        else:
            a, b = _argument(kind, c, x)
            for j in range(x_row.shape[0]):
                value = x_row[j]
                y_row[j] = value / (one + exp(-value * (a + b * (value * value))))


@compiled()
def backward(kind: int, c: float, coefficients: Array, dy: Array, x: Array, dx: Array) -> None:
    """dx of dy and the forward's x; all [t, f]."""
    p, values = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], x.dtype)
    for i in range(x.shape[0]):
        dy_row, x_row, dx_row = row(dy, i), row(x, i), row(dx, i)
        _values_and_slopes(kind, c, coefficients, x_row, values, dx_row, p)
        for j in range(x_row.shape[0]):
            dx_row[j] *= dy_row[j]


@compiled()
def gated_backward(kind: int, c: float, coefficients: Array, dy: Array, gate_up: Array, dgate_up: Array) -> None:
    """dgate_up [t, 2f] of dy [t, f] and gate_up [t, 2f]."""
    p = np.empty(dy.shape[1], dy.dtype)
    for i in range(dy.shape[0]):
        dy_row, both, dboth = row(dy, i), row(gate_up, i), row(dgate_up, i)
        width = dy_row.shape[0]
        gate, up, dgate, dup = both[:width], both[width:], dboth[:width], dboth[width:]
        _values_and_slopes(kind, c, coefficients, gate, dup, dgate, p)
        for j in range(width):
            dup[j] *= dy_row[j]
            dgate[j] *= dy_row[j] * up[j]


@compiled(inline=True)
def _values_and_slopes(kind: int, c: float, coefficients: Array, x: Array, y: Array, slope: Array, p: Array) -> None:
    """y = f(x) and slope = f'(x) of a row [f]; p is to work in."""
    one, three = x.dtype.type(1.0), x.dtype.type(3.0)
    minus_half, density = x.dtype.type(-0.5), x.dtype.type(1.0 / math.sqrt(2.0 * math.pi))
    if kind == GELU:
        _normal(x, p, y, coefficients)
        for j in range(x.shape[0]):
            value = x[j]
            y[j] = value * p[j]
            slope[j] = p[j] + value * density * exp(minus_half * value * value)
    else:
        a, b = _argument(kind, c, x)
        for j in range(x.shape[0]):
            value = x[j]
            square = value * value
            s = one / (one + exp(-value * (a + b * square)))
            y[j] = value * s
            slope[j] = s + value * s * (one - s) * (a + three * b * square)


@compiled(inline=True)
def _argument(kind: int, c: float, x: Array) -> Any:
    """a and b of x s(a x + b x^3): the tanh GELU by the logistic function, or x s(c x)."""
    if kind == TANH_GELU:
        return x.dtype.type(2.0 * A), x.dtype.type(2.0 * B)
    return x.dtype.type(c), x.dtype.type(0.0)


@compiled(inline=True)
def _normal(x: Array, p: Array, w: Array, coefficients: Array) -> None:
    """p = Phi(x), the normal distribution: half of erfc(z) = t exp(P(w) - z^2), or 1 less that; w is to work in."""
    zero, half, one, two = x.dtype.type(0.0), x.dtype.type(0.5), x.dtype.type(1.0), x.dtype.type(2.0)
    root, most, least = x.dtype.type(math.sqrt(0.5)), x.dtype.type(LARGEST), x.dtype.type(LEAST_T)
    width = two / (one - least)
    for j in range(x.shape[0]):
        z = min(abs(x[j]) * root, most)
        w[j] = (one / (one + half * z) - least) * width - one
        p[j] = coefficients[0]
    for k in range(1, coefficients.shape[0]):
        coefficient = coefficients[k]
        for j in range(x.shape[0]):
            p[j] = p[j] * w[j] + coefficient
    for j in range(x.shape[0]):
        z = min(abs(x[j]) * root, most)
        tail = half * exp(p[j] - z * z) / (one + half * z)
        p[j] = one - tail if x[j] > 0 else tail if z < most else zero
