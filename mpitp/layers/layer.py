"""The layer: everything that a model is made of, and what follows from knowing only that.

    y, ctx = layer.forward(x, run)      ctx: what backward needs; the caller owns it
    dx     = layer.backward(dy, ctx)    adds to the gradients of the layer's parameters

`run` is the pass at hand (`passes.py`). A layer holds parameters, settings and pairs, never an activation: forward may
run many times before any backward.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpitp.backend.arrays import Array
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers.algebra import Algebra
from mpitp.layers.array_type import ArrayType
from mpitp.layers.param import Param

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Send:
    """A collective that a layer calls in every pass of a kind: what its closed form needs.

    A rank hands `width` elements a token to `op` ("all_reduce sum", ...), `calls` times, as formula says in words; and
    `fixed_bytes` beside, whatever the number of tokens.
    `summands`: how many such arrays all ranks of `axis` together hand in; 0: one each.
    """

    phase: str
    op: str
    width: int
    formula: str
    axis: str = "tp"
    summands: int = 0
    calls: int = 1
    is_wide: bool = False  # elements of the dtype that is summed in, where the model's has 16 bits
    is_index: bool = False  # of 64 bits, whatever the model's dtype
    fixed_bytes: int = 0


class Layer(ABC):
    """One thing that is computed, forward and backward."""

    algebra: ClassVar[Algebra | None] = None  # its equations, where it offers them to be shown
    gives_a_row_a_sequence: ClassVar[bool] = False  # of rows that are tokens; as many in every other layer

    @abstractmethod
    def forward(self, x: Array, *args: Any, **kwargs: Any) -> tuple[Array, Any]:
        """y, and the context of this pass. A second argument is the pass at hand; who doesn't look at it may go
        without.
        """

    @abstractmethod
    def backward(self, dy: Array, ctx: Any) -> Array:
        """dx of dy; None where x has no gradient (ids). Gradients of parameters are added up."""

    @abstractmethod
    def children(self) -> Mapping[str, Layer | Param]:
        """The layers and parameters that it is made of, by name, in forward order."""

    @abstractmethod
    def placements(self, incoming: ArrayType) -> ArrayType:
        """The type of y for an x of type `incoming`. Raises PlacementError for one that it can't take."""

    def sends(self) -> tuple[Send, ...]:
        """What it communicates by itself, its children not counted; most layers nothing."""
        return ()

    def rows_sent(self, x: Array, ctx: Any) -> int:
        """The rows, in a forward pass on x, that `sends` counts by."""
        return len(x)

    def inside(self, ctx: Any) -> Mapping[str, tuple[Array, str]]:
        """What forward made on the way and didn't keep, made again from its context, each with its letter (I, R, V, P):
        for whoever shows a pass.
        """
        return {}

    def params(self) -> dict[str, Param]:
        """All parameters by name, those of the layers inside too."""
        found: dict[str, Param] = {}
        for name, child in self.children().items():
            if isinstance(child, Param):
                found[name] = child
            else:
                found |= {f"{name}.{inner}": param for inner, param in child.params().items()}
        return found


