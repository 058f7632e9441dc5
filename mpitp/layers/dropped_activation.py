"""An MLP's activation with dropout behind it (T5, BART): y = f(x) keep / (1 - rate), of the columns that a rank has.

The mask is a function of global indices, the column's in the whole FFN width among them (`dropout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.backend.rng import dropout_mask
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.partition import Share
from mpitp.layers.passes import Pass
from mpitp.ops.dropout import dropout_forward


@dataclass(slots=True)
class DroppedActivationContext:
    """The activation's own context, and the pass, which draws the mask again."""

    inner: Any
    run: Pass


class DroppedActivation(Layer):
    """`activation`, then dropout under a name of its own; `columns`: this rank's of the FFN width."""

    def __init__(self, activation: Layer, rate: float, name: str, columns: Share) -> None:
        self.activation, self.rate, self.name, self.columns = activation, rate, name, columns

    def forward(self, x: Array, run: Pass) -> tuple[Array, DroppedActivationContext]:
        """x [t, f/tp], or [t, 2f/tp] with a gate -> y [t, f/tp]."""
        y, inner = self.activation.forward(x, run)
        return self._masked(y, run), DroppedActivationContext(inner, run)

    def backward(self, dy: Array, ctx: DroppedActivationContext) -> Array:
        """dy [t, f/tp] -> dx of the activation."""
        return self.activation.backward(self._masked(dy, ctx.run), ctx.inner)

    def _masked(self, x: Array, run: Pass) -> Array:
        if run.dropout is None:
            return x
        xp, key, wide = array_module(x), run.dropout.key(self.name), wide_dtype(x.dtype)
        mask = xp.empty(x.shape, wide)
        for each, rows in run.rows.places():  # attention and MLP have all rows, whatever lies between them
            mask[rows] = dropout_mask(self.rate, key, each.sample, each.positions, self.columns.span, wide, xp)
        return dropout_forward(x, mask)

    def children(self) -> Mapping[str, Layer]:
        return {"function": self.activation}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """As the activation: the mask is element by element."""
        return self.activation.placements(incoming)
