"""RMS norm of rows whose columns are dealt: the parts that one owner of columns computes (Zhang and Sennrich 2019).

    forward     s  = sum over own columns of x * x                      added over all owners: S
                rstd = 1 / sqrt(S / n + eps),  y = x * rstd * weight
    backward    c  = sum over own columns of dy * weight * x            added over all owners: C
                dx = rstd * (dy * weight - x * rstd^2 * C / n),  dweight = sum over rows of dy * x * rstd

n: the columns of all owners. With one owner this is `rms_norm.py`, whose mean(g * xhat) is rstd * C / n.
"""

from __future__ import annotations

from mpitp.backend.arrays import Array, array_module
from mpitp.ops.row_blocks import paired_blocks, statistics_dtype


def sum_of_squares(x: Array) -> Array:
    """s [t] of x [t, w]."""
    xp, wide = array_module(x), statistics_dtype(x.dtype)
    total = xp.zeros((x.shape[0],), dtype=wide)
    if not x.shape[1]:  # NumPy's einsum leaves memory as it was where there is nothing to add
        return total
    for x_rows, total_rows, work in paired_blocks(xp, x, total, scratch=1, dtype=wide):
        work[...] = x_rows
        total_rows[...] = xp.einsum("ij,ij->i", work, work)
    return total


def reciprocal_root(squares: Array, columns: int, eps: float) -> Array:
    """rstd [t] of S [t], summed over `columns`."""
    return 1.0 / array_module(squares).sqrt(squares / columns + squares.dtype.type(eps))


def scaled_rows(x: Array, rstd: Array, weight: Array, out: Array) -> None:
    """y [t, w] of x [t, w], rstd [t] and weight [w], into `out`."""
    xp = array_module(x)
    for x_rows, out_rows, rstd_rows, work in paired_blocks(xp, x, out, rstd, scratch=1, dtype=rstd.dtype):
        xp.multiply(x_rows, rstd_rows[:, None], out=work)
        xp.multiply(work, weight, out=out_rows)


def gradient_products(dy: Array, x: Array, weight: Array) -> Array:
    """c [t] of dy and x [t, w] and weight [w]."""
    xp, wide = array_module(x), statistics_dtype(x.dtype)
    total = xp.zeros((x.shape[0],), dtype=wide)
    if not x.shape[1]:  # NumPy's einsum leaves memory as it was where there is nothing to add
        return total
    for x_rows, dy_rows, total_rows, work in paired_blocks(xp, x, dy, total, scratch=1, dtype=wide):
        xp.multiply(dy_rows, x_rows, out=work, dtype=wide)
        total_rows[...] = xp.einsum("ij,j->i", work, weight.astype(wide, copy=False))
    return total


def scaled_rows_backward(dy: Array, x: Array, weight: Array, rstd: Array, product_mean: Array, out: Array) -> Array:
    """dweight [w]; dx [t, w] goes to `out`. product_mean: C / n, [t]."""
    xp, wide = array_module(x), rstd.dtype
    dweight, factor = xp.zeros(weight.shape, dtype=wide), weight.astype(wide, copy=False)
    columns = rstd[:, None], product_mean[:, None]
    for x_rows, dy_rows, dx_rows, rstd_rows, mean_rows, xhat, g in paired_blocks(
        xp, x, dy, out, *columns, scratch=2, dtype=wide
    ):
        xp.multiply(x_rows, rstd_rows, out=xhat)
        xp.multiply(dy_rows, xhat, out=g)
        dweight += g.sum(axis=0)
        xhat *= rstd_rows * mean_rows
        xp.multiply(dy_rows, factor, out=g, dtype=wide)
        g -= xhat
        xp.multiply(g, rstd_rows, out=dx_rows)
    return dweight
