r"""A dense layer whose output every rank needs whole: a column-parallel product, its columns then put side by side.

    y = [f(x W_0^T + b_0), f(x W_1^T + b_1), ...]       x [t, k] on every rank, y [t, n] on every rank
    dy_r = rank r's columns of dy                       (every rank has the whole dy)

The pooler and the transform of BERT's masked-language-model head are such layers: behind them comes a norm over the
whole width, or another column-parallel product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Send
from mpitp.layers.linear import ColumnParallelLinear, LinearContext
from mpitp.layers.partition import Share, split_by_weight
from mpitp.layers.placement import Cut


class GatherColumns(Layer):
    """Forward: every rank's columns side by side, an all-gather. Backward: this rank's own columns."""

    algebra = Algebra(
        "gathered columns",
        (
            Segment("x_r: rank r's columns", "x", "y_partial", "of the same rows"),
            Sum("y", "y = [x_0, x_1, ...]", "an all-gather"),
        ),
        (Segment("dx_r = rank r's columns of dy", "dy", "dx", "dy is on every rank"),),
        "all-gather forward, identity backward",
    )

    def __init__(self, group: Group, columns: Share, axis: str = "tp") -> None:
        self.group, self.columns, self.axis = group, columns, axis

    def forward(self, x: Array, run: Any = None) -> tuple[Array, None]:
        """x [t, n/tp] -> y [t, n]."""
        return self.group.all_gather(x, dim=1), None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dy [t, n] -> dx [t, n/tp]."""
        own = self.columns.span
        return dy[:, own.start : own.stop].copy()

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's columns to whole rows."""
        _expect_columns(incoming, self.columns, self.axis)
        return incoming.changed(self.axis, INVARIANT)

    def sends(self) -> tuple[Send, ...]:
        """All ranks together hand in the whole rows, once."""
        return (Send(FORWARD, "all_gather", self.columns.units, "t h s / p", self.axis, summands=1),)


class ColumnsToRows(Layer):
    """The same with sequence parallelism: the columns of all rows become all columns of the rank's own rows, and
    backward the other way round, an all-to-all each. `weights`: by which both are dealt (none: evenly).
    """

    algebra = Algebra(
        "columns to rows",
        (
            Segment("x_r: rank r's columns of all rows", "x", "y_partial", "of the same rows"),
            Sum("y", "y_r = rank r's rows of [x_0, x_1, ...]", "an all-to-all"),
        ),
        (Sum("dx", "dx_r = rank r's columns of [dy_0; dy_1; ...]", "an all-to-all"),),
        "all-to-all forward and backward",
    )

    def __init__(self, group: Group, columns: Share, weights: tuple[float, ...] = (), axis: str = "tp") -> None:
        self.group, self.columns, self.weights, self.axis = group, columns, weights, axis

    def forward(self, x: Array, run: Any = None) -> tuple[Array, None]:
        """x [t, n/tp] -> y [t/tp, n]."""
        blocks = [x[rows.start : rows.stop] for rows in split_by_weight(len(x), self.group.size, self.weights)]
        return array_module(x).concatenate(self.group.all_to_all(blocks), axis=1), None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dy [t/tp, n] -> dx [t, n/tp]."""
        shares = split_by_weight(self.columns.units, self.group.size, self.weights)
        blocks = [dy[:, columns.start : columns.stop].copy() for columns in shares]
        return array_module(dy).concatenate(self.group.all_to_all(blocks))

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """This rank's columns to this rank's rows."""
        _expect_columns(incoming, self.columns, self.axis)
        return incoming.changed(self.axis, VARYING)

    def sends(self) -> tuple[Send, ...]:
        """A rank hands in its columns of all rows, and backward all columns of its rows."""
        forward = Send(FORWARD, "all_to_all", self.columns.size, "t h s / p", self.axis)
        return forward, Send(BACKWARD, "all_to_all", self.columns.units, "t/p h s", self.axis)


Gather = GatherColumns | ColumnsToRows


def _expect_columns(incoming: ArrayType, columns: Share, axis: str) -> None:
    incoming.expect(axis, VARYING, "what is gathered", "each rank has its own columns")
    names = [name for name, _ in incoming.columns] or [""]
    incoming.expect_columns(((names[0], Cut.of(columns, axis)),), "what is gathered")


@dataclass(slots=True)
class DenseContext:
    """The contexts of the layers; `activation` None: there is none."""

    dense: LinearContext
    activation: Any


class GatheredDense(Layer):
    """y = f(x W^T + b), all its columns. `activation`: f; None: nothing is applied."""

    def __init__(self, dense: ColumnParallelLinear, activation: Layer | None, gather: Gather) -> None:
        self.dense, self.activation, self.gather = dense, activation, gather

    def forward(self, x: Array, run: Any = None) -> tuple[Array, DenseContext]:
        """x [t, k] -> y [t, n]."""
        y, dense_ctx = self.dense.forward(x)
        y, activation_ctx = (y, None) if self.activation is None else self.activation.forward(y)
        return self.gather.forward(y)[0], DenseContext(dense_ctx, activation_ctx)

    def backward(self, dy: Array, ctx: DenseContext) -> Array:
        """dy [t, n] -> dx [t, k]."""
        dy = self.gather.backward(dy, None)
        dy = dy if self.activation is None else self.activation.backward(dy, ctx.activation)
        return self.dense.backward(dy, ctx.dense)

    def children(self) -> Mapping[str, Layer]:
        between: dict[str, Layer] = {} if self.activation is None else {"activation": self.activation}
        return {"dense": self.dense, **between, "gather": self.gather}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows, by way of this rank's columns, to whole rows."""
        y = self.dense.placements(incoming)
        y = y if self.activation is None else self.activation.placements(y)
        return self.gather.placements(y)
