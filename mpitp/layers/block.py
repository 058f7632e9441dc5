"""One pre-norm transformer block: two residual branches.

x1 = x  + dropout(attention(norm1(x)))
y  = x1 + dropout(mlp(norm2(x1)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import ADD, ADD_GRADS, Algebra, Join
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.dropout import Dropout, without_idle_dropouts
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, NormContext, RMSNorm
from mpitp.layers.passes import Pass

if TYPE_CHECKING:
    from mpitp.layers.mixture import MixtureOfExperts


@dataclass(slots=True)
class BlockContext:
    """The contexts of the block's layers."""

    norm1: NormContext
    attention: AttentionContext
    dropout1: Pass
    norm2: NormContext
    mlp: Any  # of an MLP, or of a mixture of experts
    dropout2: Pass


class TransformerBlock(Layer):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    algebra = Algebra(
        "residual connection",
        (Join("residual1", ADD, before=("norm2",)), Join("residual2", ADD)),
        (Join("residual1", ADD_GRADS, before=("dropout1", "attention")), Join("input", ADD_GRADS)),
    )

    def __init__(
        self,
        norm1: LayerNorm | RMSNorm,
        attention: SelfAttention,
        norm2: LayerNorm | RMSNorm,
        mlp: MLP | MixtureOfExperts,
        dropouts: tuple[Dropout, Dropout],
    ) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout1, self.dropout2 = dropouts

    def forward(self, x: Array, run: Pass) -> tuple[Array, BlockContext]:
        """x [t, h] -> y [t, h]."""
        normed, norm1_ctx = self.norm1.forward(x)
        branch, attention_ctx = self.attention.forward(normed, run)
        x1, dropout1_ctx = self.dropout1.forward(branch, run)
        x1 += x  # the branch's output is this block's own array
        normed, norm2_ctx = self.norm2.forward(x1)
        branch, mlp_ctx = self.mlp.forward(normed, run)
        y, dropout2_ctx = self.dropout2.forward(branch, run)
        y += x1
        return y, BlockContext(norm1_ctx, attention_ctx, dropout1_ctx, norm2_ctx, mlp_ctx, dropout2_ctx)

    def backward(self, dy: Array, ctx: BlockContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dbranch = self.mlp.backward(self.dropout2.backward(dy, ctx.dropout2), ctx.mlp)
        dx1 = self.norm2.backward(dbranch, ctx.norm2)
        dx1 += dy
        dbranch = self.attention.backward(self.dropout1.backward(dx1, ctx.dropout1), ctx.attention)
        dx = self.norm1.backward(dbranch, ctx.norm1)
        dx += dx1
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"norm1": self.norm1, "attention": self.attention, "dropout1": self.dropout1}
        named |= {"norm2": self.norm2, "mlp": self.mlp, "dropout2": self.dropout2}
        return without_idle_dropouts(named)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; a branch must be of the type of what it is added to."""
        branch = self.dropout1.placements(self.attention.placements(self.norm1.placements(incoming)))
        incoming.expect_like(branch, "the attention's branch")
        branch = self.dropout2.placements(self.mlp.placements(self.norm2.placements(branch)))
        incoming.expect_like(branch, "the MLP's branch")
        return branch
