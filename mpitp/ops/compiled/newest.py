"""Attention of new tokens over KV caches, all heads in one call: the compiled twin of `ops/newest_attention.py`.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]; the newest token is the last of the u

Each head is computed by itself, in an order that depends on u and d alone.
"""

from __future__ import annotations

import numpy as np

from mpitp.backend.accelerator import compiled
from mpitp.backend.arrays import Array
from mpitp.ops.compiled.exp import exp_flushed
from mpitp.ops.compiled.primitives import row
from mpitp.ops.compiled.rows import dot, row_maximum, row_sum


@compiled()
def attend(
    q: Array, k: Array, v: Array, keys: Array, values: Array, past: int, kv_index: Array, scale: float, out: Array
) -> None:
    """Store k and v [g, d] at place `past` of keys and values [g, capacity, d], and write o [a, d] of q [a, d] to out.

    Query head j uses KV head kv_index[j].
    """
    for kv in range(keys.shape[0]):
        keys[kv, past], values[kv, past] = row(k, kv), row(v, kv)
    u, factor = past + 1, q.dtype.type(scale)
    p = np.empty(u, q.dtype)
    for head in range(q.shape[0]):
        seen_keys, seen_values = keys[kv_index[head], :u], values[kv_index[head], :u]  # [u, d]
        q_row, o = row(q, head), row(out, head)
        for i in range(u):
            p[i] = dot(q_row, row(seen_keys, i)) * factor
        greatest = row_maximum(p)
        for i in range(u):
            p[i] = exp_flushed(p[i] - greatest)
        total = row_sum(p)
        o[:] = 0.0
        for i in range(u):
            v_row, share = row(seen_values, i), p[i] / total
            for j in range(o.shape[0]):
                o[j] += share * v_row[j]


@compiled()
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
    (q, k, v), (keys, values) = qkv, pool
    factor = q.dtype.type(scale)
    for b in range(texts.shape[0]):
        i, past, start = texts[b, 0], texts[b, 1], texts[b, 2]
        newest = places[start + past]
        for kv in range(keys.shape[0]):
            keys[kv, newest], values[kv, newest] = k[i, kv], v[i, kv]
        first = max(0, past + 1 - window) if window else 0
        seen = places[start + first : start + past + 1]
        u = seen.shape[0]
        p = np.empty(u, q.dtype)
        q_rows, o_rows = q[i], out[i]
        for head in range(q.shape[1]):
            of_keys, of_values = keys[kv_index[head]], values[kv_index[head]]
            q_row, o = row(q_rows, head), row(o_rows, head)
            for j in range(u):
                p[j] = dot(q_row, row(of_keys, seen[j])) * factor
            greatest = row_maximum(p)
            for j in range(u):
                p[j] = exp_flushed(p[j] - greatest)
            total = row_sum(p)
            o[:] = 0.0
            for j in range(u):
                v_row, share = row(of_values, seen[j]), p[j] / total
                for c in range(o.shape[0]):
                    o[c] += share * v_row[c]
