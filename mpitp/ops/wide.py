"""What makes operations take floats of 16 bits: widened to float32 block by block, computed, and rounded once.

products     on a CPU in float32, with BLAS, a piece of the second operand at a time; on a GPU as they are (its
             matrix units take 16 bits and add in float32)
row by row   a block of rows that stays in the cache
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import is_half, widened
from mpitp.ops.row_blocks import row_blocks

PIECE_ELEMENTS = 1 << 20  # of an operand that are widened at a time


def by_wide_rows(function: Callable[..., Array]) -> Callable[..., Array]:
    """A function of arrays whose rows are independent, made to take 16-bit floats: its result is of the first's
    dtype.
    """

    @wraps(function)
    def widening(*arrays: Array) -> Array:
        first = arrays[0]
        if not is_half(first.dtype):
            return function(*arrays)
        xp, rows = array_module(first), first.shape[0]
        blocks = list(row_blocks(xp, rows, 4 * first.size // max(rows, 1))) or [slice(0, 0)]
        made = function(*(widened(x[blocks[0]]) for x in arrays))
        y = xp.empty((rows, *made.shape[1:]), first.dtype)
        y[blocks[0]] = made
        for block in blocks[1:]:
            y[block] = function(*(widened(x[block]) for x in arrays))
        return y

    return widening


def wide_product(a: Array, b: Array, out: Array | None, product: Callable[[Array, Array], Array]) -> Array:
    """a [m, k] times b [k, n] of 16-bit floats on a CPU, each element rounded once; the pieces depend on k and n alone.

    `product` multiplies float32.
    """
    y = np.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
    a, step = widened(a), max(1, PIECE_ELEMENTS // max(b.shape[0], 1))
    for start in range(0, b.shape[1], step):
        columns = slice(start, start + step)
        y[:, columns] = product(a, widened(b[:, columns]))
    return y


def is_widened_product(xp: Any, dtype: Any) -> bool:
    """Whether products of arrays of `dtype` are computed in float32 by widening their operands."""
    return xp is np and is_half(dtype)
