"""The linear map y = x w^T + b and its three gradients.

    forward     y  = x @ w.T + b        y[t, n], x[t, k], w[n, k]
    backward    dx = dy @ w             dw = dy.T @ x        db = sum of dy over t

BLAS takes transposes and row strides as they are, so any array whose last dim is contiguous (a slice of columns of a fused
activation, say) goes in without a copy.
"""

from __future__ import annotations

from typing import Any

from mpitp.backend.arrays import array_module

Array = Any


def linear_forward(x: Array, w: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k], w [n, k] and bias [n]; written to `out` when given (it must not overlap x)."""
    xp = array_module(x)
    if x.shape[0] == 1:
        # one row is bound by reading w, which the plain matrix-vector product does best
        y = xp.empty((1, w.shape[0]), dtype=x.dtype) if out is None else out
        y[0] = xp.matmul(w, x[0])
    else:
        y = xp.matmul(x, w.T, out=out)
    if bias is not None:
        y += bias
    return y


def linear_input_grad(dy: Array, w: Array, out: Array | None = None) -> Array:
    """dx [t, k] of dy [t, n] and w [n, k]."""
    return array_module(dy).matmul(dy, w, out=out)


def linear_weight_grad(dy: Array, x: Array, out: Array | None = None) -> Array:
    """dw [n, k] of dy [t, n] and x [t, k]."""
    return array_module(dy).matmul(dy.T, x, out=out)


def linear_bias_grad(dy: Array) -> Array:
    """db [n] of dy [t, n]."""
    return dy.sum(axis=0)
