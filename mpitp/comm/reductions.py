"""What the kinds of group share about reductions: which operations exist and in which dtype sums are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.errors import UsageError

CACHED_ELEMENTS = 32 * 1024  # 128 KiB of float32: with one partial beside it, half of a small L2 cache

_FUNCTIONS = {"sum": "add", "max": "maximum", "min": "minimum"}


def reduction(op: str, module: Any) -> Any:
    """The ufunc of `module` for "sum", "max" or "min"."""
    check_op(op)
    return getattr(module, _FUNCTIONS[op])


def check_op(op: str) -> None:
    """Raise UsageError unless `op` is a reduction that groups know."""
    if op not in _FUNCTIONS:
        raise UsageError(f"unknown reduction {op!r}; expected one of {', '.join(_FUNCTIONS)}")


def add_in_order(total: Array, partials: Iterable[Array]) -> None:
    """total += p for each partial, from left to right."""
    for partial in partials:
        total += partial.astype(total.dtype, copy=False)


def sum_in_order(partials: Iterable[Array], like: Array) -> Array:
    """((0 + p0) + p1) + ... in the wide dtype, rounded once to the dtype of `like`; a new array.

    Works in stretches that stay in the cache, so that the running sum isn't fetched from memory for every partial.
    """
    total = array_module(like).empty(like.size, wide_dtype(like.dtype))
    flat = [partial.reshape(-1) for partial in partials]
    for stretch in stretches(total.size, CACHED_ELEMENTS):
        total[stretch] = 0
        add_in_order(total[stretch], [partial[stretch] for partial in flat])
    return total.astype(like.dtype, copy=False).reshape(like.shape)


def stretches(length: int, step: int) -> Iterator[slice]:
    """Neighbouring slices of at most `step` that cover 0 .. length."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


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
