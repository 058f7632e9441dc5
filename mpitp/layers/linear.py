r"""The two parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3): a product times a pair.

Column-parallel: W is cut along its outputs, W = [W_0; W_1; ...], each rank computes its columns of y.

    y_r  = x W_r^T + b_r                     x [t, k] on every rank,  y_r [t, n/tp]
    dx   = sum_r dy_r W_r                    (the sum is CopyToTP's backward)
    dW_r = dy_r^T x,   db_r = sum_t dy_r

Row-parallel: W is cut along its inputs, W = [W_0, W_1, ...], each rank has its columns of x.

    y    = sum_r x_r W_r^T + b               x_r [t, k/tp],  y [t, n] on every rank  (ReduceFromTP's forward)
    dx_r = dy W_r
    dW_r = dy^T x_r,   db = sum_t dy         b is added once, after the sum; its gradient is equal on every rank

The product (`product.py`) knows the weights, the pair (`mappings.py`) the communication. Every product is computed
block by block; there is one block, unless the layout is invariant. Both sums run behind products where that gains time
(between nodes): dx behind dW, y piece by piece behind itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import PARTIAL, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.layer import Layer, Send
from mpitp.layers.mappings import EntryPair, ExitPair
from mpitp.layers.param import Param
from mpitp.layers.product import ALL, Product
from mpitp.ops.linear import linear_bias_grad


@dataclass(slots=True)
class LinearContext:
    """What backward needs: the input."""

    x: Array  # column-parallel: [t, k]; row-parallel: [t, k/tp]


def as_slices(blocks: Sequence[range]) -> tuple[slice, ...]:
    """Ranges of rows as slices, empty ones left out."""
    return tuple(slice(block.start, block.stop) for block in blocks if len(block))


class ColumnParallelLinear(Layer):
    """y_r = x W_r^T + b_r: each rank computes its own columns of y.

    Args:
        product: W_r [n/tp, k].
        bias: [n/tp], or None.
        copy: the pair that makes dx of the ranks' parts of it.
        blocks: local rows of W that are multiplied by themselves.
        dx_blocks: those that count for dx, in global order. Rows replicated on several ranks count on one of them only.
        dx_summands: how many of these all ranks have together (0: the ranks' own sums are added).
    """

    algebra = Algebra(
        "column-parallel linear",
        (Segment("y_r = x W_r^T{ + b_r}", "x W b", "y", "W is cut along its outputs: a rank makes its columns of y"),),
        (
            Segment("dx_partial = dy_r W_r", "dy W", "dx_partial", "every rank's columns of y came from the whole x"),
            Sum("dx", "dx = sum_r dx_partial", "x was used on every rank"),
            Segment("dW_r = dy_r^T x{, db_r = sum_t dy_r}", "dy x", "", "runs while dx is being summed", grads=True),
        ),
        "CopyToTP: identity forward, all-reduce of dx backward",
        entry="copy",
    )

    def __init__(
        self,
        product: Product,
        bias: Param | None,
        copy: EntryPair,
        blocks: Sequence[range],
        dx_blocks: Sequence[range] | None = None,
        dx_summands: int = 0,
    ) -> None:
        self.product, self.bias, self.copy = product, bias, copy
        self.blocks = as_slices(blocks)
        self.dx_blocks = self.blocks if dx_blocks is None else as_slices(dx_blocks)
        self.dx_summands = dx_summands

    def forward(self, x: Array, run: Any = None) -> tuple[Array, LinearContext]:
        """x [t, k] -> y [t, n/tp]."""
        x = self.copy.forward(x)
        y = array_module(x).empty((x.shape[0], self.product.shape[0]), x.dtype)  # [t, n/tp]
        for rows in self.blocks:
            self.product.forward(x, rows, out=y[:, rows])
        if self.bias:
            y += self.bias.data
        return y, LinearContext(x)

    def backward(self, dy: Array, ctx: LinearContext) -> Array:
        """dy [t, n/tp] -> dx [t, k]; the sum over ranks runs behind the weight gradient's product."""
        x = ctx.x
        dx_partials = [
            self.product.input_grad(dy[:, rows], rows, out=None if i else self.copy.operand(x.shape, x))
            for i, rows in enumerate(self.dx_blocks)
        ]
        pending = self.copy.start_backward(dx_partials, like=x)
        self.product.accumulate_grads(dy, x, [(rows, ALL) for rows in self.blocks])
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dy))
        return pending.wait()

    def children(self) -> Mapping[str, Param]:
        return {**self.product.params(), **({"bias": self.bias} if self.bias else {})}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """From whole rows, copied to every rank, to this rank's columns."""
        x, placement = self.copy.placements(incoming), self.product.placement
        x.expect_summed("x of a linear")
        x.expect_columns((), "x of a column-parallel linear")
        axis = placement.parts[0].dims[0].axis
        x.expect(axis, REPLICATE, "x of a column-parallel product", f"a copy along {axis}, which sums dx, is missing")
        for name, param in self.children().items():
            x.expect_gradient_summed(name, param)
        return x.changed(axis, VARYING, columns_of(placement.parts, 0))

    def sends(self) -> tuple[Send, ...]:
        return self.copy.sends(self.product.shape[1], self.dx_summands)


