"""A layer's pass under way, as the recorder sees it: what it is, what it was given, what it has made so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from mpitp.backend.arrays import Array
from mpitp.layers.algebra import Algebra, Join, Segment, Sum
from mpitp.layers.array_type import PARTIAL, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Layer
from mpitp.layers.mappings import GatherFromSP, ReduceScatterToSP
from mpitp.layers.param import Param
from mpitp.step.film import Shown, Telling
from mpitp.step.letters import TP
from mpitp.trace.observe import Spot

# Pairs that the algebra of a linear doesn't tell of.
TOKEN_SHARDS: dict[type, str] = {
    GatherFromSP: "GatherFromSP: all-gather of rows forward, reduce-scatter of dx backward",
    ReduceScatterToSP: "ReduceScatterToSP: reduce-scatter of y forward, all-gather of rows backward",
}


def algebra_of(layer: Layer) -> Algebra:
    """What a layer offers; else its class, docstring and arrays, for all work that isn't done by layers inside it."""
    if layer.algebra is not None:
        return layer.algebra
    name, params = type(layer).__name__, " ".join(own_params(layer))
    told = (type(layer).__doc__ or name).strip().partition("\n")[0]
    forward = Segment(told, f"x {params}", "y")
    backward = Segment(f"backward of {name}", f"dy {params}", "dx", grads=True)
    return Algebra(name, (forward,), (backward,), names={param: param for param in params.split()})


@dataclass(slots=True)
class Frame:
    """A layer's pass under way: what it was given and has made, by name; how many collectives and joins are over."""

    spot: Spot
    phase: str
    algebra: Algebra
    newest: Array  # what it was given, or what a layer inside it has made
    past: Shown  # what the next join adds
    shown: dict[str, Shown]
    microbatch: int = 0
    inside: list[Shown] = field(default_factory=list)  # what is made on the way to y
    collectives: int = 0
    exchanges: int = 0
    gathers: int = 0
    joins: int = 0
    put_off: int = 0  # weight gradients that are computed later
    later: Segment | None = None  # how they are told then
    began: float = field(default_factory=time.perf_counter)

    def steps(self, kind: type) -> list[Any]:
        """The steps of one kind."""
        return [step for step in getattr(self.algebra, self.phase) if isinstance(step, kind)]

    def telling(self, step: Segment | Sum, place: str = "", collective: str = "", title: str = "") -> Telling:
        """An operation of this pass in words."""
        equation = step.equation_of("b" in self.shown) if isinstance(step, Segment) else step.equation
        name, title = self.spot.name + place, title or collective or self.algebra.title
        kind, subject = type(self.spot.layer), self.algebra.title
        code = f"{kind.__module__}:{kind.__qualname__}.{self.phase}"
        return Telling(name, self.phase, title, equation, step.note, self.pair, collective, subject, code)

    def alone(self, rest: list[Segment]) -> list[Segment]:
        """The work of a rank that sums nothing, if the pass would give such a sum: its summand is all, and goes into
        what comes after it, `rest`.
        """
        made = self.algebra.name("y" if self.phase == FORWARD else "dx")
        pairs = zip(self.steps(Segment), self.steps(Sum), strict=False)
        whole = [step for step, total in pairs if total.makes == made]
        if not whole:
            return []
        both = whole + [step for step in rest if not step.needs or step.needs in self.shown]
        equation = ", ".join(step.equation.replace("_partial", "") for step in both)
        used = dict.fromkeys(name for step in both for name in step.inputs.split() if name != made)
        return [replace(whole[0], equation=equation, inputs=" ".join(used), output=made, grads=both[-1].grads)]

    @property
    def past_of(self) -> str:
        """The layer inside whose input is what the next join adds; "": another array is."""
        children = self.spot.layer.children()
        past = next((join.past for join in self.steps(Join)[self.joins :]), ())
        return next((name for name in past if name in children), "")

    @property
    def kind(self) -> ArrayType:
        """What the pass gives."""
        return self.spot.outgoing if self.phase == FORWARD else self.spot.incoming.gradient

    @property
    def pair(self) -> str:
        """The pair of the layer in words: its own, where that isn't the one of its algebra."""
        pairs = (getattr(self.spot.layer, field, None) for field in (self.algebra.entry, self.algebra.exit) if field)
        return next((TOKEN_SHARDS[type(pair)] for pair in pairs if type(pair) in TOKEN_SHARDS), self.algebra.pair)


def own_params(layer: Layer) -> dict[str, Param]:
    """Those that belong to the layer itself, not to layers inside it."""
    return {name: child for name, child in layer.children().items() if isinstance(child, Param)}


def given_type(spot: Spot, phase: str) -> ArrayType:
    """What the layer is given in this pass."""
    return spot.incoming if phase == FORWARD else spot.outgoing.gradient


def used_type(spot: Spot, algebra: Algebra, phase: str) -> ArrayType:
    """What its own work takes: x behind the pair at its entry, dy behind the one at its exit."""
    if phase == FORWARD and algebra.entry:
        return getattr(spot.layer, algebra.entry).placements(spot.incoming)
    if phase == BACKWARD and algebra.exit:
        summands = spot.outgoing.changed(TP, PARTIAL)
        if getattr(spot.layer, algebra.exit).placements(summands).letters == spot.outgoing.letters:
            return summands.gradient
    return given_type(spot, phase)
