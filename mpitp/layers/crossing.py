"""Where an encoder ends and a decoder begins: the encoder's output becomes what the decoder's blocks read.

    forward     memory = x [t_source, h];  on go the ids of the target [t]
    backward    dx = sum over the decoder's blocks of what their cross attention has left as the memory's gradient

Encoder and decoder are one row of layers so, and whatever walks, wraps, types or saves layers knows nothing of two
sides. The memory belongs to the pass (`Pass.crossing`), never to a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Segment
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import Layer, Wrapper
from mpitp.layers.passes import Crossing, Pass


class ToDecoder(Layer):
    """Turns from the encoder's rows to the decoder's. Its context is the pass's crossing.

    `memory`: the type that the decoder's blocks take the encoder's output to be of; `ids`: that of the target's ids.
    """

    algebra = Algebra(
        "from encoder to decoder",
        (Segment("memory = x, which every block of the decoder reads; on go the ids of the target", "x", "ids"),),
        (Segment("dx = sum over the blocks of what their cross attention has left for the memory", "", "dx"),),
        names={"y": "ids"},
    )

    def __init__(self, memory: ArrayType, ids: ArrayType) -> None:
        self.memory, self.ids = memory, ids

    def forward(self, x: Array, run: Pass) -> tuple[Array, Crossing]:
        """x [t_source, h] -> ids [t]."""
        crossing = crossing_of(run)
        crossing.memory = x
        return crossing.ids, crossing

    def backward(self, dy: None, ctx: Crossing) -> Array:
        """dx [t_source, h]: ids have no gradient."""
        return ctx.taken_grad()

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """The memory as the blocks take it, to ids that are on every rank of tp alike."""
        self.memory.expect_like(incoming, "the encoder's output")
        return self.ids


class OnSource(Wrapper):
    """A layer of the encoder: its rows are the source's."""

    def forward(self, x: Array, run: Pass) -> tuple[Array, Any]:
        return self.inner.forward(x, crossing_of(run).source)

    def backward(self, dy: Array, ctx: Any) -> Array:
        return self.inner.backward(dy, ctx)


def crossing_of(run: Pass) -> Crossing:
    """What the pass of an encoder-decoder must have."""
    assert run.crossing is not None, "a pass without a source; `EncoderDecoder.new_pass` makes one"
    return run.crossing
