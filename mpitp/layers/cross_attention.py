r"""Cross attention: the decoder's queries over the encoder's keys and values (Vaswani et al. 2017, section 3.2.3).

    q    = x Wq^T                           x [t, h], of the decoder: column-parallel, cut by heads
    k, v = m Wk^T, m Wv^T                   m [t_source, h], the memory: column-parallel, cut by heads
    o_h  = softmax(q_h k_h^T / sqrt(d)) v_h     every query of a sample sees all of that sample's source
    y    = sum_r o_r Wo_r^T                 row-parallel: the one all-reduce of the forward pass

Backward has two: dx, and this block's part of the memory's gradient. In generation k and v are made once a source.
Where sources and targets are cut over ranks (cp), k and v are gathered, their gradients scattered (`source_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, VARYING, ArrayType
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.crossing import crossing_of
from mpitp.layers.layer import Layer, Send
from mpitp.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from mpitp.layers.partition import HeadShare
from mpitp.layers.passes import Crossing, Pass
from mpitp.layers.placement import Cut
from mpitp.layers.rows import Run
from mpitp.layers.source_rows import OWN_SOURCES, SourceRows
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.attention_shown import scores_and_softmax
from mpitp.ops.sight import EVERYTHING


@dataclass(slots=True)
class CrossContext:
    """The contexts of the projections, and what attention itself wants back."""

    run: Pass
    q: LinearContext
    kv: LinearContext
    sources: Any
    heads: CrossHeadsContext
    out: LinearContext


class CrossAttention(Layer):
    """Projections of x and of the memory, this rank's heads, output projection. `kv` has local rows [k | v].

    `memory`: the type of the encoder's output; `sources`: whose rows k and v are.
    """

    algebra = Algebra(  # the layers inside do all else
        "cross attention",
        (
            Segment("kv_c: k and v of the source's rows here", "kv", "kv_c", "sources are cut over cp"),
            Sum("kv", "kv = [kv_0; kv_1; ...], in the order of the sources", "queries here see the whole source"),
        ),
        (
            Segment("dkv_partial: of the queries here", "do", "dkv_partial", "other ranks have the other queries"),
            Sum("dkv", "dkv_c = rank c's rows of sum_c dkv_partial", "every rank's queries have seen them"),
        ),
        "all-gather of k and v along cp forward, reduce-scatter of dk and dv backward",
    )

    def __init__(
        self,
        q: ColumnParallelLinear,
        kv: ColumnParallelLinear,
        heads: CrossHeads,
        out: RowParallelLinear,
        memory: ArrayType,
        sources: SourceRows = OWN_SOURCES,
    ) -> None:
        self.q, self.kv, self.heads, self.out, self.memory, self.sources = q, kv, heads, out, memory, sources

    def forward(self, x: Array, run: Pass) -> tuple[Array, CrossContext]:
        """x [t, h] -> y [t, h]."""
        q, q_ctx = self.q.forward(x)
        kv, kv_ctx, sources_ctx = self._keys_and_values(crossing_of(run))
        o, heads_ctx = self.heads.forward(q, kv, run)
        y, out_ctx = self.out.forward(o)
        return y, CrossContext(run, q_ctx, kv_ctx, sources_ctx, heads_ctx, out_ctx)

    def backward(self, dy: Array, ctx: CrossContext) -> Array:
        """dy [t, h] -> dx [t, h]; what is due to the memory is added to its gradient."""
        do = self.out.backward(dy, ctx.out)
        dq = self.heads.backward(do, ctx.heads)
        dkv = self.sources.backward(ctx.heads.taken_dkv(), ctx.sources, like=do)
        crossing_of(ctx.run).add(self.kv.backward(dkv, ctx.kv))
        return self.q.backward(dq, ctx.q)

    def _keys_and_values(self, crossing: Crossing) -> tuple[Array, LinearContext, Any]:
        """kv [t_source, 2 a/tp, d] of whole sources, head by head in memory; those of a generating pass are made once.
        Also the contexts of what made them.
        """
        memory = crossing.memory
        assert memory is not None, "the encoder runs before the decoder"
        if crossing.kept is not None and self in crossing.kept:
            return crossing.kept[self], LinearContext(memory), None
        kv, ctx = self.kv.forward(memory)
        kv, sources_ctx = self.sources.forward(kv, crossing.source.rows)
        kv = by_head(kv, self.heads.head_dim)
        if crossing.kept is not None:
            crossing.kept[self] = kv
        return kv, ctx, sources_ctx

    def children(self) -> Mapping[str, Layer]:
        return {"q": self.q, "kv": self.kv, "heads": self.heads, "out": self.out}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows of the decoder and of the memory, by way of this rank's heads, to whole rows of the decoder."""
        q = self.q.placements(incoming)
        self.heads.check_keys(self.sources.placements(self.kv.placements(self.memory)))
        return self.out.placements(self.heads.placements(q))

    def rows_sent(self, x: Array, ctx: CrossContext) -> int:
        """Those of whole sources."""
        return len(ctx.heads.kv)

    def sends(self) -> tuple[Send, ...]:
        return self.sources.sends(2 * self.heads.heads.query.size * self.heads.head_dim)


@dataclass(slots=True)
class CrossHeadsContext:
    """What backward needs; the probabilities are computed again from the lse of each sample. `dkv`: what it has made
    beside dq, until that is taken.
    """

    run: Pass
    q: Array  # [t, a/tp, d]
    kv: Array  # [t_source, 2 a/tp, d]
    o: Array  # [t, a/tp, d]
    lse: list[Array]
    dkv: Array | None = None  # [t_source, 2 a/tp * d]

    def taken_dkv(self) -> Array:
        """The gradient of keys and values, once."""
        dkv, self.dkv = self.dkv, None
        assert dkv is not None, "backward of the heads makes it"
        return dkv


