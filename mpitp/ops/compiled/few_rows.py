r"""y = x w^T for up to a few dozen rows of x: as fast as w can be read, or as the products can be made.

Some rows of w are read from memory once, and multiplied with four rows of x at a time from the first-level cache
(`dots.py`). Up to about eight rows memory sets the time, so the rows of w to come are asked for ahead of their use.

The order of a dot product depends on k alone: a row's bits don't depend on how many others go along.
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.dots import OF_W, OF_X, block, lanes_of, packed_rows

AHEAD_BYTES = 16 * 1024  # between what is multiplied and what is asked for (measured: flat from 8 KiB)

assert OF_X == 4, "the loops below take four rows of x together"
_four, _three, _two, _one = (block(OF_W, of_x) for of_x in (4, 3, 2, 1))
_single = block(1, 1)


def few_rows(x: Array, w: Array, out: Array) -> None:
    """Write y [t, n] of x [t, k] and w [n, k], whose rows have no gaps within; float32 or float64."""
    fits = out.strides[1] == out.itemsize
    y = out if fits else np.empty(out.shape, x.dtype)
    _multiply(x, w, y, lanes_of(w.itemsize), AHEAD_BYTES)
    if not fits:
        out[...] = y


@compiled()
def _multiply(x: Array, w: Array, y: Array, lanes: int, ahead: int) -> None:
    n, k = w.shape
    rows = packed_rows(x, (k + lanes - 1) // lanes * lanes)
    whole = n - n % OF_W
    for i in range(0, whole, OF_W):
        multiply_block(rows, w, i, y, i, ahead)
    for i in range(whole, n):
        for r in range(rows.shape[0]):
            _single(w, i, rows, r, y, i, ahead)


@compiled(inline=True)
def multiply_block(x: Array, w: Array, i: int, y: Array, column: int, ahead: int) -> None:
    """y[:, column + a] of all rows of x and the OF_W rows of w from i on."""
    t = x.shape[0]
    fours = t - t % 4
    for r in range(0, fours, 4):
        _four(w, i, x, r, y, column, ahead)
    if t - fours == 3:
        _three(w, i, x, fours, y, column, ahead)
    elif t - fours == 2:
        _two(w, i, x, fours, y, column, ahead)
    elif t - fours == 1:
        _one(w, i, x, fours, y, column, ahead)
