"""Arrays made small enough to be shown: every value of a small one, a map of magnitudes of a large one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpitp.backend.arrays import Array, to_host

MAX_ROWS, MAX_COLS = 48, 72  # larger arrays become maps


@dataclass(frozen=True, slots=True)
class Picture:
    """One rank's array: `values` are its rows (all but the last dim folded), or root mean squares of its tiles."""

    shape: tuple[int, ...]
    dtype: str
    values: list[list[float]]
    is_whole: bool
    largest: float  # magnitude
    nbytes: int

    @property
    def is_integer(self) -> bool:
        """Whether the values are whole numbers (token ids)."""
        return self.dtype.startswith(("int", "uint"))


def picture_of(array: Array) -> Picture:
    """The picture of an array in host or device memory, as it is now."""
    host = np.asarray(to_host(array))
    columns = host.shape[-1] if host.ndim else 1
    rows = host.reshape(math.prod(host.shape[:-1]), columns)
    largest = float(np.abs(rows).max(initial=0))
    is_whole = rows.shape[0] <= MAX_ROWS and rows.shape[1] <= MAX_COLS
    values = rows if is_whole else tiles(rows, MAX_ROWS // 2, MAX_COLS // 2)
    return Picture(tuple(host.shape), str(host.dtype), _rounded(values), is_whole, largest, host.nbytes)


def tiles(rows: np.ndarray, most_rows: int, most_cols: int) -> np.ndarray:
    """The root mean square of each tile, of at most most_rows x most_cols tiles that cover the array."""
    down = np.linspace(0, rows.shape[0], min(rows.shape[0], most_rows) + 1).astype(int)[:-1]
    across = np.linspace(0, rows.shape[1], min(rows.shape[1], most_cols) + 1).astype(int)[:-1]
    squares = np.square(rows.astype(np.float64))
    sums = np.add.reduceat(np.add.reduceat(squares, down, axis=0), across, axis=1)
    counts = np.outer(np.diff([*down, rows.shape[0]]), np.diff([*across, rows.shape[1]]))
    return np.sqrt(sums / counts)


def _rounded(values: np.ndarray) -> list[list[float]]:
    """Four digits are enough to look at, and keep a page small."""
    if values.dtype.kind in "iu":
        return values.tolist()
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]
