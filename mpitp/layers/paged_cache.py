"""Keys and values of many texts in one pool of places, a store a layer: a text's places need not lie together.

    pool of a layer     keys and values [g/tp, places, d], of this rank's KV heads
    a text's table      extents (start, stop) of places, one after the other: position 0 of the text lies at the first

Places are handed out in blocks by `infer/blocks.py`; neighbouring blocks are one extent. A text in one extent is read
where it lies. One in several is gathered first, so attention sees the same numbers in the same order: where a text lies
can't change a bit. Where kernels are compiled, the newest tokens of all texts attend in one call, without a copy.

`one_by_one` (the invariant mode): the rows of a prompt attend one at a time, as the newest token does, so a row's bits
depend on its position and on what is before it, not on the pieces in which a prompt was taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.cached_attention import Caches
from mpitp.layers.kv_cache import Stores, stored
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Run
from mpitp.ops.attention import attention_forward
from mpitp.ops.newest_attention import attend_newest, attend_newest_of_all, takes_all

if TYPE_CHECKING:
    from mpitp.layers.attention import AttentionHeads

Extent = tuple[int, int]
Table = Sequence[Extent]


class PagedCaches(Caches):
    """A pool of `num_places` for each layer of attention, made when it first attends.

    `tables`: of the runs of the next pass, by their slots; whoever runs a pass sets them.
    """

    def __init__(self, num_places: int, *, one_by_one: bool = False) -> None:
        self.num_places, self.one_by_one = num_places, one_by_one
        self.tables: Sequence[Table] = ()
        self._pools: dict[AttentionHeads, Stores] = {}
        self._newest: tuple[Pass, _Newest] | None = None  # of the pass that is under way

    def attend(self, layer: AttentionHeads, run: Pass, qkv: tuple[Array, Array, Array], out: Array) -> list[Array]:
        """o [t, a/tp, d] of q, k and v [t, ..., d] goes to `out`; nothing is kept for a backward."""
        q, k, v = qkv
        pool = self._pool(layer, q)
        together = takes_all(q, layer.query_groups)
        if together and self._newest_of(run).texts.size:
            self.attend_newest(layer, run, qkv, out)
        for each, rows in run.rows.places():
            if together and each.length == 1:
                continue
            stores, is_copy = _whole(pool, self.tables[each.slot], each.first + each.length)
            if each.length == 1 or self.one_by_one:
                for row in range(rows.start, rows.stop):
                    past = each.first + row - rows.start
                    attend_newest((q[row], k[row], v[row]), stores, past, layer.query_groups, out[row])
            else:
                keys, values = stored(stores, each.first, k[rows], v[rows])
                attention_forward(q[rows], keys, values, layer.head_map, sight=layer.sight, out=out[rows])
            if is_copy:
                _put(pool, self.tables[each.slot], each, k[rows], v[rows])
        return []

    def attend_newest(self, layer: AttentionHeads, run: Pass, qkv: tuple[Array, Array, Array], out: Array) -> None:
        """`attend` of the runs of one new token alone, in one compiled call; only where `takes_all` says so."""
        newest = self._newest_of(run)
        attend_newest_of_all(qkv, self._pool(layer, qkv[0]), newest.texts, newest.places, layer.query_groups, out)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` places, of all layers, from `source` on to `target` on."""
        for stores in self._pools.values():
            for store in stores:
                store[:, target : target + count] = store[:, source : source + count]

    @property
    def nbytes(self) -> int:
        """Bytes set aside by all layers; the system gives memory only for places that have been used."""
        return sum(store.nbytes for stores in self._pools.values() for store in stores)

    def _newest_of(self, run: Pass) -> _Newest:
        """Made once a pass and not once a layer."""
        if self._newest is None or self._newest[0] is not run:
            self._newest = run, _Newest.of(run, self.tables)
        return self._newest[1]

    def _pool(self, layer: AttentionHeads, like: Array) -> Stores:
        if layer not in self._pools:
            shape, xp = (len(layer.heads.kv), self.num_places, layer.head_dim), array_module(like)
            self._pools[layer] = xp.zeros(shape, like.dtype), xp.zeros(shape, like.dtype)
        return self._pools[layer]


@dataclass(frozen=True, slots=True)
class _Newest:
    """The texts of a pass that have one new token: texts [b, 3] (row, tokens before, where its places begin among
    `places`), places [...] of their positions 0, 1, ..., text after text.
    """

    texts: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, run: Pass, tables: Sequence[Table]) -> _Newest:
        texts, pieces, start = [], [np.zeros(0, np.int64)], 0
        for each, rows in run.rows.places():
            if each.length == 1:
                texts.append((rows.start, each.first, start))
                pieces += [np.arange(a, b, dtype=np.int64) for a, b in tables[each.slot]]
                start += sum(b - a for a, b in tables[each.slot])
        return cls(np.array(texts, np.int64).reshape(-1, 3), np.concatenate(pieces))


def _whole(pool: Stores, table: Table, length: int) -> tuple[Stores, bool]:
    """Keys and values [g, at least length, d] of a text: a view of the pool, or (True) a copy."""
    start, stop = table[0]
    if stop - start >= length:
        return (pool[0][:, start:stop], pool[1][:, start:stop]), False
    keys, values = (_gathered(store, table) for store in pool)
    return (keys, values), True


def _gathered(store: Array, table: Table) -> Array:
    """[g, room, d], with a gap behind each head as in a pool: compiled kernels then take it for the same kind."""
    g, _, d = store.shape
    room = sum(b - a for a, b in table)
    whole = array_module(store).empty((g, room + 1, d), store.dtype)[:, :room]
    for (a, b), rows in _pieces(table, 0, room):
        whole[:, rows] = store[:, a:b]
    return whole


def _put(pool: Stores, table: Table, run: Run, k: Array, v: Array) -> None:
    """Write the new k and v [s, g, d] of a run into the pool."""
    for (a, b), rows in _pieces(table, run.first, run.first + run.length):
        pool[0][:, a:b], pool[1][:, a:b] = k[rows].transpose(1, 0, 2), v[rows].transpose(1, 0, 2)


def _pieces(table: Table, first: int, stop: int) -> Iterator[tuple[Extent, slice]]:
    """The places of positions first .. stop - 1, extent by extent, each with the rows (from 0) that go there.

    >>> list(_pieces([(32, 48), (0, 16)], 14, 18))
    [((46, 48), slice(0, 2, None)), ((0, 2), slice(2, 4, None))]
    """
    begin = 0  # position at the extent's first place
    for a, b in table:
        low, high = max(first, begin), min(stop, begin + b - a)
        if low < high:
            yield (a + low - begin, a + high - begin), slice(low - first, high - first)
        begin += b - a
