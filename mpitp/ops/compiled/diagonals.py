"""Numbers added to the diagonals of a matrix, and the sums over them: row by row, each a place further to the left."""

from __future__ import annotations

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.primitives import row


@compiled()
def add_to_diagonals(x: Array, numbers: Array) -> None:
    """x[i, j] += numbers[j - i + r - 1], x [r, c]."""
    rows, cols = x.shape
    for i in range(rows):
        own, added = row(x, i), numbers[rows - 1 - i : rows - 1 - i + cols]
        for j in range(cols):
            own[j] += added[j]


@compiled()
def add_diagonals(x: Array, sums: Array) -> None:
    """sums[j - i + r - 1] += x[i, j], from the last row on."""
    rows, cols = x.shape
    for i in range(rows - 1, -1, -1):
        own, total = row(x, i), sums[rows - 1 - i : rows - 1 - i + cols]
        for j in range(cols):
            total[j] += own[j]