class RowParallelLinear(Layer):
    """y = sum_r x_r W_r^T + b: each rank has its own columns of x.

    Args:
        product: W_r [n, k/tp].
        bias: [n], replicated, or None.
        reduce: the pair that makes y of the ranks' parts of it.
        blocks: local columns of W that are multiplied by themselves, in global order.
        summands: how many of these all ranks have together (0: the ranks' own sums are added).
    """

    _backward = "dx_r = dy W_r, dW_r = dy^T x_r{, db = sum_t dy}"
    algebra = Algebra(
        "row-parallel linear",
        (
            Segment("y_partial = x_r W_r^T", "x W", "y_partial", "W is cut along its inputs: a part of the sum"),
            Sum("y", "y = sum_r y_partial"),
            Segment("y = y + b", "y b", "y", "the bias is added once, after the sum", needs="b"),
        ),
        (Segment(_backward, "dy W x", "dx", "dy is the gradient of every rank's y_partial", grads=True),),
        "ReduceFromTP: all-reduce of y forward, identity backward",
        exit="reduce",
    )

    def __init__(
        self, product: Product, bias: Param | None, reduce: ExitPair, blocks: Sequence[range], summands: int = 0
    ) -> None:
        self.product, self.bias, self.reduce = product, bias, reduce
        self.blocks, self.summands = as_slices(blocks), summands

    def forward(self, x: Array, run: Any = None) -> tuple[Array, LinearContext]:
        """x [t, k/tp] -> y [t, n]."""
        shape = (x.shape[0], self.product.shape[0])
        pieces = self.reduce.pieces(shape, x.dtype.itemsize)
        y = self._sum_pieces(x, shape, pieces) if len(pieces) > 1 else self._sum_whole(x, shape)  # [t, n]
        if self.bias:
            y += self.bias.data
        return y, LinearContext(x)

    def _sum_whole(self, x: Array, shape: tuple[int, int]) -> Array:
        y_partials = self._partials(x, shape)
        like = y_partials[0] if y_partials else array_module(x).zeros(shape, x.dtype)
        return self.reduce.forward(y_partials, like)

    def _sum_pieces(self, x: Array, shape: tuple[int, int], pieces: Sequence[slice]) -> Array:
        """y piece by piece: the sum of one piece of rows over the ranks runs behind the product of the next."""
        y = array_module(x).empty(shape, x.dtype)
        pending = [
            self.reduce.start_forward(self._partials(x[rows], (rows.stop - rows.start, shape[1])), out=y[rows])
            for rows in pieces
        ]
        for piece in pending:
            piece.wait()
        return y

    def _partials(self, x: Array, shape: tuple[int, int]) -> list[Array]:
        """The partial y of each block: x_r W_r^T."""
        return [
            self.product.forward(x[:, cols], cols=cols, out=None if i else self.reduce.operand(shape, x))
            for i, cols in enumerate(self.blocks)
        ]

    def backward(self, dy: Array, ctx: LinearContext) -> Array:
        """dy [t, n] -> dx [t, k/tp]."""
        x = ctx.x
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dy))
        dy = self.reduce.backward(dy)
        dx = array_module(x).empty(x.shape, x.dtype)
        for cols in self.blocks:
            self.product.input_grad(dy, cols=cols, out=dx[:, cols])
        self.product.accumulate_grads(dy, x, [(ALL, cols) for cols in self.blocks])
        return dx

    def children(self) -> Mapping[str, Param]:
        return {**self.product.params(), **({"bias": self.bias} if self.bias else {})}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """From this rank's columns to whole rows, summed over the ranks."""
        placement = self.product.placement
        axis = placement.parts[0].dims[1].axis
        incoming.expect(axis, VARYING, "x of a row-parallel product", "each rank needs its own columns")
        incoming.expect_columns(columns_of(placement.parts, 1), "x of a row-parallel linear")
        for name, param in self.product.params().items():
            incoming.expect_gradient_summed(name, param)
        y = self.reduce.placements(incoming.changed(axis, PARTIAL).of_layer("its own product"))
        if self.bias:
            y.expect_summed("what a bias is added to")
            y.expect_gradient_summed("bias", self.bias)
        return y

    def sends(self) -> tuple[Send, ...]:
        return self.reduce.sends(self.product.shape[0], self.summands)
