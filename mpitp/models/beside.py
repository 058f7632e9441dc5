"""What goes from stage to stage of a pipeline: an activation forward and its gradient backward, and beside them an
encoder's output, which every later block of a decoder reads, and its gradient.

    forward     x goes into a chunk, y comes out; with them the memory, to the chunks behind the one that makes it
    backward    dy and dx; with them the sum of what all later blocks have added to the memory's gradient

| chunk                              | comes in          | goes out           |
|------------------------------------|-------------------|--------------------|
| of the encoder                     | x of the source   | y of the source    |
| where the decoder begins           | the memory itself | y, memory          |
| of the decoder                     | x, memory         | y, memory          |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.crossing import crossing_of
from mpitp.layers.passes import Pass
from mpitp.models.batch import Batch
from mpitp.models.stages import TO_DECODER, Chunk

if TYPE_CHECKING:
    from mpitp.models.layered import LayeredModel

Shape = tuple[int, ...]


class Beside(ABC):
    """What stages of a kind of model hand to one another."""

    @abstractmethod
    def shapes(self, batch: Batch, chunk: Chunk, *, entering: bool) -> list[Shape]:
        """Of the arrays that go into a chunk, or come out of it: the activation first. Gradients have the same."""

    @abstractmethod
    def take(self, run: Pass, arrays: Sequence[Array]) -> None:
        """What has come behind an activation is for this pass."""

    @abstractmethod
    def give(self, run: Pass, chunk: Chunk) -> list[Array]:
        """What goes on behind a chunk's output."""

    @abstractmethod
    def take_grads(self, run: Pass, arrays: Sequence[Array]) -> None:
        """What has come behind a gradient is for this pass. The arrays are given away."""

    @abstractmethod
    def give_grads(self, run: Pass, chunk: Chunk) -> list[Array]:
        """What goes back behind the gradient of a chunk's input."""


class Alone(Beside):
    """Nothing."""

    def __init__(self, model: LayeredModel) -> None:
        self.model = model

    def shapes(self, batch: Batch, chunk: Chunk, *, entering: bool) -> list[Shape]:
        return [self.model.hidden_shape(batch)]

    def take(self, run: Pass, arrays: Sequence[Array]) -> None:
        """There is none."""

    def give(self, run: Pass, chunk: Chunk) -> list[Array]:
        return []

    def take_grads(self, run: Pass, arrays: Sequence[Array]) -> None:
        """There are none."""

    def give_grads(self, run: Pass, chunk: Chunk) -> list[Array]:
        return []


class Memory(Beside):
    """The encoder's output."""

    def __init__(self, model: LayeredModel) -> None:
        self.model = model

    def shapes(self, batch: Batch, chunk: Chunk, *, entering: bool) -> list[Shape]:
        assert batch.source is not None, "pairs have sources"
        source = self.model.hidden_shape(batch.source)
        has_memory = takes_memory(chunk) if entering else gives_memory(chunk)
        return [self.model.hidden_shape(batch), source] if has_memory else [source]

    def take(self, run: Pass, arrays: Sequence[Array]) -> None:
        for memory in arrays:
            crossing_of(run).memory = memory

    def give(self, run: Pass, chunk: Chunk) -> list[Array]:
        memory = crossing_of(run).memory
        return [memory] if gives_memory(chunk) and memory is not None else []

    def take_grads(self, run: Pass, arrays: Sequence[Array]) -> None:
        for grad in arrays:
            crossing_of(run).add(grad)

    def give_grads(self, run: Pass, chunk: Chunk) -> list[Array]:
        if not takes_memory(chunk):
            return []
        crossing = crossing_of(run)
        if crossing.grad is None and crossing.memory is not None:  # a last stage without blocks reads nothing of it
            return [array_module(crossing.memory).zeros_like(crossing.memory)]
        return [crossing.taken_grad()]


def takes_memory(chunk: Chunk) -> bool:
    """Whether the memory is made before the chunk."""
    return chunk.names[0] != TO_DECODER and not chunk.names[0].startswith("encoder.")


def gives_memory(chunk: Chunk) -> bool:
    """Whether the memory is needed, and there, behind the chunk."""
    return not chunk.ends_in_loss and not chunk.names[-1].startswith("encoder.")
