r"""Self-attention, its heads dealt to the ranks (Megatron-LM, section 3; grouped KV heads: Ainslie et al. 2023).

    q, k, v = x Wq^T, x Wk^T, x Wv^T         column-parallel, cut by heads: [t, (a + 2g)/tp * d]
    o_h     = softmax(mask(q_h k_g^T / sqrt(d))) v_g       head h uses KV head g = h // (a/g)
    y       = sum_r o_r Wo_r^T               row-parallel: the one all-reduce of the forward pass

Query heads are dealt one by one and a rank holds the KV heads that they use, so a KV head may live on several ranks.
Each of them then computes dk and dv from its own query heads only; the sum over those ranks is taken here, in backward,
before anything is made of dk and dv. With it every replica has the whole dk, hence the same weight gradient, and dx
counts a replicated head on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.backend.rng import dropout_mask
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, VARYING, ArrayType
from mpitp.layers.keys import OWN_KEYS, Attended, Keys
from mpitp.layers.layer import BACKWARD, Layer, Send
from mpitp.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare
from mpitp.layers.passes import Pass
from mpitp.layers.placement import Cut
from mpitp.layers.relative_bias import RelativeBias
from mpitp.layers.rotary import Rotary
from mpitp.layers.rows import Run
from mpitp.layers.summation import Summation
from mpitp.ops.attention import HeadMap
from mpitp.ops.attention_shown import block_diagonal, scores_and_softmax, seen_by
from mpitp.ops.newest_attention import QueryGroups
from mpitp.ops.rope import rope_backward, rope_forward
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import CAUSAL, Sight


@dataclass(slots=True)
class AttentionContext:
    """The contexts of the layers."""

    qkv: LinearContext
    heads: HeadsContext
    out: LinearContext
    norms: Any = None


class SelfAttention(Layer):
    """Input projection, this rank's heads, output projection. `qkv` has local rows [q heads | k heads | v heads].

    `norms`: of q and k (`HeadNorms`, `JointNorms`), between the projection and the heads; None: there are none.
    """

    def __init__(
        self, qkv: ColumnParallelLinear, heads: AttentionHeads, out: RowParallelLinear, norms: Layer | None = None
    ) -> None:
        self.qkv, self.heads, self.out, self.norms = qkv, heads, out, norms

    def forward(self, x: Array, run: Pass) -> tuple[Array, AttentionContext]:
        """x [t, h] -> y [t, h]."""
        qkv, qkv_ctx = self.qkv.forward(x)
        qkv, norms_ctx = (qkv, None) if self.norms is None else self.norms.forward(qkv)
        o, heads_ctx = self.heads.forward(qkv, run)
        y, out_ctx = self.out.forward(o)
        return y, AttentionContext(qkv_ctx, heads_ctx, out_ctx, norms_ctx)

    def backward(self, dy: Array, ctx: AttentionContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        do = self.out.backward(dy, ctx.out)
        dqkv = self.heads.backward(do, ctx.heads)
        if self.norms is not None:
            dqkv = self.norms.backward(dqkv, ctx.norms)
        return self.qkv.backward(dqkv, ctx.qkv)

    def children(self) -> Mapping[str, Layer]:
        norms: dict[str, Layer] = {} if self.norms is None else {"norms": self.norms}
        return {"qkv": self.qkv, **norms, "heads": self.heads, "out": self.out}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows, by way of this rank's heads, to whole rows."""
        qkv = self.qkv.placements(incoming)
        qkv = qkv if self.norms is None else self.norms.placements(qkv)
        return self.out.placements(self.heads.placements(qkv))


@dataclass(slots=True)
class HeadsContext:
    """What backward needs; the probabilities are computed again from `lse`."""

    run: Pass
    qkv: Array  # [t, (a + 2g)/tp * d], q and k rotated
    o: Array  # [t, a/tp, d]
    more: Any  # what `Keys.attend` returned: the lse of each row's scores, for one


@dataclass(frozen=True, slots=True)
class Scores:
    """Which keys a query sees, and what becomes of its scores: `scale` (None: 1 / sqrt(head_dim)), then `change`."""

    sight: Sight = CAUSAL
    scale: float | None = None
    change: ScoreChange | None = None


