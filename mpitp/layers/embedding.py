r"""Token embedding cut along the vocabulary, and learned positions.

    y[i] = sum_r E_r[id_i - start_r]  if id_i is one of rank r's rows, else 0          [t, h]

Exactly one rank contributes to a row, so the sum over ranks is exact in any order. Backward needs no communication: dy
is equal on every rank, and each rank adds it to the rows it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.comm.group import Group
from mpitp.layers.param import Param
from mpitp.layers.partition import Share
from mpitp.ops.embedding import embedding_backward, embedding_forward

Array = Any


@dataclass(slots=True)
class EmbeddingContext:
    """The ids that were looked up."""

    ids: Array  # [t]


class VocabParallelEmbedding:
    """Rows of the token table [v/tp, h] on this rank; ids must lie in the vocabulary (the model checks them first)."""

    def __init__(self, weight: Param, vocab: Share, group: Group) -> None:
        self.weight, self.vocab, self.group = weight, vocab, group

    def forward(self, ids: Array) -> tuple[Array, EmbeddingContext]:
        """ids [t] -> y [t, h]."""
        y_partial = embedding_forward(ids, self.weight.data, self.vocab.span.start)
        return self.group.all_reduce(y_partial, out=y_partial), EmbeddingContext(ids)

    def backward(self, dy: Array, ctx: EmbeddingContext) -> None:
        """dy [t, h] is added to the rows of the table that were looked up."""
        self.weight.accumulate(embedding_backward(dy, ctx.ids, self.weight.data.shape[0], self.vocab.span.start))

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight}


class PositionEmbedding:
    """Learned positions [max_positions, h], replicated (GPT-2)."""

    def __init__(self, weight: Param) -> None:
        self.weight = weight

    def forward(self, positions: Array) -> tuple[Array, EmbeddingContext]:
        """positions [t] -> y [t, h]."""
        return embedding_forward(positions, self.weight.data), EmbeddingContext(positions)

    def backward(self, dy: Array, ctx: EmbeddingContext) -> None:
        """dy [t, h] is added to the rows that were looked up."""
        self.weight.accumulate(embedding_backward(dy, ctx.ids, self.weight.data.shape[0]))

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight}
