r"""Attention of one new token over a KV cache: all heads of a sequence in a few calls.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]; the newest token sees every key

Generation spends its time in calls on tiny arrays when each head goes through the tiles of `ops/attention.py`. Here the
softmax runs over all heads at once. The products stay one vector times one matrix a head, so that a head's bits don't
depend on which other heads its rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import array_module
from mpitp.layers.kv_cache import LayerCache

Array = Any


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Which KV head each of this rank's query heads uses."""

    kv_index: np.ndarray  # [a], the local KV head of each query head
    neighbours: tuple[tuple[int, slice], ...]  # (local KV head, the neighbouring query heads that use it)

    @classmethod
    def of(cls, kv_index: Sequence[int]) -> QueryGroups:
        """From the KV head of each query head.

        >>> QueryGroups.of([0, 0, 0, 1, 1]).neighbours
        ((0, slice(0, 3, None)), (1, slice(3, 5, None)))
        """
        neighbours, start = [], 0
        for kv, heads in groupby(kv_index):
            stop = start + len(list(heads))
            neighbours.append((kv, slice(start, stop)))
            start = stop
        return cls(np.array(kv_index, np.int64), tuple(neighbours))


def attend_newest(
    q: Array,
    k: Array,
    v: Array,
    cache: LayerCache,
    index: int,
    past: int,
    groups: QueryGroups,
    scale: float,
    out: Array,
) -> None:
    """Store k and v [g, d] as token `past` of the cache's sequence `index`; o [a, d] of q [a, d] goes to `out`."""
    xp = array_module(q)
    if is_accelerated(xp, q.dtype):
        from mpitp.ops.compiled.newest import attend

        attend(q, k, v, *cache.stores(index, past + 1), past, groups.kv_index, scale, out)
        return
    keys, values = cache.extend(index, past, k[None], v[None])
    keys_of, values_of = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)  # [g, u, d], as the cache stores them
    q, o = (q * scale)[:, None], out[:, None]  # [a, 1, d]
    p = xp.empty((q.shape[0], 1, keys.shape[0]), q.dtype)
    for kv, heads in groups.neighbours:
        xp.matmul(q[heads], keys_of[kv].T, out=p[heads])
    p -= p.max(axis=2, keepdims=True)
    xp.exp(p, out=p)
    for kv, heads in groups.neighbours:
        xp.matmul(p[heads], values_of[kv], out=o[heads])
    o /= p.sum(axis=2, keepdims=True)
