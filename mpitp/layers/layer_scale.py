"""A factor for each column of a branch, learnt from a small one on (Touvron et al. 2021, CaiT; DINOv2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.norm import row_by_row
from mpitp.layers.param import Param


@dataclass(slots=True)
class ScaleContext:
    """The branch."""

    x: Array  # [t, h]


class LayerScale(Layer):
    """y = x * weight, row by row."""

    algebra = Algebra(
        "layer scale",
        (Segment("y = x * W, row by row", "x W", "y", "row by row: no communication"),),
        (
            Segment(
                "dx = dy * W, dW = sum over rows of dy * x", "dy x", "dx", "row by row: no communication", grads=True
            ),
        ),
    )

    def __init__(self, weight: Param) -> None:
        self.weight = weight

    def forward(self, x: Array, run: Any = None) -> tuple[Array, ScaleContext]:
        """x [t, h] -> y [t, h]."""
        return x * self.weight.data, ScaleContext(x)

    def backward(self, dy: Array, ctx: ScaleContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        self.weight.accumulate((dy * ctx.x).sum(axis=0))
        return dy * self.weight.data

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())
