"""Logits plus a number for each token that isn't trained (BART's and Marian's `final_logits_bias`).

y = x + b        x [t, v/tp], b [1, v/tp], cut like the vocabulary;  dx = dy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import VARYING, ArrayType, columns_of
from mpitp.layers.layer import Layer
from mpitp.layers.param import Param


class LogitsBias(Layer):
    """Adds `bias` [1, v/tp]. A constant of the model: it gets no gradient, so an optimizer leaves it as it is."""

    algebra = Algebra(
        "logits bias",
        (Segment("y_r = x_r + b_r", "x b", "y", "each rank its own columns"),),
        (Segment("dx_r = dy_r", "dy", "dx", "b is not trained"),),
    )

    def __init__(self, bias: Param) -> None:
        self.bias = bias

    def forward(self, x: Array, run: Any = None) -> tuple[Array, None]:
        """x [t, v/tp] -> y [t, v/tp]."""
        return x + self.bias.data, None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dy [t, v/tp] -> dx [t, v/tp]."""
        return dy

    def children(self) -> Mapping[str, Param]:
        return {"bias": self.bias}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Logits of this rank's tokens."""
        columns = columns_of(self.bias.placement.parts, 1)
        incoming.expect(columns[0][1].axis, VARYING, "logits", "each rank needs its own tokens' numbers")
        incoming.expect_columns(columns, "logits")
        return incoming
