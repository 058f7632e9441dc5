"""Floats of 16 bits, bfloat16 and float16: stored and sent in 16 bits, computed and added up in float32.

    bfloat16    8 bits of exponent, 8 of significand: float32's range, a relative step of 2^-8
    float16     5 bits of exponent, 11 of significand: up to 65504, subnormal below 6e-5, a relative step of 2^-11

NumPy knows bfloat16 through ml_dtypes alone, which has its conversions; its arithmetic there is element by element.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mpitp.backend.arrays import Array

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
HALF_DTYPES = (BFLOAT16, FLOAT16)


def is_half(dtype: Any) -> bool:
    """Whether it is one of the two."""
    return dtype in HALF_DTYPES


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype that sums of `dtype` are kept in: float32 for the 16-bit floats (and smaller), else itself."""
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 2 and dtype.kind in "fV":  # ml_dtypes' bfloat16 has kind V
        return np.dtype(np.float32)
    return dtype


def widened(x: Array) -> Array:
    """x in the dtype that it is computed in: x itself, or a float32 copy of 16-bit floats."""
    return x.astype(np.float32) if is_half(x.dtype) else x


def rounded(x: Array, dtype: Any, out: Array | None = None) -> Array:
    """x in `dtype`, each element rounded to the nearest; written to `out` when given."""
    if out is None:
        return x.astype(dtype)
    out[...] = x
    return out
