"""Records every operation of one rank by looking at its layers and its group from outside (`mpitp.trace`).

A pass through a layer is cut into steps by its collectives. The layer's `algebra` says what a step computes and which
arrays to show; here the arrays are found, and their letters: from the types of what a layer takes and gives, inside it
from its pairs, of a collective's arrays from its kind, of parameters from their placements.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group, Pending
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers.algebra import Algebra, Join, Segment, Sum
from mpitp.layers.array_type import PARTIAL, REPLICATE, VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Layer
from mpitp.layers.mappings import GatherFromSP, ReduceScatterToSP
from mpitp.layers.param import Param
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.optim.reduction import make_reduction
from mpitp.step.contents import arrays_in, joined, row
from mpitp.step.film import Memory, Message, RankOp, Shown, Telling
from mpitp.step.letters import COLLECTIVES, TP, Letters
from mpitp.step.moves import SUMS, Moves
from mpitp.step.picture import Picture, picture_of
from mpitp.step.update import Update
from mpitp.trace.observe import LayerObserver, Spot, observe

Outside = Callable[[Call, Arrays, Any, float], None]  # its result, and when it began
# Pairs that the algebra of a linear doesn't tell of.
TOKEN_SHARDS: dict[type, str] = {
    GatherFromSP: "GatherFromSP: all-gather of rows forward, reduce-scatter of dx backward",
    ReduceScatterToSP: "ReduceScatterToSP: reduce-scatter of y forward, all-gather of rows backward",
}


def record_pass(
    group: Group,
    make_model: Callable[[Site], CausalLM],
    batch: Batch,
    *,
    sequence_parallel: bool = False,
    blocks: int = 0,
) -> list[RankOp]:
    """Every operation of a training step on `batch` on this rank. `blocks` > 0: the invariant mode. A collective."""
    recorder = Recorder()
    watched = ObservedGroup(group, recorder, "all", whole_sums=True)
    model = make_model(make_site(watched, sequence_parallel=sequence_parallel, invariant_blocks=blocks))
    reduction = make_reduction(model)
    reduction.begin(1)
    recorder.watch(model)
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    recorder.forget_activations()
    Update(recorder, model, reduction).run()
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
    microbatch: int = 0
    inside: list[Shown] = field(default_factory=list)  # what is made on the way to y
    collectives: int = 0
    exchanges: int = 0
    joins: int = 0
    began: float = field(default_factory=time.perf_counter)

    def steps(self, kind: type) -> list[Any]:
        """The steps of one kind."""
        return [step for step in getattr(self.algebra, self.phase) if isinstance(step, kind)]

    def telling(self, step: Segment | Sum, place: str = "", collective: str = "") -> Telling:
        """An operation of this pass in words."""
        equation = step.equation_of("b" in self.shown) if isinstance(step, Segment) else step.equation
        name, title = self.spot.name + place, collective or self.algebra.title
        kind, subject = type(self.spot.layer), self.algebra.title
        code = f"{kind.__module__}:{kind.__qualname__}.{self.phase}"
        return Telling(name, self.phase, title, equation, step.note, self.pair, collective, subject, code)

    @property
    def kind(self) -> ArrayType:
        """What the pass gives."""
        return self.spot.outgoing if self.phase == FORWARD else self.spot.incoming.gradient

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
    letters: Letters = Letters()  # noqa: RUF009 (it is frozen)
    moves: Moves | None = None
    is_open: bool = False  # what is outside of layers counts too
    outside: Outside | None = None  # is shown every collective that no layer calls
    moments: int = 0  # bytes that the optimizer keeps
    _stack: list[Frame] = field(default_factory=list)
    _held: dict[int, dict[int, int]] = field(default_factory=dict)  # bytes of each array kept for backward, by its
    # identity, for each microbatch
    _weights: dict[int, Picture] = field(default_factory=dict)
    _inputs: dict[tuple[str, int], Shown] = field(default_factory=dict)  # x of each layer in each microbatch
    _passes: Counter[tuple[str, str]] = field(default_factory=Counter)  # through each layer
    _messages: Counter[Message] = field(default_factory=Counter)
    _early: list[RankOp] = field(default_factory=list)  # receives whose microbatch isn't known yet
    _turn: tuple[str, int] = (FORWARD, 0)  # the pass and the microbatch at hand
    _last: Shown | None = None  # what the newest operation made

    def watch(self, model: CausalLM) -> None:
        """See every pass through `model`, on a mesh of several axes what is between layers too."""
        mesh = model.site.mesh
        self.params = [param for _, param in model.named_params()]
        self.letters = Letters(tuple(a for a in mesh.sizes if mesh.sizes[a] > 1 and a != "pp") or (TP,))
        self.moves = Moves(mesh, model.site.batch_type, model.site.sequence_parallel)
        observe(model, self)

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if self._stack:
            self._before(self._stack[-1], spot.name.rpartition(".")[2], _given_type(spot, phase), args[0])
        else:
            self._begin_turn(phase, self._passes[spot.name, phase])
        frame = self._frame(spot, phase, args[0])
        self._stack.append(frame)
        result = run()
        self._stack.pop()
        if phase == FORWARD:
            self._hold(result[1])
            for name, (array, letter) in spot.layer.inside(result[1]).items():
                kind = spot.outgoing if letter == VARYING else spot.outgoing.changed(TP, letter)
                frame.inside.append(self.letters.shown(name, kind, picture_of(array), "mid"))
        made = result[0] if phase == FORWARD else result
        self._end(frame, made)
        for parent in self._stack[-1:]:
            parent.newest, parent.began = made, time.perf_counter()
            if parent.spot.layer.algebra is None and self._last is not None:
                parent.shown["x" if phase == FORWARD else "dy"] = self._last
        return result

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        moves = self.moves
        if self.outside is not None and not self._stack:
            return self._show_outside(self.outside, call, arrays, run)
        if moves is None or not (self._stack or self.is_open):
            return run()
        if call.op in ("send", "recv"):
            return self._message(moves, call, arrays, group, run)
        if not self._stack:
            return self._gradients(moves, call, arrays, group, run) if call.op in SUMS else run()
        if not (arrays or call.op in COLLECTIVES):
            return run()
        frame, op = self._stack[-1], f"{call.op} {call.detail}".strip()
        if call.op == "all_to_all":
            return self._exchange(moves, frame, arrays, group, run)
        if call.op == "all_gather" and frame.collectives >= len(frame.steps(Sum)):
            return self._gather(frame, op, arrays, run)
        count, sums, segments = frame.collectives, frame.steps(Sum), frame.steps(Segment)
        at = min(count, len(sums) - 1)
        step = sums[at] if sums else Sum("made", f"made = {op} of what is given")
        taken, given_back = COLLECTIVES.get(call.op, (VARYING, VARYING))
        kinds = [self.letters.changed(frame.kind, TP, letter) for letter in (taken, given_back)]
        given = self.letters.shown(
            segments[at].output if sums else "given", kinds[0], picture_of(joined(arrays, call.shape))
        )
        if count < len(sums):
            self._own_work(frame, segments[count], given)
        began, result = time.perf_counter(), run()
        if isinstance(result, np.ndarray | list):
            made = self.letters.shown(step.makes, kinds[1], picture_of(joined(result)))
            self.add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays)
            self._last = frame.shown[made.name] = made
        frame.collectives, frame.began = count + 1, time.perf_counter()
        return result

    def _show_outside(self, outside: Outside, call: Call, arrays: Arrays, run: Callable[[], Any]) -> Any:
        """A sum may be written over what it was given, which is copied first."""
        copies = tuple(array.copy() for array in arrays)
        began, result = time.perf_counter(), run()
        outside(call, copies, result, began)
        return result

    def _gather(self, frame: Frame, op: str, arrays: Arrays, run: Callable[[], Any]) -> Any:
        """What the layer was given becomes the rows of all ranks."""
        name = frame.algebra.name("x" if frame.phase == FORWARD else "dy")
        began, result = time.perf_counter(), run()
        kinds = [self.letters.changed(frame.kind, TP, letter) for letter in (VARYING, REPLICATE)]
        given = self.letters.shown(name, kinds[0], picture_of(joined(arrays)))
        made = frame.shown[name] = self.letters.shown(name, kinds[1], picture_of(joined(result)))
        if frame.phase == FORWARD:
            self._inputs[frame.spot.name, frame.microbatch] = made
        step = Sum(name, f"{name} = the rows of {name} of all ranks")
        self.add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays)
        self._last, frame.began = made, time.perf_counter()
        return result

    def around_start(self, call: Call, arrays: Arrays, group: ObservedGroup, start: Callable[[], Pending]) -> Pending:
        if call.op == "recv":  # told when it is waited for, as the ranks that send may come later
            pending = start()
            return Pending(lambda: self.around_collective(call, arrays, group, pending.wait), pending.test)
        if call.op == "send":
            return Pending(self.around_collective(call, arrays, group, start).wait)
        return Pending.done(self.around_collective(call, arrays, group, lambda: start().wait()))

    def _begin_turn(self, phase: str, microbatch: int) -> None:
        """A layer of the model itself begins: what came before it was received for it. When backward of a microbatch
        is over, what was kept for it is let go of.
        """
        if self._turn != (phase, microbatch) and self._turn[0] == BACKWARD:
            self._held.pop(self._turn[1], None)
        self._turn = phase, microbatch
        for op in self._early:
            op.telling.phase, op.microbatch = self._turn
        self._early.clear()

    def _message(self, moves: Moves, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """A send or a receive, between stages or inside a layer."""
        began, result = time.perf_counter(), run()
        frame, is_send = self._stack[-1] if self._stack else None, call.op == "send"
        phase, layer = (frame.phase, frame.spot.name) if frame else (moves.phase_of(call), "")
        name = moves.name_of(call, phase)
        kind = frame.kind if frame else moves.kind_of(name)
        shown = self.letters.shown(name, kind, picture_of(arrays[0] if is_send else result), "in" if is_send else "out")
        message = moves.message(call, group)
        number, self._messages[message] = self._messages[message], self._messages[message] + 1
        telling = moves.message_telling(call, name, layer, phase)
        op = self.add(telling, [shown], began, arrays if is_send else ())
        op.axis, op.message = moves.axis_of(group), replace(message, number=number)
        if not is_send and frame is None:
            self._early.append(op)
        if frame:
            frame.began = time.perf_counter()
        return result

    def _gradients(self, moves: Moves, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """A sum of gradients over replicas, behind backward."""
        axis, kind = moves.axis_of(group), f"{call.op} {call.detail}" if call.op == "all_reduce" else call.op
        given = self.letters.shown(
            "dW_partial", self.letters.changed(moves.whole, axis, PARTIAL), picture_of(arrays[0])
        )
        began, result = time.perf_counter(), run()
        made = self.letters.shown(
            "dW", self.letters.changed(moves.whole, axis, COLLECTIVES[call.op][1]), picture_of(result)
        )
        self.add(moves.sum_telling(kind, axis, BACKWARD), [_as_input(given), made], began, arrays).axis = axis
        return result

    def _exchange(
        self, moves: Moves, frame: Frame, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]
    ) -> Any:
        """All-to-all: the blocks for all ranks, and those of all ranks, each as one row of numbers."""
        began, result = time.perf_counter(), run()
        kind = self.letters.changed(frame.kind, moves.axis_of(group), VARYING)
        given, made = (
            self.letters.shown(name, kind, picture_of(row(x))) for name, x in (("given", arrays), ("made", result))
        )
        telling = moves.exchange_telling(frame.spot.name, frame.phase, "all_to_all", frame.exchanges)
        self.add(telling, [_as_input(given), made], began, arrays).axis = moves.axis_of(group)
        frame.exchanges, frame.began = frame.exchanges + 1, time.perf_counter()
        return result

    def _frame(self, spot: Spot, phase: str, array: Array) -> Frame:
        algebra = algebra_of(spot.layer)
        name = algebra.name("x" if phase == FORWARD else "dy")
        given = self.letters.shown(name, _used_type(spot, algebra, phase), picture_of(array))
        number = self._passes[spot.name, phase]
        self._passes[spot.name, phase] += 1
        x = given if phase == FORWARD else self._inputs.pop((spot.name, number))
        if phase == FORWARD:
            self._inputs[spot.name, number] = x
        shown = {x.name: x, name: given, **self._params_of(spot, algebra)}
        return Frame(spot, phase, algebra, array, given, shown, number)

    def _end(self, frame: Frame, made: Array | None) -> None:
        """What comes after the last collective; where one rank alone sums nothing, the work that makes its summand."""
        kind, segments, sums = frame.kind, frame.steps(Segment), frame.steps(Sum)
        rest = segments[len(sums) :]
        if segments and not rest and not frame.collectives:
            alone = segments[0].equation.replace("_partial", "")
            rest = [replace(segments[0], equation=alone, output=sums[0].makes)]
        for segment in rest:
            if (frame.spot.layer.algebra or made is not frame.newest) and (
                not segment.needs or segment.needs in frame.shown
            ):
                makes = segment.output and made is not None
                self._own_work(
                    frame, segment, self.letters.shown(segment.output, kind, picture_of(made)) if makes else None
                )
        if made is not None:
            self._join(frame, "", kind, made)

    def _before(self, frame: Frame, child: str, kind: ArrayType, given: Array) -> None:
        """What the layer has done by itself before its layer `child`."""
        self._join(frame, child, kind, given)
        if frame.spot.layer.algebra is None and given is not frame.newest:
            segment = frame.steps(Segment)[0]
            self._own_work(frame, segment, self.letters.shown(segment.output, kind, picture_of(given)))

    def _own_work(self, frame: Frame, segment: Segment, out: Shown | None) -> None:
        arrays = [_as_input(frame.shown[name]) for name in segment.inputs.split() if name in frame.shown]
        arrays += [*frame.inside, out] if out is not None else []
        if segment.grads:
            arrays += self._grads_of(frame)
        self.add(frame.telling(segment), arrays, frame.began)
        self._last = out or self._last

    def _join(self, frame: Frame, child: str, kind: ArrayType, made: Array) -> None:
        """What went past and what was made last: their sum is what `child` is given, or ("") what is returned."""
        for join in frame.steps(Join)[frame.joins :][:1]:
            if self._last is not None and (child in join.before or not (child or join.before)):
                past, branch = join.segment.inputs.split()
                out = self.letters.shown(join.segment.output, kind, picture_of(made))
                arrays = [_as_input(frame.past, past), _as_input(self._last, branch), out]
                self.add(frame.telling(join.segment, f".{join.name}"), arrays, time.perf_counter())
                self._last = frame.past = out
                frame.joins += 1

    def forget_activations(self) -> None:
        """Backward is over: its contexts are gone."""
        self._held.clear()

    def add(self, telling: Telling, arrays: list[Shown], began: float, given: Sequence[Array] = ()) -> RankOp:
        """An operation that has ended now. `given`: what was handed to its collective."""
        seconds, size = time.perf_counter() - began, sum(array.nbytes for array in given)
        self.ops.append(RankOp(telling, arrays, self._memory(), seconds, size, microbatch=self._turn[1]))
        return self.ops[-1]

    def _params_of(self, spot: Spot, algebra: Algebra) -> dict[str, Shown]:
        shown = {}
        for name, param in _own_params(spot.layer).items():
            if id(param) not in self._weights:
                self._weights[id(param)] = picture_of(param.data)
            letter = algebra.name(name)
            shown[letter] = self.letters.shown(letter, self.letters.of_param(param), self._weights[id(param)], "param")
        return shown

    def _grads_of(self, frame: Frame) -> list[Shown]:
        return [
            self.letters.shown(
                f"d{frame.algebra.name(name)}", self.letters.of_param(param).gradient, picture_of(param.grad), "grad"
            )
            for name, param in _own_params(frame.spot.layer).items()
            if param.grad is not None
        ]

    def _memory(self) -> Memory:
        grads = sum(param.grad.nbytes for param in self.params if param.grad is not None)
        return Memory(
            sum(param.data.nbytes for param in self.params),
            grads,
            sum(sum(own.values()) for own in self._held.values()),
            self.moments,
        )

    def _hold(self, ctx: Any) -> None:
        """The caller keeps contexts until the whole backward pass is over."""
        for array in arrays_in(ctx):
            while isinstance(array.base, np.ndarray):
                array = array.base
            self._held.setdefault(self._turn[1], {})[id(array)] = array.nbytes


def _given_type(spot: Spot, phase: str) -> ArrayType:
    """What the layer is given in this pass."""
    return spot.incoming if phase == FORWARD else spot.outgoing.gradient


def _used_type(spot: Spot, algebra: Algebra, phase: str) -> ArrayType:
    """What its own work takes: x behind the pair at its entry, dy behind the one at its exit."""
    if phase == FORWARD and algebra.entry:
        return getattr(spot.layer, algebra.entry).placements(spot.incoming)
    if phase == BACKWARD and algebra.exit:
        summands = spot.outgoing.changed(TP, PARTIAL)
        if getattr(spot.layer, algebra.exit).placements(summands).letters == spot.outgoing.letters:
            return summands.gradient
    return _given_type(spot, phase)


def _own_params(layer: Layer) -> dict[str, Param]:
    return {name: child for name, child in layer.children().items() if isinstance(child, Param)}


def _as_input(shown: Shown, name: str = "") -> Shown:
    return replace(shown, name=name or shown.name, role="in" if shown.role == "out" else shown.role)
