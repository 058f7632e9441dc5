"""Attention of one sequence (Vaswani et al. 2017), head by head in tiles.

What a query sees is the affair of a `Sight`, which yields the tiles; causal: query i of s stands at position u - s + i
among u keys and sees the keys up to there. What is done to scores beyond their scale is that of a `ScoreChange`. For
one head:

    forward     S = scale * q k^T,  P = softmax(S) = exp(S - lse),  o = P v
    backward    dv = P^T do,  dP = do v^T,  dS = P * (dP - D),  D = rowsum(do * o)
                dq = scale * dS k,  dk = scale * dS^T q

The forward takes a block of queries and all keys that one of them sees, in several tiles where these are many. Then a
row's maximum m, its sum of exponentials l and its output o go on from tile to tile (online softmax: Milakov and
Gimelshein 2018; `online_softmax.py`). The backward takes a block of keys and all queries that see one of them: dk and
dv are added up over few tiles, dq over the blocks.

Only lse, the log of the softmax's denominator, is kept; the backward makes P again from it (Dao et al. 2022), so no
array of s x u lives longer than its tile, and memory is linear in the sequence. With dropout, P becomes P * mask after
the softmax; then dP = (do v^T) * mask, and D is still rowsum(do * o).

Each head is computed by itself, with shapes that depend on s, u and d alone: its bits don't depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import is_half, rounded, widened
from mpitp.ops.online_softmax import RunningSoftmax
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import CAUSAL, Block, Sight, Tile
from mpitp.ops.tile_passes import TilePasses

DropoutMask = Callable[[int, range, range], Array]  # (head, queries, keys) -> mask [queries, keys]


@dataclass(frozen=True, slots=True)
class HeadMap:
    """Query head j uses KV head kv_index[j]; its scores are multiplied by `scale`, then changed by `change`.

    In backward its share of dk and dv is added to slot grad_index[j] of `num_grads`, in head order; each slot has one
    at least. None: a slot a KV head.
    """

    kv_index: Sequence[int]
    scale: float
    grad_index: Sequence[int] | None = None
    num_grads: int = 0
    change: ScoreChange | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What the forward of one sequence was given and returned: q and o [s, a, d], k and v [u, g, d], lse [a, s]."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array


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
    heads: HeadMap,
    *,
    sight: Sight = CAUSAL,
    dropout: DropoutMask | None = None,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """o [s, a, d] and lse [a, s] of q [s, a, d], k and v [u, g, d].

    Inputs and `out` may be strided views; `out` must not overlap the inputs.
    """
    xp = array_module(q)
    if is_half(q.dtype):  # in float32, sequence by sequence
        made = attention_forward(widened(q), widened(k), widened(v), heads, sight=sight, dropout=dropout)
        return rounded(made[0], q.dtype, out), made[1]
    s, num_heads, d = q.shape
    tiles = _Tiles(TilePasses(xp, q.dtype, heads.scale, heads.change), dropout)
    out = xp.empty(q.shape, dtype=q.dtype) if out is None else out
    lse = xp.empty((num_heads, s), dtype=q.dtype)
    blocks = sight.query_blocks(xp, s, k.shape[0])
    rows = RunningSoftmax.of(xp, (s, d), q.dtype)
    for head, kv in enumerate(heads.kv_index):
        for block in blocks:
            tiles.attend_block(head, block, (q[:, head], k[:, kv], v[:, kv]), rows)
        rows.finish(out[:, head], lse[head])
    return out, lse


def attention_backward(
    do: Array,
    kept: Kept,
    heads: HeadMap,
    *,
    sight: Sight = CAUSAL,
    dropout: DropoutMask | None = None,
    out: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """dq [s, a, d], dk and dv [u, num_grads, d] of do [s, a, d]; `out` names arrays to write them to (views too)."""
    xp = array_module(do)
    if is_half(do.dtype):
        wide = Kept(widened(kept.q), widened(kept.k), widened(kept.v), widened(kept.o), kept.lse)
        grads = attention_backward(widened(do), wide, heads, sight=sight, dropout=dropout)
        dq, dk, dv = (rounded(x, do.dtype, y) for x, y in zip(grads, out or (None, None, None), strict=True))
        return dq, dk, dv
    q, k, v = kept.q, kept.k, kept.v
    (s, _, d), u = q.shape, k.shape[0]
    tiles = _Tiles(TilePasses(xp, q.dtype, heads.scale, heads.change), dropout)
    slots = heads.kv_index if heads.grad_index is None else heads.grad_index
    shape = (u, k.shape[1] if heads.grad_index is None else heads.num_grads, d)
    dq, dk, dv = out or (xp.empty(q.shape, q.dtype), xp.empty(shape, q.dtype), xp.empty(shape, q.dtype))
    begun: set[int] = set()  # slots of dk and dv that hold something
    dq_head = xp.empty((s, d), dtype=q.dtype)
    blocks = sight.key_blocks(xp, s, u)
    for head, (kv, slot) in enumerate(zip(heads.kv_index, slots, strict=True)):
        do_head = do[:, head]
        row_dots = xp.einsum("sd,sd->s", do_head, kept.o[:, head])  # D
        inputs = _BackwardInputs(q[:, head], k[:, kv], v[:, kv], do_head, kept.lse[head], row_dots)
        if not _sees_all(blocks, s):
            dq_head[...] = 0.0
        for block in blocks:
            grads = dq_head, dk[block.span, slot], dv[block.span, slot]
            tiles.backward_block(head, block, inputs, grads, add=slot in begun)
        dq[:, head] = dq_head
        begun.add(slot)
    return dq, dk, dv


def as_range(block: slice) -> range:
    """The indices of a slice that names both ends."""
    return range(block.start, block.stop)


def _sees_all(blocks: list[Block], s: int) -> bool:
    """Whether all s queries are in the one tile of the first keys, so that it begins dq."""
    return bool(blocks) and [tile.queries for tile in blocks[0].tiles] == [slice(0, s)]


@dataclass(slots=True)
class _BackwardInputs:
    """Those of one head: q and do [s, d], k and v [u, d], lse and D [s]."""

    q: Array
    k: Array
    v: Array
    do: Array
    lse: Array
    row_dots: Array


@dataclass(frozen=True, slots=True)
class _Tiles:
    """What is done to the blocks of one sequence."""

    passes: TilePasses
    dropout: DropoutMask | None

    def attend_block(self, head: int, block: Block, qkv: tuple[Array, Array, Array], rows: RunningSoftmax) -> None:
        """Numerators of the softmax, times v, and their sums, for a block of queries."""
        if len(block.tiles) == 1:
            return self._attend(head, block.tiles[0], qkv, rows.at(block.span))
        rows.at(block.span).restart()
        for tile in block.tiles:
            seen = rows.like(tile.queries)
            self._attend(head, tile, qkv, seen)
            rows.at(tile.queries).join(seen)

    def _attend(self, head: int, tile: Tile, qkv: tuple[Array, Array, Array], rows: RunningSoftmax) -> None:
        """One tile, as if its keys were all."""
        (q, k, v), xp = qkv, self.passes.xp
        e = xp.matmul(q[tile.queries], k[tile.keys].T)
        self.passes.softmax_numerators(e, head, tile, rows)
        if self.dropout is not None:
            e *= self.dropout(head, as_range(tile.queries), as_range(tile.keys))
        xp.matmul(e, v[tile.keys], out=rows.o)

    def backward_block(
        self, head: int, block: Block, x: _BackwardInputs, grads: tuple[Array, Array, Array], *, add: bool
    ) -> None:
        """A block of keys: dk and dv of it (are added when `add`), and what it adds to dq (the first one begins it)."""
        dq, dk, dv = grads
        if not block.tiles and not add:
            dk[...], dv[...] = 0.0, 0.0
        for tile in block.tiles:
            rows, mask = tile.queries, None
            p = self.passes.xp.matmul(x.q[rows], x.k[tile.keys].T)
            dp = self.passes.xp.matmul(x.do[rows], x.v[tile.keys].T)
            if self.dropout is not None:
                mask = self.dropout(head, as_range(tile.queries), as_range(tile.keys))
                dp *= mask
            self.passes.softmax_backward(p, dp, head, tile, (x.lse[rows], x.row_dots[rows]))  # dp is scale * dS now
            if mask is not None:
                p *= mask
            self._multiply(p.T, x.do[rows], dv, add=add)
            self._multiply(dp.T, x.q[rows], dk, add=add)
            begins = tile.keys.start == 0 and rows == slice(0, len(dq))
            self._multiply(dp, x.k[tile.keys], dq[rows], add=not begins)
            add = True

    def _multiply(self, a: Array, b: Array, out: Array, *, add: bool) -> None:
        """out = a b, or out += a b."""
        if add:
            out += self.passes.xp.matmul(a, b)
        else:
            self.passes.xp.matmul(a, b, out=out)
