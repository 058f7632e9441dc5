"""Row blocks that stay in the cache.

A chain of NumPy operations over a large array reads and writes main memory at every step. Cut in blocks of rows that fit
the second-level cache, only the first read and the last write go to memory. On a GPU a block is the whole array: there
each call is a kernel launch, and fewer are better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BLOCK_BYTES = 192 * 1024  # of one operand; a handful of operands and scratch rows share an L2 of 1 to 2 MiB


def row_blocks(xp: Any, rows: int, row_bytes: int, block_bytes: int | None = None) -> Iterator[slice]:
    """Neighbouring slices that cover range(rows), each about `block_bytes` (default BLOCK_BYTES) large, on a CPU."""
    step = block_rows(xp, rows, row_bytes, block_bytes)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def block_rows(xp: Any, rows: int, row_bytes: int, block_bytes: int | None = None) -> int:
    """Rows of the largest block: at least one, so that it can be a step."""
    if xp is not np:
        return max(rows, 1)
    return max(min(rows, (block_bytes or BLOCK_BYTES) // max(row_bytes, 1)), 1)


def statistics_dtype(dtype: Any) -> Any:
    """The dtype that sums over an array of `dtype` are kept in: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)
