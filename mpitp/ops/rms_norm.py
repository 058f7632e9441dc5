"""RMS norm (Zhang and Sennrich 2019): every row to mean square 1, then a factor per column.

    forward     xhat = x * rstd,  rstd = 1 / sqrt(mean(x * x) + eps),  y = xhat * weight
    backward    g  = dy * weight
                dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum over rows of dy * xhat

Statistics are kept in float32 at least, as in Hugging Face's LlamaRMSNorm.
"""

from __future__ import annotations

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.ops.row_blocks import paired_blocks, statistics_dtype, without_gaps


def rms_norm_reference(x: Array, weight: Array, eps: float) -> Array:
    """The plain forward over the whole array."""
    return x / array_module(x).sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


def rms_norm_forward(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """y [t, h] of x [t, h] and weight [h]; with rstd [t] for the backward."""
    xp = array_module(x)
    wide = statistics_dtype(x.dtype)
    y, rstd = xp.empty(x.shape, dtype=x.dtype), xp.empty((x.shape[0],), dtype=wide)
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import rms_norm as compiled

        compiled.rms_norm_forward(without_gaps(x), weight, eps, y, rstd)
        return y, rstd
    for x_rows, y_rows, rstd_rows, work in paired_blocks(xp, x, y, rstd, scratch=1, dtype=wide):
        work[...] = x_rows
        mean_square = xp.einsum("ij,ij->i", work, work) / x.shape[1]
        rstd_rows[...] = 1.0 / xp.sqrt(mean_square + eps)
        work *= rstd_rows[:, None]
        xp.multiply(work, weight, out=y_rows)
    return y, rstd


def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
    """dx [t, h] and dweight [h] of dy [t, h] and what the forward was given and returned."""
    xp = array_module(x)
    wide = rstd.dtype
    dx, dweight = xp.empty(x.shape, dtype=x.dtype), xp.zeros(weight.shape, dtype=wide)
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import rms_norm as compiled

        compiled.rms_norm_backward(without_gaps(dy), without_gaps(x), weight, rstd, dx, dweight)
        return dx, dweight
    wide_weight = weight.astype(wide, copy=False)
    blocks = paired_blocks(xp, x, dy, dx, rstd[:, None], scratch=3, dtype=wide)
    for x_rows, dy_rows, dx_rows, rstd_rows, xhat, product, g in blocks:
        xp.multiply(x_rows, rstd_rows, out=xhat)
        xp.multiply(dy_rows, xhat, out=product)
        dweight += product.sum(axis=0)
        xp.multiply(dy_rows, weight, out=g, dtype=wide)
        xhat *= (xp.einsum("ij,j->i", product, wide_weight) / x.shape[1])[:, None]  # mean(g * xhat)
        g -= xhat
        xp.multiply(g, rstd_rows, out=dx_rows)
    return dx, dweight
