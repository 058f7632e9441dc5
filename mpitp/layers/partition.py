"""How many units (heads, FFN columns, vocabulary rows) each rank gets: pure arithmetic, no arrays, no communication.

Units are dealt in **blocks**: whole groups of neighbouring units that never part. Normally every rank has one block,
its share. In the invariant mode the number of blocks is fixed and does not depend on the number of ranks, so that each
block's matrix product has one shape in every layout.

Parts of unequal **weight** (ranks of unequal speed) get n_i of N units such that the part that takes longest is done
as soon as can be: max_i n_i / w_i is the least there is, and no n_i lies below the whole units of N w_i / sum(w).
Equal weights are the same as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


def split_evenly(units: int, parts: int) -> tuple[range, ...]:
    """Cut `units` into `parts` neighbouring ranges whose sizes differ by at most one; the first ones are larger.

    >>> split_evenly(9, 2)
    (range(0, 5), range(5, 9))
    """
    return tuple(piece_of(units, part, parts) for part in range(parts))


def split_by_weight(units: int, parts: int, weights: Sequence[float] = ()) -> tuple[range, ...]:
    """Cut `units` into `parts` neighbouring ranges by weight; without weights, evenly.

    >>> split_by_weight(9, 2, [2, 1])
    (range(0, 6), range(6, 9))
    """
    return tuple(piece_of(units, part, parts, weights) for part in range(parts))


def piece_of(units: int, part: int, parts: int, weights: Sequence[float] = ()) -> range:
    """One of the ranges of `split_by_weight`; without weights, in time that doesn't grow with their number."""
    if weights:
        counts = counts_by_weight(units, tuple(weights))
        return range(start := sum(counts[:part]), start + counts[part])
    size, extra = divmod(units, parts)
    start = part * size + min(part, extra)
    return range(start, start + size + (part < extra))


@lru_cache(maxsize=1024)
def counts_by_weight(units: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many of `units` each part gets, for weights that aren't negative nor all 0; weight 0 gets none.

    The highest averages of D'Hondt: one unit after the other goes to the part that would be done with it first, at
    (n_i + 1) / w_i (ties: to whom has fewer, then to the first). No part ends below floor(N w_i / sum(w)), so the
    dealing starts there, and fewer units than parts are left.
    """
    largest = max(weights)
    total = sum(weight / largest for weight in weights)
    counts = [int(units * (weight / largest) / total) for weight in weights]
    for _ in range(units - sum(counts)):
        done = [((n + 1) / w, n, part) for part, (n, w) in enumerate(zip(counts, weights, strict=True)) if w]
        counts[min(done)[2]] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of `units`: the blocks `blocks`, neighbours in global order."""

    units: int
    blocks: tuple[range, ...]

    @property
    def span(self) -> range:
        """The units of all blocks as one range."""
        return range(self.blocks[0].start, self.blocks[-1].stop) if self.blocks else range(0)

    @property
    def size(self) -> int:
        """How many units this rank holds."""
        return len(self.span)

    @property
    def local_blocks(self) -> tuple[range, ...]:
        """The blocks, counted from the rank's own first unit."""
        first = self.span.start
        return tuple(range(block.start - first, block.stop - first) for block in self.blocks)

    def scaled(self, factor: int) -> Share:
        """The same share of units that are each `factor` rows wide (heads to rows)."""
        blocks = tuple(range(block.start * factor, block.stop * factor) for block in self.blocks)
        return Share(self.units * factor, blocks)


def share_of(units: int, rank: int, ranks: int, num_blocks: int = 0, weights: Sequence[float] = ()) -> Share:
    """Rank's share of `units`. With `num_blocks` > 0 they are cut into that many blocks, which are dealt whole."""
    if not num_blocks:
        own = piece_of(units, rank, ranks, weights)
        return Share(units, (own,) if len(own) else ())
    blocks = split_evenly(units, num_blocks)
    return Share(units, tuple(blocks[i] for i in piece_of(num_blocks, rank, ranks, weights)))


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one rank: its query heads, and the KV heads that those use.

    Query heads are dealt one by one, so a KV head may be needed on several neighbouring ranks (GQA, MQA). It is *owned*
    by the rank that holds the first query head of its group: the owner saves it and counts it.
    """

    query: Share
    kv: range  # KV heads held here
    kv_owned: range  # those of them that this rank owns
    kv_shared: tuple[int, ...]  # KV heads held by more than one rank of the group, the same list on every rank
    group_size: int  # query heads a KV head

    def owned_of(self, block: range) -> range:
        """The KV heads that this rank owns for a block of its query heads: those whose groups begin there."""
        owned = [g for g in self.kv_owned if g * self.group_size in block]
        return range(owned[0], owned[-1] + 1) if owned else range(self.kv.start, self.kv.start)

    def kv_index(self, local_query_head: int) -> int:
        """Which local KV head the local query head uses."""
        return (self.query.span.start + local_query_head) // self.group_size - self.kv.start


def share_heads(
    heads: int, kv_heads: int, rank: int, ranks: int, num_blocks: int = 0, weights: Sequence[float] = ()
) -> HeadShare:
    """Rank's heads. `heads` must be a multiple of `kv_heads`; any number of ranks works, some may hold no head."""
    group_size = heads // kv_heads
    query = share_of(heads, rank, ranks, num_blocks, weights)
    kv = _groups_of(query.span, group_size)
    firsts = _first_heads(heads, ranks, num_blocks, weights)
    shared = tuple(sorted({first // group_size for first in firsts if first % group_size}))  # a rank begins within them
    owned = [g for g in kv if g * group_size in query.span]
    kv_owned = range(owned[0], owned[-1] + 1) if owned else range(kv.start, kv.start)
    return HeadShare(query, kv, kv_owned, shared, group_size)


def _first_heads(heads: int, ranks: int, num_blocks: int, weights: Sequence[float]) -> list[int]:
    """The first query head of every rank that has one: at most as many as there are heads, however many the ranks."""
    if weights:
        spans = (share_of(heads, rank, ranks, num_blocks, weights).span for rank in range(ranks))
        return [span.start for span in spans if span]
    blocks = split_evenly(heads, num_blocks or min(ranks, heads))
    return [blocks[own.start].start for own in split_evenly(len(blocks), min(ranks, len(blocks)))]


def _groups_of(heads: range, group_size: int) -> range:
    return range(heads.start // group_size, (heads.stop - 1) // group_size + 1) if heads else range(0)


def runs_of(units: int, singles: set[int]) -> list[range]:
    """0 .. units-1 as neighbouring ranges, each of `singles` by itself."""
    cuts = sorted({0, units} | singles | {single + 1 for single in singles})
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