class AttentionHeads(Layer):
    """What happens between the projections: this rank's heads, each by itself.

    Args:
        heads: this rank's query and KV heads.
        head_dim: width of a head.
        replicas: sums dk and dv of KV heads that live on several ranks.
        dropout: drops attention probabilities.
        rotary: turns q and k by their positions; None: positions are learned.
        scores: which keys a query sees, and what becomes of the scores.
        keys: which keys the queries of this rank meet, and where they come from.
    """

    _by_head = "head by head (RoPE turns q and k first): no communication"
    _grads, _shared = "dk_g, dv_g of this rank's query heads only", "this KV head lives on several ranks"
    algebra = Algebra(
        "attention of each rank's heads",
        (Segment("o_h = softmax(mask(q_h k_g^T / sqrt(d))) v_g", "qkv", "o", _by_head),),
        (
            Segment(_grads, "do", "dkv_partial", _shared),
            Sum("dkv", "dk_g, dv_g = sum over the ranks whose query heads use KV head g"),
            Segment("dq_h, dk_g, dv_g of softmax(mask(q k^T / sqrt(d))) v", "do dkv", "dqkv", "head by head"),
        ),
        "KV heads on several ranks: copies forward, all-reduce of dk and dv backward",
        names={"x": "qkv", "y": "o", "dy": "do", "dx": "dqkv"},
    )

    def __init__(
        self,
        heads: HeadShare,
        head_dim: int,
        replicas: KvReplicas,
        dropout: AttentionDropout,
        rotary: Rotary | None = None,
        scores: Scores | None = None,
        keys: Keys = OWN_KEYS,
    ) -> None:
        scores = scores or Scores()
        self.heads, self.head_dim, self.replicas, self.dropout = heads, head_dim, replicas, dropout
        self.rotary, self.sight, self.keys = rotary, scores.sight, keys
        self.bias = scores.change if isinstance(scores.change, RelativeBias) else None
        scale = head_dim**-0.5 if scores.scale is None else scores.scale
        kv_index = [heads.kv_index(j) for j in range(heads.query.size)]
        self.head_map = HeadMap(kv_index, scale, replicas.index, replicas.count, scores.change)
        self.query_groups = QueryGroups.of(kv_index, scale, scores.sight, scores.change)

    def forward(self, x: Array, run: Pass) -> tuple[Array, HeadsContext]:
        """x [t, (a + 2g)/tp * d] -> o [t, a/tp * d]. x is turned in place: it is given away."""
        q, k, v = self._heads_of(x)
        if self.rotary is not None:
            qk = self._rotated(x, self.rotary)
            rope_forward(qk, *run.rotation(self.rotary, x), out=qk)
        o = array_module(x).empty(q.shape, x.dtype)  # [t, a/tp, d]
        keys = run.caches or self.keys
        more = keys.attend(self, run, (q, k, v), out=o)
        return o.reshape(len(o), o.shape[1] * o.shape[2]), HeadsContext(run, x, o, more)

    def backward(self, dy: Array, ctx: HeadsContext) -> Array:
        """do [t, a/tp * d] -> dqkv [t, (a + 2g)/tp * d]."""
        do = dy.reshape(ctx.o.shape)
        q, k, v = self._heads_of(ctx.qkv)
        dqkv = array_module(dy).empty(ctx.qkv.shape, dy.dtype)
        dq, dk, dv = self._heads_of(dqkv)
        slots = self.replicas.allocate(dk, dv)
        self.keys.backward(self, ctx.run, do, Attended(q, k, v, ctx.o, ctx.more), (dq, *slots))
        self.replicas.collect(slots, dk, dv)
        if self.rotary is not None:
            dqk = self._rotated(dqkv, self.rotary)
            rope_backward(dqk, *ctx.run.rotation(self.rotary, dqkv), out=dqk)
        return dqkv

    def inside(self, ctx: HeadsContext) -> Mapping[str, tuple[Array, str]]:
        """scores and softmax [a/tp, t, t], mask [t, t] (1: seen). Nothing where keys come from elsewhere."""
        if ctx.run.caches or self.keys is not OWN_KEYS:
            return {}
        q, k, _ = self._heads_of(ctx.qkv)
        seen = block_diagonal(seen_by(self.sight, rows.length) for rows, _ in ctx.run.rows.places())
        scores, softmax = scores_and_softmax(q, k, seen, self.head_map)
        return {"scores": (scores, VARYING), "mask": (seen.astype(int), INVARIANT), "softmax": (softmax, VARYING)}

    def _heads_of(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Views q [t, a/tp, d], k and v [t, g/tp, d] of the fused projection."""
        a, g, d = self.heads.query.size, len(self.heads.kv), self.head_dim
        by_head = qkv.reshape(qkv.shape[0], a + 2 * g, d)
        return by_head[:, :a], by_head[:, a : a + g], by_head[:, a + g :]

    def _rotated(self, qkv: Array, rotary: Rotary) -> Array:
        """View [t, (a + g)/tp, width] of what RoPE turns: of q and k, neighbours in the fused projection, the first
        columns of each head, or all.
        """
        count = self.heads.query.size + len(self.heads.kv)
        return qkv.reshape(qkv.shape[0], qkv.shape[1] // self.head_dim, self.head_dim)[:, :count, : rotary.width]

    def children(self) -> Mapping[str, Param]:
        return {} if self.bias is None else self.bias.params()

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's q, k and v to its o, cut by query heads."""
        axis = self.replicas.axis
        incoming.expect(axis, VARYING, "q, k and v", "each rank needs its own heads")
        self.keys.check(incoming)
        query = Cut.of(self.heads.query.scaled(self.head_dim), axis)
        if not incoming.columns or incoming.columns[0][1] != query:
            incoming.expect_columns((("q", query), *incoming.columns[1:]), "q, k and v")
        if self.bias is not None:
            self.bias.check(incoming, query)
        return incoming.changed(axis, VARYING, (("o", query),))

    def sends(self) -> tuple[Send, ...]:
        return (*self.keys.sends(self), *self.replicas.sends(self.head_dim))


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout on the attention probabilities; masks are indexed by (sample, global head, query and key position)."""

    rate: float
    name: str

    def masks(
        self, run: Pass, rows: Run, heads: HeadShare, like: Array, firsts: tuple[int, int] = (0, 0)
    ) -> Callable[..., Array] | None:
        """A function (local head, queries, keys) -> keep mask for the rows of one run. `firsts`: the positions in the
        sample that queries and keys are counted from.
        """
        if not self.rate or run.dropout is None:
            return None
        state, first, xp = run.dropout, heads.query.span.start, array_module(like)
        wide = wide_dtype(like.dtype)

        def mask(head: int, queries: range, keys: range) -> Array:
            key = state.key(f"{self.name}/head {first + head}")
            at = _moved(queries, firsts[0]), _moved(keys, firsts[1])
            return dropout_mask(self.rate, key, rows.sample, *at, wide, xp)

        return mask


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


@dataclass(frozen=True, slots=True)
class KvReplicas:
    """The pair of KV heads on several ranks: copies forward, a sum of dk and dv over the ranks backward.

    A KV head that lives on this rank alone has one slot, and its query heads add to it in order. A replicated one has a
    slot for each of this rank's query heads: their sum must run over all ranks' heads from left to right.
    """

    index: tuple[int, ...]  # a query head: its slot
    count: int
    own: tuple[tuple[int, int], ...]  # (slot, local KV head) of the heads that live here alone
    shared: tuple[tuple[int | None, tuple[int, ...]], ...]  # replicated heads: local KV head (None: not here), slots
    summation: Summation
    group_size: int  # query heads a KV head
    axis: str = "tp"

    @classmethod
    def of(cls, heads: HeadShare, summation: Summation, axis: str = "tp") -> KvReplicas:
        """The slots of a rank with these heads."""
        index: list[int] = []
        own: dict[int, int] = {}
        slots_of: dict[int, list[int]] = {g: [] for g in heads.kv_shared}
        count = 0
        for j in range(heads.query.size):
            kv = heads.kv_index(j)
            kv_global = heads.kv.start + kv
            if kv_global in slots_of:
                slots_of[kv_global].append(count)
            elif kv in own:
                index.append(own[kv])
                continue
            else:
                own[kv] = count
            index.append(count)
            count += 1
        shared = tuple((g - heads.kv.start if g in heads.kv else None, tuple(s)) for g, s in slots_of.items())
        by_slot = tuple((slot, kv) for kv, slot in own.items())
        return cls(tuple(index), count, by_slot, shared, summation, heads.group_size, axis)

    def allocate(self, dk: Array, dv: Array) -> tuple[Array, Array]:
        """Arrays [t, count, d] to add into: dk and dv themselves when nothing is replicated."""
        if not self.shared:
            return dk, dv
        shape = (dk.shape[0], self.count, dk.shape[2])
        xp = array_module(dk)
        return xp.empty(shape, dk.dtype), xp.empty(shape, dv.dtype)

    def collect(self, slots: tuple[Array, Array], dk: Array, dv: Array) -> None:
        """Write each KV head's gradient to dk and dv [t, g/tp, d], replicated heads summed over the ranks."""
        if not self.shared:
            return
        xp = array_module(dk)
        for slot, kv in self.own:
            dk[:, kv], dv[:, kv] = slots[0][:, slot], slots[1][:, slot]
        for held, own_slots in self.shared:
            partials = [xp.stack((slots[0][:, slot], slots[1][:, slot])) for slot in own_slots]
            total = self.summation(partials, like=xp.empty((2, dk.shape[0], dk.shape[2]), dk.dtype))
            if held is not None:
                dk[:, held], dv[:, held] = total[0], total[1]

    def sends(self, head_dim: int) -> tuple[Send, ...]:
        """One sum for each replicated KV head."""
        if not self.shared:
            return ()
        op, summands = self.summation.op, self.group_size if self.summation.op != "all_reduce sum" else 0
        return (Send(BACKWARD, op, 2 * head_dim, "2 t d s", self.axis, summands, calls=len(self.shared)),)
