"""Layer norm (Ba, Kiros, Hinton 2016): every row to mean 0 and variance 1, then an affine map per column.

    forward     xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps),  y = xhat * weight + bias
    backward    g  = dy * weight
                dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
                dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy

The backward follows from d(mean) and d(var) of a row: both are sums over the row, and their parts of the gradient are
the two projections subtracted above. Statistics are kept in float32 at least.
"""

from __future__ import annotations

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.ops.row_blocks import paired_blocks, statistics_dtype, without_gaps


def layer_norm_reference(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """The plain forward over the whole array."""
    xp = array_module(x)
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / xp.sqrt((centred * centred).mean(axis=1, keepdims=True) + eps) * weight + bias


def layer_norm_forward(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """y [t, h] of x [t, h], weight [h], bias [h]; with mean [t] and rstd [t] for the backward."""
    xp = array_module(x)
    wide = statistics_dtype(x.dtype)
    y = xp.empty(x.shape, dtype=x.dtype)
    mean, rstd = xp.empty((x.shape[0],), dtype=wide), xp.empty((x.shape[0],), dtype=wide)
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import layer_norm as compiled

        compiled.layer_norm_forward(without_gaps(x), weight, bias, eps, y, mean, rstd)
        return y, mean, rstd
    blocks = paired_blocks(xp, x, y, mean, rstd, scratch=1, dtype=wide)
    for x_rows, y_rows, mean_rows, rstd_rows, centred in blocks:
        mean_rows[...] = x_rows.mean(axis=1, dtype=wide)
        xp.subtract(x_rows, mean_rows[:, None], out=centred)
        variance = xp.einsum("ij,ij->i", centred, centred) / x.shape[1]
        rstd_rows[...] = 1.0 / xp.sqrt(variance + eps)
        centred *= rstd_rows[:, None]
        centred *= weight
        xp.add(centred, bias, out=y_rows)
    return y, mean, rstd


def layer_norm_backward(dy: Array, x: Array, weight: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """dx [t, h], dweight [h] and dbias [h] of dy [t, h] and what the forward was given and returned."""
    xp = array_module(x)
    wide = mean.dtype
    dx = xp.empty(x.shape, dtype=x.dtype)
    dweight, dbias = xp.zeros(weight.shape, dtype=wide), xp.zeros(weight.shape, dtype=wide)
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import layer_norm as compiled

        compiled.layer_norm_backward(without_gaps(dy), without_gaps(x), weight, mean, rstd, dx, dweight, dbias)
        return dx, dweight, dbias
    wide_weight = weight.astype(wide, copy=False)
    blocks = paired_blocks(xp, x, dy, dx, mean[:, None], rstd[:, None], scratch=3, dtype=wide)
    for x_rows, dy_rows, dx_rows, mean_rows, rstd_rows, xhat, product, g in blocks:
        xp.subtract(x_rows, mean_rows, out=xhat)
        xhat *= rstd_rows
        xp.multiply(dy_rows, xhat, out=product)
        dweight += product.sum(axis=0)
        dbias += dy_rows.sum(axis=0, dtype=wide)
        xp.multiply(dy_rows, weight, out=g, dtype=wide)
        xhat *= (xp.einsum("ij,j->i", product, wide_weight) / x.shape[1])[:, None]  # mean(g * xhat)
        xhat += g.mean(axis=1, keepdims=True)
        g -= xhat
        xp.multiply(g, rstd_rows, out=dx_rows)
    return dx, dweight, dbias
