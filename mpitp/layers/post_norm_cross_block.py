"""One post-norm block of a decoder that reads an encoder's output (Vaswani et al. 2017; BART, Marian).

y1 = norm1(x  + dropout(attention(x)))
y2 = norm2(y1 + dropout(cross(y1)))          over the memory of the pass
y  = norm3(y2 + dropout(mlp(y2)))
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import ADD, ADD_GRADS, Algebra, Join
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import SelfAttention
from mpitp.layers.cross_attention import CrossAttention
from mpitp.layers.cross_block import CrossBlockContext
from mpitp.layers.dropout import Dropout, without_idle_dropouts
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm
from mpitp.layers.passes import Pass


class PostNormCrossBlock(Layer):
    """Self-attention, cross attention and MLP, each with a residual connection beside it and a norm behind the sum."""

    algebra = Algebra(
        "residual connection",
        (
            Join("residual1", ADD, before=("norm1",)),
            Join("residual2", ADD, before=("norm2",), past=("cross",)),
            Join("residual3", ADD, before=("norm3",), past=("mlp",)),
        ),
        (
            Join("residual2", ADD_GRADS, before=("norm2",), past=("dropout3", "mlp")),
            Join("residual1", ADD_GRADS, before=("norm1",), past=("dropout2", "cross")),
            Join("input", ADD_GRADS, past=("dropout1", "attention")),
        ),
    )

    def __init__(
        self,
        attention: SelfAttention,
        cross: CrossAttention,
        mlp: MLP,
        norms: tuple[LayerNorm, LayerNorm, LayerNorm],
        dropouts: tuple[Dropout, Dropout, Dropout],
    ) -> None:
        self.attention, self.cross, self.mlp = attention, cross, mlp
        self.norm1, self.norm2, self.norm3 = norms
        self.dropout1, self.dropout2, self.dropout3 = dropouts

    def forward(self, x: Array, run: Pass) -> tuple[Array, CrossBlockContext]:
        """x [t, h] -> y [t, h]."""
        branch, attention_ctx = self.attention.forward(x, run)
        x1, dropout1_ctx = self.dropout1.forward(branch, run)
        x1 += x  # the branch's output is this block's own array
        y1, norm1_ctx = self.norm1.forward(x1)
        branch, cross_ctx = self.cross.forward(y1, run)
        x2, dropout2_ctx = self.dropout2.forward(branch, run)
        x2 += y1
        y2, norm2_ctx = self.norm2.forward(x2)
        branch, mlp_ctx = self.mlp.forward(y2, run)
        x3, dropout3_ctx = self.dropout3.forward(branch, run)
        x3 += y2
        y, norm3_ctx = self.norm3.forward(x3)
        norms, dropouts = (norm1_ctx, norm2_ctx, norm3_ctx), (dropout1_ctx, dropout2_ctx, dropout3_ctx)
        return y, CrossBlockContext(attention_ctx, cross_ctx, mlp_ctx, norms, dropouts)

    def backward(self, dy: Array, ctx: CrossBlockContext) -> Array:
        """dy [t, h] -> dx [t, h]; the memory's part of the gradient goes to the pass."""
        (norm1_ctx, norm2_ctx, norm3_ctx), (dropout1_ctx, dropout2_ctx, dropout3_ctx) = ctx.norms, ctx.dropouts
        dx3 = self.norm3.backward(dy, norm3_ctx)
        dy2 = self.mlp.backward(self.dropout3.backward(dx3, dropout3_ctx), ctx.mlp)
        dy2 += dx3
        dx2 = self.norm2.backward(dy2, norm2_ctx)
        dy1 = self.cross.backward(self.dropout2.backward(dx2, dropout2_ctx), ctx.cross)
        dy1 += dx2
        dx1 = self.norm1.backward(dy1, norm1_ctx)
        dx = self.attention.backward(self.dropout1.backward(dx1, dropout1_ctx), ctx.attention)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"attention": self.attention, "dropout1": self.dropout1, "norm1": self.norm1}
        named |= {"cross": self.cross, "dropout2": self.dropout2, "norm2": self.norm2}
        named |= {"mlp": self.mlp, "dropout3": self.dropout3, "norm3": self.norm3}
        return without_idle_dropouts(named)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branches = (self.attention, self.dropout1, self.norm1), (self.cross, self.dropout2, self.norm2)
        for inner, dropout, norm in (*branches, (self.mlp, self.dropout3, self.norm3)):
            branch = dropout.placements(inner.placements(incoming))
            incoming.expect_like(branch, "a branch")
            incoming = norm.placements(branch)
        return incoming
