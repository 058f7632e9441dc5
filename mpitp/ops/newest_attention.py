r"""Attention of one new token over the keys and values of those before it: all heads of a sequence in a few calls.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]; the newest token sees every key, or the
                                                last ones only: a window

Generation spends its time in calls on tiny arrays when each head goes through the tiles of `attention.py`. Here the
softmax runs over all heads at once. The products stay one vector times one matrix a head, so that a head's bits don't
depend on which other heads its rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import widened
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import CAUSAL, Band, Sight


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Which KV head each of this rank's query heads uses, what scores are multiplied by, and then become.

    `window`: how many of the newest keys are seen; 0: all.
    """

    kv_index: np.ndarray  # [a], the local KV head of each query head
    neighbours: tuple[tuple[int, slice], ...]  # (local KV head, the neighbouring query heads that use it)
    scale: float
    window: int = 0
    change: ScoreChange | None = None

    @classmethod
    def of(
        cls, kv_index: Sequence[int], scale: float, sight: Sight = CAUSAL, change: ScoreChange | None = None
    ) -> QueryGroups:
        """From the KV head of each query head.

        >>> QueryGroups.of([0, 0, 0, 1, 1], 0.5).neighbours
        ((0, slice(0, 3, None)), (1, slice(3, 5, None)))
        """
        neighbours, start = [], 0
        for kv, heads in groupby(kv_index):
            stop = start + len(list(heads))
            neighbours.append((kv, slice(start, stop)))
            start = stop
        window = sight.behind + 1 if isinstance(sight, Band) and sight.behind is not None else 0
        return cls(np.array(kv_index, np.int64), tuple(neighbours), scale, window, change)


def attend_newest(
    newest: tuple[Array, Array, Array], stores: tuple[Array, Array], past: int, groups: QueryGroups, out: Array
) -> None:
    """Store k and v [g, d] of `newest` = q, k, v at place `past` of the stores; o [a, d] of q [a, d] goes to `out`.

    stores: keys and values [g, capacity, d], of which the first `past` places are filled.
    """
    first = max(0, past + 1 - groups.window) if groups.window else 0
    (q, k, v), (keys, values), past = newest, (store[:, first:] for store in stores), past - first
    xp = array_module(q)
    if is_accelerated(xp, q.dtype) and groups.change is None:
        from mpitp.ops.compiled.newest import attend

        attend(q, k, v, keys, values, past, groups.kv_index, groups.scale, out)
        return
    keys[:, past], values[:, past] = k, v
    keys, values = widened(keys[:, : past + 1]), widened(values[:, : past + 1])  # [g, u, d]
    q = (widened(q) * groups.scale)[:, None]  # [a, 1, d]
    o = out[:, None] if q.dtype == out.dtype else xp.empty(q.shape, q.dtype)
    p = xp.empty((q.shape[0], 1, past + 1), q.dtype)
    for kv, heads in groups.neighbours:
        xp.matmul(q[heads], keys[kv].T, out=p[heads])
    if groups.change is not None:
        newest_at = first + past
        for head in range(len(p)):
            groups.change.forward(p[head], head, range(newest_at, newest_at + 1), range(first, newest_at + 1))
    p -= p.max(axis=2, keepdims=True)
    xp.exp(p, out=p)
    for kv, heads in groups.neighbours:
        xp.matmul(p[heads], values[kv], out=o[heads])
    o /= p.sum(axis=2, keepdims=True)
    if o.dtype != out.dtype:
        out[...] = o[:, 0]


def attend_newest_of_all(
    qkv: tuple[Array, Array, Array],
    pool: tuple[Array, Array],
    texts: np.ndarray,
    places: np.ndarray,
    groups: QueryGroups,
    out: Array,
) -> None:
    """The same for the newest tokens of several texts in one compiled call, wherever in a pool their places lie.

    q, k and v [t, ..., d], pool: keys and values [g, places, d]. texts [b, 3]: a text's row, the number of tokens
    before it, and where its places begin among `places`, those of position 0, 1, ... Only where `takes_all` says so.
    """
    from mpitp.ops.compiled.newest import attend_all

    attend_all(qkv, pool, texts, places, groups.window, groups.kv_index, groups.scale, out)


def takes_all(q: Array, groups: QueryGroups) -> bool:
    """Whether `attend_newest_of_all` can be called."""
    return is_accelerated(array_module(q), q.dtype) and groups.change is None
