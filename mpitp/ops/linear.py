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
from mpitp.backend.threads import blas_threads

Array = Any


SMALL_PRODUCT = 10**6  # t n k up to which OpenBLAS multiplies without packing
DOT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
FEW_ROWS = 64  # up to here w @ x.T is faster than x @ w.T on a CPU (OpenBLAS, measured: 1.1 to 3 times)


def linear_forward(x: Array, w: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k], w [n, k] and bias [n]; written to `out` when given (it must not overlap x)."""
    xp = array_module(x)
    rows = x.shape[0]
    if rows == 0 or rows > FEW_ROWS or xp is not np:
        y = _product(x, w.T, out)
    else:
        y = np.empty((rows, w.shape[0]), dtype=x.dtype) if out is None else out
        if rows == 1:
            _one_row(x[0], w, out=y[0])
        else:
            _few_rows(x, w, out=y)
    if bias is not None:
        y += bias
    return y


def _one_row(x: Array, w: Array, out: Array) -> None:
    """out [n] = w @ x, x [k]: bound by reading w.

    One core reads w nearly twice as fast in a dot product a row (one stream of memory) as in BLAS's matrix-vector
    product (several rows at a time); several BLAS threads share the latter.
    """
    if blas_threads() == 1 and x.dtype in DOT_DTYPES:
        np.vecdot(w, x, out=out)
    else:
        out[...] = np.matmul(_packed(w), _packed(x))


def _few_rows(x: Array, w: Array, out: Array) -> None:
    """out [t, n] = (w @ x.T).T: bound by reading w as well, once and in order.

    w goes in pieces small enough for OpenBLAS to compute without packing them (it packs for reuse: there is none).
    """
    columns, (n, k) = np.ascontiguousarray(x.T), w.shape
    step = max(1, SMALL_PRODUCT // (len(x) * max(k, 1)))
    for i in range(0, n, step):
        out.T[i : i + step] = _product(w[i : i + step], columns)


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
