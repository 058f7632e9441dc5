r"""The two MLPs, their inner width f dealt to the ranks: column-parallel, elementwise, row-parallel.

    GELU:    y = sum_r gelu(x Wup_r^T + bup_r) Wdown_r^T + bdown              (GPT-2)
    SwiGLU:  y = sum_r (silu(x Wgate_r^T) * (x Wup_r^T)) Wdown_r^T            (Llama; Shazeer 2020)

Each has one all-reduce forward (of y) and one backward (of dx). The fused SwiGLU projection has the local rows
[gate | up], each cut by FFN columns on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from mpitp.layers.param import Param, prefixed
from mpitp.ops.gelu import gelu_backward, gelu_forward
from mpitp.ops.swiglu import swiglu_backward, swiglu_forward

Array = Any


@dataclass(slots=True)
class MlpContext:
    """The inner activation before the nonlinearity, and the two linears' inputs."""

    inner: Array  # GELU: [t, f/tp]; SwiGLU: [t, 2f/tp]
    up_linear: LinearContext
    down_linear: LinearContext


class GeluMLP:
    """y = gelu(x Wup^T + bup) Wdown^T + bdown, with the tanh form of GELU."""

    def __init__(self, up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        self.up, self.down = up, down

    def forward(self, x: Array) -> tuple[Array, MlpContext]:
        """x [t, h] -> y [t, h]."""
        inner, up_ctx = self.up.forward(x)
        y, down_ctx = self.down.forward(gelu_forward(inner))
        return y, MlpContext(inner, up_ctx, down_ctx)

    def backward(self, dy: Array, ctx: MlpContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dact = self.down.backward(dy, ctx.down_linear)
        return self.up.backward(gelu_backward(dact, ctx.inner), ctx.up_linear)

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return prefixed("up", self.up.params()) | prefixed("down", self.down.params())


class SwiGluMLP:
    """y = (silu(x Wgate^T) * (x Wup^T)) Wdown^T."""

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear) -> None:
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Array) -> tuple[Array, MlpContext]:
        """x [t, h] -> y [t, h]."""
        inner, up_ctx = self.gate_up.forward(x)
        y, down_ctx = self.down.forward(swiglu_forward(inner))
        return y, MlpContext(inner, up_ctx, down_ctx)

    def backward(self, dy: Array, ctx: MlpContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dact = self.down.backward(dy, ctx.down_linear)
        return self.gate_up.backward(swiglu_backward(dact, ctx.inner), ctx.up_linear)

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return prefixed("gate_up", self.gate_up.params()) | prefixed("down", self.down.params())
