"""One pre-norm block of a decoder that reads an encoder's output: three residual branches (T5).

x1 = x  + dropout(attention(norm1(x)))
x2 = x1 + dropout(cross(norm2(x1)))          over the memory of the pass
y  = x2 + dropout(mlp(norm3(x2)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import ADD, ADD_GRADS, Algebra, Join
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.cross_attention import CrossAttention, CrossContext
from mpitp.layers.dropout import Dropout, without_idle_dropouts
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP, MlpContext
from mpitp.layers.norm import LayerNorm, NormContext, RMSNorm
from mpitp.layers.passes import Pass

Norm = LayerNorm | RMSNorm


@dataclass(slots=True)
class CrossBlockContext:
    """The contexts of the branches, in order, and of their norms and dropouts."""

    attention: AttentionContext
    cross: CrossContext
    mlp: MlpContext
    norms: tuple[NormContext, NormContext, NormContext]
    dropouts: tuple[Pass, Pass, Pass]


class CrossBlock(Layer):
    """Self-attention, cross attention and MLP, each behind a norm and beside a residual connection."""

    algebra = Algebra(
        "residual connection",
        (Join("residual1", ADD, before=("norm2",)), Join("residual2", ADD, before=("norm3",)), Join("residual3", ADD)),
        (
            Join("residual2", ADD_GRADS, before=("dropout2", "cross")),
            Join("residual1", ADD_GRADS, before=("dropout1", "attention")),
            Join("input", ADD_GRADS),
        ),
    )

    def __init__(
        self,
        attention: SelfAttention,
        cross: CrossAttention,
        mlp: MLP,
        norms: tuple[Norm, Norm, Norm],
        dropouts: tuple[Dropout, Dropout, Dropout],
    ) -> None:
        self.attention, self.cross, self.mlp = attention, cross, mlp
        self.norm1, self.norm2, self.norm3 = norms
        self.dropout1, self.dropout2, self.dropout3 = dropouts

    def forward(self, x: Array, run: Pass) -> tuple[Array, CrossBlockContext]:
        """x [t, h] -> y [t, h]."""
        normed, norm1_ctx = self.norm1.forward(x)
        branch, attention_ctx = self.attention.forward(normed, run)
        x1, dropout1_ctx = self.dropout1.forward(branch, run)
        x1 += x  # the branch's output is this block's own array
        normed, norm2_ctx = self.norm2.forward(x1)
        branch, cross_ctx = self.cross.forward(normed, run)
        x2, dropout2_ctx = self.dropout2.forward(branch, run)
        x2 += x1
        normed, norm3_ctx = self.norm3.forward(x2)
        branch, mlp_ctx = self.mlp.forward(normed, run)
        y, dropout3_ctx = self.dropout3.forward(branch, run)
        y += x2
        norms, dropouts = (norm1_ctx, norm2_ctx, norm3_ctx), (dropout1_ctx, dropout2_ctx, dropout3_ctx)
        return y, CrossBlockContext(attention_ctx, cross_ctx, mlp_ctx, norms, dropouts)

    def backward(self, dy: Array, ctx: CrossBlockContext) -> Array:
        """dy [t, h] -> dx [t, h]; the memory's part of the gradient goes to the pass."""
        (norm1_ctx, norm2_ctx, norm3_ctx), (dropout1_ctx, dropout2_ctx, dropout3_ctx) = ctx.norms, ctx.dropouts
        dbranch = self.mlp.backward(self.dropout3.backward(dy, dropout3_ctx), ctx.mlp)
        dx2 = self.norm3.backward(dbranch, norm3_ctx)
        dx2 += dy
        dbranch = self.cross.backward(self.dropout2.backward(dx2, dropout2_ctx), ctx.cross)
        dx1 = self.norm2.backward(dbranch, norm2_ctx)
        dx1 += dx2
        dbranch = self.attention.backward(self.dropout1.backward(dx1, dropout1_ctx), ctx.attention)
        dx = self.norm1.backward(dbranch, norm1_ctx)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"norm1": self.norm1, "attention": self.attention, "dropout1": self.dropout1}
        named |= {"norm2": self.norm2, "cross": self.cross, "dropout2": self.dropout2}
        named |= {"norm3": self.norm3, "mlp": self.mlp, "dropout3": self.dropout3}
        return without_idle_dropouts(named)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branches = (self.norm1, self.attention, self.dropout1), (self.norm2, self.cross, self.dropout2)
        for norm, inner, dropout in (*branches, (self.norm3, self.mlp, self.dropout3)):
            branch = dropout.placements(inner.placements(norm.placements(incoming)))
            incoming.expect_like(branch, "a branch")
            incoming = branch
        return incoming
