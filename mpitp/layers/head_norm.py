r"""Norms of queries and keys, head by head, between the projection and RoPE (Henry et al. 2020; Qwen3, Gemma 3).

    q_h <- q_h / sqrt(mean(q_h^2) + eps) * (c + w_q),    k_g the same with w_k        w_q, w_k [d], shared by all heads

A rank normalises its own heads. The weights meet the heads of every rank, so that their gradients are summands along
the axis that deals heads, to be summed before the update; in the invariant mode backward itself adds those of all
blocks of heads in their order. A KV head that lives on several ranks has its whole dk on each of them (`attention.py`),
and counts for dw_k where it is owned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import widened
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import INVARIANT, ArrayType
from mpitp.layers.layer import BACKWARD, Layer, Send
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare
from mpitp.layers.summation import OrderedSum, local_sum
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward
from mpitp.ops.row_blocks import statistics_dtype


@dataclass(slots=True)
class HeadNormsContext:
    """The input, and 1 / root mean square of each of its heads."""

    x: Array  # [t, (a + 2g)/tp * d]
    rstd_q: Array  # [t * a/tp]
    rstd_k: Array  # [t * g/tp]


class HeadNorms(Layer):
    """RMSNorm of every query and key head; values go through as they are.

    Args:
        heads: this rank's query and KV heads; x has their columns [q | k | v].
        weights: w_q and w_k, [d].
        eps: added to the mean square.
        offset: c, added to the weights.
        ordered: of the invariant mode, adds dw of all blocks of heads; None: dw is a summand along the axis.
        summands: how many blocks all ranks have together.
    """

    algebra = Algebra(
        "norms of q and k",
        (Segment("q_h, k_g = head / sqrt(mean(head^2) + eps) * w", "qkv", "qkv_normed", "head by head"),),
        (Segment("dq_h, dk_g, dw of the head-wise norms", "dqkv_normed qkv", "dqkv", "head by head", grads=True),),
        names={"x": "qkv", "y": "qkv_normed", "dy": "dqkv_normed", "dx": "dqkv"},
    )

    def __init__(
        self,
        heads: HeadShare,
        weights: tuple[Param, Param],
        eps: float,
        offset: float = 0.0,
        ordered: OrderedSum | None = None,
        summands: int = 0,
    ) -> None:
        self.q_weight, self.k_weight = weights
        self.heads, self.eps, self.offset = heads, eps, offset
        self.ordered, self.summands = ordered, summands
        self.head_dim = d = self.q_weight.data.shape[0]
        a, g, first = heads.query.size, len(heads.kv), heads.kv.start
        self.q_columns, self.k_columns = slice(0, a * d), slice(a * d, (a + g) * d)
        self.values = slice((a + g) * d, (a + 2 * g) * d)
        self.unowned = slice(a * d, (a + heads.kv_owned.start - first if heads.kv_owned else a + g) * d)
        owned = [heads.owned_of(block) for block in heads.query.blocks]
        keys = [slice((a + own.start - first) * d, (a + own.stop - first) * d) for own in owned]
        queries = [slice(block.start * d, block.stop * d) for block in heads.query.local_blocks]
        self.blocks = list(zip(queries, keys, strict=True))  # the columns of each block of heads, as they count for dw

    def forward(self, x: Array, run: Any = None) -> tuple[Array, HeadNormsContext]:
        """x [t, (a + 2g)/tp * d] -> y of the same shape, a new array."""
        y = array_module(x).empty(x.shape, x.dtype)
        rstds = []
        for columns, weight in ((self.q_columns, self.q_weight), (self.k_columns, self.k_weight)):
            normed, rstd = rms_norm_forward(self._heads_of(x, columns), self._factors(weight), self.eps)
            y[:, columns] = normed.reshape(len(x), columns.stop - columns.start)
            rstds.append(rstd)
        y[:, self.values] = x[:, self.values]
        return y, HeadNormsContext(x, *rstds)

    def backward(self, dy: Array, ctx: HeadNormsContext) -> Array:
        """dy -> dx, both [t, (a + 2g)/tp * d]."""
        xp, dx = array_module(dy), array_module(dy).empty(dy.shape, dy.dtype)
        partials = []  # [2, d] of each block of heads: its part of dw_q and of dw_k
        for queries, keys in self.blocks:
            dw_q = self._backward_of(dy, ctx, self.q_weight, queries, out=dx)
            partials.append(xp.stack([dw_q, self._backward_of(dy, ctx, self.k_weight, keys, out=dx)]))
        self._backward_of(dy, ctx, self.k_weight, self.unowned, out=dx)
        dx[:, self.values] = dy[:, self.values]
        like = xp.empty((2, self.head_dim), statistics_dtype(dy.dtype))
        dw = local_sum(partials, like) if self.ordered is None else self.ordered(partials, like)
        self.q_weight.accumulate(dw[0])
        self.k_weight.accumulate(dw[1])
        return dx

    def _backward_of(self, dy: Array, ctx: HeadNormsContext, weight: Param, columns: slice, out: Array) -> Array:
        """dx of the heads in some columns into those of `out`; what they add to dw [d]."""
        keeps_q = weight is self.q_weight
        first, rstds = (0, ctx.rstd_q) if keeps_q else (self.k_columns.start, ctx.rstd_k)
        heads = slice((columns.start - first) // self.head_dim, (columns.stop - first) // self.head_dim)
        rstd = rstds.reshape(len(dy), -1)[:, heads].reshape(-1) if len(dy) else rstds
        grad, x = self._heads_of(dy, columns), self._heads_of(ctx.x, columns)
        dx, dw = rms_norm_backward(grad, x, self._factors(weight), rstd)
        out[:, columns] = dx.reshape(len(dy), columns.stop - columns.start)
        return dw

    def _heads_of(self, x: Array, columns: slice) -> Array:
        """The heads of some columns, one a row."""
        return x[:, columns].reshape(len(x) * ((columns.stop - columns.start) // self.head_dim), self.head_dim)

    def _factors(self, weight: Param) -> Array:
        if not self.offset:
            return weight.data
        factors = widened(weight.data)
        return factors + factors.dtype.type(self.offset)

    def children(self) -> Mapping[str, Param]:
        return {"q_weight": self.q_weight, "k_weight": self.k_weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's q, k and v, each head by itself."""
        incoming.expect_summed("what is normalised")
        axis = incoming.columns[0][1].axis
        met = incoming if self.ordered is None else incoming.changed(axis, INVARIANT, incoming.columns)
        for name, param in self.children().items():
            met.expect_gradient_summed(name, param)
        return incoming

    def sends(self) -> tuple[Send, ...]:
        if self.ordered is None:
            return ()
        nbytes = 2 * self.head_dim * statistics_dtype(self.q_weight.data.dtype).itemsize
        return (Send(BACKWARD, self.ordered.op, 0, "2 d s", summands=self.summands, fixed_bytes=nbytes),)
