"""RMS norm (Zhang and Sennrich 2019): every row to mean square 1, then a factor per column.

    forward     xhat = x * rstd,  rstd = 1 / sqrt(mean(x * x) + eps),  y = xhat * weight
    backward    g  = dy * weight
                dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum over rows of dy * xhat

Statistics are kept in float32 at least, as in Hugging Face's LlamaRMSNorm.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.ops.row_blocks import statistics_dtype

Array = Any


def rms_norm_reference(x: Array, weight: Array, eps: float) -> Array:
    """The plain forward over the whole array."""
    return x / array_module(x).sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight


def rms_norm_forward(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """y [t, h] of x [t, h] and weight [h]; with rstd [t] for the backward."""
    xp = array_module(x)
    wide = x.astype(statistics_dtype(x.dtype), copy=False)
    rstd = 1.0 / xp.sqrt((wide * wide).mean(axis=1) + eps)
    return (wide * rstd[:, None] * weight).astype(x.dtype, copy=False), rstd


def rms_norm_backward(dy: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
    """dx [t, h] and dweight [h] of dy [t, h] and what the forward was given and returned."""
    xhat = x * rstd[:, None]
    g = dy * weight
    projection = (g * xhat).mean(axis=1, keepdims=True)
    dx = (g - xhat * projection) * rstd[:, None]
    return dx.astype(x.dtype), (dy * xhat).sum(axis=0).astype(weight.dtype)
