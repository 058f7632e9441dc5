r"""y = x w^T for 2 to 8 rows of x: as fast as w can be read, or nearly so.

Each row of w is read once, from the first-level cache by all rows of x: 4 or 8 dot products side by side. Memory and
arithmetic take about the same time here, so the rows of w to come are asked for ahead of their use.

Every dot product is taken in the same order, which depends on k and the kind of kernel alone.
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import ROW_SUM, compiled
from mpitp.backend.arrays import LINE_BYTES, Array, aligned_zeros
from mpitp.ops.compiled.prefetch import prefetch
from mpitp.ops.compiled.primitives import row

AHEAD_BYTES = 16 * 1024  # between the row that is multiplied and the one that is asked for (measured: flat from 8 KiB)


def few_rows(x: Array, w: Array, out: Array) -> None:
    """Write y [t, n] of x [t, k], 2 <= t <= 8, and w [n, k], whose rows have no gaps within; float32 or float64."""
    (t, k), n = x.shape, w.shape[0]
    wide = 4 if t <= 4 else 8
    rows = aligned_zeros((wide, k), x.dtype)  # they are read again for each row of w: a fifth faster
    rows[:t] = x
    fits = t == wide and out.flags.c_contiguous
    y = out if fits else np.empty((wide, n), x.dtype)
    (_four if wide == 4 else _eight)(rows, w, y, AHEAD_BYTES // w.itemsize, LINE_BYTES // w.itemsize)
    if not fits:
        out[...] = y[:t]


@compiled(ROW_SUM)
def _four(x: Array, w: Array, y: Array, ahead: int, line: int) -> None:
    """y [4, n] of x [4, k] and w [n, k]."""
    k = x.shape[1]
    for i in range(y.shape[1]):
        w_row = row(w, i)
        for j in range(0, k, line):
            prefetch(w_row, j + ahead)
        a = b = c = d = x.dtype.type(0)
        for j in range(k):
            v = w_row[j]
            a += v * x[0, j]
            b += v * x[1, j]
            c += v * x[2, j]
            d += v * x[3, j]
        y[0, i], y[1, i], y[2, i], y[3, i] = a, b, c, d


@compiled(ROW_SUM)
def _eight(x: Array, w: Array, y: Array, ahead: int, line: int) -> None:
    """y [8, n] of x [8, k] and w [n, k]."""
    k = x.shape[1]
    for i in range(y.shape[1]):
        w_row = row(w, i)
        for j in range(0, k, line):
            prefetch(w_row, j + ahead)
        a = b = c = d = e = f = g = h = x.dtype.type(0)
        for j in range(k):
            v = w_row[j]
            a += v * x[0, j]
            b += v * x[1, j]
            c += v * x[2, j]
            d += v * x[3, j]
            e += v * x[4, j]
            f += v * x[5, j]
            g += v * x[6, j]
            h += v * x[7, j]
        y[0, i], y[1, i], y[2, i], y[3, i] = a, b, c, d
        y[4, i], y[5, i], y[6, i], y[7, i] = e, f, g, h
