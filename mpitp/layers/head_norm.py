r"""Norms of queries and keys, head by head, between the projection and RoPE (Henry et al. 2020; Qwen3, Gemma 3).

    q_h <- q_h / sqrt(mean(q_h^2) + eps) * (c + w_q),    k_g the same with w_k        w_q, w_k [d], shared by all heads

A rank normalises its own heads. The weights meet the heads of every rank, so that their gradients are summands along
the axis that deals heads, to be summed before the update. A KV head that lives on several ranks has its whole dk on
each of them (`attention.py`), and counts for dw_k where it is owned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import widened
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward


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
        q_weight, k_weight: [d].
        eps: added to the mean square.
        offset: c, added to the weights.
    """

    algebra = Algebra(
        "norms of q and k",
        (Segment("q_h, k_g = head / sqrt(mean(head^2) + eps) * w", "qkv", "qkv_normed", "head by head"),),
        (Segment("dq_h, dk_g, dw of the head-wise norms", "dqkv_normed qkv", "dqkv", "head by head", grads=True),),
        names={"x": "qkv", "y": "qkv_normed", "dy": "dqkv_normed", "dx": "dqkv"},
    )

    def __init__(self, heads: HeadShare, q_weight: Param, k_weight: Param, eps: float, offset: float = 0.0) -> None:
        self.heads, self.q_weight, self.k_weight = heads, q_weight, k_weight
        self.eps, self.offset = eps, offset
        d, a, g = q_weight.data.shape[0], heads.query.size, len(heads.kv)
        self.q_columns, self.k_columns = slice(0, a * d), slice(a * d, (a + g) * d)
        self.values = slice((a + g) * d, (a + 2 * g) * d)

    def forward(self, x: Array, run: Any = None) -> tuple[Array, HeadNormsContext]:
        """x [t, (a + 2g)/tp * d] -> y of the same shape, a new array."""
        y = array_module(x).empty(x.shape, x.dtype)
        rstds = []
        for columns, weight in ((self.q_columns, self.q_weight), (self.k_columns, self.k_weight)):
            normed, rstd = rms_norm_forward(self._heads_of(x, columns), self._factors(weight), self.eps)
            y[:, columns] = normed.reshape(x.shape[0], -1)
            rstds.append(rstd)
        y[:, self.values] = x[:, self.values]
        return y, HeadNormsContext(x, *rstds)

    def backward(self, dy: Array, ctx: HeadNormsContext) -> Array:
        """dy -> dx, both [t, (a + 2g)/tp * d]."""
        x, dx = ctx.x, array_module(dy).empty(dy.shape, dy.dtype)
        dq, dw = self._backward_of(dy, x, self.q_columns, self.q_weight, ctx.rstd_q)
        dx[:, self.q_columns] = dq
        self.q_weight.accumulate(dw)
        dk, dw = self._backward_of(dy, x, self.k_columns, self.k_weight, ctx.rstd_k)
        dx[:, self.k_columns] = dk
        owned = self._owned_columns()
        if owned != self.k_columns:
            rstd = ctx.rstd_k.reshape(x.shape[0], -1)[:, self._owned_heads()].reshape(-1)
            dw = self._backward_of(dy, x, owned, self.k_weight, rstd)[1]
        self.k_weight.accumulate(dw)
        dx[:, self.values] = dy[:, self.values]
        return dx

    def _backward_of(self, dy: Array, x: Array, columns: slice, weight: Param, rstd: Array) -> tuple[Array, Array]:
        """dx of some heads' columns, [t, heads * d], and what they add to dw [d]."""
        dx, dw = rms_norm_backward(self._heads_of(dy, columns), self._heads_of(x, columns), self._factors(weight), rstd)
        return dx.reshape(x.shape[0], -1), dw

    def _heads_of(self, x: Array, columns: slice) -> Array:
        """The heads of some columns, one a row."""
        return x[:, columns].reshape(-1, self.q_weight.data.shape[0])

    def _factors(self, weight: Param) -> Array:
        if not self.offset:
            return weight.data
        factors = widened(weight.data)
        return factors + factors.dtype.type(self.offset)

    def _owned_heads(self) -> slice:
        """The local KV heads that this rank owns."""
        first = self.heads.kv.start
        return slice(self.heads.kv_owned.start - first, self.heads.kv_owned.stop - first)

    def _owned_columns(self) -> slice:
        owned, d = self._owned_heads(), self.q_weight.data.shape[0]
        return slice(self.k_columns.start + owned.start * d, self.k_columns.start + owned.stop * d)

    def children(self) -> Mapping[str, Param]:
        return {"q_weight": self.q_weight, "k_weight": self.k_weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's q, k and v, each head by itself."""
        incoming.expect_summed("what is normalised")
        for name, param in self.children().items():
            incoming.expect_gradient_summed(name, param)
        return incoming
