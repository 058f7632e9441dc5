"""What is computed of each sequence's first row alone (BERT's [CLS], a class token): a pooler and a classifier.

x [t, h]  ->  first rows [b, h]  ->  the layers inside, one row a sequence
backward: their dx goes to the first rows, all other rows get 0

With sequence parallelism x is the rank's own rows [t/tp, h]: the first rows among them are gathered from all ranks, and
backward each rank takes the gradients of its own. The layers inside have all of them then, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.comm.group import Group
from mpitp.layers.array_type import INVARIANT, VARYING, ArrayType
from mpitp.layers.layer import FORWARD, Layer, Send
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class FirstRowsContext:
    """Which rows were taken, of how many, and which of how many sequences they are; the contexts of what is inside."""

    rows: Array  # [b], or those of them that are here
    count: int
    own: slice
    sequences: int
    inner: list[Any]


class OnFirstRows(Layer):
    """The layers inside, one after the other, on the first row of each sequence.

    `gather`: the ranks that have rows of their own, with sequence parallelism; `width`: h.
    """

    gives_a_row_a_sequence = True

    def __init__(self, layers: Mapping[str, Layer], width: int, gather: Group | None = None) -> None:
        self.layers, self.width, self.gather = dict(layers), width, gather

    def forward(self, x: Array, run: Pass) -> tuple[Array, FirstRowsContext]:
        """x [t, h] -> y [b, ...]."""
        rows = from_host(run.shard_rows.first_rows(), array_module(x))
        inner, y, ctxs = Pass(run.rows.heads(), run.dropout), x[rows], []
        if self.gather is not None:
            y = self.gather.all_gather(y)  # in the order of the ranks, which is that of the sequences
        for layer in self.layers.values():
            y, ctx = layer.forward(y, inner)
            ctxs.append(ctx)
        return y, FirstRowsContext(rows, x.shape[0], _those_here(run), len(inner.rows.runs), ctxs)

    def backward(self, dy: Array, ctx: FirstRowsContext) -> Array:
        """dy [b, ...] -> dx [t, h]."""
        for layer, layer_ctx in zip(reversed(self.layers.values()), reversed(ctx.inner), strict=True):
            dy = layer.backward(dy, layer_ctx)
        dx = array_module(dy).zeros((ctx.count, dy.shape[1]), dy.dtype)
        dx[ctx.rows] = dy[ctx.own]
        return dx

    def children(self) -> Mapping[str, Layer]:
        return self.layers

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Some of the rows, through the layers inside."""
        if self.gather is not None:
            incoming.expect("tp", VARYING, "what first rows are taken of", "each rank has its own rows of tokens")
            incoming = incoming.changed("tp", INVARIANT)
        for layer in self.layers.values():
            incoming = layer.placements(incoming)
        return incoming

    def rows_sent(self, x: Array, ctx: FirstRowsContext) -> int:
        """A row a sequence."""
        return ctx.sequences

    def sends(self) -> tuple[Send, ...]:
        """All ranks together hand in every first row once."""
        if self.gather is None:
            return ()
        return (Send(FORWARD, "all_gather", self.width, "b h s / p", summands=1),)


def _those_here(run: Pass) -> slice:
    """Which of the pass's sequences begin among the rows here: neighbours."""
    samples = [each.sample for each in run.rows.heads().runs]
    own = [each.sample for each in run.shard_rows.heads().runs]
    first = samples.index(own[0]) if own else 0
    return slice(first, first + len(own))
