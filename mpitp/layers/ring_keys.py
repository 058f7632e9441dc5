r"""Attention of sequences that are cut over ranks, keys and values going round (Ring Attention: Liu et al. 2023).

Rank c of p holds pieces c and 2p-1-c of every sequence, an early and a late one (`Rows.cut`), so that under a causal
mask all ranks have as much to do. In step r = 0, 1, ... p-1 a rank has the k and v of rank c - r:

    forward     k, v start on their way to rank c + 1; o and lse of the queries here over these keys are joined with
                those so far (`online_softmax.py`); the next k and v are waited for
    backward    the same way round; dk and dv of these keys, of the queries here, are added to what came with them, and
                follow them to rank c + 1. After p steps they are at home.

Only own k, v, o and lse are kept. Pairs of pieces of which no query sees a key are skipped. Positions are those in the
sequence, so that sight, dropout and what changes scores are as on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.comm.group import Group, Pending
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.keys import Attended, Heads, Keys, check_cut
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Rows
from mpitp.ops.attention import Kept, attention_backward, attention_forward
from mpitp.ops.online_softmax import join_finished
from mpitp.ops.sight import Sight

if TYPE_CHECKING:
    from mpitp.layers.attention import AttentionHeads

TAG_KEYS, TAG_GRADIENTS = 11, 12


@dataclass(frozen=True, slots=True)
class Meeting:
    """Queries of a run here, and the keys of a run of the same sequence that they see some of.

    `queries` are rows of this rank, `keys` of the rank whose keys are here.
    """

    queries: slice
    keys: slice
    sight: Sight
    mask: Any


class RingKeys(Keys):
    """Keys and values go from rank to rank of `group`, whose rows are `Rows.everyone`."""

    axis = "cp"

    def __init__(self, group: Group) -> None:
        self.group = group

    def attend(self, layer: AttentionHeads, run: Pass, qkv: Heads, out: Array) -> Array:
        """lse [a/tp, t]."""
        check_cut(run.rows, self.group.size)
        q, k, v = qkv
        xp, g = array_module(q), k.shape[1]
        o = xp.zeros(q.shape, wide_dtype(q.dtype))
        lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, o.dtype)
        kv = xp.concatenate((k, v), axis=1)
        met: list[slice] = []  # queries that have seen some keys
        for source in self._sources():
            coming = self._start_keys(run.rows, kv, source)
            for pair in self._meetings(layer, run, source, q):
                at, k, v = pair.queries, kv[pair.keys, :g], kv[pair.keys, g:]
                made = attention_forward(q[at], k, v, layer.head_map, sight=pair.sight, dropout=pair.mask)
                if any(at.start < other.stop and other.start < at.stop for other in met):
                    join_finished(o[at], lse[:, at], *made)
                else:
                    o[at], lse[:, at] = made
                met.append(at)
            kv = coming.wait()
        out[...] = o
        return lse

    def backward(self, layer: AttentionHeads, run: Pass, do: Array, kept: Attended, grads: Heads) -> None:
        dq, dk, dv = grads
        xp, slots = array_module(do), dk.shape[1]
        total_dq = xp.zeros(dq.shape, wide_dtype(dq.dtype))
        kv = xp.concatenate((kept.k, kept.v), axis=1)
        gradients: Pending | None = None  # of the keys that are here, from the ranks before
        for source in self._sources():
            coming = self._start_keys(run.rows, kv, source)
            dkv = xp.zeros((self._count(run.rows, source), 2 * slots, dq.shape[2]), total_dq.dtype)
            for pair in self._meetings(layer, run, source, do):
                made = _gradients_of(layer, pair, do, kept, kv)
                total_dq[pair.queries] += made[0]
                dkv[pair.keys, :slots] += made[1]
                dkv[pair.keys, slots:] += made[2]
            if gradients is not None:
                dkv += gradients.wait()
            gradients = self._start_shift(dkv, self._count(run.rows, self._before(source)), TAG_GRADIENTS)
            kv = coming.wait()
        assert gradients is not None
        home = gradients.wait()
        dq[...], dk[...], dv[...] = total_dq, home[:, :slots], home[:, slots:]

    def check(self, incoming: ArrayType) -> None:
        incoming.expect(self.axis, VARYING, "q, k and v", "keys go round among ranks that have other rows")

    def sends(self, layer: AttentionHeads) -> tuple[Send, ...]:
        p, d = self.group.size, layer.head_dim
        kv, slots = 2 * len(layer.heads.kv) * d, 2 * layer.replicas.count * d
        moves = [(FORWARD, kv, p - 1, False), (BACKWARD, kv, p - 1, False), (BACKWARD, slots, p, True)]
        return tuple(
            Send(phase, op, width, "2 t g d s", self.axis, 0, n, is_wide)
            for phase, width, n, is_wide in moves
            for op in ("send", "recv")
        )

    def _sources(self) -> Iterator[int]:
        """Whose keys are here, step by step: own ones, then those of the ranks before."""
        yield from ((self.group.rank - step) % self.group.size for step in range(self.group.size))

    def _before(self, rank: int) -> int:
        return (rank - 1) % self.group.size

    def _count(self, rows: Rows, rank: int) -> int:
        """Rows of a rank."""
        return sum(run.length for run in rows.everyone[rank])

    def _start_keys(self, rows: Rows, kv: Array, source: int) -> Pending:
        """Hand on the keys of `source`, and take those of the rank before it; in the last step there are none."""
        before = self._before(source)
        if before == self.group.rank:
            return Pending.done(kv)
        return self._start_shift(kv, self._count(rows, before), TAG_KEYS)

    def _start_shift(self, x: Array, count: int, tag: int) -> Pending:
        """Send x [t, ...] to the next rank; what the rank before sends, `count` rows."""
        like = array_module(x).empty((count, *x.shape[1:]), x.dtype)
        coming = self.group.start_recv(like, self._before(self.group.rank), tag)
        going = self.group.start_send(x, (self.group.rank + 1) % self.group.size, tag)

        def wait() -> Array:
            result = coming.wait()
            going.wait()
            return result

        return Pending(wait)

    def _meetings(self, layer: AttentionHeads, run: Pass, source: int, like: Array) -> Iterator[Meeting]:
        """Pairs of a run here and one of `source` that belong to the same sequence, where queries see keys."""
        theirs = list(Rows(run.rows.everyone[source]).places())
        for number, (mine, rows) in enumerate(run.rows.places()):
            for other, keys in theirs[number - number % 2 : number - number % 2 + 2]:
                placed = layer.sight.at(mine.positions, other.positions)
                seeing = placed.seeing()
                if seeing:
                    positions = mine.positions[seeing.start : seeing.stop]
                    firsts = positions.start, other.first
                    mask = layer.dropout.masks(run, mine, layer.heads, like, firsts)
                    queries = slice(rows.start + seeing.start, rows.start + seeing.stop)
                    yield Meeting(queries, keys, layer.sight.at(positions, other.positions), mask)


def _gradients_of(layer: AttentionHeads, pair: Meeting, do: Array, kept: Attended, kv: Array) -> Heads:
    """dq, dk and dv of one meeting; kv has the keys' k and v."""
    at, g = pair.queries, kept.k.shape[1]
    k, v = kv[pair.keys, :g], kv[pair.keys, g:]
    of_pair = Kept(kept.q[at], k, v, kept.o[at], kept.more[:, at])
    return attention_backward(do[at], of_pair, layer.head_map, sight=pair.sight, dropout=pair.mask)
