"""Records every operation of one rank by looking at its layers and its group from outside (`mpitp.trace`).

A pass through a layer is cut into steps by its collectives. The layer's `algebra` says what a step computes and which
arrays to show; here the arrays are found, and their letters: from the types of what a layer takes and gives, inside it
from its pairs, of a collective's arrays from its kind, of parameters from their placements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group, Pending
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers.algebra import UNITS, Algebra, Join, Segment, Sum
from mpitp.layers.array_type import INVARIANT, PARTIAL, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.layer import BACKWARD, FORWARD, Layer
from mpitp.layers.mappings import GatherFromSP, ReduceScatterToSP
from mpitp.layers.param import Param
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.step.film import Memory, RankOp, Shown, Telling
from mpitp.step.picture import Picture, picture_of
from mpitp.trace.observe import LayerObserver, Spot, observe

AXIS = "tp"  # along which letters are told
# What a collective takes and gives; others, from each rank its own to each its own.
COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "all_reduce_in_order"), (PARTIAL, INVARIANT)),
    **{"reduce_scatter": (PARTIAL, VARYING), "all_gather": (VARYING, INVARIANT), "broadcast": (VARYING, INVARIANT)},
}
# Pairs that the algebra of a linear doesn't tell of.
TOKEN_SHARDS: dict[type, str] = {
    GatherFromSP: "GatherFromSP: all-gather of rows forward, reduce-scatter of dx backward",
    ReduceScatterToSP: "ReduceScatterToSP: reduce-scatter of y forward, all-gather of rows backward",
}


def record_pass(
    group: Group, make_model: Callable[[Site], CausalLM], batch: Batch, *, sequence_parallel: bool = False
) -> list[RankOp]:
    """Every operation of a forward and a backward pass over `batch` on this rank. A collective."""
    recorder = Recorder()
    watched = ObservedGroup(group, recorder, "all", whole_sums=True)
    model = make_model(make_site(watched, sequence_parallel=sequence_parallel))
    recorder.params = [param for _, param in model.named_params()]
    observe(model, recorder)
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    return recorder.ops


def algebra_of(layer: Layer) -> Algebra:
    """What a layer offers; else its class, docstring and arrays, for all work that isn't done by layers inside it."""
    if layer.algebra is not None:
        return layer.algebra
    name, params = type(layer).__name__, " ".join(_own_params(layer))
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
    collectives: int = 0
    joins: int = 0
    began: float = field(default_factory=time.perf_counter)

    def steps(self, kind: type) -> list[Any]:
        """The steps of one kind."""
        return [step for step in getattr(self.algebra, self.phase) if isinstance(step, kind)]

    def telling(self, step: Segment | Sum, place: str = "", collective: str = "") -> Telling:
        """An operation of this pass in words."""
        equation = step.equation_of("b" in self.shown) if isinstance(step, Segment) else step.equation
        name, title = self.spot.name + place, collective or self.algebra.title
        return Telling(name, self.phase, title, equation, step.note, self.pair, collective)

    @property
    def pair(self) -> str:
        """The pair of the layer in words: its own, where that isn't the one of its algebra."""
        pairs = (getattr(self.spot.layer, field, None) for field in (self.algebra.entry, self.algebra.exit) if field)
        return next((TOKEN_SHARDS[type(pair)] for pair in pairs if type(pair) in TOKEN_SHARDS), self.algebra.pair)


