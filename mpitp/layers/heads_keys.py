r"""Attention of sequences that are cut over ranks, rows exchanged for heads (DeepSpeed Ulysses: Jacobs et al. 2023).

Each rank of cp gets all rows of the sequences for its share of the query heads that its place along tp has, computes
attention as one rank does, and gives each rank its rows back:

    forward     q, k, v by rows  -- all-to-all -->  by heads,   o by heads  -- all-to-all -->  by rows
    backward    do by rows  -- all-to-all -->  by heads,   dq, dk, dv by heads  -- all-to-all -->  by rows

Query heads are dealt one by one (raggedly; with more ranks than heads some have none), each with the KV head that it
uses. A KV head that several ranks use goes to each of them, and the dk and dv of these are added up where its rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.comm.group import Group
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.keys import Attended, Heads, Keys, check_cut
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.partition import piece_of
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Rows, Run
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.score_change import ScoreChange

if TYPE_CHECKING:
    from mpitp.layers.attention import AttentionHeads


@dataclass(frozen=True, slots=True)
class Dealt:
    """The heads of one rank along cp: query heads, their KV heads and their slots of dk and dv, by local number."""

    query: range
    kv: range
    slots: range

    @classmethod
    def of(cls, head_map: HeadMap, rank: int, ranks: int) -> Dealt:
        """A rank's share of the heads of a map."""
        query = piece_of(len(head_map.kv_index), rank, ranks)
        assert head_map.grad_index is not None
        return cls(query, _span(head_map.kv_index, query), _span(head_map.grad_index, query))

    def map(self, whole: HeadMap) -> HeadMap:
        """The same heads, counted from the rank's own first ones."""
        assert whole.grad_index is not None
        kv_index = [whole.kv_index[j] - self.kv.start for j in self.query]
        grad_index = [whole.grad_index[j] - self.slots.start for j in self.query]
        change = None if whole.change is None else _FromHead(whole.change, self.query.start)
        return HeadMap(kv_index, whole.scale, grad_index, len(self.slots), change)

    def mask(self, layer: AttentionHeads, run: Pass, sequence: Run, like: Array) -> Callable[..., Array] | None:
        """Dropout's, for these heads."""
        of_all = layer.dropout.masks(run, sequence, layer.heads, like)
        return None if of_all is None else lambda head, queries, keys: of_all(self.query.start + head, queries, keys)


def _span(index: Any, query: range) -> range:
    used = [index[j] for j in query]
    return range(min(used), max(used) + 1) if used else range(0)


@dataclass(frozen=True, slots=True)
class _FromHead(ScoreChange):
    """A change whose heads are counted from `first`."""

    change: ScoreChange
    first: int

    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        self.change.forward(scores, self.first + head, queries, keys)

    def backward(self, dscores: Array, scores: Array | None, head: int, queries: range, keys: range) -> None:
        self.change.backward(dscores, scores, self.first + head, queries, keys)


