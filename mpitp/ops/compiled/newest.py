"""Attention of new tokens over KV caches, all heads in one call: the compiled twin of `ops/newest_attention.py`.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]; the newest token is the last of the u

Keys and values are read once for all query heads that use them, run by run of neighbouring places. Each head is
computed by itself, in an order that depends on u and d alone: not on its neighbours, nor on where the places lie.
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.dots import OF_W, block, lanes_of, packed_rows
from mpitp.ops.compiled.exp import exp_flushed
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import row_maximum, row_sum
from mpitp.ops.compiled.weighted_rows import VECTORS, add_weighted_rows

RUN = 64  # places: what is read of them for some columns is still in the first-level cache for the next ones
AHEAD_BYTES = 4096  # between the keys that are multiplied and those that are asked for

_four, _three, _two, _one = (block(OF_W, of_x) for of_x in (4, 3, 2, 1))
_single = block(1, 1)


def attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, past: int, kv_index: Array, scale: float, out: Array
) -> None:
    """Store k and v [g, d] at place `past` of keys and values [g, capacity, d], and write o [a, d] of q [a, d] to out.

    Query head j uses KV head kv_index[j]; heads that use one are neighbours.
    """
    _attend(q, k, v, keys, values, past, kv_index, scale, lanes_of(q.itemsize), out)


def attend_all(
    qkv: tuple[Array, Array, Array],
    pool: tuple[Array, Array],
    texts: Array,
    places: Array,
    window: int,
    kv_index: Array,
    scale: float,
    out: Array,
) -> None:
    """The same for the newest tokens of several texts, whose places in one pool [g, places, d] need not lie together.

    q, k and v [t, ..., d] are those of all rows. texts [b, 3]: a text's row, the number of tokens before, and where its
    places begin among `places`: those of position 0, 1, ... `window`: how many of the newest keys are seen; 0: all.
    """
    _attend_all(qkv, pool, texts, places, window, kv_index, scale, lanes_of(out.itemsize), out)


@compiled()
def _attend(
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    past: int,
    kv_index: Array,
    scale: float,
    lanes: int,
    out: Array,
) -> None:
    for kv in range(keys.shape[0]):
        keys[kv, past], values[kv, past] = row(k, kv), row(v, kv)
    runs = np.empty((past // RUN + 1, 2), np.int64)
    for n in range(runs.shape[0]):
        runs[n, 0], runs[n, 1] = n * RUN, min(RUN, past + 1 - n * RUN)
    _attend_runs(q, keys, values, runs, past + 1, kv_index, q.dtype.type(scale), lanes, out)


@compiled()
def _attend_all(
    qkv: tuple[Array, Array, Array],
    pool: tuple[Array, Array],
    texts: Array,
    places: Array,
    window: int,
    kv_index: Array,
    scale: float,
    lanes: int,
    out: Array,
) -> None:
    (q, k, v), (keys, values) = qkv, pool
    for b in range(texts.shape[0]):
        i, past, start = texts[b, 0], texts[b, 1], texts[b, 2]
        newest = places[start + past]
        for kv in range(keys.shape[0]):
            keys[kv, newest], values[kv, newest] = k[i, kv], v[i, kv]
        first = max(0, past + 1 - window) if window else 0
        runs = _runs(places[start + first : start + past + 1])
        _attend_runs(q[i], keys, values, runs, past + 1 - first, kv_index, q.dtype.type(scale), lanes, out[i])


@compiled(inline=True)
def _runs(places: Array) -> Array:
    """Runs of neighbours, at most RUN long, int64 [n, 2]: the first place, and how many."""
    runs = np.empty((places.shape[0], 2), np.int64)
    n = -1
    for j in range(places.shape[0]):
        if n >= 0 and runs[n, 1] < RUN and places[j] == runs[n, 0] + runs[n, 1]:
            runs[n, 1] += 1
        else:
            n += 1
            runs[n, 0], runs[n, 1] = places[j], 1
    return runs[: n + 1]


@compiled(inline=True)
def _attend_runs(
    q: Array, keys: Array, values: Array, runs: Array, u: int, kv_index: Array, factor: float, lanes: int, out: Array
) -> None:
    """o [a, d] of q [a, d] over u places of keys and values [g, places, d], which lie in these runs."""
    a, d = q.shape
    x = packed_rows(q, (d + lanes - 1) // lanes * lanes)
    p = np.empty((a, u), q.dtype)
    start = 0
    while start < a:
        kv, stop = kv_index[start], start + 1
        while stop < a and kv_index[stop] == kv:
            stop += 1
        at = 0
        for n in range(runs.shape[0]):
            _score(x, start, stop, keys[kv], runs[n, 0], runs[n, 1], p, at)
            at += runs[n, 1]
        for head in range(start, stop):
            _softmax(row(p, head), factor)
            out[head] = 0.0
        at = 0
        for n in range(runs.shape[0]):
            add_weighted_rows(p, start, stop, at, values[kv], runs[n, 0], runs[n, 1], out, VECTORS * lanes)
            at += runs[n, 1]
        start = stop


@compiled(inline=True)
def _score(x: Array, start: int, stop: int, keys: Array, first: int, count: int, p: Array, at: int) -> None:
    """p[start:stop, at:at + count] of the heads start .. stop - 1 and `count` keys from `first` on."""
    whole = count - count % OF_W
    for j in range(0, whole, OF_W):
        r = start
        while stop - r >= 4:
            _four(keys, first + j, x, r, p, at + j, AHEAD_BYTES)
            r += 4
        if stop - r == 3:
            _three(keys, first + j, x, r, p, at + j, AHEAD_BYTES)
        elif stop - r == 2:
            _two(keys, first + j, x, r, p, at + j, AHEAD_BYTES)
        elif stop - r == 1:
            _one(keys, first + j, x, r, p, at + j, AHEAD_BYTES)
    for j in range(whole, count):
        for r in range(start, stop):
            _single(keys, first + j, x, r, p, at + j, AHEAD_BYTES)


@compiled(inline=True)
def _softmax(p: Array, factor: float) -> None:
    """softmax(factor * p) of a row [u], in its place."""
    for j in range(p.shape[0]):
        p[j] *= factor
    greatest = row_maximum(p)
    for j in range(p.shape[0]):
        p[j] = exp_flushed(p[j] - greatest)
    total = row_sum(p)
    for j in range(p.shape[0]):
        p[j] /= total
