r"""Attention of one new token over a KV cache: all heads of a sequence in a few calls.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]; the newest token sees every key

Generation spends its time in calls on tiny arrays when each head goes through the tiles of `ops/attention.py`. Here the
softmax runs over all heads at once. The products stay one vector times one matrix a head, so that a head's bits don't
depend on which other heads its rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from mpitp.backend.arrays import array_module

Array = Any


def query_groups(kv_index: Sequence[int]) -> tuple[tuple[int, slice], ...]:
    """(local KV head, the neighbouring query heads that use it) of `kv_index`, the KV head of each query head.

    >>> query_groups([0, 0, 0, 1, 1])
    ((0, slice(0, 3, None)), (1, slice(3, 5, None)))
    """
    groups, start = [], 0
    for kv, heads in groupby(kv_index):
        stop = start + len(list(heads))
        groups.append((kv, slice(start, stop)))
        start = stop
    return tuple(groups)


def attend_newest(
    q: Array, keys: Array, values: Array, groups: Sequence[tuple[int, slice]], scale: float, out: Array
) -> None:
    """Write o [a, d] of q [a, d] over keys and values [u, g, d] to `out`; groups from `query_groups`."""
    xp = array_module(q)
    keys_of, values_of = keys.transpose(1, 0, 2), values.transpose(1, 0, 2)  # [g, u, d], as the cache stores them
    q, o = (q * scale)[:, None], out[:, None]  # [a, 1, d]
    p = xp.empty((q.shape[0], 1, keys.shape[0]), q.dtype)
    for kv, heads in groups:
        xp.matmul(q[heads], keys_of[kv].T, out=p[heads])
    p -= p.max(axis=2, keepdims=True)
    xp.exp(p, out=p)
    for kv, heads in groups:
        xp.matmul(p[heads], values_of[kv], out=o[heads])
    o /= p.sum(axis=2, keepdims=True)
