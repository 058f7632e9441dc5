"""What is computed of each sequence's first row alone (BERT's [CLS], a class token): a pooler and a classifier.

x [t, h]  ->  first rows [b, h]  ->  the layers inside, one row a sequence
backward: their dx goes to the first rows, all other rows get 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.passes import Pass


@dataclass(slots=True)
class FirstRowsContext:
    """Which rows were taken, of how many, and the contexts of the layers inside."""

    rows: Array  # [b]
    count: int
    inner: list[Any]


class OnFirstRows(Layer):
    """The layers inside, one after the other, on the first row of each run."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self.layers = dict(layers)

    def forward(self, x: Array, run: Pass) -> tuple[Array, FirstRowsContext]:
        """x [t, h] -> y [b, ...]."""
        rows = from_host(run.rows.first_rows(), array_module(x))
        inner, y, ctxs = Pass(run.rows.heads(), run.dropout), x[rows], []
        for layer in self.layers.values():
            y, ctx = layer.forward(y, inner)
            ctxs.append(ctx)
        return y, FirstRowsContext(rows, x.shape[0], ctxs)

    def backward(self, dy: Array, ctx: FirstRowsContext) -> Array:
        """dy [b, ...] -> dx [t, h]."""
        for layer, layer_ctx in zip(reversed(self.layers.values()), reversed(ctx.inner), strict=True):
            dy = layer.backward(dy, layer_ctx)
        dx = array_module(dy).zeros((ctx.count, dy.shape[1]), dy.dtype)
        dx[ctx.rows] = dy
        return dx

    def children(self) -> Mapping[str, Layer]:
        return self.layers

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Some of the rows, through the layers inside."""
        for layer in self.layers.values():
            incoming = layer.placements(incoming)
        return incoming
