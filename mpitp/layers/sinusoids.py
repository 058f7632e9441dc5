"""Positions as sines and cosines that nobody trains (Vaswani et al. 2017, section 3.5).

    y[i] = x[i] + S[position_i]        S[p, j] = sin(p / 10000^(2j/h)) for j < h/2, then the cosines of the same angles

The paper lays sine and cosine of an angle beside one another; Marian, whose weights are trained so, half by half.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.norm import row_by_row
from mpitp.layers.passes import Pass


class Sinusoids(Layer):
    """Adds the position of each row. Its context is empty."""

    algebra = Algebra(
        "sinusoidal positions",
        (Segment("y[i] = x[i] + S[position_i]", "x", "y", "row by row: no communication"),),
        (Segment("dx = dy", "dy", "dx", "S is not trained"),),
    )

    def forward(self, x: Array, run: Pass) -> tuple[Array, None]:
        """x [t, h] -> y [t, h]."""
        positions = sinusoids(run.shard_rows.positions(), x.shape[1])
        return x + from_host(positions, array_module(x)).astype(x.dtype), None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dy [t, h] -> dx [t, h]."""
        return dy

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, {})


def sinusoids(positions: np.ndarray, width: int) -> np.ndarray:
    """S of these positions [t, width], in float32 as Marian's table is."""
    angles = positions[:, None] / 10000.0 ** (2 * (np.arange(width) // 2) / width)
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)
