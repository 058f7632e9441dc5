"""Row blocks that stay in the cache.

A chain of NumPy operations over a large array reads and writes main memory at every step. Cut in blocks of rows that
fit the second-level cache, only the first read and the last write go to memory. On a GPU a block is the whole array:
there each call is a kernel launch, and fewer are better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array

BLOCK_BYTES = 256 * 1024  # of one operand; three to five of them share an L2 cache of 1 to 2 MiB


def row_blocks(xp: Any, rows: int, row_bytes: int) -> Iterator[slice]:
    """Neighbouring slices that cover range(rows), each about BLOCK_BYTES large on a CPU."""
    step = block_rows(xp, rows, row_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def block_rows(xp: Any, rows: int, row_bytes: int) -> int:
    """Rows of the largest block: at least one, so that it can be a step."""
    if xp is not np:
        return max(rows, 1)
    return max(min(rows, BLOCK_BYTES // max(row_bytes, 1)), 1)


def paired_blocks(xp: Any, *arrays: Array, scratch: int = 0, dtype: Any = None) -> Iterator[tuple[Array, ...]]:
    """Blocks of the same rows of each array, and `scratch` blocks to work in, reused from block to block.

    The arrays have the first one's number of rows; scratch has the first one's width, and `dtype` or the first one's.
    """
    first = arrays[0]
    dtype = np.dtype(dtype or first.dtype)
    rows, row_bytes = first.shape[0], math.prod(first.shape[1:]) * dtype.itemsize
    if rows * row_bytes <= BLOCK_BYTES or xp is not np:  # one block: the arrays themselves
        yield (*arrays, *(xp.empty(first.shape, dtype=dtype) for _ in range(scratch)))
        return
    step = block_rows(xp, rows, row_bytes)
    spare = [xp.empty((step, *first.shape[1:]), dtype=dtype) for _ in range(scratch)]
    for block in row_blocks(xp, rows, row_bytes):
        yield (*(x[block] for x in arrays), *(x[: block.stop - block.start] for x in spare))


def without_gaps(x: Array) -> Array:
    """x [n, m] itself where neighbours in a row are neighbours in memory, as compiled kernels need it; else a copy."""
    return x if x.strides[1] == x.itemsize or x.shape[1] == 1 else np.ascontiguousarray(x)


def statistics_dtype(dtype: Any) -> Any:
    """The dtype that sums over an array of `dtype` are kept in: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
