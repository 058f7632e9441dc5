"""Rotary position embedding (Su et al. 2021) on halves, as Hugging Face's Llama lays it out.

Column j < d/2 and column j + d/2 of a head are the two coordinates of a point that is turned by the angle
position * inv_freq[j]:

    forward     y1 = x1 cos - x2 sin,   y2 = x2 cos + x1 sin
    backward    the turn back: the same with -sin
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.backend.precision import is_half, widened
from mpitp.ops.rope_scaling import scaled_frequencies
from mpitp.ops.row_blocks import paired_blocks, row_blocks


def rope_inv_freq(head_dim: int, theta: float, scaling: dict[str, Any] | None = None, length: int = 0) -> np.ndarray:
    """Angle a position [head_dim/2], float64: theta^(-2j/d), changed by `scaling`, a config's rope_scaling.

    The kinds stand in `rope_scaling.py`; some look at the `length` of the text. Raises ConfigError for any other kind
    and for a missing number.
    """
    return scaled_frequencies(head_dim, theta, scaling, length)


def rope_table(positions: Array, inv_freq: np.ndarray, dtype: Any, xp: Any) -> tuple[Array, Array]:
    """cos and sin [t, d/2] of the angles at `positions` [t] (host or device integers), computed in float64.

    inv_freq: [d/2], or [t, d/2] where rows turn at different speeds.
    """
    positions = positions if array_module(positions) is xp else from_host(positions, xp)
    angles = positions.astype(np.float64)[:, None] * from_host(inv_freq, xp)
    return xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)


def rope_reference(x: Array, cos: Array, sin: Array) -> Array:
    """The plain forward over the whole array."""
    x1, x2 = _halves(x)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return array_module(x).concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=2)


def rope_forward(x: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """x [t, n, d] turned by the tables [t, d/2]; into `out`, which may be x itself."""
    xp = array_module(x)
    out = xp.empty(x.shape, dtype=x.dtype) if out is None else out
    if is_half(x.dtype):
        for rows in row_blocks(xp, x.shape[0], 4 * x.size // max(x.shape[0], 1)):
            out[rows] = rope_forward(widened(x[rows]), cos[rows], sin[rows])
        return out
    if is_accelerated(xp, x.dtype) and _heads_side_by_side(out):
        from mpitp.ops.compiled import rope as compiled

        if out is not x:
            out[...] = x
        compiled.turn(out.reshape(out.shape[0], out.shape[1] * out.shape[2]), cos, sin)
        return out
    arrays = (*_halves(x), *_halves(out), cos[:, None, :], sin[:, None, :])
    for x1, x2, out1, out2, cos_rows, sin_rows, x1_sin, x2_sin in paired_blocks(xp, *arrays, scratch=2):
        xp.multiply(x1, sin_rows, out=x1_sin)
        xp.multiply(x2, sin_rows, out=x2_sin)
        xp.multiply(x1, cos_rows, out=out1)
        xp.multiply(x2, cos_rows, out=out2)
        out1 -= x2_sin
        out2 += x1_sin
    return out


def rope_backward(dy: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """dx [t, n, d] of dy [t, n, d]: turned back; into `out`, which may be dy itself."""
    return rope_forward(dy, cos, -sin, out)


def _halves(x: Array) -> tuple[Array, Array]:
    half = x.shape[2] // 2
    return x[:, :, :half], x[:, :, half:]


def _heads_side_by_side(x: Array) -> bool:
    """Whether the heads [n, d] of a token lie in memory without gaps, so that a view [t, n * d] can be had."""
    return x.strides[1:] == (x.shape[2] * x.itemsize, x.itemsize)