@dataclass(slots=True)
class Recorder(LayerObserver, GroupObserver):
    """The operations of one rank, in the order in which they happened."""

    ops: list[RankOp] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    _stack: list[Frame] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)  # bytes of each array kept for backward, by its identity
    _weights: dict[int, Picture] = field(default_factory=dict)
    _inputs: dict[str, Shown] = field(default_factory=dict)  # x of each layer
    _last: Shown | None = None  # what the newest operation made

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if self._stack:
            self._before(self._stack[-1], spot.name.rpartition(".")[2], _given_type(spot, phase), args[0])
        frame = self._frame(spot, phase, args[0])
        self._stack.append(frame)
        result = run()
        self._stack.pop()
        if phase == FORWARD:
            self._hold(result[1])
        made = result[0] if phase == FORWARD else result
        self._end(frame, made)
        for parent in self._stack[-1:]:
            parent.newest, parent.began = made, time.perf_counter()
            if parent.spot.layer.algebra is None and self._last is not None:
                parent.shown["x" if phase == FORWARD else "dy"] = self._last
        return result

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if not self._stack or not (arrays or call.op in COLLECTIVES):
            return run()
        frame, op = self._stack[-1], f"{call.op} {call.detail}"
        if call.op == "all_gather" and frame.collectives >= len(frame.steps(Sum)):
            return self._gather(frame, op, arrays, run)
        count, sums, segments = frame.collectives, frame.steps(Sum), frame.steps(Segment)
        at = min(count, len(sums) - 1)
        step = sums[at] if sums else Sum("made", f"made = {op} of what is given")
        taken, given_back = COLLECTIVES.get(call.op, (VARYING, VARYING))
        given = _shown(segments[at].output if sums else "given", _type(taken), picture_of(_joined(arrays)))
        if count < len(sums):
            self._own_work(frame, segments[count], given)
        began, result = time.perf_counter(), run()
        if isinstance(result, np.ndarray | list):
            made = _shown(step.makes, _type(given_back), picture_of(_joined(result)))
            self._add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays)
            self._last = frame.shown[made.name] = made
        frame.collectives, frame.began = count + 1, time.perf_counter()
        return result

    def _gather(self, frame: Frame, op: str, arrays: Arrays, run: Callable[[], Any]) -> Any:
        """What the layer was given becomes the rows of all ranks."""
        name = frame.algebra.name("x" if frame.phase == FORWARD else "dy")
        began, result = time.perf_counter(), run()
        given = _shown(name, _type(VARYING), picture_of(_joined(arrays)))
        made = frame.shown[name] = _shown(name, _type(REPLICATE), picture_of(_joined(result)))
        if frame.phase == FORWARD:
            self._inputs[frame.spot.name] = made
        step = Sum(name, f"{name} = the rows of {name} of all ranks")
        self._add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays)
        self._last, frame.began = made, time.perf_counter()
        return result

    def around_start(self, call: Call, arrays: Arrays, group: ObservedGroup, start: Callable[[], Pending]) -> Pending:
        return Pending.done(self.around_collective(call, arrays, group, lambda: start().wait()))

    def _frame(self, spot: Spot, phase: str, array: Array) -> Frame:
        algebra = algebra_of(spot.layer)
        name = algebra.name("x" if phase == FORWARD else "dy")
        given = _shown(name, _used_type(spot, algebra, phase), picture_of(array))
        x = self._inputs[spot.name] = given if phase == FORWARD else self._inputs[spot.name]
        shown = {x.name: x, name: given, **self._params_of(spot, algebra)}
        return Frame(spot, phase, algebra, array, given, shown)

    def _end(self, frame: Frame, made: Array | None) -> None:
        """What comes after the last collective."""
        kind = frame.spot.outgoing if frame.phase == FORWARD else frame.spot.incoming.gradient
        for segment in frame.steps(Segment)[len(frame.steps(Sum)) :]:
            if (frame.spot.layer.algebra or made is not frame.newest) and (
                not segment.needs or segment.needs in frame.shown
            ):
                makes = segment.output and made is not None
                self._own_work(frame, segment, _shown(segment.output, kind, picture_of(made)) if makes else None)
        if made is not None:
            self._join(frame, "", kind, made)

    def _before(self, frame: Frame, child: str, kind: ArrayType, given: Array) -> None:
        """What the layer has done by itself before its layer `child`."""
        self._join(frame, child, kind, given)
        if frame.spot.layer.algebra is None and given is not frame.newest:
            segment = frame.steps(Segment)[0]
            self._own_work(frame, segment, _shown(segment.output, kind, picture_of(given)))

    def _own_work(self, frame: Frame, segment: Segment, out: Shown | None) -> None:
        arrays = [_as_input(frame.shown[name]) for name in segment.inputs.split() if name in frame.shown]
        arrays += [out] if out is not None else []
        if segment.grads:
            arrays += self._grads_of(frame)
        self._add(frame.telling(segment), arrays, frame.began)
        self._last = out or self._last

    def _join(self, frame: Frame, child: str, kind: ArrayType, made: Array) -> None:
        """What went past and what was made last: their sum is what `child` is given, or ("") what is returned."""
        for join in frame.steps(Join)[frame.joins :][:1]:
            if self._last is not None and (child in join.before or not (child or join.before)):
                past, branch = join.segment.inputs.split()
                out = _shown(join.segment.output, kind, picture_of(made))
                arrays = [_as_input(frame.past, past), _as_input(self._last, branch), out]
                self._add(frame.telling(join.segment, f".{join.name}"), arrays, time.perf_counter())
                self._last = frame.past = out
                frame.joins += 1

    def _add(self, telling: Telling, arrays: list[Shown], began: float, given: Sequence[Array] = ()) -> None:
        seconds, size = time.perf_counter() - began, sum(array.nbytes for array in given)
        self.ops.append(RankOp(telling, arrays, self._memory(), seconds, size))

    def _params_of(self, spot: Spot, algebra: Algebra) -> dict[str, Shown]:
        shown = {}
        for name, param in _own_params(spot.layer).items():
            if id(param) not in self._weights:
                self._weights[id(param)] = picture_of(param.data)
            letter = algebra.name(name)
            shown[letter] = _shown(letter, _type_of(param), self._weights[id(param)], "param")
        return shown

    def _grads_of(self, frame: Frame) -> list[Shown]:
        return [
            _shown(f"d{frame.algebra.name(name)}", _type_of(param).gradient, picture_of(param.grad), "grad")
            for name, param in _own_params(frame.spot.layer).items()
            if param.grad is not None
        ]

    def _memory(self) -> Memory:
        grads = sum(param.grad.nbytes for param in self.params if param.grad is not None)
        return Memory(sum(param.data.nbytes for param in self.params), grads, sum(self._held.values()))

    def _hold(self, ctx: Any) -> None:
        """The caller keeps contexts until the whole backward pass is over."""
        for array in arrays_in(ctx):
            while isinstance(array.base, np.ndarray):
                array = array.base
            self._held[id(array)] = array.nbytes


