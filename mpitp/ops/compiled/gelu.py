"""GELU in the tanh form, by the logistic function: (1 + tanh u) / 2 = s(2u) = 1 / (1 + exp(-2u)).

forward     y  = x * s,  s = 1 / (1 + exp(-2 x (A + B x^2)))
backward    dx = dy * (s + 2 x s (1 - s) (A + 3 B x^2))
"""

from __future__ import annotations

import math

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp
from mpitp.ops.compiled.primitives import row

A = math.sqrt(2.0 / math.pi)
B = 0.044715 * A


@compiled()
def gelu_forward(x: Array, y: Array) -> None:
    """y = gelu(x); both [t, f]."""
    a, b, one = x.dtype.type(-2.0 * A), x.dtype.type(-2.0 * B), x.dtype.type(1.0)
    for i in range(x.shape[0]):
        x_row, y_row = row(x, i), row(y, i)
        for j in range(x_row.shape[0]):
            value = x_row[j]
            y_row[j] = value / (one + exp(value * (a + b * (value * value))))


@compiled()
def gelu_backward(dy: Array, x: Array, dx: Array) -> None:
    """dx of dy and the forward's x; all [t, f]."""
    a, b, one = x.dtype.type(-2.0 * A), x.dtype.type(-2.0 * B), x.dtype.type(1.0)
    slope_a, slope_b = x.dtype.type(2.0 * A), x.dtype.type(6.0 * B)
    for i in range(x.shape[0]):
        dy_row, x_row, dx_row = row(dy, i), row(x, i), row(dx, i)
        for j in range(x_row.shape[0]):
            value = x_row[j]
            square = value * value
            s = one / (one + exp(value * (a + b * square)))
            dx_row[j] = dy_row[j] * (s + s * (one - s) * (value * (slope_a + slope_b * square)))
