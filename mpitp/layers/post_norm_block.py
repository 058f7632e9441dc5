"""One post-norm transformer block (Vaswani et al. 2017; BERT): a norm behind each sum of a branch and what went past.

y1 = norm1(x  + dropout(attention(x)))
y  = norm2(y1 + dropout(mlp(y1)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import ADD, ADD_GRADS, Algebra, Join
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.dropout import Dropout, without_idle_dropouts
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP, MlpContext
from mpitp.layers.norm import LayerNorm, NormContext
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class PostNormContext:
    """The contexts of the block's layers."""

    attention: AttentionContext
    dropout1: Pass
    norm1: NormContext
    mlp: MlpContext
    dropout2: Pass
    norm2: NormContext


class PostNormBlock(Layer):
    """Attention and MLP, each with a residual connection beside it and a norm behind the sum."""

    algebra = Algebra(
        "residual connection",
        (Join("residual1", ADD, before=("norm1",)), Join("residual2", ADD, before=("norm2",), past=("mlp",))),
        (
            Join("residual1", ADD_GRADS, before=("norm1",), past=("dropout2", "mlp")),
            Join("input", ADD_GRADS, past=("dropout1", "attention")),
        ),
    )

    def __init__(
        self,
        attention: SelfAttention,
        norm1: LayerNorm,
        mlp: MLP,
        norm2: LayerNorm,
        dropouts: tuple[Dropout, Dropout],
    ) -> None:
        self.attention, self.norm1, self.mlp, self.norm2 = attention, norm1, mlp, norm2
        self.dropout1, self.dropout2 = dropouts

    def forward(self, x: Array, run: Pass) -> tuple[Array, PostNormContext]:
        """x [t, h] -> y [t, h]."""
        branch, attention_ctx = self.attention.forward(x, run)
        x1, dropout1_ctx = self.dropout1.forward(branch, run)
        x1 += x  # the branch's output is this block's own array
        y1, norm1_ctx = self.norm1.forward(x1)
        branch, mlp_ctx = self.mlp.forward(y1, run)
        x2, dropout2_ctx = self.dropout2.forward(branch, run)
        x2 += y1
        y, norm2_ctx = self.norm2.forward(x2)
        return y, PostNormContext(attention_ctx, dropout1_ctx, norm1_ctx, mlp_ctx, dropout2_ctx, norm2_ctx)

    def backward(self, dy: Array, ctx: PostNormContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dx2 = self.norm2.backward(dy, ctx.norm2)
        dy1 = self.mlp.backward(self.dropout2.backward(dx2, ctx.dropout2), ctx.mlp)
        dy1 += dx2
        dx1 = self.norm1.backward(dy1, ctx.norm1)
        dx = self.attention.backward(self.dropout1.backward(dx1, ctx.dropout1), ctx.attention)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"attention": self.attention, "dropout1": self.dropout1, "norm1": self.norm1}
        named |= {"mlp": self.mlp, "dropout2": self.dropout2, "norm2": self.norm2}
        return without_idle_dropouts(named)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branch = self.dropout1.placements(self.attention.placements(incoming))
        incoming.expect_like(branch, "the attention's branch")
        normed = self.norm1.placements(branch)
        branch = self.dropout2.placements(self.mlp.placements(normed))
        normed.expect_like(branch, "the MLP's branch")
        return self.norm2.placements(branch)
