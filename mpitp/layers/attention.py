r"""Causal self-attention, its heads dealt to the ranks (Megatron-LM, section 3; grouped KV heads: Ainslie et al. 2023).

    q, k, v = x Wq^T, x Wk^T, x Wv^T         column-parallel, cut by heads: [t, (a + 2g)/tp * d]
    o_h     = softmax(mask(q_h k_g^T / sqrt(d))) v_g       head h uses KV head g = h // (a/g)
    y       = sum_r o_r Wo_r^T               row-parallel: the one all-reduce of the forward pass

Query heads are dealt one by one and a rank holds the KV heads that they use, so a KV head may live on several ranks.
Each of them then computes dk and dv from its own query heads only; the sum over those ranks is taken here, in backward,
before anything is made of dk and dv. With it every replica has the whole dk, hence the same weight gradient, and dx
counts a replicated head on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.backend.rng import dropout_mask
from mpitp.layers.cached_attention import QueryGroups, attend_newest
from mpitp.layers.kv_cache import LayerCache
from mpitp.layers.layout import Summation
from mpitp.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from mpitp.layers.param import Param, prefixed
from mpitp.layers.partition import HeadShare
from mpitp.layers.sequences import Sequences
from mpitp.ops.attention import attention_backward, attention_forward
from mpitp.ops.rope import rope_backward, rope_forward

Array = Any


@dataclass(slots=True)
class AttentionContext:
    """What backward needs; the probabilities are computed again from `lse`."""

    seqs: Sequences
    qkv: Array  # [t, (a + 2g)/tp * d], q and k rotated
    o: Array  # [t, a/tp, d]
    lse: list[Array]  # a sequence: [a/tp, s], log of the sum of exponentials of each row's scores
    qkv_linear: LinearContext
    out_linear: LinearContext


class SelfAttention:
    """Causal self-attention over this rank's heads.

    Args:
        heads: this rank's query and KV heads.
        head_dim: width of a head.
        qkv: fused input projection, local rows [q heads | k heads | v heads].
        out: output projection.
        summation: adds dk and dv of replicated KV heads over the ranks.
        dropout: drops attention probabilities.
    """

    def __init__(
        self,
        heads: HeadShare,
        head_dim: int,
        qkv: ColumnParallelLinear,
        out: RowParallelLinear,
        summation: Summation,
        dropout: AttentionDropout,
    ) -> None:
        self.heads, self.head_dim, self.qkv, self.out, self.summation = heads, head_dim, qkv, out, summation
        self.dropout = dropout
        self.scale = head_dim**-0.5
        self.kv_index = [heads.kv_index(j) for j in range(heads.query.size)]
        self.query_groups = QueryGroups.of(self.kv_index)
        self.grad_slots = GradSlots.of(heads)

    def forward(self, x: Array, seqs: Sequences, cache: LayerCache | None = None) -> tuple[Array, AttentionContext]:
        """x [t, h] -> y [t, h]. With a cache the pass is for generation: its context is not one for backward."""
        qkv, qkv_ctx = self.qkv.forward(x)
        q, k, v = self._heads_of(qkv)
        if seqs.rotation is not None:
            qk = self._rotated(qkv)
            rope_forward(qk, *seqs.rotation, out=qk)
        o = array_module(x).empty(q.shape, x.dtype)  # [t, a/tp, d]
        lse = []
        for i, rows in seqs.rows():
            if cache and seqs.lengths[i] == 1:
                newest = q[rows.start], k[rows.start], v[rows.start]
                attend_newest(*newest, cache, i, seqs.past_of(i), self.query_groups, self.scale, out=o[rows.start])
                continue
            keys, values = cache.extend(i, seqs.past_of(i), k[rows], v[rows]) if cache else (k[rows], v[rows])
            mask = self.dropout.masks(seqs, i, self.heads, x)
            lse.append(
                attention_forward(q[rows], keys, values, self.kv_index, self.scale, out=o[rows], dropout=mask)[1]
            )
        y, out_ctx = self.out.forward(o.reshape(o.shape[0], -1))
        return y, AttentionContext(seqs, qkv, o, lse, qkv_ctx, out_ctx)

    def backward(self, dy: Array, ctx: AttentionContext) -> Array:
        """dy [t, h] -> dx [t, h]."""
        do = self.out.backward(dy, ctx.out_linear).reshape(ctx.o.shape)
        q, k, v = self._heads_of(ctx.qkv)
        dqkv = array_module(dy).empty(ctx.qkv.shape, dy.dtype)
        dq, dk, dv = self._heads_of(dqkv)
        slots = self.grad_slots.allocate(dk, dv)
        for i, rows in ctx.seqs.rows():
            mask = self.dropout.masks(ctx.seqs, i, self.heads, dy)
            attention_backward(
                do[rows], q[rows], k[rows], v[rows], ctx.o[rows], ctx.lse[i], self.kv_index, self.scale,
                self.grad_slots.index, self.grad_slots.count, dropout=mask,
                dq=dq[rows], dk=slots[0][rows], dv=slots[1][rows],
            )  # fmt: skip
        self.grad_slots.collect(slots, dk, dv, self.summation)
        if ctx.seqs.rotation is not None:
            dqk = self._rotated(dqkv)
            rope_backward(dqk, *ctx.seqs.rotation, out=dqk)
        return self.qkv.backward(dqkv, ctx.qkv_linear)

    def _heads_of(self, qkv: Array) -> tuple[Array, Array, Array]:
        """Views q [t, a/tp, d], k and v [t, g/tp, d] of the fused projection."""
        a, g, d = self.heads.query.size, len(self.heads.kv), self.head_dim
        by_head = qkv.reshape(qkv.shape[0], a + 2 * g, d)
        return by_head[:, :a], by_head[:, a : a + g], by_head[:, a + g :]

    def _rotated(self, qkv: Array) -> Array:
        """View [t, (a + g)/tp, d] of the heads that RoPE turns: q and k, neighbours in the fused projection."""
        return qkv.reshape(qkv.shape[0], -1, self.head_dim)[:, : self.heads.query.size + len(self.heads.kv)]

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return prefixed("qkv", self.qkv.params()) | prefixed("out", self.out.params())


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout on the attention probabilities; masks are indexed by (sample, global head, query and key position)."""

    rate: float
    name: str

    def masks(self, seqs: Sequences, index: int, heads: HeadShare, like: Array) -> Callable[..., Array] | None:
        """A function (local head, queries, keys) -> keep mask for sequence `index`."""
        if not self.rate or seqs.dropout is None:
            return None
        state, first, xp = seqs.dropout, heads.query.span.start, array_module(like)

        def mask(head: int, queries: range, keys: range) -> Array:
            key = state.key(f"{self.name}/head {first + head}")
            return dropout_mask(self.rate, key, state.samples[index], queries, keys, like.dtype, xp)

        return mask