@dataclass(frozen=True, slots=True)
class Order:
    """Rows as the ranks hold them, one after the other, and as the sequences have them.

    `counts`: rows of each rank; `to_sequences` and `to_ranks`: which row of the one order each of the other one is.
    """

    sequences: Rows
    counts: list[int]
    to_sequences: Array
    to_ranks: Array

    @classmethod
    def of(cls, rows: Rows, like: Array) -> Order:
        """From the runs of every rank."""
        xp, whole = array_module(like), rows.uncut()
        begins = [place.start - run.first for run, place in whole.places()]
        runs = [(run, begins[i // 2]) for own in rows.everyone for i, run in enumerate(own)]
        to_ranks = np.concatenate([np.arange(run.length) + run.first + begin for run, begin in runs])
        counts = [sum(run.length for run in own) for own in rows.everyone]
        return cls(whole, counts, from_host(np.argsort(to_ranks), xp), from_host(to_ranks, xp))


@dataclass(frozen=True, slots=True)
class Whole:
    """What backward wants back: q, k, v and o of whole sequences for this rank's heads, the lse of each, and the order
    of their rows.
    """

    heads: Heads
    o: Array
    lse: list[Array]
    order: Order


class HeadsKeys(Keys):
    """Rows are exchanged for heads among the ranks of `group`, whose rows are `Rows.everyone`."""

    axis = "cp"

    def __init__(self, group: Group) -> None:
        self.group = group

    def attend(self, layer: AttentionHeads, run: Pass, qkv: Heads, out: Array) -> Whole:
        check_cut(run.rows, self.group.size)
        dealt, order = self._dealt(layer), Order.of(run.rows, out)
        own = dealt[self.group.rank]
        q, k, v = self._to_heads(qkv, [(each.query, each.kv, each.kv) for each in dealt], order)
        o, lse = array_module(q).empty(q.shape, q.dtype), []
        for each, rows in order.sequences.places():
            mask, of_run = own.mask(layer, run, each, out), (q[rows], k[rows], v[rows])
            made = attention_forward(*of_run, own.map(layer.head_map), sight=layer.sight, dropout=mask, out=o[rows])
            lse.append(made[1])
        for share, part in zip(dealt, self._to_rows(o, order), strict=True):
            out[:, share.query.start : share.query.stop] = part
        return Whole((q, k, v), o, lse, order)

    def backward(self, layer: AttentionHeads, run: Pass, do: Array, kept: Attended, grads: Heads) -> None:
        dealt, whole = self._dealt(layer), kept.more
        own = dealt[self.group.rank]
        (do,) = self._to_heads((do,), [(each.query,) for each in dealt], whole.order)
        xp, (total, a, d) = array_module(do), do.shape
        joined = xp.empty((total, a + 2 * len(own.slots), d), do.dtype)
        parts = joined[:, :a], joined[:, a : a + len(own.slots)], joined[:, a + len(own.slots) :]
        for i, (each, rows) in enumerate(whole.order.sequences.places()):
            (q, k, v), mask = (x[rows] for x in whole.heads), own.mask(layer, run, each, do)
            of_run = Kept(q, k, v, whole.o[rows], whole.lse[i])
            out = parts[0][rows], parts[1][rows], parts[2][rows]
            attention_backward(do[rows], of_run, own.map(layer.head_map), sight=layer.sight, dropout=mask, out=out)
        for grad in grads:
            grad[...] = 0.0
        for share, part in zip(dealt, self._to_rows(joined, whole.order), strict=True):
            start = 0
            for grad, heads in zip(grads, (share.query, share.slots, share.slots), strict=True):
                grad[:, heads.start : heads.stop] += part[:, start : start + len(heads)]
                start += len(heads)

    def check(self, incoming: ArrayType) -> None:
        incoming.expect(self.axis, VARYING, "q, k and v", "rows are exchanged among ranks that have other ones")

    def sends(self, layer: AttentionHeads) -> tuple[Send, ...]:
        a, d, dealt = layer.heads.query.size, layer.head_dim, self._dealt(layer)
        kv, slots = 2 * sum(len(each.kv) for each in dealt), 2 * sum(len(each.slots) for each in dealt)
        widths = [(FORWARD, a + kv), (FORWARD, a), (BACKWARD, a), (BACKWARD, a + slots)]
        return tuple(Send(phase, "all_to_all", n * d, "t (a+2g) d s", self.axis) for phase, n in widths)

    def _dealt(self, layer: AttentionHeads) -> list[Dealt]:
        """The heads of every rank of cp."""
        return [Dealt.of(layer.head_map, rank, self.group.size) for rank in range(self.group.size)]

    def _to_heads(self, arrays: Sequence[Array], heads: Sequence[Sequence[range]], order: Order) -> list[Array]:
        """Own rows of all heads to all rows of own heads; `heads`: those of each array that each rank gets."""
        xp = array_module(arrays[0])
        blocks = [
            xp.concatenate([x[:, own.start : own.stop] for x, own in zip(arrays, each, strict=True)], axis=1)
            for each in heads
        ]
        joined = xp.concatenate(self.group.all_to_all(blocks))[order.to_sequences]
        bounds = [0, *accumulate(len(own) for own in heads[self.group.rank])]
        return [joined[:, start:stop] for start, stop in pairwise(bounds)]

    def _to_rows(self, x: Array, order: Order) -> list[Array]:
        """All rows of own heads to own rows of all heads: those of each rank."""
        by_rank, bounds = x[order.to_ranks], [0, *accumulate(order.counts)]
        return self.group.all_to_all([by_rank[start:stop] for start, stop in pairwise(bounds)])
