"""Activations times a constant, and logits that are held below a cap (Gemma; Bello et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer


class Scale(Layer):
    """y = c x. Its context is empty."""

    algebra = Algebra(
        "scale",
        (Segment("y = c x", "x", "y", "element by element"),),
        (Segment("dx = c dy", "dy", "dx", "element by element"),),
    )

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, x: Array, run: Any = None) -> tuple[Array, None]:
        """x [t, h] -> y [t, h]."""
        return x * x.dtype.type(self.factor), None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dy [t, h] -> dx [t, h]."""
        return dy * dy.dtype.type(self.factor)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Linear, element by element: anything stays what it is."""
        return incoming


class SoftCap(Layer):
    """y = cap tanh(x / cap), dx = dy (1 - (y / cap)^2). Its context is y / cap."""

    algebra = Algebra(
        "soft cap",
        (Segment("y = cap tanh(x / cap)", "x", "y", "element by element: each rank its own columns"),),
        (Segment("dx = dy (1 - (y / cap)^2)", "dy", "dx", "element by element"),),
    )

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def forward(self, x: Array, run: Any = None) -> tuple[Array, Array]:
        """x [t, v/tp] -> y [t, v/tp]."""
        xp, cap = array_module(x), x.dtype.type(self.cap)
        ratio = xp.tanh(x / cap)
        return ratio * cap, ratio

    def backward(self, dy: Array, ctx: Array) -> Array:
        """dy [t, v/tp] -> dx [t, v/tp]."""
        return dy * (1.0 - ctx * ctx)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Each element by itself: whatever isn't a summand stays what it is."""
        incoming.expect_summed("what is held below a cap")
        return incoming
