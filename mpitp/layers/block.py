"""One pre-norm transformer block: two residual branches.

x1 = x  + dropout(attention(norm1(x)))
y  = x1 + dropout(mlp(norm2(x1)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.layers.attention import AttentionContext, SelfAttention
from mpitp.layers.dropout import Dropout
from mpitp.layers.kv_cache import LayerCache
from mpitp.layers.mlp import GeluMLP, MlpContext, SwiGluMLP
from mpitp.layers.norm import LayerNorm, NormContext, RMSNorm
from mpitp.layers.param import Param, prefixed
from mpitp.layers.sequences import Sequences

Array = Any


@dataclass(slots=True)
class BlockContext:
    """The contexts of the block's four layers."""

    seqs: Sequences
    norm1: NormContext
    attention: AttentionContext
    norm2: NormContext
    mlp: MlpContext


class TransformerBlock:
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(
        self,
        norm1: LayerNorm | RMSNorm,
        attention: SelfAttention,
        norm2: LayerNorm | RMSNorm,
        mlp: GeluMLP | SwiGluMLP,
        dropouts: tuple[Dropout, Dropout],
    ) -> None:
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp
        self.dropouts = dropouts

    def forward(self, x: Array, seqs: Sequences, cache: LayerCache | None = None) -> tuple[Array, BlockContext]:
        """x [t, h] -> y [t, h]."""
        normed, norm1_ctx = self.norm1.forward(x)
        branch, attention_ctx = self.attention.forward(normed, seqs, cache)
        x1 = self.dropouts[0].forward(branch, seqs)
        x1 += x  # the branch's output is this block's own array
        normed, norm2_ctx = self.norm2.forward(x1)
        branch, mlp_ctx = self.mlp.forward(normed)
        y = self.dropouts[1].forward(branch, seqs)
        y += x1
        return y, BlockContext(seqs, norm1_ctx, attention_ctx, norm2_ctx, mlp_ctx)

    def backward(self, dy: Array, ctx: BlockContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        dbranch = self.mlp.backward(self.dropouts[1].backward(dy, ctx.seqs), ctx.mlp)
        dx1 = self.norm2.backward(dbranch, ctx.norm2)
        dx1 += dy
        dbranch = self.attention.backward(self.dropouts[0].backward(dx1, ctx.seqs), ctx.attention)
        dx = self.norm1.backward(dbranch, ctx.norm1)
        dx += dx1
        return dx

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        named: dict[str, Param] = {}
        for name, layer in self.layers():
            named |= prefixed(name, layer.params())
        return named

    def layers(self) -> tuple[tuple[str, Any], ...]:
        """The block's layers by name, in forward order."""
        return (("norm1", self.norm1), ("attention", self.attention), ("norm2", self.norm2), ("mlp", self.mlp))
