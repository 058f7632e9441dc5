r"""Numbers for each diagonal of a matrix, which is what depends on the distance of a row and a column alone.

add     x[i, j] += d[j - i + r - 1]            x [r, c], d [r + c - 1]: from the lower left corner on
sum     d[k] = sum of x[i, j] with j - i + r - 1 = k
"""

from __future__ import annotations

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module


def add_to_diagonals(x: Array, numbers: Array) -> None:
    """Add numbers [r + c - 1] to the diagonals of x [r, c], in place."""
    xp, (rows, cols) = array_module(x), x.shape
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import diagonals as compiled

        return compiled.add_to_diagonals(x, numbers)
    x += numbers[xp.arange(cols)[None, :] + xp.arange(rows - 1, -1, -1)[:, None]]


def diagonal_sums(x: Array) -> Array:
    """The sums over the diagonals of x [r, c]: [r + c - 1].

    Rows, last one first, lie in rows one element longer; read in rows of the sums' length, each has moved by one.
    """
    xp, (rows, cols) = array_module(x), x.shape
    width = rows + cols - 1
    if is_accelerated(xp, x.dtype):
        from mpitp.ops.compiled import diagonals as compiled

        sums = xp.zeros(width, x.dtype)
        compiled.add_diagonals(x, sums)
        return sums
    wide = xp.zeros((rows, rows + cols), x.dtype)
    wide[:, :cols] = x[::-1]
    return wide.reshape(-1)[: rows * width].reshape(rows, width).sum(axis=0)
