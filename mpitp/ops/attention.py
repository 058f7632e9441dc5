"""Causal attention of one sequence (Vaswani et al. 2017), head by head in tiles.

Query i of s stands at position u - s + i among u keys and sees the keys up to there. For one head:

    forward     S = scale * q k^T,  P = softmax(S) = exp(S - lse),  o = P v
    backward    dv = P^T do,  dP = do v^T,  dS = P * (dP - D),  D = rowsum(do * o)
                dq = scale * dS k,  dk = scale * dS^T q

The forward takes a block of queries and all keys that its last one sees: a softmax needs its whole row. The backward
takes a block of keys and all queries that see its first one: dk and dv are then one product each, and dq alone is added
up.

Only lse, the log of the softmax's denominator, is kept; the backward makes P again from it (Dao et al. 2022), so no
array of s x u lives longer than its tile. With dropout, P becomes P * mask after the softmax; then dP = (do v^T) *
mask, and D is still rowsum(do * o).

Each head is computed by itself, with shapes that depend on s, u and d alone: its bits don't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import array_module

Array = Any
DropoutMask = Callable[[int, range, range], Array]  # (head, queries, keys) -> mask [queries, keys]

TILE = 96  # queries or keys; measured: less waste above the diagonal against larger products; flat from 64 to 128
DEVICE_TILE = 1024  # on a GPU few large products are better


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
    passes = TilePasses(xp, q.dtype, scale)
    out = xp.empty(q.shape, dtype=q.dtype) if out is None else out
    lse = xp.empty((heads, s), dtype=q.dtype)
    tiles = query_tiles(xp, s, k.shape[0])
    o_head, row_max, total = (xp.empty((s, width), dtype=q.dtype) for width in (d, 1, 1))
    for head, kv in enumerate(kv_index):
        q_head, k_head, v_head = q[:, head], k[:, kv], v[:, kv]
        for tile in tiles:
            rows, cols = tile.queries, tile.keys
            e = xp.matmul(q_head[rows], k_head[cols].T)
            passes.softmax_numerators(e, tile.seen, row_max[rows], total[rows])
            if dropout is not None:
                e *= dropout(head, as_range(rows), as_range(cols))
            xp.matmul(e, v_head[cols], out=o_head[rows])
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

    Query head j's share of dk and dv is added to slot grad_index[j], in head order; each slot has one at least. `dq`,
    `dk` and `dv` name arrays to write to (strided views too).
    """
    xp = array_module(q)
    (s, _, d), u = q.shape, k.shape[0]
    passes = TilePasses(xp, q.dtype, scale)
    dq = xp.empty(q.shape, dtype=q.dtype) if dq is None else dq
    dk = xp.empty((u, num_grads, d), dtype=q.dtype) if dk is None else dk
    dv = xp.empty((u, num_grads, d), dtype=q.dtype) if dv is None else dv
    begun: set[int] = set()  # slots of dk and dv that hold something
    dq_head = xp.empty((s, d), dtype=q.dtype)
    tiles = key_tiles(xp, s, u)
    for head, (kv, slot) in enumerate(zip(kv_index, grad_index, strict=True)):
        q_head, k_head, v_head, do_head = q[:, head], k[:, kv], v[:, kv], do[:, head]
        row_dots = xp.einsum("sd,sd->s", do_head, o[:, head])  # D
        for tile in tiles:
            rows, cols = tile.queries, tile.keys
            p = xp.matmul(q_head[rows], k_head[cols].T)
            dp = xp.matmul(do_head[rows], v_head[cols].T)
            if dropout is not None:
                mask = dropout(head, as_range(rows), as_range(cols))
                dp *= mask
            passes.softmax_backward(p, dp, tile.seen, lse[head, rows], row_dots[rows])  # dp is scale * dS now
            if dropout is not None:
                p *= mask
            _multiply(xp, p.T, do_head[rows], dv[cols, slot], add=slot in begun)
            _multiply(xp, dp.T, q_head[rows], dk[cols, slot], add=slot in begun)
            _multiply(xp, dp, k_head[cols], dq_head[rows], add=tile is not tiles[0])  # all queries see the first key
        dq[:, head] = dq_head
        begun.add(slot)
    return dq, dk, dv


