"""Rotary positions in place: columns j and j + d/2 of each head are turned by the position's angle j."""

from __future__ import annotations

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.primitives import row


@compiled()
def turn(x: Array, cos: Array, sin: Array) -> None:
    """x [t, n * d], heads side by side, turned in place by the tables [t, d/2]."""
    half = cos.shape[1]
    for i in range(x.shape[0]):
        x_row, cos_row, sin_row = row(x, i), row(cos, i), row(sin, i)
        for start in range(0, x_row.shape[0], 2 * half):
            first, second = x_row[start : start + half], x_row[start + half : start + 2 * half]
            for j in range(half):
                x1, x2 = first[j], second[j]
                first[j] = x1 * cos_row[j] - x2 * sin_row[j]
                second[j] = x2 * cos_row[j] + x1 * sin_row[j]
