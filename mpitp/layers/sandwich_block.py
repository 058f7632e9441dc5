"""A transformer block with a norm before and behind each branch (Ding et al. 2021; Gemma 2 and 3).

x1 = x  + post_norm1(attention(norm1(x)))
y  = x1 + post_norm2(mlp(norm2(x1)))
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
from mpitp.layers.norm import NormContext
from mpitp.layers.passes import Pass

Norm = Layer  # LayerNorm, RMSNorm, or a scale behind a branch (LayerScale)


@dataclass(slots=True)
class SandwichBlockContext:
    """The contexts of the block's layers."""

    norm1: NormContext
    attention: AttentionContext
    post_norm1: NormContext
    norm2: NormContext
    mlp: MlpContext
    post_norm2: NormContext


class SandwichBlock(Layer):
    """Attention and MLP, each between two norms and beside a residual connection."""

    algebra = Algebra(
        "residual connection",
        (Join("residual1", ADD, before=("norm2",)), Join("residual2", ADD)),
        (Join("residual1", ADD_GRADS, before=("post_norm1",)), Join("input", ADD_GRADS)),
    )

    def __init__(self, norms: tuple[Norm, Norm, Norm, Norm], attention: SelfAttention, mlp: MLP) -> None:
        self.norm1, self.post_norm1, self.norm2, self.post_norm2 = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Array, run: Pass) -> tuple[Array, SandwichBlockContext]:
        """x [t, h] -> y [t, h]."""
        normed, norm1_ctx = self.norm1.forward(x)
        branch, attention_ctx = self.attention.forward(normed, run)
        x1, post_norm1_ctx = self.post_norm1.forward(branch)
        x1 += x  # the norm's output is this block's own array
        normed, norm2_ctx = self.norm2.forward(x1)
        branch, mlp_ctx = self.mlp.forward(normed, run)
        y, post_norm2_ctx = self.post_norm2.forward(branch)
        y += x1
        return y, SandwichBlockContext(norm1_ctx, attention_ctx, post_norm1_ctx, norm2_ctx, mlp_ctx, post_norm2_ctx)

    def backward(self, dy: Array, ctx: SandwichBlockContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dbranch = self.mlp.backward(self.post_norm2.backward(dy, ctx.post_norm2), ctx.mlp)
        dx1 = self.norm2.backward(dbranch, ctx.norm2)
        dx1 += dy
        dbranch = self.attention.backward(self.post_norm1.backward(dx1, ctx.post_norm1), ctx.attention)
        dx = self.norm1.backward(dbranch, ctx.norm1)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"norm1": self.norm1, "attention": self.attention, "post_norm1": self.post_norm1}
        return named | {"norm2": self.norm2, "mlp": self.mlp, "post_norm2": self.post_norm2}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branch = self.post_norm1.placements(self.attention.placements(self.norm1.placements(incoming)))
        incoming.expect_like(branch, "the attention's branch")
        branch = self.post_norm2.placements(self.mlp.placements(self.norm2.placements(branch)))
        incoming.expect_like(branch, "the MLP's branch")
        return branch
