"""LayerNorm and RMSNorm with replicated weights.

Every rank normalises all t rows over the whole width h, so nothing is summed over ranks: x is equal on every rank, and
so are dy, the weights and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.layers.param import Param
from mpitp.ops.layer_norm import layer_norm_backward, layer_norm_forward
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward

Array = Any


@dataclass(slots=True)
class NormContext:
    """The input and its row statistics; `mean` is None for RMSNorm."""

    x: Array  # [t, h]
    rstd: Array  # [t]
    mean: Array | None = None  # [t]


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, row by row (Ba et al. 2016)."""

    def __init__(self, weight: Param, bias: Param, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Array) -> tuple[Array, NormContext]:
        """x [t, h] -> y [t, h]."""
        y, mean, rstd = layer_norm_forward(x, self.weight.data, self.bias.data, self.eps)
        return y, NormContext(x, rstd, mean)

    def backward(self, dy: Array, ctx: NormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx, dweight, dbias = layer_norm_backward(dy, ctx.x, self.weight.data, ctx.mean, ctx.rstd)
        self.weight.accumulate(dweight)
        self.bias.accumulate(dbias)
        return dx

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight, "bias": self.bias}


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row (Zhang & Sennrich 2019)."""

    def __init__(self, weight: Param, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def forward(self, x: Array) -> tuple[Array, NormContext]:
        """x [t, h] -> y [t, h]."""
        y, rstd = rms_norm_forward(x, self.weight.data, self.eps)
        return y, NormContext(x, rstd)

    def backward(self, dy: Array, ctx: NormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx, dweight = rms_norm_backward(dy, ctx.x, self.weight.data, ctx.rstd)
        self.weight.accumulate(dweight)
        return dx

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight}
