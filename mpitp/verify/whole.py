"""Puts the pieces of an array that ranks and microbatches have recorded together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.verify.record import Record

Held = tuple[int, Record]  # a rank, and what it has recorded


@dataclass(frozen=True, slots=True)
class Whole:
    """An array of which pieces are known. `replicas`: the largest difference between two that claim the same elements.

    `is_full`: every element is known, and every piece fits.
    """

    array: np.ndarray
    filled: np.ndarray
    replicas: float = 0.0
    fits: bool = True

    @property
    def is_full(self) -> bool:
        """Whether nothing of it is missing."""
        return self.fits and bool(self.filled.all())


def assemble(held: Sequence[Held], shape: tuple[int, ...] | None = None) -> Whole:
    """The array of all pieces; summands are added up. `shape`: what it must have (None: what the first one says)."""
    if not held:
        return Whole(np.zeros(shape or ()), np.zeros(shape or (), bool), fits=False)
    shape = held[0][1].shape if shape is None else shape
    assert shape is not None
    array, filled, replicas = np.zeros(shape, held[0][1].array.dtype), np.zeros(shape, bool), 0.0
    for _, record in held:
        if record.shape != shape:
            return Whole(array, filled, replicas, fits=False)
        for piece in record.pieces:
            values, seen, before = record.array[piece.here], filled[piece.there], array[piece.there]
            if values.shape != seen.shape:
                return Whole(array, filled, replicas, fits=False)
            if record.is_summand:
                array[piece.there] = before + values
            else:
                replicas = max(replicas, difference(before[seen], values[seen]))
                array[piece.there] = np.where(seen, before, values)
            filled[piece.there] = True
    return Whole(array, filled, replicas)


def magnitude(array: np.ndarray) -> float:
    """The largest absolute value."""
    return float(np.abs(array).max(initial=0.0))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference; infinite where one is not finite and the other isn't the same."""
    if a.shape != b.shape:
        return float("inf")
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        largest = np.abs(a - b).max(initial=0.0)
    return float(largest) if np.isfinite(largest) else float("inf")