@dataclass(frozen=True, slots=True)
class GradSlots:
    """Where each query head's dk and dv are added up before they are summed over ranks.

    A KV head that lives on this rank alone has one slot, and its query heads add to it in order. A replicated one has a
    slot for each of this rank's query heads: their sum must run over all ranks' heads from left to right.
    """

    index: tuple[int, ...]  # a query head: its slot
    count: int
    own: tuple[tuple[int, int], ...]  # (slot, local KV head) of the heads that live here alone
    shared: tuple[tuple[int | None, tuple[int, ...]], ...]  # replicated heads: local KV head (None: not here), slots

    @classmethod
    def of(cls, heads: HeadShare) -> GradSlots:
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
        return cls(tuple(index), count, tuple((slot, kv) for kv, slot in own.items()), shared)

    def allocate(self, dk: Array, dv: Array) -> tuple[Array, Array]:
        """Arrays [t, count, d] to add into: dk and dv themselves when nothing is replicated."""
        if not self.shared:
            return dk, dv
        shape = (dk.shape[0], self.count, dk.shape[2])
        xp = array_module(dk)
        return xp.empty(shape, dk.dtype), xp.empty(shape, dv.dtype)

    def collect(self, slots: tuple[Array, Array], dk: Array, dv: Array, summation: Summation) -> None:
        """Write each KV head's gradient to dk and dv [t, g/tp, d], replicated heads summed over the ranks."""
        if not self.shared:
            return
        xp = array_module(dk)
        for slot, kv in self.own:
            dk[:, kv], dv[:, kv] = slots[0][:, slot], slots[1][:, slot]
        for held, own_slots in self.shared:
            partials = [xp.stack((slots[0][:, slot], slots[1][:, slot])) for slot in own_slots]
            total = summation(partials, like=xp.empty((2, dk.shape[0], dk.shape[2]), dk.dtype))
            if held is not None:
                dk[:, held], dv[:, held] = total[0], total[1]
