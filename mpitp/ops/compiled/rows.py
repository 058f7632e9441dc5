"""Sums and the largest element of a row. Their order depends on the row's length alone; they write nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mpitp.backend.accelerator import ROW_SUM, compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.primitives import bits

SIGN_32, LOWER_32 = np.int32(31), np.int32(2**31 - 1)
SIGN_64, LOWER_64 = np.int64(63), np.int64(2**63 - 1)


def row_maximum(x: Array) -> Any:
    """Largest element of a row x [n]; -inf for an empty row. A NaN counts as beyond the infinity of its sign."""
    return x.max(initial=-np.inf)


@overload(row_maximum)
def _choose(x: Array) -> Any:
    return {types.float32: _maximum32, types.float64: _maximum64}.get(x.dtype)


# As integers, with the lower bits of negative numbers turned over, floats are in order. A maximum of floats that is
# right for NaN takes the vector unit three times as long.


def _maximum32(x: Array) -> Any:
    largest = np.int32(bits(np.float32(-np.inf)) ^ LOWER_32)
    for j in range(x.shape[0]):
        value = bits(x[j])
        largest = max(largest, np.int32(value ^ np.int32(np.int32(value >> SIGN_32) & LOWER_32)))
    return bits(np.int32(largest ^ np.int32(np.int32(largest >> SIGN_32) & LOWER_32)))


def _maximum64(x: Array) -> Any:
    largest = np.int64(bits(np.float64(-np.inf)) ^ LOWER_64)
    for j in range(x.shape[0]):
        value = bits(x[j])
        largest = max(largest, value ^ ((value >> SIGN_64) & LOWER_64))
    return bits(np.int64(largest ^ ((largest >> SIGN_64) & LOWER_64)))


@compiled(ROW_SUM, inline=True)
def row_sum(x: Array) -> Any:
    """Sum of x [n]."""
    total = x.dtype.type(0.0)
    for j in range(x.shape[0]):
        total += x[j]
    return total


@compiled(ROW_SUM, inline=True)
def sum_of_squares_about(x: Array, centre: Any) -> Any:
    """Sum of (x - centre)^2 over x [n]."""
    total = x.dtype.type(0.0)
    for j in range(x.shape[0]):
        total += (x[j] - centre) * (x[j] - centre)
    return total


@compiled(ROW_SUM, inline=True)
def dot(x: Array, y: Array) -> Any:
    """Sum of x * y over two rows [n]."""
    total = x.dtype.type(0.0)
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@compiled(ROW_SUM, inline=True)
def dot_of_three(x: Array, y: Array, z: Array, centre: Any) -> Any:
    """Sum of x * y * (z - centre) over three rows [n]."""
    total = x.dtype.type(0.0)
    for j in range(x.shape[0]):
        total += x[j] * y[j] * (z[j] - centre)
    return total
