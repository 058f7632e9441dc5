r"""A learned number for each head and each bucket of distances, added to attention's scores (Raffel et al. 2020).

    S'_h[p, u] = S_h[p, u] + B[bucket(u - p), h]        B [buckets, a], cut by heads: [buckets, a/tp] on a rank
    dB[b, h]   = sum of dS'_h[p, u] over all p and u with bucket(u - p) = b

A rank adds and sums for its own heads alone: no communication. Blocks that share B add to one gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.errors import PlacementError
from mpitp.layers.array_type import ArrayType
from mpitp.layers.param import Param
from mpitp.layers.placement import Cut
from mpitp.ops.diagonals import add_to_diagonals, diagonal_sums
from mpitp.ops.relative_buckets import Buckets
from mpitp.ops.score_change import ScoreChange


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias(ScoreChange):
    """Adds `table` [buckets, a/tp] by distance."""

    uses_scores = False
    table: Param
    buckets: Buckets

    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        of_distance = self.table.data[from_host(self._buckets_of(queries, keys), array_module(scores)), head]
        add_to_diagonals(scores, of_distance.astype(scores.dtype, copy=False))

    def backward(self, dscores: Array, scores: Array | None, head: int, queries: range, keys: range) -> None:
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
