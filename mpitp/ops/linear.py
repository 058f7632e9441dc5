"""The linear map y = x w^T + b and its three gradients.

    forward     y  = x @ w.T + b        y[t, n], x[t, k], w[n, k]
    backward    dx = dy @ w             dw = dy.T @ x        db = sum of dy over t

BLAS takes transposes and row strides as they are, so any array whose last dim is contiguous (a slice of columns of a
fused activation, say) goes in without a copy.

The bits of a product depend on its values and shapes alone, not on whether an operand is a whole array or a slice of
one: the invariant layout needs that. Matrix products are so by themselves; a matrix-vector product, which rounds
differently for a matrix with gaps between its rows, gets its operands packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module

Array = Any


SMALL_PRODUCT = 10**6  # t n k up to which OpenBLAS multiplies without packing
FEW_ROWS = 64  # up to here w @ x.T is faster than x @ w.T on a CPU (OpenBLAS, measured: 1.1 to 3 times)


def linear_forward(x: Array, w: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k], w [n, k] and bias [n]; written to `out` when given (it must not overlap x)."""
    xp = array_module(x)
    rows = x.shape[0]
    if rows == 0 or rows > FEW_ROWS or xp is not np:
        y = _product(x, w.T, out)
    else:
        # few rows are bound by reading w: once, in order. One row is a matrix-vector product
        y = np.empty((rows, w.shape[0]), dtype=x.dtype) if out is None else out
        columns = np.ascontiguousarray(x.T)
        for block in _few_rows_blocks(rows, w):
            y.T[block] = _product(w[block], columns)
    if bias is not None:
        y += bias
    return y


def _few_rows_blocks(rows: int, w: Array) -> list[slice]:
    """Rows of w for products small enough for OpenBLAS to compute without packing w (it packs for reuse: none here)."""
    n, k = w.shape
    step = max(1, n if rows == 1 else SMALL_PRODUCT // (rows * max(k, 1)))
    return [slice(i, i + step) for i in range(0, n, step)]


def linear_input_grad(dy: Array, w: Array, out: Array | None = None) -> Array:
    """dx [t, k] of dy [t, n] and w [n, k]."""
    return _product(dy, w, out)


def linear_weight_grad(dy: Array, x: Array, out: Array | None = None) -> Array:
    """dw [n, k] of dy [t, n] and x [t, k]."""
    return _product(dy.T, x, out)


def linear_bias_grad(dy: Array) -> Array:
    """db [n] of dy [t, n]."""
    if dy.shape[1] == 1:  # NumPy adds one column by itself pairwise, but several row by row; so make it two
        return array_module(dy).repeat(dy, 2, axis=1).sum(axis=0)[:1]
    return dy.sum(axis=0)


def _product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b; written to `out` when given."""
    xp = array_module(a)
    if a.shape[0] > 1 and b.shape[1] > 1:
        return xp.matmul(a, b, out=out)
    y = xp.matmul(_packed(a), _packed(b))
    if out is None:
        return y
    out[...] = y
    return out


def _packed(x: Array) -> Array:
    """x itself where it is an array without gaps (or the transpose of one), else a copy that is one."""
    if x.flags.c_contiguous or x.flags.f_contiguous:
        return x
    pack = array_module(x).ascontiguousarray
    return pack(x.T).T if x.ndim == 2 and x.strides[0] < x.strides[1] else pack(x)
