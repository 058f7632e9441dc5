r"""The two parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3).

Column-parallel: W is cut along its outputs, W = [W_0; W_1; ...], each rank computes its columns of y.

    y_r  = x W_r^T + b_r                     x [t, k] on every rank,  y_r [t, n/tp]
    dx   = sum_r dy_r W_r                    (the sum is CopyToTP's backward)
    dW_r = dy_r^T x,   db_r = sum_t dy_r

Row-parallel: W is cut along its inputs, W = [W_0, W_1, ...], each rank has its columns of x.

    y    = sum_r x_r W_r^T + b               x_r [t, k/tp],  y [t, n] on every rank  (ReduceFromTP's forward)
    dx_r = dy W_r
    dW_r = dy^T x_r,   db = sum_t dy         b is added once, after the sum; its gradient is equal on every rank

Every product is computed block by block (`Share.blocks`); there is one block, unless the layout is invariant.

Both sums run behind products where that gains time (between nodes): dx behind dW, y piece by piece behind itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.layers.mappings import CopyToTP, ReduceFromTP
from mpitp.layers.param import Param
from mpitp.ops.linear import linear_bias_grad, linear_forward, linear_input_grad, linear_weight_grad

Array = Any


@dataclass(slots=True)
class LinearContext:
    """What backward needs: the input."""

    x: Array  # column-parallel: [t, k]; row-parallel: [t, k/tp]


def as_slices(blocks: Sequence[range]) -> tuple[slice, ...]:
    """Ranges of rows as slices, empty ones left out."""
    return tuple(slice(block.start, block.stop) for block in blocks if len(block))


class ColumnParallelLinear:
    """y_r = x W_r^T + b_r: each rank computes its own columns of y.

    Args:
        weight: [n/tp, k].
        bias: [n/tp], or None.
        copy: the conjugate pair that sums dx.
        blocks: local rows of W that are multiplied by themselves.
        dx_blocks: those that count for dx, in global order. Rows replicated on several ranks count on one of them only.
    """

    def __init__(
        self,
        weight: Param,
        bias: Param | None,
        copy: CopyToTP,
        blocks: Sequence[range],
        dx_blocks: Sequence[range] | None = None,
    ) -> None:
        self.weight, self.bias, self.copy = weight, bias, copy
        self.blocks = as_slices(blocks)
        self.dx_blocks = self.blocks if dx_blocks is None else as_slices(dx_blocks)

    def forward(self, x: Array) -> tuple[Array, LinearContext]:
        """x [t, k] -> y [t, n/tp]."""
        x = self.copy.forward(x)
        w = self.weight.data
        y = array_module(x).empty((x.shape[0], w.shape[0]), x.dtype)  # [t, n/tp]
        for rows in self.blocks:
            linear_forward(x, w[rows], self.bias.data[rows] if self.bias else None, out=y[:, rows])
        return y, LinearContext(x)

    def backward(self, dy: Array, ctx: LinearContext) -> Array:
        """dy [t, n/tp] -> dx [t, k]; the sum over ranks runs behind the weight gradient's product."""
        w, x = self.weight.data, ctx.x
        dx_partials = [
            linear_input_grad(dy[:, rows], w[rows], out=None if i else self.copy.operand(x.shape, x))
            for i, rows in enumerate(self.dx_blocks)
        ]
        pending = self.copy.start_backward(dx_partials, like=x)
        dw = array_module(x).empty(w.shape, w.dtype)
        for rows in self.blocks:
            linear_weight_grad(dy[:, rows], x, out=dw[rows])
        self.weight.accumulate(dw)
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dy))
        return pending.wait()

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight} | ({"bias": self.bias} if self.bias else {})


class RowParallelLinear:
    """y = sum_r x_r W_r^T + b: each rank has its own columns of x.

    Args:
        weight: [n, k/tp].
        bias: [n], replicated, or None.
        reduce: the conjugate pair that sums y.
        blocks: local columns of W that are multiplied by themselves, in global order.
    """

    def __init__(self, weight: Param, bias: Param | None, reduce: ReduceFromTP, blocks: Sequence[range]) -> None:
        self.weight, self.bias, self.reduce = weight, bias, reduce
        self.blocks = as_slices(blocks)

    def forward(self, x: Array) -> tuple[Array, LinearContext]:
        """x [t, k/tp] -> y [t, n]."""
        shape = (x.shape[0], self.weight.data.shape[0])
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
        w = self.weight.data
        return [
            linear_forward(x[:, cols], w[:, cols], out=None if i else self.reduce.operand(shape, x))
            for i, cols in enumerate(self.blocks)
        ]

    def backward(self, dy: Array, ctx: LinearContext) -> Array:
        """dy [t, n] -> dx [t, k/tp]."""
        w, x = self.weight.data, ctx.x
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dy))
        dy = self.reduce.backward(dy)
        dx, dw = array_module(x).empty(x.shape, x.dtype), array_module(x).empty(w.shape, w.dtype)
        for cols in self.blocks:
            linear_input_grad(dy, w[:, cols], out=dx[:, cols])
            linear_weight_grad(dy, x[:, cols], out=dw[:, cols])
        self.weight.accumulate(dw)
        return dx

    def params(self) -> dict[str, Param]:
        """Parameters by name."""
        return {"weight": self.weight} | ({"bias": self.bias} if self.bias else {})