class CrossHeads(Layer):
    """Between the projections: this rank's heads, each by itself. It takes two arrays, q and kv, and gives one;
    backward it gives dq, and leaves dkv in the context.
    """

    _goes_on = "head by head; dkv goes on to the product that made k and v of the memory"
    algebra = Algebra(
        "cross attention of each rank's heads",
        (Segment("o_h = softmax(q_h k_h^T / sqrt(d)) v_h", "q kv", "o", "head by head: no communication"),),
        (Segment("dq_h, dk_h, dv_h of softmax(q_h k_h^T / sqrt(d)) v_h", "do q kv", "dq", _goes_on),),
        names={"x": "q", "y": "o", "dy": "do", "dx": "dq"},
        beside=("kv",),
    )

    def __init__(self, heads: HeadShare, head_dim: int, scale: float, dropout: AttentionDropout) -> None:
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.head_map = HeadMap(range(heads.query.size), scale)

    def forward(self, x: Array, kv: Array, run: Pass) -> tuple[Array, CrossHeadsContext]:
        """q [t, a/tp * d] and kv [t_source, 2 a/tp, d] -> o [t, a/tp * d]."""
        a, d = self.heads.query.size, self.head_dim
        q = by_head(x, d)
        o, lse = array_module(q).empty(q.shape, q.dtype), []
        for each, rows, source in _samples(run):
            mask = self.dropout.masks(run, each, self.heads, q, (each.first, 0))
            k, v = kv[source, :a], kv[source, a:]
            made = attention_forward(q[rows], k, v, self.head_map, sight=EVERYTHING, dropout=mask, out=o[rows])
            lse.append(made[1])
        return o.reshape(len(o), a * d), CrossHeadsContext(run, q, kv, o, lse)

    def backward(self, dy: Array, ctx: CrossHeadsContext) -> Array:
        """do [t, a/tp * d] -> dq [t, a/tp * d]; dkv [t_source, 2 a/tp * d] stays in the context."""
        xp, a = array_module(dy), self.heads.query.size
        do, is_cut = by_head(dy, self.head_dim), bool(ctx.run.rows.everyone)
        dq, dkv = xp.empty(ctx.q.shape, do.dtype), xp.zeros(ctx.kv.shape, wide_dtype(do.dtype) if is_cut else do.dtype)
        for i, (each, rows, source) in enumerate(_samples(ctx.run)):
            mask = self.dropout.masks(ctx.run, each, self.heads, do, (each.first, 0))
            kept = Kept(ctx.q[rows], ctx.kv[source, :a], ctx.kv[source, a:], ctx.o[rows], ctx.lse[i])
            if is_cut:  # several runs of a sample, whose dk and dv add up
                made = attention_backward(do[rows], kept, self.head_map, sight=EVERYTHING, dropout=mask)
                dq[rows] = made[0]
                dkv[source, :a] += made[1]
                dkv[source, a:] += made[2]
            else:
                out = dq[rows], dkv[source, :a], dkv[source, a:]
                attention_backward(do[rows], kept, self.head_map, sight=EVERYTHING, dropout=mask, out=out)
        ctx.dkv = dkv.reshape(len(dkv), -1)
        return dq.reshape(len(dq), -1)

    def inside(self, ctx: CrossHeadsContext) -> Mapping[str, tuple[Array, str]]:
        """scores and softmax [a/tp, t, t_source], mask [t, t_source] (1: seen)."""
        seen = np.zeros((len(ctx.q), len(ctx.kv)), bool)
        for _, rows, source in _samples(ctx.run):
            seen[rows, source] = True
        scores, softmax = scores_and_softmax(ctx.q, ctx.kv[:, : self.heads.query.size], seen, self.head_map)
        return {"scores": (scores, VARYING), "mask": (seen.astype(int), INVARIANT), "softmax": (softmax, VARYING)}

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's q to its o, cut alike."""
        query = self._cut()
        incoming.expect(query.axis, VARYING, "q", "each rank needs its own heads")
        incoming.expect_columns((("q", query),), "q")
        return incoming.changed(query.axis, VARYING, (("o", query),))

    def check_keys(self, incoming: ArrayType) -> None:
        """Raise PlacementError unless k and v are those of this rank's heads."""
        query = self._cut()
        incoming.expect(query.axis, VARYING, "k and v", "each rank needs its own heads")
        incoming.expect_columns((("k", query), ("v", query)), "k and v")

    def _cut(self) -> Cut:
        return Cut.of(self.heads.query.scaled(self.head_dim))


def by_head(x: Array, head_dim: int) -> Array:
    """x [t, n * d] as [t, n, d] whose rows of one head are neighbours in memory: the bits of a product with a single
    row depend on strides, which then are the same however many heads a rank has.
    """
    xp = array_module(x)
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim).transpose(1, 0, 2)
    return xp.ascontiguousarray(heads).transpose(1, 0, 2)


def _samples(run: Pass) -> Iterator[tuple[Run, slice, slice]]:
    """Each sample's rows of the decoder (in generation of several beams, neighbours) and of the source; where samples
    are cut over ranks, each piece of the decoder's that has any, and the whole source.

    The run is the first of the sample's: in training it is the only one.
    """
    of_source = crossing_of(run).source.rows
    whole = of_source.uncut() if of_source.everyone else of_source
    source = {each.sample: rows for each, rows in whole.places()}
    if run.rows.everyone:
        yield from ((each, rows, source[each.sample]) for each, rows in run.rows.places() if each.length)
        return
    for sample, places in groupby(run.rows.places(), key=lambda place: place[0].sample):
        own = list(places)
        yield own[0][0], slice(own[0][1].start, own[-1][1].stop), source[sample]
