"""Looks at every pass through every layer of a model, from outside.

`observe` hides each layer's forward and backward, on this object, behind one that hands the pass to an observer, which
runs it and may look at what goes in and comes out. It needs to know of a layer only what all have (`layers/layer.py`);
the layers know nothing of it, and a model that nobody observes runs exactly the code that it always runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.array_type import ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, given_by
from mpitp.models.layered import LayeredModel


@dataclass(frozen=True, slots=True, eq=False)
class Spot:
    """A place in the model: a layer by its name, and the types of what it takes and gives there."""

    name: str
    layer: Layer
    incoming: ArrayType
    outgoing: ArrayType


class LayerObserver(ABC):
    """Sees every pass through every layer."""

    @abstractmethod
    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Do `run()` and return what it returns: (y, ctx) when `phase` is "forward", dx (or None) when "backward"."""


def observe(model: LayeredModel, observer: LayerObserver) -> None:
    """Show every pass through every layer of `model`, the loss too, to `observer` from now on."""
    for name, typed in model.types().items():
        spot = Spot(name, typed.layer, typed.incoming, typed.outgoing)
        for phase in (FORWARD, BACKWARD):
            setattr(typed.layer, phase, _shown(observer, spot, phase, getattr(typed.layer, phase)))


def _shown(observer: LayerObserver, spot: Spot, phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any) -> tuple[Array, Any]:
        return given_by(spot.layer, run(*args), spot.name)

    once = forward if phase == FORWARD else run

    def shown(*args: Any) -> Any:
        return observer.around_layer(spot, phase, args, lambda: once(*args))

    return shown
