"""A transformer block whose attention and MLP read the same input side by side (GPT-J, Wang 2021; GPT-NeoX, Falcon).

y = x + dropout(attention(norm1(x))) + dropout(mlp(norm2(x)))        norm2 may be norm1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Join, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.dropout import Dropout, without_idle_dropouts
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP, MlpContext
from mpitp.layers.norm import LayerNorm, NormContext, RMSNorm
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class ParallelBlockContext:
    """The contexts of the block's layers; `norm2` is None where both branches share one norm."""

    norm1: NormContext
    attention: AttentionContext
    dropout1: Pass
    norm2: NormContext | None
    mlp: MlpContext
    dropout2: Pass


class ParallelBlock(Layer):
    """Attention and MLP beside one another and beside the residual connection. norm2 None: both read norm1."""

    algebra = Algebra(
        "residual connection",
        (Join("residual", Segment("y = x + both branches", "x branch", "y", "row by row: no communication")),),
        (
            Join(
                "input", Segment("dx = dy + dbranches", "dy dbranch", "dx", "x was used by both branches and past them")
            ),
        ),
    )

    def __init__(
        self,
        norm1: LayerNorm | RMSNorm,
        attention: SelfAttention,
        norm2: LayerNorm | RMSNorm | None,
        mlp: MLP,
        dropouts: tuple[Dropout, Dropout],
    ) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropout1, self.dropout2 = dropouts

    def forward(self, x: Array, run: Pass) -> tuple[Array, ParallelBlockContext]:
        """x [t, h] -> y [t, h]."""
        normed, norm1_ctx = self.norm1.forward(x)
        branch, attention_ctx = self.attention.forward(normed, run)
        branch1, dropout1_ctx = self.dropout1.forward(branch, run)
        normed, norm2_ctx = (normed, None) if self.norm2 is None else self.norm2.forward(x)
        branch, mlp_ctx = self.mlp.forward(normed, run)
        y, dropout2_ctx = self.dropout2.forward(branch, run)
        y += branch1  # the branches' outputs are this block's own arrays
        y += x
        return y, ParallelBlockContext(norm1_ctx, attention_ctx, dropout1_ctx, norm2_ctx, mlp_ctx, dropout2_ctx)

    def backward(self, dy: Array, ctx: ParallelBlockContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dnormed2 = self.mlp.backward(self.dropout2.backward(dy, ctx.dropout2), ctx.mlp)
        dnormed1 = self.attention.backward(self.dropout1.backward(dy, ctx.dropout1), ctx.attention)
        if self.norm2 is None or ctx.norm2 is None:
            dnormed1 += dnormed2
            dx = self.norm1.backward(dnormed1, ctx.norm1)
        else:
            dx = self.norm2.backward(dnormed2, ctx.norm2)
            dx += self.norm1.backward(dnormed1, ctx.norm1)
        dx += dy
        return dx

    def children(self) -> Mapping[str, Layer]:
        named: dict[str, Layer] = {"norm1": self.norm1, "attention": self.attention, "dropout1": self.dropout1}
        named |= {} if self.norm2 is None else {"norm2": self.norm2}
        named |= {"mlp": self.mlp, "dropout2": self.dropout2}
        return without_idle_dropouts(named)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows; each branch must be of the type of what it is added to."""
        normed = self.norm1.placements(incoming)
        branch = self.dropout1.placements(self.attention.placements(normed))
        incoming.expect_like(branch, "the attention's branch")
        normed = normed if self.norm2 is None else self.norm2.placements(incoming)
        branch = self.dropout2.placements(self.mlp.placements(normed))
        incoming.expect_like(branch, "the MLP's branch")
        return branch