class Wrapper(Layer):
    """A layer around a layer, that changes when or with what it runs and not what it computes.

    It is transparent: what is inside bears its name, so that files, types, verify, trace and step see no difference.
    """

    def __init__(self, inner: Layer) -> None:
        self.inner = inner

    def children(self) -> Mapping[str, Layer | Param]:
        return self.inner.children()

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Those of what is inside."""
        return self.inner.placements(incoming)


def unwrapped(layer: Layer) -> Layer:
    """What is inside all wrappers."""
    while isinstance(layer, Wrapper):
        layer = layer.inner
    return layer


def walk(layers: Mapping[str, Layer | Param], prefix: str = "") -> Iterator[tuple[str, Layer]]:
    """Every layer under these names, outer ones first, each with its dotted name; what is inside a wrapper for it."""
    for name, child in layers.items():
        if not isinstance(child, Param):
            layer = unwrapped(child)
            yield prefix + name, layer
            yield from walk(layer.children(), f"{prefix}{name}.")


@dataclass(frozen=True, slots=True)
class TypedLayer:
    """A layer with the types of what it takes and gives in its place."""

    layer: Layer
    incoming: ArrayType
    outgoing: ArrayType


def typed_layers(layers: Mapping[str, Layer], incoming: ArrayType) -> dict[str, TypedLayer]:
    """The types between all `layers` (run one after the other) and inside them, by dotted name.

    Raises PlacementError, which names the layer, where they don't fit. Nothing is computed.
    """
    found: dict[str, TypedLayer] = {}
    order = list(walk(layers))
    for name, layer in order:
        _refuse_lost(name, layer)
    for name, layer in layers.items():
        _refuse_uncallable(name, layer)
    for name, layer in order:
        setattr(layer, "placements", _noting(name, layer, found))  # noqa: B010  (hides the method on this object)
    try:
        for layer in layers.values():
            incoming = layer.placements(incoming)
    finally:
        for _, layer in order:
            vars(layer).pop("placements", None)  # a layer in two places has one
    return {name: found[name] for name, _ in order if name in found}


def _refuse_lost(name: str, layer: Layer) -> None:
    """Nothing with parameters may be left out of `children()`: they would be neither trained nor saved."""
    known = {id(param) for param in layer.params().values()}
    for attribute, value in vars(layer).items():
        params = (value,) if isinstance(value, Param) else value.params().values() if isinstance(value, Layer) else ()
        if any(id(param) not in known for param in params):
            raise PlacementError(
                f"{attribute} is not among children(), so that its parameters would be neither trained nor saved",
                cure="name it there",
                place=name,
            )


def _refuse_uncallable(name: str, layer: Layer) -> None:
    """A model calls forward(x, run) and backward(dy, ctx) of each of its own layers."""
    for phase, (given, other) in ((FORWARD, ("x", "run")), (BACKWARD, ("dy", "ctx"))):
        own = inspect.signature(getattr(layer, phase))
        try:
            own.bind(None, None)
        except TypeError:
            words = str(own).replace("(", "(self, ", 1).partition(" ->")[0]
            kind, default = type(unwrapped(layer)).__name__, "=None" if phase == FORWARD else ""
            being = "run being the pass at hand" if phase == FORWARD else "ctx being what forward has returned behind y"
            raise PlacementError(
                f"{kind}.{phase}{words} can't be called as {phase}({given}, {other})",
                cure=f"write def {phase}(self, {given}, {other}{default}), {being}",
                place=name,
            ) from None


def given_by(layer: Layer, given: Any, name: str = "") -> tuple[Array, Any]:
    """What a layer's forward has given: y and its context. Raises ConfigError for anything else, such as y alone."""
    if isinstance(given, tuple) and len(given) == 2:
        return given
    shape = getattr(given, "shape", None)
    what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"{given!r:.60}"
    what = what if shape is None else f"an array {list(shape)}"
    raise ConfigError(
        f"{name}{': ' * bool(name)}{type(unwrapped(layer)).__name__}.forward returns {what}, expected y and its "
        "context; end it with `return y, ctx`, where ctx is all that backward needs (None where that is nothing)"
    )


def _noting(name: str, layer: Layer, found: dict[str, TypedLayer]) -> Any:
    original = layer.placements

    def placements(incoming: ArrayType) -> ArrayType:
        try:
            outgoing = original(incoming)
            if not isinstance(outgoing, ArrayType):
                raise PlacementError(
                    f"placements() of {type(layer).__name__} returns {outgoing!r:.60}",
                    cure="it must return the type of what forward gives",
                )
            outgoing = outgoing.of_layer(name)
        except PlacementError as error:
            raise error.at(name) from None
        found[name] = TypedLayer(layer, incoming, outgoing)
        return outgoing

    return placements
