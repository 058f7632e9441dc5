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

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import LINE_BYTES, Array, aligned_zeros, array_module
from mpitp.backend.precision import is_half
from mpitp.backend.threads import blas_kernels, blas_threads
from mpitp.ops.wide import is_widened_product, wide_product

COMPILED_ROWS = 32  # up to here compiled dot products are faster than BLAS (measured: 1.2 times at 32, 1.7 at 8)
FEWEST_ROWS = 8  # up to here reading w takes most of the time
OFF_LINE_BYTES = 16
CACHED_BYTES = 256 * 1024  # of w, in the second-level cache
SMALL_PRODUCT = 10**6  # t n k up to which OpenBLAS multiplies without packing
DOT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
PACKING_KERNELS = ("Haswell", "Zen")  # of OpenBLAS: it packs small products too, so pieces of w gain nothing
FEW_ROWS = 64  # elsewhere up to here w @ x.T is faster than x @ w.T on a CPU (OpenBLAS, measured: 1.1 to 3 times)


def linear_forward(x: Array, w: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k], w [n, k] and bias [n]; written to `out` when given (it must not overlap x)."""
    xp = array_module(x)
    rows = x.shape[0]
    if rows == 0 or rows > FEW_ROWS or xp is not np or is_half(x.dtype):
        y = _product(x, w.T, out)
    else:
        y = np.empty((rows, w.shape[0]), dtype=x.dtype) if out is None else out
        is_one_core = blas_threads() == 1 and x.dtype in DOT_DTYPES
        is_ours = is_one_core and rows <= COMPILED_ROWS and w.strides[1] == w.itemsize
        if is_ours and is_accelerated(np, x.dtype):
            from mpitp.ops.compiled.few_rows import few_rows

            few_rows(x, w, out=y)
        elif is_one_core and rows > FEWEST_ROWS and blas_kernels() in PACKING_KERNELS:
            _product(x, w.T, out=y)  # measured: 1.2 times as fast for 16 rows, twice for 64
        elif not is_one_core or rows > FEWEST_ROWS:
            _few_rows(x, w, out=y)
        else:
            _fewest_rows(x, w, out=y)
    if bias is not None:
        y += bias
    return y


def linear_row_by_row(x: Array, w: Array, out: Array | None = None) -> Array:
    """y [t, n] of x [t, k] and w [n, k], each number a dot product of its own.

    The bits of a row then don't depend on how many others go along, which those of a matrix product do.
    """
    xp = array_module(x)
    y = xp.empty((x.shape[0], w.shape[0]), x.dtype) if out is None else out
    if xp is np and x.dtype in DOT_DTYPES:
        step = max(1, CACHED_BYTES // max(w.shape[1] * w.itemsize, 1))
        for i in range(0, len(w), step):
            np.vecdot(w[i : i + step], x[:, None], out=y[:, i : i + step])
    else:
        for i in range(len(x)):
            linear_forward(x[i : i + 1], w, out=y[i : i + 1])
    return y


def _fewest_rows(x: Array, w: Array, out: Array) -> None:
    """out [t, n] = x @ w.T on one core for few rows of x: bound by reading w, once and in order.

    A dot product a row of w is one stream of memory and reads it nearly twice as fast as BLAS's products do, which go
    through several rows at a time. So the first row of x is multiplied in that way, piece by piece of w, and the others
    find the piece in the cache.
    """
    if len(x) == 1:
        np.vecdot(w, _off_line(x[0]), out=out[0])
        return
    step = max(1, CACHED_BYTES // max(w.shape[1] * w.itemsize, 1))
    for i in range(0, len(w), step):
        piece = w[i : i + step]
        np.vecdot(piece, x[0], out=out[0, i : i + step])
        if len(x) == 2:
            np.vecdot(piece, x[1], out=out[1, i : i + step])
        else:
            _product(x[1:], piece.T, out=out[1:, i : i + step])


def _off_line(x: Array) -> Array:
    """x [k], moved where it begins with a cache line, as the rows of w do.

    OpenBLAS's dot product then reads w from memory a sixth slower (measured: 27.4 against 23.5 ms for all weights of
    SmolLM2); loads that touch two lines seem to wake the processor's prefetching earlier.
    """
    if x.ctypes.data % LINE_BYTES:
        return x
    moved = aligned_zeros((len(x) + OFF_LINE_BYTES // x.itemsize,), x.dtype)[OFF_LINE_BYTES // x.itemsize :]
    moved[...] = x
    return moved


def _few_rows(x: Array, w: Array, out: Array) -> None:
    """out [t, n] = (w @ x.T).T, w in pieces that OpenBLAS multiplies without packing (it packs for reuse: none here).

    A single row is a matrix-vector product, which several threads share.
    """
    columns, (n, k) = np.ascontiguousarray(x.T), w.shape
    step = max(1, n if len(x) == 1 else SMALL_PRODUCT // (len(x) * max(k, 1)))
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
    if is_half(dy.dtype):
        return dy.sum(axis=0, dtype=np.float32)
    if dy.shape[1] == 1:  # NumPy adds one column by itself pairwise, but several row by row; so make it two
        return array_module(dy).repeat(dy, 2, axis=1).sum(axis=0)[:1]
    return dy.sum(axis=0)


def _product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b; written to `out` when given."""
    xp = array_module(a)
    if is_widened_product(xp, a.dtype):
        return wide_product(a, b, out, _product)
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
