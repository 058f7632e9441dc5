"""Checks sums over ranks whose answers are known, in every dtype in use."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mpitp.backend.arrays import from_host, to_host
from mpitp.comm.group import Group

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
_ELEMENTS = 10_007  # a prime: no algorithm's blocks fit evenly


def check_sums(group: Group, xp: Any) -> dict[str, bool]:
    """Whether each dtype's sum is right on this rank. Every rank must call it."""
    return {name: _sum_is_right(group, dtype, xp) for name, dtype in DTYPES.items()}


def _sum_is_right(group: Group, dtype: np.dtype, xp: Any) -> bool:
    """Rank r holds (i mod 4) + (r mod 2), so that the total is exact in every dtype, up to 64 ranks in bfloat16.

    Beyond that the total is what float32 sums, rounded once, must give.
    """
    pattern = np.arange(_ELEMENTS) % 4
    mine = (pattern + group.rank % 2).astype(dtype)
    expected = (pattern * group.size + group.size // 2).astype(np.float64).astype(dtype)
    x = from_host(mine, xp)
    out_of_place = to_host(group.all_reduce(x))
    in_order = to_host(group.all_reduce_in_order([x], x))
    in_place = to_host(group.all_reduce(x, out=x))
    return all((result == expected).all() for result in (out_of_place, in_order, in_place))
