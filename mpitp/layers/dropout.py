"""Dropout whose mask is a function of global indices: equal on every rank, drawn again in backward, never stored.

Element (sample, position, column) of the activation is kept by a number drawn at exactly that index of the stream
(seed, name, step), see `backend/rng.py`. The layout, the microbatch and the rank count don't enter.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitp.backend.arrays import Array, array_module
from mpitp.backend.precision import wide_dtype
from mpitp.backend.rng import dropout_mask
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer
from mpitp.layers.passes import Pass
from mpitp.ops.dropout import dropout_forward


class Dropout(Layer):
    """y = x * keep / (1 - rate) on an activation [t, h] (Srivastava et al. 2014). Its context is the pass itself."""

    algebra = Algebra(
        "dropout",
        (Segment("y = x keep / (1 - rate)", "x", "y", "the mask depends on global indices, not on the rank"),),
        (Segment("dx = dy keep / (1 - rate)", "dy", "dx", "the same mask, drawn again"),),
    )

    def __init__(self, rate: float, name: str) -> None:
        self.rate, self.name = rate, name

    def forward(self, x: Array, run: Pass) -> tuple[Array, Pass]:
        """x [t, h] -> y [t, h]; x itself when nothing is dropped."""
        return self._masked(x, run), run

    def backward(self, dy: Array, ctx: Pass) -> Array:
        """dy [t, h] -> dx [t, h]: the same mask again."""
        return self._masked(dy, ctx)

    def _masked(self, x: Array, run: Pass) -> Array:
        if not self.rate or run.dropout is None:
            return x
        xp, key = array_module(x), run.dropout.key(self.name)
        wide = wide_dtype(x.dtype)
        mask = xp.empty(x.shape, wide)
        for each, rows in run.shard_rows.places():
            places = range(each.first, each.first + each.length)
            mask[rows] = dropout_mask(self.rate, key, each.sample, places, range(x.shape[1]), wide, xp)
        return dropout_forward(x, mask)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Each element by itself, the mask by its global place."""
        incoming.expect_summed("what is dropped out")
        incoming.expect_columns((), "what is dropped out")
        return incoming


def without_idle_dropouts(layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """The layers of a block but for dropouts that drop nothing."""
    return {name: layer for name, layer in layers.items() if not isinstance(layer, Dropout) or layer.rate}
