"""A transformer block with one norm a branch, behind it and before the residual sum (OLMo et al. 2024; OLMo-2).

x1 = x  + norm1(attention(x))
y  = x1 + norm2(mlp(x1))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import ADD, ADD_GRADS, Algebra, Join
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP, MlpContext
from mpitp.layers.norm import NormContext, RMSNorm
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class BranchNormContext:
    """The contexts of the block's layers."""

    attention: AttentionContext
    norm1: NormContext
    mlp: MlpContext
    norm2: NormContext


class BranchNormBlock(Layer):
    """Attention and MLP, each with a norm behind it and beside a residual connection."""

    algebra = Algebra(
        "residual connection",
        (Join("residual1", ADD, before=("mlp",)), Join("residual2", ADD)),
        (Join("residual1", ADD_GRADS, before=("norm1",)), Join("input", ADD_GRADS)),
    )

    def __init__(self, attention: SelfAttention, norm1: RMSNorm, mlp: MLP, norm2: RMSNorm) -> None:
        self.attention, self.norm1, self.mlp, self.norm2 = attention, norm1, mlp, norm2

    def forward(self, x: Array, run: Pass) -> tuple[Array, BranchNormContext]:
        """x [t, h] -> y [t, h]."""
        branch, attention_ctx = self.attention.forward(x, run)
        x1, norm1_ctx = self.norm1.forward(branch)
        x1 += x  # the norm's output is this block's own array
        branch, mlp_ctx = self.mlp.forward(x1, run)
        y, norm2_ctx = self.norm2.forward(branch)
        y += x1
        return y, BranchNormContext(attention_ctx, norm1_ctx, mlp_ctx, norm2_ctx)

    def backward(self, dy: Array, ctx: BranchNormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx1 = self.mlp.backward(self.norm2.backward(dy, ctx.norm2), ctx.mlp)
        dx1 += dy
        dx = self.attention.backward(self.norm1.backward(dx1, ctx.norm1), ctx.attention)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        return {"attention": self.attention, "norm1": self.norm1, "mlp": self.mlp, "norm2": self.norm2}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branch = self.norm1.placements(self.attention.placements(incoming))
        incoming.expect_like(branch, "the attention's branch")
        branch = self.norm2.placements(self.mlp.placements(branch))
        incoming.expect_like(branch, "the MLP's branch")
        return branch
