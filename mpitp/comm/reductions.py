"""What the kinds of group share about reductions: which operations exist and in which dtype sums are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module
from mpitp.errors import UsageError

Array = Any

_FUNCTIONS = {"sum": "add", "max": "maximum", "min": "minimum"}


def reduction(op: str, module: Any) -> Any:
    """The ufunc of `module` for "sum", "max" or "min"."""
    check_op(op)
    return getattr(module, _FUNCTIONS[op])


def check_op(op: str) -> None:
    """Raise UsageError unless `op` is a reduction that groups know."""
    if op not in _FUNCTIONS:
        raise UsageError(f"unknown reduction {op!r}; expected one of {', '.join(_FUNCTIONS)}")


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype that sums of `dtype` are kept in: float32 for the 16-bit floats (and smaller), else itself."""
    dtype = np.dtype(dtype)
    if dtype.itemsize <= 2 and dtype.kind in "fV":  # ml_dtypes' bfloat16 has kind V
        return np.dtype(np.float32)
    return dtype


def sum_in_order(partials: Iterable[Array], like: Array) -> Array:
    """((0 + p0) + p1) + ... in the wide dtype, rounded once to the dtype of `like`; a new array."""
    xp = array_module(like)
    total = xp.zeros(like.shape, wide_dtype(like.dtype))
    for partial in partials:
        total += partial.astype(total.dtype, copy=False)
    return total.astype(like.dtype, copy=False)


def cut(x: Array, sizes: Sequence[int], dim: int) -> list[Array]:
    """Views of `x` cut along `dim` into pieces of `sizes`, which must add up."""
    dim = dim % x.ndim
    if sum(sizes) != x.shape[dim]:
        raise UsageError(
            f"sizes {list(sizes)} add up to {sum(sizes)}, but dim {dim} of shape {x.shape} has another length"
        )
    pieces, start = [], 0
    for size in sizes:
        pieces.append(x[(slice(None),) * dim + (slice(start, start + size),)])
        start += size
    return pieces
