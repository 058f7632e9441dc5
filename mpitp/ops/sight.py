"""What a query of attention may see, as the tiles of the score matrix that are worth computing.

A `Sight` yields tiles for s queries and u keys; attention computes them and hides, within a tile, the keys before and
after those that a row sees. The kinds that models have (causal, everything, a window) are bands along the diagonal: the
query at position p sees the keys at p - behind to p + ahead.

Of s queries and u keys, the queries stand at the last s of the u positions. `Band.at` says other positions: pieces of a
sequence that lie on different ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

TILE = 96  # queries or keys; measured: less waste above the diagonal against larger products; flat from 64 to 128
DEVICE_TILE = 1024  # on a GPU few large products are better
LONG_TILE = 1024  # a tile's longer side: what is longer is cut, so that a tile and its gradient stay in the cache
DEVICE_LONG_TILE = 4096
UNBOUNDED = 1 << 40  # further than any position


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring queries and keys; query number i of them sees the keys from number unseen + i up to, but not
    including, number seen + i. `first_query` and `first_key` are the positions of the first ones in the sequence.
    """

    queries: slice
    keys: slice
    seen: int
    unseen: int
    first_query: int
    first_key: int

    @property
    def query_positions(self) -> range:
        """Where its queries stand in the sequence."""
        return range(self.first_query, self.first_query + self.queries.stop - self.queries.start)

    @property
    def key_positions(self) -> range:
        """Where its keys stand in the sequence."""
        return range(self.first_key, self.first_key + self.keys.stop - self.keys.start)


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring queries with the tiles of all keys that they see, or keys with those of all queries that see them.

    `span`: which queries, or keys.
    """

    span: slice
    tiles: list[Tile]


class Sight(ABC):
    """Which keys each query sees."""

    @abstractmethod
    def query_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        """The forward's blocks, of queries: together all of them, and each sees a key of every tile that it is in."""

    @abstractmethod
    def key_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        """The backward's blocks, of keys: together all of them."""

    @abstractmethod
    def at(self, queries: range, keys: range) -> PlacedSight:
        """The sight of queries at these positions over keys at those."""


class PlacedSight(Sight):
    """What queries at certain positions see of keys at certain positions."""

    @abstractmethod
    def seeing(self) -> range:
        """The queries, counted from the first, that see at least one of the keys: neighbours."""


@dataclass(frozen=True, slots=True)
class Band(Sight):
    """The query at position p sees p - behind to p + ahead; None: as far as there are keys.

    >>> Band(behind=255)  # a sliding window of 256 keys, the query's own among them
    Band(behind=255, ahead=0)
    """

    behind: int | None = None
    ahead: int | None = 0

    def query_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        return self.at(range(u - s, u), range(u)).query_blocks(xp, s, u)

    def key_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        return self.at(range(u - s, u), range(u)).key_blocks(xp, s, u)

    def at(self, queries: range, keys: range) -> PlacedBand:
        return PlacedBand(self, queries, keys)


CAUSAL = Band()
EVERYTHING = Band(ahead=None)


@dataclass(frozen=True, slots=True)
class PlacedBand(PlacedSight):
    """A band for queries and keys at positions of their own; attention is given those queries that see a key."""

    band: Band
    queries: range
    keys: range

    def query_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        assert (s, u) == (len(self.queries), len(self.keys)), "a sight of other queries and keys"
        return [self._of_queries(xp, span) for span in _blocks(xp, s)]

    def key_blocks(self, xp: Any, s: int, u: int) -> list[Block]:
        assert (s, u) == (len(self.queries), len(self.keys)), "a sight of other queries and keys"
        return [self._of_keys(xp, span) for span in _blocks(xp, u)]

    def at(self, queries: range, keys: range) -> PlacedBand:
        return PlacedBand(self.band, queries, keys)

    def seeing(self) -> range:
        return self._queries_of(range(len(self.keys)))

    def _of_queries(self, xp: Any, span: slice) -> Block:
        before = self.queries.start - self.keys.start  # of the first query, counted from the first key
        keys = _within(before + span.start - self._behind, before + span.stop + self._ahead, len(self.keys))
        tiles = []
        for cut in _cuts(xp, keys):
            rows = self._queries_of(cut)
            tiles.append(self._tile(range(max(span.start, rows.start), min(span.stop, rows.stop)), cut))
        return Block(span, tiles)

    def _of_keys(self, xp: Any, span: slice) -> Block:
        cols = range(span.start, span.stop)
        return Block(span, [self._tile(rows, cols) for rows in _cuts(xp, self._queries_of(cols))])

    def _queries_of(self, keys: range) -> range:
        """The queries that see at least one of the keys."""
        if not keys:
            return range(0)
        before = self.keys.start - self.queries.start  # of the first key, counted from the first query
        return _within(before + keys.start - self._ahead, before + keys.stop + self._behind, len(self.queries))

    def _tile(self, rows: range, cols: range) -> Tile:
        first_query, first_key = self.queries.start + rows.start, self.keys.start + cols.start
        seen, unseen = first_query - first_key + self._ahead + 1, first_query - first_key - self._behind
        return Tile(slice(rows.start, rows.stop), slice(cols.start, cols.stop), seen, unseen, first_query, first_key)

    @property
    def _behind(self) -> int:
        return UNBOUNDED if self.band.behind is None else self.band.behind

    @property
    def _ahead(self) -> int:
        return UNBOUNDED if self.band.ahead is None else self.band.ahead


def _within(start: int, stop: int, length: int) -> range:
    """What of start .. stop - 1 lies within range(length)."""
    first = min(max(0, start), length)
    return range(first, max(first, min(stop, length)))


def _cuts(xp: Any, whole: range) -> Iterator[range]:
    """Neighbouring ranges of one size, give or take one, of about that of a tile's longer side."""
    longest = LONG_TILE if xp is np else DEVICE_LONG_TILE
    parts = -(-2 * len(whole) // (3 * longest))  # up to one and a half of it
    bounds = [whole.start + len(whole) * i // max(parts, 1) for i in range(parts + 1)]
    yield from (range(start, stop) for start, stop in pairwise(bounds))


def _blocks(xp: Any, length: int) -> list[slice]:
    """Neighbouring blocks of range(length).

    None has one row, if that can be had: the bits of a matrix-vector product depend on the strides of the matrix.
    """
    starts = list(range(0, length, TILE if xp is np else DEVICE_TILE))
    if len(starts) > 1 and length - starts[-1] == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in pairwise([*starts, length])]
