"""Stand-ins for a model's layers: `attach` puts one where each layer was, and takes nothing out of the path.

A stand-in hands every forward and backward to its observer, which runs it and may look at what goes in and comes out.
The layers know nothing of it, and a model that nobody attached to runs exactly the code that it always runs.

What lies between two layers with a stand-in (the heads between qkv and out, the activation between up and down) shows
too: its output is the input of the layer after it, the gradient of its input is what the layer before it gets backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.dropout import Dropout
from mpitp.layers.mlp import GeluMLP
from mpitp.layers.param import Param, Part
from mpitp.layers.sequences import Sequences
from mpitp.models.model import CausalLM

Array = Any
Parts = tuple[Part, ...]

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """A place in the model. `x_parts` and `y_parts`: how input and output are cut over the ranks; None: they aren't.

    `before` and `after` name what stands between this layer and its neighbours with a stand-in; None: nothing does.
    """

    name: str
    layer: Any
    x_parts: Parts | None = None
    y_parts: Parts | None = None
    before: str | None = None
    after: str | None = None


class LayerObserver(ABC):
    """Sees every pass through every layer."""

    @abstractmethod
    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Do `run()` and return what it returns: (y, ctx) when `phase` is "forward", dx (or None) when "backward"."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """In the place of a layer."""

    spot: Spot
    observer: LayerObserver

    def forward(self, *args: Any) -> tuple[Array, Any]:
        """The layer's own forward."""
        return self.observer.around_layer(self.spot, FORWARD, args, lambda: self.spot.layer.forward(*args))

    def backward(self, dy: Array, ctx: Any) -> Array:
        """The layer's own backward."""
        return self.observer.around_layer(self.spot, BACKWARD, (dy, ctx), lambda: self.spot.layer.backward(dy, ctx))

    def params(self) -> dict[str, Param]:
        """The layer's own parameters."""
        return self.spot.layer.params()


@dataclass(frozen=True, slots=True)
class DropoutStandIn:
    """In the place of a dropout, which keeps no context."""

    spot: Spot
    observer: LayerObserver

    def forward(self, x: Array, seqs: Sequences) -> Array:
        """The dropout's own forward."""
        run = self.spot.layer.forward
        return self.observer.around_layer(self.spot, FORWARD, (x,), lambda: (run(x, seqs), None))[0]

    def backward(self, dy: Array, seqs: Sequences) -> Array:
        """The dropout's own backward."""
        return self.observer.around_layer(self.spot, BACKWARD, (dy, None), lambda: self.spot.layer.backward(dy, seqs))


def attach(model: CausalLM, observer: LayerObserver) -> None:
    """Show every layer of `model` to `observer` from now on."""

    def stand_in(layer: Any, name: str, x_parts: Parts | None = None, y_parts: Parts | None = None) -> Any:
        return StandIn(Spot(name, layer, x_parts, y_parts), observer)

    vocab_parts = model.head.weight.spec.parts
    model.embedding = stand_in(model.embedding, "embedding")
    if model.positions is not None:
        model.positions = stand_in(model.positions, "positions")
    model.embedding_dropout = _dropout(model.embedding_dropout, "embedding dropout", observer)
    for i, block in enumerate(model.blocks):
        _attach_block(block, f"blocks.{i}", observer)
        model.blocks[i] = stand_in(block, f"blocks.{i}")
    model.final_norm = stand_in(model.final_norm, "final_norm")
    model.head = stand_in(model.head, "head", y_parts=vocab_parts)
    model.loss = stand_in(model.loss, "loss", x_parts=vocab_parts)


def _attach_block(block: TransformerBlock, name: str, observer: LayerObserver) -> None:
    _attach_pair(block.attention, "qkv", "out", f"{name}.attention", "heads", observer)
    up = "up" if isinstance(block.mlp, GeluMLP) else "gate_up"
    _attach_pair(block.mlp, up, "down", f"{name}.mlp", "activation", observer)
    first, second = block.dropouts
    block.dropouts = (_dropout(first, f"{name}.dropout1", observer), _dropout(second, f"{name}.dropout2", observer))
    for layer_name, layer in block.layers():
        setattr(block, layer_name, StandIn(Spot(f"{name}.{layer_name}", layer), observer))


def _attach_pair(owner: Any, first: str, last: str, name: str, between: str, observer: LayerObserver) -> None:
    """A column-parallel linear, something between, and a row-parallel linear."""
    column, row, middle = getattr(owner, first), getattr(owner, last), f"{name}.{between}"
    y_parts, x_parts = column.weight.spec.parts, row.weight.spec.parts
    setattr(owner, first, StandIn(Spot(f"{name}.{first}", column, y_parts=y_parts, after=middle), observer))
    setattr(owner, last, StandIn(Spot(f"{name}.{last}", row, x_parts=x_parts, before=middle), observer))


def _dropout(layer: Dropout, name: str, observer: LayerObserver) -> Any:
    """The dropout stood in for, unless it drops nothing."""
    return DropoutStandIn(Spot(name, layer), observer) if layer.rate else layer
