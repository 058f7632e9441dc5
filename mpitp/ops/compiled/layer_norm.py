"""Layer norm, a row at a time: the row is read again while it is still in the nearest cache.

forward     xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * weight + bias
backward    g  = dy * weight,  dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
            dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import dot, dot_of_three, row_sum, sum_of_squares_about

ROWS_TOGETHER = 64  # rows whose gradients are added to one partial sum: long float32 sums would lose digits


@compiled()
def layer_norm_forward(x: Array, weight: Array, bias: Array, eps: float, y: Array, mean: Array, rstd: Array) -> None:
    """y [t, h], mean [t] and rstd [t] of x [t, h], weight [h] and bias [h]."""
    one, width, epsilon = x.dtype.type(1.0), x.dtype.type(x.shape[1]), x.dtype.type(eps)
    for i in range(x.shape[0]):
        x_row, y_row = row(x, i), row(y, i)
        centre = row_sum(x_row) / width
        factor = one / np.sqrt(sum_of_squares_about(x_row, centre) / width + epsilon)
        for j in range(x_row.shape[0]):
            y_row[j] = (x_row[j] - centre) * factor * weight[j] + bias[j]
        mean[i], rstd[i] = centre, factor


@compiled()
def layer_norm_backward(
    dy: Array, x: Array, weight: Array, mean: Array, rstd: Array, dx: Array, dweight: Array, dbias: Array
) -> None:
    """dx [t, h] of dy [t, h] and what the forward was given and gave; dweight and dbias [h] start at 0."""
    width = x.dtype.type(x.shape[1])
    partial = np.empty((2, x.shape[1]), x.dtype)
    weights, biases = partial[0], partial[1]
    for first in range(0, x.shape[0], ROWS_TOGETHER):
        partial[:] = 0.0
        for i in range(first, min(first + ROWS_TOGETHER, x.shape[0])):
            dy_row, x_row, dx_row = row(dy, i), row(x, i), row(dx, i)
            centre, factor = mean[i], rstd[i]
            mean_g = dot(dy_row, weight) / width
            mean_g_xhat = dot_of_three(dy_row, weight, x_row, centre) * factor / width
            for j in range(x_row.shape[0]):
                xhat = (x_row[j] - centre) * factor
                weights[j] += dy_row[j] * xhat
                biases[j] += dy_row[j]
                dx_row[j] = (dy_row[j] * weight[j] - (xhat * mean_g_xhat + mean_g)) * factor
        for j in range(x.shape[1]):
            dweight[j] += weights[j]
            dbias[j] += biases[j]
