"""Causal attention of one sequence (Vaswani et al. 2017), head by head in tiles of query rows.

Query i of s stands at position u - s + i among u keys and sees the keys up to there. For one head, with tile rows r and
the keys c that the tile can see:

    forward     S = scale * q k^T,  P = softmax(S) = exp(S - lse),  o = P v
    backward    dv += P^T do,  dP = do v^T,  dS = P * (dP - D),  D = rowsum(do * o)
                dq  = scale * dS k,  dk += scale * dS^T q

Only lse, the log of the softmax's denominator, is kept; the backward makes P again from it (Dao et al. 2022), so no
array of s x u lives longer than its tile. With dropout, P becomes P * mask after the softmax; then dP = (do v^T) *
mask, and D is still rowsum(do * o).

Each head is computed by itself, with shapes that depend on s, u and d alone: its bits don't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import array_module

Array = Any
DropoutMask = Callable[[int, int, int, int], Array]  # (head, row_start, row_stop, cols) -> mask [rows, cols]

TILE_ROWS = 96  # measured: less waste above the diagonal against larger products; flat from 64 to 128
DEVICE_TILE_ROWS = 1024  # on a GPU few large products are better


def attention_reference(q: Array, k: Array, v: Array, kv_index: Sequence[int], scale: float) -> Array:
    """The plain forward: o [s, a, d], all scores at once."""
    xp = array_module(q)
    s, u = q.shape[0], k.shape[0]
    hidden = xp.arange(u)[None, :] > xp.arange(u - s, u)[:, None]
    o = xp.empty(q.shape, dtype=q.dtype)
    for head, kv in enumerate(kv_index):
        scores = xp.where(hidden, -xp.inf, scale * (q[:, head] @ k[:, kv].T)).astype(q.dtype)
        p = xp.exp(scores - scores.max(axis=1, keepdims=True))
        o[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, kv]
    return o


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    kv_index: Sequence[int],
    scale: float,
    out: Array | None = None,
    dropout: DropoutMask | None = None,
) -> tuple[Array, Array]:
    """o [s, a, d] and lse [a, s] of q [s, a, d], k and v [u, g, d]; query head j uses KV head kv_index[j].

    Inputs and `out` may be strided views; `out` must not overlap the inputs.
    """
    xp = array_module(q)
    s, heads, d = q.shape
    tiles = Tiles(xp, s, k.shape[0], q.dtype)
    out = xp.empty(q.shape, dtype=q.dtype) if out is None else out
    lse = xp.empty((heads, s), dtype=q.dtype)
    o_head, row_max, total = (xp.empty((s, width), dtype=q.dtype) for width in (d, 1, 1))
    for head, kv in enumerate(kv_index):
        q_head, k_head, v_head = q[:, head] * scale, k[:, kv], v[:, kv]
        for rows, cols in tiles:
            e = tiles.scores(q_head[rows], k_head[:cols])
            row_max[rows] = e.max(axis=1, keepdims=True)
            e -= row_max[rows]
            xp.exp(e, out=e)
            xp.matmul(e, tiles.ones[:cols], out=total[rows])  # a sum of rows, twice as fast
            if dropout is not None:
                e *= dropout(head, rows.start, rows.stop, cols)
            xp.matmul(e, v_head[:cols], out=o_head[rows])
        xp.divide(o_head, total, out=out[:, head])
        lse[head] = (row_max + xp.log(total))[:, 0]
    return out, lse


def attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    kv_index: Sequence[int],
    scale: float,
    grad_index: Sequence[int],
    num_grads: int,
    dropout: DropoutMask | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
) -> tuple[Array, Array, Array]:
    """dq [s, a, d], dk and dv [u, num_grads, d] of do [s, a, d] and what the forward was given and returned.

    Query head j's share of dk and dv is added to slot grad_index[j], in head order, starting from zeros. `dq`, `dk` and
    `dv` name arrays to write to (strided views too).
    """
    xp = array_module(q)
    (s, _, d), u = q.shape, k.shape[0]
    tiles = Tiles(xp, s, u, q.dtype)
    dq = xp.empty(q.shape, dtype=q.dtype) if dq is None else dq
    dk = xp.empty((u, num_grads, d), dtype=q.dtype) if dk is None else dk
    dv = xp.empty((u, num_grads, d), dtype=q.dtype) if dv is None else dv
    dk[...] = 0
    dv[...] = 0
    dq_head, dk_head, dv_head = (xp.empty((rows, d), dtype=q.dtype) for rows in (s, u, u))
    for head, (kv, slot) in enumerate(zip(kv_index, grad_index, strict=True)):
        q_head, k_head, v_head, do_head = q[:, head] * scale, k[:, kv], v[:, kv], do[:, head]
        row_dots = xp.einsum("sd,sd->s", do_head, o[:, head])[:, None]  # D
        dk_head[...] = 0
        dv_head[...] = 0
        for rows, cols in tiles:
            p = tiles.scores(q_head[rows], k_head[:cols])
            p -= lse[head, rows, None]
            xp.exp(p, out=p)
            dp = xp.matmul(do_head[rows], v_head[:cols].T)
            if dropout is not None:
                mask = dropout(head, rows.start, rows.stop, cols)
                dp *= mask
            dp -= row_dots[rows]
            dp *= p  # now dS
            if dropout is not None:
                p *= mask
            dv_head[:cols] += xp.matmul(p.T, do_head[rows])
            dk_head[:cols] += xp.matmul(dp.T, q_head[rows])
            xp.matmul(dp, k_head[:cols], out=dq_head[rows])
        xp.multiply(dq_head, scale, out=dq[:, head])
        dk[:, slot] += dk_head
        dv[:, slot] += dv_head
    return dq, dk, dv


class Tiles:
    """The tiles of one sequence: pairs of query rows and the number of keys that the last of these rows sees."""

    def __init__(self, xp: Any, s: int, u: int, dtype: Any) -> None:
        self.xp = xp
        size = max(1, min(s, TILE_ROWS if xp is np else DEVICE_TILE_ROWS))
        self.tiles = [(slice(i, min(i + size, s)), u - s + min(i + size, s)) for i in range(0, s, size)]
        self.ones = xp.ones((u, 1), dtype=dtype)
        self.after = xp.triu(xp.full((size, size), -xp.inf, dtype=dtype), 1)  # -inf where the key is after the query

    def __iter__(self) -> Iterator[tuple[slice, int]]:
        return iter(self.tiles)

    def scores(self, q_rows: Array, k_cols: Array) -> Array:
        """q k^T [rows, cols], -inf where a key lies after the query."""
        scores = self.xp.matmul(q_rows, k_cols.T)
        rows, cols = scores.shape
        if rows > 1:
            scores[:, cols - rows :] += self.after[:rows, :rows]
        return scores
