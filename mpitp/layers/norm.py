"""LayerNorm and RMSNorm with replicated weights.

A rank normalises the rows that it has over the whole width h, so nothing is summed over ranks. Where x is equal on
every rank, so are dy, the weights and their gradients; where each rank has rows of its own, the weights' gradients are
summands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.backend.precision import widened
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.param import Param
from mpitp.ops.layer_norm import layer_norm_backward, layer_norm_forward
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward


@dataclass(slots=True)
class NormContext:
    """The input and its row statistics; `mean` is None for RMSNorm."""

    x: Array  # [t, h]
    rstd: Array  # [t]
    mean: Array | None = None  # [t]


class LayerNorm(Layer):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, row by row (Ba et al. 2016)."""

    algebra = Algebra(
        "LayerNorm",
        (
            Segment(
                "y = (x - mean) / sqrt(var + eps) * W + b, row by row", "x W b", "y", "row by row: no communication"
            ),
        ),
        (Segment("dx, dW, db of the row-wise norm", "dy x", "dx", "row by row: no communication", grads=True),),
    )

    def __init__(self, weight: Param, bias: Param, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Array, run: Any = None) -> tuple[Array, NormContext]:
        """x [t, h] -> y [t, h]."""
        y, mean, rstd = layer_norm_forward(x, self.weight.data, self.bias.data, self.eps)
        return y, NormContext(x, rstd, mean)

    def backward(self, dy: Array, ctx: NormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx, dweight, dbias = layer_norm_backward(dy, ctx.x, self.weight.data, ctx.mean, ctx.rstd)
        self.weight.accumulate(dweight)
        self.bias.accumulate(dbias)
        return dx

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight, "bias": self.bias}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())


class RMSNorm(Layer):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), row by row (Zhang & Sennrich 2019).

    `offset` is 0, or 1 where the weight says how far the factor is from 1 (Gemma).
    """

    algebra = Algebra(
        "RMSNorm",
        (Segment("y = x / sqrt(mean(x^2) + eps) * W, row by row", "x W", "y", "row by row: no communication"),),
        (Segment("dx, dW of the row-wise norm", "dy x", "dx", "row by row: no communication", grads=True),),
    )

    def __init__(self, weight: Param, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: Array, run: Any = None) -> tuple[Array, NormContext]:
        """x [t, h] -> y [t, h]."""
        y, rstd = rms_norm_forward(x, self.factors(), self.eps)
        return y, NormContext(x, rstd)

    def backward(self, dy: Array, ctx: NormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx, dweight = rms_norm_backward(dy, ctx.x, self.factors(), ctx.rstd)
        self.weight.accumulate(dweight)
        return dx

    def factors(self) -> Array:
        """What a row is multiplied by, [h]."""
        if not self.offset:
            return self.weight.data
        weight = widened(self.weight.data)
        return weight + weight.dtype.type(self.offset)

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())


def row_by_row(incoming: ArrayType, params: Mapping[str, Param]) -> ArrayType:
    """The type of what is computed from whole rows, each by itself, with replicated parameters."""
    incoming.expect_summed("what is normalised")
    incoming.expect_columns((), "what is normalised")
    for name, param in params.items():
        incoming.expect_gradient_summed(name, param)
    return incoming
