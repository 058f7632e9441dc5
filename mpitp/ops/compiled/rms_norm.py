"""RMS norm, a row at a time: the row is read again while it is still in the nearest cache.

forward     xhat = x * rstd,  rstd = 1 / sqrt(mean(x * x) + eps),  y = xhat * weight
backward    g = dy * weight,  dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum over rows of dy * xhat
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.layer_norm import ROWS_TOGETHER
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import dot_of_three, sum_of_squares_about


@compiled()
def rms_norm_forward(x: Array, weight: Array, eps: float, y: Array, rstd: Array) -> None:
    """y [t, h] and rstd [t] of x [t, h] and weight [h]."""
    zero, one = x.dtype.type(0.0), x.dtype.type(1.0)
    width, epsilon = x.dtype.type(x.shape[1]), x.dtype.type(eps)
    for i in range(x.shape[0]):
        x_row, y_row = row(x, i), row(y, i)
        factor = one / np.sqrt(sum_of_squares_about(x_row, zero) / width + epsilon)
        for j in range(x_row.shape[0]):
            y_row[j] = x_row[j] * factor * weight[j]
        rstd[i] = factor


@compiled()
def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array, dx: Array, dweight: Array) -> None:
    """dx [t, h] of dy [t, h] and what the forward was given and gave; dweight [h] starts at 0."""
    zero, width = x.dtype.type(0.0), x.dtype.type(x.shape[1])
    weights = np.empty(x.shape[1], x.dtype)
    for first in range(0, x.shape[0], ROWS_TOGETHER):
        weights[:] = 0.0
        for i in range(first, min(first + ROWS_TOGETHER, x.shape[0])):
            dy_row, x_row, dx_row = row(dy, i), row(x, i), row(dx, i)
            factor = rstd[i]
            mean_g_xhat = dot_of_three(dy_row, weight, x_row, zero) * factor / width
            for j in range(x_row.shape[0]):
                xhat = x_row[j] * factor
                weights[j] += dy_row[j] * xhat
                dx_row[j] = (dy_row[j] * weight[j] - xhat * mean_g_xhat) * factor
        for j in range(x.shape[1]):
            dweight[j] += weights[j]