def arrays_in(value: Any) -> Iterator[Any]:
    """Every array in a context."""
    if isinstance(value, np.ndarray):
        yield value
    inner: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    if is_dataclass(value):
        inner = [getattr(value, each.name) for each in fields(value)]
    for item in inner:
        yield from arrays_in(item)


def _given_type(spot: Spot, phase: str) -> ArrayType:
    """What the layer is given in this pass."""
    return spot.incoming if phase == FORWARD else spot.outgoing.gradient


def _used_type(spot: Spot, algebra: Algebra, phase: str) -> ArrayType:
    """What its own work takes: x behind the pair at its entry, dy behind the one at its exit."""
    if phase == FORWARD and algebra.entry:
        return getattr(spot.layer, algebra.entry).placements(spot.incoming)
    if phase == BACKWARD and algebra.exit:
        summands = spot.outgoing.changed(AXIS, PARTIAL)
        if getattr(spot.layer, algebra.exit).placements(summands).letters == spot.outgoing.letters:
            return summands.gradient
    return _given_type(spot, phase)


def _own_params(layer: Layer) -> dict[str, Param]:
    return {name: child for name, child in layer.children().items() if isinstance(child, Param)}


def _shown(name: str, kind: ArrayType, picture: Picture, role: str = "out") -> Shown:
    letter = kind.along(AXIS)
    part = kind.columns[0][0] or "columns" if kind.columns else "rows"
    along = UNITS.get(part, part) if letter == VARYING else ""
    return Shown(name, role, letter, along, picture)


def _type(letter: str) -> ArrayType:
    return ArrayType(((AXIS, letter),))


def _type_of(param: Param) -> ArrayType:
    """With one rank all is whole, but stays cut in the reader's mind."""
    placement = param.placement
    if AXIS in placement.axes:
        return replace(_type(VARYING), columns=columns_of(placement.parts, placement.fused))
    return _type(REPLICATE if AXIS in placement.partial else INVARIANT)


def _joined(arrays: Any) -> Array:
    """As one array; several partials (blocks that are summed in order), or none, one below the other."""
    if isinstance(arrays, np.ndarray):
        return arrays
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.zeros((0, 1), np.float32)


def _as_input(shown: Shown, name: str = "") -> Shown:
    return replace(shown, name=name or shown.name, role="in" if shown.role == "out" else shown.role)
