r"""A learned number for each head and each bucket of distances, added to attention's scores (Raffel et al. 2020).

    S'_h[p, u] = S_h[p, u] + B[bucket(u - p), h]        B [buckets, a], cut by heads: [buckets, a/tp] on a rank
    dB[b, h]   = sum of dS'_h[p, u] over all p and u with bucket(u - p) = b

A rank adds and sums for its own heads alone: no communication. Blocks that share B add to one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.backend.precision import widened
from mpitp.errors import PlacementError
from mpitp.layers.array_type import ArrayType
from mpitp.layers.param import Param
from mpitp.layers.placement import Cut
from mpitp.ops.relative_buckets import Buckets
from mpitp.ops.score_change import ScoreChange


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias(ScoreChange):
    """Adds `table` [buckets, a/tp] by distance."""

    table: Param
    buckets: Buckets

    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        xp, (rows, cols) = array_module(scores), scores.shape
        of_distance = widened(self.table.data)[from_host(self._buckets_of(queries, keys), xp), head]
        number = xp.arange(cols)[None, :] + xp.arange(rows - 1, -1, -1)[:, None]  # of the distance u - p
        scores += of_distance[number]

    def backward(self, dscores: Array, scores: Array, head: int, queries: range, keys: range) -> None:
        """A number was added, so dscores stay; their sums by bucket are the table's gradient."""
        xp = array_module(dscores)
        buckets = from_host(self._buckets_of(queries, keys), xp)
        is_in = (xp.arange(self.buckets.count)[:, None] == buckets[None, :]).astype(dscores.dtype)
        grad = xp.zeros(self.table.data.shape, dscores.dtype)
        grad[:, head] = is_in @ diagonal_sums(dscores)
        self.table.accumulate(grad)

    def _buckets_of(self, queries: range, keys: range) -> Array:
        """Of every distance from the last query's to the first key up to the first query's to the last key."""
        return self.buckets.of(range(keys.start - queries.stop + 1, keys.stop - queries.start))

    def params(self) -> Mapping[str, Param]:
        """The table, by name."""
        return {"bias": self.table}

    def check(self, incoming: ArrayType, query: Cut) -> None:
        """Raise PlacementError unless the table is cut as the heads are, `query`, and its gradient is summed."""
        own = self.table.placement.parts[0].dims[1]
        heads = query.size // own.size
        if (own.held.start * heads, own.held.stop * heads) != (query.held.start, query.held.stop):
            raise PlacementError(
                f"the bias of heads {own.held.start}:{own.held.stop} meets the scores of other ones",
                cure="cut its table by the query heads",
            )
        incoming.expect_gradient_summed("bias", self.table)


def diagonal_sums(x: Array) -> Array:
    """The sums over the diagonals of x [r, c], from the one of its lower left corner on: [r + c - 1].

    Rows, last one first, lie in rows one element longer; read in rows of the sums' length, each has moved by one.
    """
    xp, (rows, cols) = array_module(x), x.shape
    wide = xp.zeros((rows, rows + cols), x.dtype)
    wide[:, :cols] = x[::-1]
    width = rows + cols - 1
    return wide.reshape(-1)[: rows * width].reshape(rows, width).sum(axis=0)
