r"""Norms of queries and keys over all heads together, between the projection and RoPE (Dehghani et al. 2023; OLMo-2).

    q <- q / sqrt(mean(q^2) + eps) * w_q        mean over the a d columns of all query heads, w_q [a d]
    k <- k / sqrt(mean(k^2) + eps) * w_k        over the g d columns of all KV heads, w_k [g d]

The columns are dealt by heads, and the weights with them. A rank's sums of squares of its own columns [2, t] are
summed over tp before the roots are taken; backward has the one sum that dx needs, of dy w x, in the same way. A KV head
that lives on several ranks counts where it is owned; each of them has its whole dk (`attention.py`), hence the whole
gradient of its part of w_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Send
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare, runs_of
from mpitp.layers.summation import Summation
from mpitp.ops.rms_norm_parts import (
    gradient_products,
    reciprocal_root,
    scaled_rows,
    scaled_rows_backward,
    sum_of_squares,
)
from mpitp.ops.row_blocks import statistics_dtype


@dataclass(slots=True)
class JointNormsContext:
    """The input, and 1 / root mean square of each row's queries and keys."""

    x: Array  # [t, (a + 2g)/tp * d]
    rstds: Array  # [2, t]


@dataclass(frozen=True, slots=True)
class _Half:
    """Queries or keys. `first`: the column of x at which they begin. `pieces`: their columns, from the first one on, as
    they are computed: a KV head that lives on several ranks by itself, so that its replicas get the same bits.
    `counted`: of each block of heads, the columns that this rank counts.
    """

    weight: Param
    columns: int  # of all ranks
    first: int
    pieces: tuple[range, ...]
    counted: tuple[range, ...]

    def of(self, x: Array, columns: range) -> Array:
        """Columns of x, [t, w]."""
        return x[:, self.first + columns.start : self.first + columns.stop]

    def factors(self, columns: range) -> Array:
        """The weights of some columns."""
        return self.weight.data[columns.start : columns.stop]


class JointNorms(Layer):
    """RMSNorm of all query heads as one row, and of all key heads; values go through as they are.

    Args:
        heads: this rank's query and KV heads; x has their columns [q | k | v].
        weights: w_q [a/tp * d] and w_k [g/tp * d], cut as the projection's rows are.
        eps: added to the mean square.
        summation: adds what ranks, or blocks of heads, have.
        summands: how many of these blocks all ranks have together (0: the ranks' own sums are added).
    """

    algebra = Algebra(
        "norms of q and k over all heads",
        (
            Segment("s_r = sum(q_r^2), sum(k_r^2) of this rank's columns", "qkv", "squares_partial"),
            Sum("squares", "s = sum_r s_r"),
            Segment("q_r, k_r = x_r / sqrt(s / n + eps) * w_r", "qkv squares", "qkv_normed"),
        ),
        (
            Segment("c_r = sum(dy_r w_r x_r) of this rank's columns", "dqkv_normed qkv", "products_partial"),
            Sum("products", "c = sum_r c_r"),
            Segment("dq_r, dk_r, dw_r of the norms", "dqkv_normed qkv products", "dqkv", grads=True),
        ),
        "the mean square of a row whose columns are on several ranks: a sum of two numbers a token, both ways",
        names={"x": "qkv", "y": "qkv_normed", "dy": "dqkv_normed", "dx": "dqkv"},
    )

    def __init__(
        self,
        heads: HeadShare,
        weights: tuple[Param, Param],
        eps: float,
        summation: Summation,
        summands: int = 0,
    ) -> None:
        self.q_weight, self.k_weight = weights
        self.heads = heads
        self.eps, self.summation, self.summands = eps, summation, summands
        columns = [param.placement.parts[0].dims[0].size for param in weights]  # of all ranks
        a, g, d = heads.query.size, len(heads.kv), columns[0] // heads.query.units
        blocks, first = heads.query.local_blocks, heads.kv.start
        owned = [range(own.start - first, own.stop - first) for own in map(heads.owned_of, heads.query.blocks)]
        singles = {head - first for head in heads.kv if summands or head in heads.kv_shared}
        self.halves = (
            _Half(self.q_weight, columns[0], 0, _scaled(blocks, d), _scaled(blocks, d)),
            _Half(self.k_weight, columns[1], a * d, _scaled(runs_of(g, singles), d), _scaled(owned, d)),
        )
        self.values = slice((a + g) * d, (a + 2 * g) * d)

    def forward(self, x: Array, run: Any = None) -> tuple[Array, JointNormsContext]:
        """x [t, (a + 2g)/tp * d] -> y of the same shape, a new array."""
        squares = self._summed(x, lambda half, columns: sum_of_squares(half.of(x, columns)))
        xp, y = array_module(x), array_module(x).empty(x.shape, x.dtype)
        means = zip(self.halves, squares, strict=True)
        rstds = xp.stack([reciprocal_root(total, half.columns, self.eps) for half, total in means])
        for half, rstd in zip(self.halves, rstds, strict=True):
            for columns in half.pieces:
                scaled_rows(half.of(x, columns), rstd, half.factors(columns), out=half.of(y, columns))
        y[:, self.values] = x[:, self.values]
        return y, JointNormsContext(x, rstds)

    def backward(self, dy: Array, ctx: JointNormsContext) -> Array:
        """dy -> dx, both [t, (a + 2g)/tp * d]."""
        x, xp = ctx.x, array_module(dy)
        products = self._summed(
            x,
            lambda half, columns: gradient_products(half.of(dy, columns), half.of(x, columns), half.factors(columns)),
        )
        dx = xp.empty(dy.shape, dy.dtype)
        for half, rstd, total in zip(self.halves, ctx.rstds, products, strict=True):
            dw = xp.empty(half.weight.data.shape, rstd.dtype)
            for columns in half.pieces:
                arrays = half.of(dy, columns), half.of(x, columns), half.factors(columns)
                dw[columns.start : columns.stop] = scaled_rows_backward(
                    *arrays, rstd, total / half.columns, out=half.of(dx, columns)
                )
            half.weight.accumulate(dw)
        dx[:, self.values] = dy[:, self.values]
        return dx

    def _summed(self, like: Array, number: Callable[[_Half, range], Array]) -> Array:
        """A number of each row, of queries and of keys, [2, t]: that of each block of heads, added over all ranks."""
        xp = array_module(like)
        blocks = zip(*(half.counted for half in self.halves), strict=True)
        partials = [
            xp.stack([number(half, columns) for half, columns in zip(self.halves, pair, strict=True)])
            for pair in blocks
        ]
        return self.summation(partials, xp.empty((2, like.shape[0]), statistics_dtype(like.dtype)))

    def children(self) -> Mapping[str, Param]:
        return {"q_weight": self.q_weight, "k_weight": self.k_weight}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's q, k and v, the weights cut as they are."""
        incoming.expect_summed("what is normalised")
        (axis,) = self.q_weight.placement.axes
        incoming.expect(axis, VARYING, "q, k and v", "the weights of a norm over all heads are cut by heads")
        for name, param in self.children().items():
            incoming.expect_gradient_summed(name, param)
        return incoming

    def sends(self) -> tuple[Send, ...]:
        (axis,) = self.q_weight.placement.axes
        op = self.summation.op
        return tuple(Send(phase, op, 2, "2 t s", axis, self.summands, is_wide=True) for phase in (FORWARD, BACKWARD))


def _scaled(heads: Iterable[range], head_dim: int) -> tuple[range, ...]:
    return tuple(range(block.start * head_dim, block.stop * head_dim) for block in heads)
