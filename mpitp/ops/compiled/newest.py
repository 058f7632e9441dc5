"""Attention of one new token over a KV cache, all heads in one call: the compiled twin of `layers/cached_attention.py`.

    o_h = softmax(scale * q_h k_g^T) v_g        q_h [d], k_g and v_g [u, d]

Each head is computed by itself, in an order that depends on u and d alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitp.backend.accelerator import ROW_SUM, compiled
from mpitp.ops.compiled.primitives import row

Array = Any


@compiled(ROW_SUM)
def attend(q: Array, keys: Array, values: Array, kv_index: Array, scale: float, out: Array) -> None:
    """Write o [a, d] of q [a, d] over keys and values [u, g, d]; query head j uses KV head kv_index[j]."""
    u, p = keys.shape[0], np.empty(keys.shape[0], q.dtype)
    for head in range(q.shape[0]):
        k, v = keys[:, kv_index[head]], values[:, kv_index[head]]  # [u, d]
        greatest = _scores(row(q, head), k, scale, p)
        total = q.dtype.type(0)
        for i in range(u):
            p[i] = np.exp(p[i] - greatest)
            total += p[i]
        o = row(out, head)
        o[:] = 0
        for i in range(u):
            v_row, weight = row(v, i), p[i]
            for j in range(o.shape[0]):
                o[j] += weight * v_row[j]
        for j in range(o.shape[0]):
            o[j] /= total


@compiled(ROW_SUM, inline=True)
def _scores(q: Array, keys: Array, scale: float, p: Array) -> Any:
    """p [u] = scale * keys [u, d] @ q [d]; the greatest of them."""
    greatest = q.dtype.type(-np.inf)
    for i in range(keys.shape[0]):
        k, score = row(keys, i), q.dtype.type(0)
        for j in range(q.shape[0]):
            score += q[j] * k[j]
        p[i] = score * q.dtype.type(scale)
        if not p[i] <= greatest:  # so that NaN is kept
            greatest = p[i]
    return greatest
