r"""The two MLPs, their inner width f dealt to the ranks: column-parallel, elementwise, row-parallel.

    GELU:    y = sum_r gelu(x Wup_r^T + bup_r) Wdown_r^T + bdown              (GPT-2)
    SwiGLU:  y = sum_r (silu(x Wgate_r^T) * (x Wup_r^T)) Wdown_r^T            (Llama; Shazeer 2020)

or another activation, with a gate or without (`activation.py`).

Each has one all-reduce forward (of y) and one backward (of dx). The fused SwiGLU projection has the local rows
[gate | up], each cut by FFN columns on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from mpitp.ops.gelu import gelu_backward, gelu_forward
from mpitp.ops.swiglu import swiglu_backward, swiglu_forward


@dataclass(slots=True)
class ActivationContext:
    """The activation before the nonlinearity."""

    x: Array  # GELU: [t, f/tp]; SwiGLU: [t, 2f/tp]


class Gelu(Layer):
    """y = gelu(x), the tanh form, element by element (Hendrycks & Gimpel 2016)."""

    algebra = Algebra(
        "GELU",
        (Segment("a_r = gelu(up_r)", "up", "a", "element by element: each rank its own columns"),),
        (Segment("dup_r = da_r gelu'(up_r)", "da", "dup", "element by element"),),
        names={"x": "up", "y": "a", "dy": "da", "dx": "dup"},
    )

    def forward(self, x: Array, run: Any = None) -> tuple[Array, ActivationContext]:
        """x [t, f/tp] -> y [t, f/tp]."""
        return gelu_forward(x), ActivationContext(x)

    def backward(self, dy: Array, ctx: ActivationContext) -> Array:
        """dy [t, f/tp] -> dx [t, f/tp]."""
        return gelu_backward(dy, ctx.x)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Each element by itself: whatever isn't a summand stays what it is."""
        incoming.expect_summed("what goes through GELU")
        return incoming


class SwiGlu(Layer):
    """y = silu(gate) * up, of x = [gate | up] (Shazeer 2020)."""

    algebra = Algebra(
        "SwiGLU",
        (Segment("a_r = silu(gate_r) * up_r", "gate_up", "a", "element by element: gate and up are cut alike"),),
        (Segment("dgate_r, dup_r of da_r silu(gate_r) * up_r", "da", "dgate_up", "element by element"),),
        names={"x": "gate_up", "y": "a", "dy": "da", "dx": "dgate_up"},
    )

    def forward(self, x: Array, run: Any = None) -> tuple[Array, ActivationContext]:
        """x [t, 2f/tp] -> y [t, f/tp]."""
        return swiglu_forward(x), ActivationContext(x)

    def backward(self, dy: Array, ctx: ActivationContext) -> Array:
        """dy [t, f/tp] -> dx [t, 2f/tp]."""
        return swiglu_backward(dy, ctx.x)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Gate and up must be cut alike."""
        return incoming.joined(2, "gate and up")


@dataclass(slots=True)
class MlpContext:
    """The contexts of the three layers."""

    up: LinearContext
    activation: ActivationContext
    down: LinearContext


class MLP(Layer):
    """y = down(activation(up(x))). With a gate the first linear makes gate and up, and is called `gate_up`."""

    def __init__(self, up: ColumnParallelLinear, activation: Layer, down: RowParallelLinear) -> None:
        self.up, self.activation, self.down = up, activation, down

    def forward(self, x: Array, run: Any = None) -> tuple[Array, MlpContext]:
        """x [t, h] -> y [t, h]."""
        inner, up_ctx = self.up.forward(x)
        act, act_ctx = self.activation.forward(inner, run)
        y, down_ctx = self.down.forward(act)
        return y, MlpContext(up_ctx, act_ctx, down_ctx)

    def backward(self, dy: Array, ctx: MlpContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dact = self.down.backward(dy, ctx.down)
        dinner = self.activation.backward(dact, ctx.activation)
        return self.up.backward(dinner, ctx.up)

    def children(self) -> Mapping[str, Layer]:
        first = "_".join(part.name for part in self.up.product.placement.parts)  # up, or gate_up
        return {first: self.up, "activation": self.activation, "down": self.down}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows, by way of this rank's FFN columns, to whole rows."""
        return self.down.placements(self.activation.placements(self.up.placements(incoming)))
