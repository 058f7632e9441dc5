"""Layer norm (Ba, Kiros, Hinton 2016): every row to mean 0 and variance 1, then an affine map per column.

    forward     xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * weight + bias
    backward    g  = dy * weight
                dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
                dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

The backward follows from d(mean) and d(var) of a row: both are sums over the row, and their parts of the gradient are the
two projections subtracted above. Statistics are kept in float32 at least.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.ops.row_blocks import block_rows, row_blocks, statistics_dtype

Array = Any


def layer_norm_reference(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """The plain forward over the whole array."""
    xp = array_module(x)
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / xp.sqrt((centred * centred).mean(axis=1, keepdims=True) + eps) * weight + bias


def layer_norm_forward(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """y [t, h] of x [t, h], weight [h], bias [h]; with mean [t] and rstd [t] for the backward."""
    xp = array_module(x)
    rows, hidden = x.shape
    wide = statistics_dtype(x.dtype)
    y = xp.empty((rows, hidden), dtype=x.dtype)
    mean, rstd = xp.empty((rows,), dtype=wide), xp.empty((rows,), dtype=wide)
    row_bytes = hidden * wide.itemsize
    centred_all = xp.empty((block_rows(xp, rows, row_bytes), hidden), dtype=wide)
    squares_all = xp.empty_like(centred_all)
    for block in row_blocks(xp, rows, row_bytes):
        size = block.stop - block.start
        centred, squares = centred_all[:size], squares_all[:size]
        mean[block] = x[block].mean(axis=1, dtype=wide)
        xp.subtract(x[block], mean[block, None], out=centred)
        xp.multiply(centred, centred, out=squares)
        rstd[block] = 1.0 / xp.sqrt(squares.mean(axis=1) + eps)
        centred *= rstd[block, None]
        centred *= weight
        centred += bias
        y[block] = centred
    return y, mean, rstd


def layer_norm_backward(dy: Array, x: Array, weight: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """dx [t, h], dweight [h] and dbias [h] of dy [t, h] and what the forward was given and returned."""
    xp = array_module(x)
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dy * weight
    g_mean = g.mean(axis=1, keepdims=True)
    projection = (g * xhat).mean(axis=1, keepdims=True)
    dx = (g - g_mean - xhat * projection) * rstd[:, None]
    return dx.astype(x.dtype), xp.sum(dy * xhat, axis=0).astype(weight.dtype), dy.sum(axis=0)
