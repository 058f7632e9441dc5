"""Causal attention of one sequence (Vaswani et al. 2017), head by head in tiles of query rows.

Query i of s stands at position u - s + i among u keys and sees the keys up to there. For one head, with tile rows r and the
keys c that the tile can see:

    forward     S = scale * q k^T,  P = softmax(S) = exp(S - lse),  o = P v
    backward    dv += P^T do,  dP = do v^T,  dS = P * (dP - D),  D = rowsum(do * o)
                dq  = scale * dS k,  dk += scale * dS^T q

Only lse, the log of the softmax's denominator, is kept; the backward makes P again from it (Dao et al. 2022), so no array of
s x u lives longer than its tile. With dropout, P becomes P * mask after the softmax; then dP = (do v^T) * mask, and D is
still rowsum(do * o).

Each head is computed by itself, with shapes that depend on s, u and d alone: its bits don't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpitp.backend.arrays import array_module

Array = Any
DropoutMask = Callable[[int, int, int, int], Array]  # (head, row_start, row_stop, cols) -> mask [rows, cols]

TILE_ROWS = 128


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
    s, heads, _ = q.shape
    u = k.shape[0]
    o = xp.empty(q.shape, dtype=q.dtype) if out is None else out
    lse = xp.empty((heads, s), dtype=q.dtype)
    for head, kv in enumerate(kv_index):
        for rows, cols in _tiles(s, u):
            scores = _scores(xp, q[rows, head] * scale, k[:cols, kv])
            row_max = scores.max(axis=1)
            scores -= row_max[:, None]
            e = xp.exp(scores, out=scores)
            total = e.sum(axis=1)
            lse[head, rows] = row_max + xp.log(total)
            if dropout is not None:
                e *= dropout(head, rows.start, rows.stop, cols)
            o[rows, head] = xp.matmul(e, v[:cols, kv]) / total[:, None]
    return o, lse


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
    (s, heads, d), u = q.shape, k.shape[0]
    dq = xp.empty(q.shape, dtype=q.dtype) if dq is None else dq
    dk = xp.empty((u, num_grads, d), dtype=q.dtype) if dk is None else dk
    dv = xp.empty((u, num_grads, d), dtype=q.dtype) if dv is None else dv
    dk[...] = 0
    dv[...] = 0
    for head, (kv, slot) in enumerate(zip(kv_index, grad_index, strict=True)):
        dk_head, dv_head = xp.zeros((u, d), dtype=q.dtype), xp.zeros((u, d), dtype=q.dtype)
        for rows, cols in _tiles(s, u):
            q_rows, do_rows = q[rows, head] * scale, do[rows, head]
            p = _scores(xp, q_rows, k[:cols, kv])
            p -= lse[head, rows, None]
            xp.exp(p, out=p)
            ds = xp.matmul(do_rows, v[:cols, kv].T)
            if dropout is None:
                dv_head[:cols] += xp.matmul(p.T, do_rows)
            else:
                mask = dropout(head, rows.start, rows.stop, cols)
                dv_head[:cols] += xp.matmul((p * mask).T, do_rows)
                ds *= mask
            ds -= (do_rows * o[rows, head]).sum(axis=1)[:, None]
            ds *= p
            dq[rows, head] = xp.matmul(ds, k[:cols, kv]) * scale
            dk_head[:cols] += xp.matmul(ds.T, q_rows)
        dk[:, slot] += dk_head
        dv[:, slot] += dv_head
    return dq, dk, dv


def _tiles(s: int, u: int) -> Iterator[tuple[slice, int]]:
    """Query rows of a tile, and how many keys they may see (the last row sees all of these)."""
    for start in range(0, s, TILE_ROWS):
        stop = min(start + TILE_ROWS, s)
        yield slice(start, stop), u - s + stop


def _scores(xp: Any, q_rows: Array, k_cols: Array) -> Array:
    """q k^T [rows, cols] with -inf where a key lies after the query; the last row sees every key."""
    scores = xp.matmul(q_rows, k_cols.T)
    rows, cols = scores.shape
    scores[:, cols - rows :] += xp.triu(xp.full((rows, rows), -xp.inf, dtype=scores.dtype), 1)
    return scores
