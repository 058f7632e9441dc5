r"""Token embedding cut along the vocabulary, and learned positions.

    y[i] = sum_r E_r[id_i - start_r]  if id_i is one of rank r's rows, else 0          [t, h]

Exactly one rank contributes to a row, so the sum over ranks is exact in any order. Backward needs no communication: dy
is equal on every rank, and each rank adds it to the rows it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, PARTIAL, ArrayType
from mpitp.layers.layer import Layer, Send
from mpitp.layers.mappings import ExitPair
from mpitp.layers.norm import row_by_row
from mpitp.layers.param import Param
from mpitp.layers.partition import Share
from mpitp.layers.passes import Pass
from mpitp.ops.embedding import embedding_backward, embedding_forward


@dataclass(slots=True)
class EmbeddingContext:
    """The ids that were looked up."""

    ids: Array  # [t]


class VocabParallelEmbedding(Layer):
    """Rows of the token table [v/tp, h] on this rank; ids must lie in the vocabulary (the model checks them first).

    `held`: the id whose row no lookup trains (a padding's), as the reference has it for some models; None: none.
    """

    _forward = "y_partial[i] = E_r[ids_i] if rank r holds that row, else 0"
    algebra = Algebra(
        "vocabulary-parallel embedding",
        (
            Segment(_forward, "ids E", "y_partial", "one rank has each token"),
            Sum("y", "y = sum_r y_partial", "all terms but one are 0"),
        ),
        (Segment("dE_r[ids_i] += dy[i] for the rows that rank r holds", "dy", "", "dy is on every rank", grads=True),),
        "all-reduce of y forward, identity backward",
        exit="reduce",
        names={"x": "ids", "weight": "E"},
    )

    def __init__(self, weight: Param, vocab: Share, reduce: ExitPair, held: int | None = None) -> None:
        self.weight, self.vocab, self.reduce, self.held = weight, vocab, reduce, held

    def forward(self, x: Array, run: Any = None) -> tuple[Array, EmbeddingContext]:
        """ids x [t] -> y [t, h]."""
        y_partial = embedding_forward(x, self.weight.data, self.vocab.span.start)
        return self.reduce.forward([y_partial], like=y_partial), EmbeddingContext(x)

    def backward(self, dy: Array, ctx: EmbeddingContext) -> None:
        """dy [t, h] is added to the rows of the table that were looked up."""
        dy = self.reduce.backward(dy)
        if self.held is not None:
            dy = dy * (ctx.ids != self.held)[:, None].astype(dy.dtype)
        self.weight.accumulate(embedding_backward(dy, ctx.ids, self.weight.data.shape[0], self.vocab.span.start))

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Ids, the same on every rank that has rows of the table, to whole rows."""
        axis = self.weight.placement.parts[0].dims[0].axis
        incoming.expect(axis, INVARIANT, "ids")
        incoming.expect_gradient_summed("weight", self.weight)
        return self.reduce.placements(incoming.changed(axis, PARTIAL))

    def sends(self) -> tuple[Send, ...]:
        return self.reduce.sends(self.weight.data.shape[1], summands=0)


class PositionEmbedding(Layer):
    """y = x + P[offset + positions]: learned positions [offset + max_positions, h], replicated (GPT-2).

    `offset`: rows at the beginning of the table that no position uses (2 in OPT).
    """

    algebra = Algebra(
        "learned positions",
        (Segment("y[i] = x[i] + P[position_i]", "x P", "y", "row by row: no communication"),),
        (Segment("dx = dy, dP[position_i] += dy[i]", "dy", "dx", "row by row: no communication", grads=True),),
        names={"weight": "P"},
    )

    def __init__(self, weight: Param, offset: int = 0) -> None:
        self.weight, self.offset = weight, offset

    def forward(self, x: Array, run: Pass) -> tuple[Array, EmbeddingContext]:
        """x [t, h] -> y [t, h]."""
        positions = from_host(run.shard_rows.positions() + self.offset, array_module(x))
        y = embedding_forward(positions, self.weight.data)
        y += x
        return y, EmbeddingContext(positions)

    def backward(self, dy: Array, ctx: EmbeddingContext) -> Array:
        """dy [t, h] -> dx [t, h]; it is added to the rows that were looked up."""
        self.weight.accumulate(embedding_backward(dy, ctx.ids, self.weight.data.shape[0]))
        return dy

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())


class TypeEmbedding(Layer):
    """y = x + T[types]: what kind of token a row is [num_types, h], replicated (BERT: first or second sentence)."""

    algebra = Algebra(
        "token types",
        (Segment("y[i] = x[i] + T[type_i]", "x T", "y", "row by row: no communication"),),
        (Segment("dx = dy, dT[type_i] += dy[i]", "dy", "dx", "row by row: no communication", grads=True),),
        names={"weight": "T"},
    )

    def __init__(self, weight: Param) -> None:
        self.weight = weight

    def forward(self, x: Array, run: Pass) -> tuple[Array, EmbeddingContext]:
        """x [t, h] -> y [t, h]."""
        types = array_module(x).zeros(x.shape[0], np.int64) if run.types is None else run.types
        y = embedding_forward(types, self.weight.data)
        y += x
        return y, EmbeddingContext(types)

    def backward(self, dy: Array, ctx: EmbeddingContext) -> Array:
        """dy [t, h] -> dx [t, h]; it is added to the rows of the types."""
        self.weight.accumulate(embedding_backward(dy, ctx.ids, self.weight.data.shape[0]))
        return dy

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())
