"""Arrays found in contexts, and several arrays as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array


def arrays_in(value: Any) -> Iterator[Any]:
    """Every array in a context."""
    if isinstance(value, np.ndarray):
        yield value
    inner: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if is_dataclass(value):
        inner = [getattr(value, each.name) for each in fields(value)]
    for item in inner:
        yield from arrays_in(item)


def joined(arrays: Any, shape: tuple[int, ...] = (0, 1)) -> Array:
    """Arrays of `shape` as one; several partials (blocks that are summed in order), or none, one below the other."""
    if isinstance(arrays, np.ndarray):
        return arrays
    if not arrays:
        return np.zeros((0, *shape[1:]), np.float32)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def stacked(arrays: Sequence[Array]) -> Array:
    """Rows of one width one below the other; arrays of other shapes one after the other, as one row."""
    if len({array.shape[1:] for array in arrays}) == 1 and arrays[0].ndim == 2:
        return np.concatenate(arrays)
    return np.concatenate([array.reshape(-1) for array in arrays])[None]