def _multiply(xp: Any, a: Array, b: Array, out: Array, *, add: bool) -> None:
    """out = a b, or out += a b."""
    if add:
        out += xp.matmul(a, b)
    else:
        xp.matmul(a, b, out=out)


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring queries and keys; query number i of them sees the first seen + i of the keys."""

    queries: slice
    keys: slice
    seen: int


def query_tiles(xp: Any, s: int, u: int) -> list[Tile]:
    """The forward's tiles, of s queries and u keys: blocks of queries, each with all keys that one of them sees."""
    return [Tile(slice(start, stop), slice(0, u - s + stop), u - s + start + 1) for start, stop in _blocks(xp, s)]


def key_tiles(xp: Any, s: int, u: int) -> list[Tile]:
    """The backward's tiles: blocks of keys, each with all queries that see one of them."""
    tiles = []
    for start, stop in _blocks(xp, u):
        first = max(0, start - (u - s))
        tiles.append(Tile(slice(first, s), slice(start, stop), u - s + first - start + 1))
    return tiles


def _blocks(xp: Any, length: int) -> list[tuple[int, int]]:
    """Neighbouring blocks (start, stop) of range(length).

    None has one row, if that can be had: the bits of a matrix-vector product depend on the strides of the matrix.
    """
    starts = list(range(0, length, TILE if xp is np else DEVICE_TILE))
    if len(starts) > 1 and length - starts[-1] == 1:
        starts.pop()
    return list(pairwise([*starts, length]))


def as_range(block: slice) -> range:
    """The indices of a slice that names both ends."""
    return range(block.start, block.stop)


class TilePasses:
    """What is done to a tile's products q k^T [rows, cols]; row i sees the first seen + i columns."""

    def __init__(self, xp: Any, dtype: Any, scale: float) -> None:
        self.xp, self.dtype, self.scale, self.accelerated = xp, dtype, scale, is_accelerated(xp, dtype)
        self.ones = self.after = xp.empty((0, 1), dtype=dtype)

    def softmax_numerators(self, scores: Array, seen: int, row_max: Array, total: Array) -> None:
        """scores become exp(S - m), 0 for keys not seen; S's maxima m and the rows' sums go to [rows, 1]."""
        if self.accelerated:
            from mpitp.ops.compiled import attention as compiled

            return compiled.softmax_numerators(scores, seen, self.scale, row_max, total)
        self._scale_and_hide(scores, seen)
        row_max[...] = scores.max(axis=1, keepdims=True)
        scores -= row_max
        self.xp.exp(scores, out=scores)
        if len(self.ones) < scores.shape[1]:
            self.ones = self.xp.ones((scores.shape[1], 1), dtype=self.dtype)
        self.xp.matmul(scores, self.ones[: scores.shape[1]], out=total)  # a sum of rows, twice as fast

    def softmax_backward(self, scores: Array, dp: Array, seen: int, lse: Array, row_dots: Array) -> None:
        """scores become P = exp(S - lse), 0 for keys not seen, and dp becomes scale * dS."""
        if self.accelerated:
            from mpitp.ops.compiled import attention as compiled

            return compiled.softmax_backward(scores, dp, seen, self.scale, lse, row_dots)
        self._scale_and_hide(scores, seen)
        scores -= lse[:, None]
        self.xp.exp(scores, out=scores)
        dp -= row_dots[:, None]
        dp *= self.scale
        dp *= scores

    def _scale_and_hide(self, scores: Array, seen: int) -> None:
        """-inf where a key lies after the query: a triangle that begins in the first row, behind the keys it sees."""
        scores *= self.scale
        side = scores.shape[1] - seen
        if side > len(self.after):
            self.after = self.xp.triu(self.xp.full((side, side), -self.xp.inf, dtype=self.dtype))
        if side > 0:
            scores[:side, seen:] += self.after[:side, :side]
