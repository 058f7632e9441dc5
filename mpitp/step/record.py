"""Records every operation of one rank by looking at its layers and its group from outside (`mpitp.trace`).

A pass through a layer is cut into steps by its collectives. The layer's `algebra` says what a step computes and which
arrays to show; here the arrays are found, and their letters: from the types of what a layer takes and gives, inside it
from its pairs, of a collective's arrays from its kind, of parameters from their placements.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Group, Pending
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers.algebra import Algebra, Join, Move, Segment, Sum
from mpitp.layers.array_type import REPLICATE, VARYING, ArrayType
from mpitp.layers.deferral import Task
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.layers.param import Param
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.layered import LayeredModel
from mpitp.optim.reduction import make_reduction
from mpitp.step.contents import joined, stacked
from mpitp.step.dealt import DEALT, Dealing
from mpitp.step.film import WEIGHT_GRADS, Memory, Message, RankOp, Shown, Telling
from mpitp.step.frame import Frame, algebra_of, given_type, own_params, used_type
from mpitp.step.held import Held, captured
from mpitp.step.later import WatchedDeferral, halves
from mpitp.step.letters import COLLECTIVES, TP, Letters
from mpitp.step.moves import SUMS, Moves
from mpitp.step.picture import Picture, picture_of
from mpitp.step.turns import Turn, Turns
from mpitp.step.update import Update
from mpitp.trace.observe import LayerObserver, Spot, observe

Outside = Callable[[Call, Arrays, Any, float, str], None]  # its result, when it began, and its axis


def record_pass(
    group: Group,
    make_model: Callable[[Site], LayeredModel],
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


@dataclass(slots=True)
class Recorder(LayerObserver, GroupObserver):
    """The operations of one rank, in the order in which they happened."""

    ops: list[RankOp] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    pieces: list[Param] = field(default_factory=list)  # rows of them that this rank updates for others (ZeRO)
    is_dealt: bool = False  # each replica updates rows of the parameters (ZeRO)
    totals: Mapping[str, Array] = field(default_factory=dict)  # gradients so far, of the invariant mode
    in_order: Iterator[str] | None = None  # of the invariant mode: whose gradients replicas add next
    letters: Letters = Letters()  # noqa: RUF009 (it is frozen)
    moves: Moves | None = None
    is_open: bool = False  # what is outside of layers counts too
    outside: Outside | None = None  # is shown every collective that no layer calls
    moments: int = 0  # bytes that the optimizer keeps
    _stack: list[Frame] = field(default_factory=list)
    deferral: WatchedDeferral = field(init=False)  # for parameters whose gradients may be put off
    _weights: dict[int, Picture] = field(default_factory=dict)
    _held: Held = field(default_factory=Held)
    _turns: Turns = field(default_factory=Turns)
    _inputs: dict[tuple[str, int], list[dict[str, Shown]]] = field(default_factory=dict)  # of a layer in a microbatch
    _messages: Counter[Message] = field(default_factory=Counter)
    _last: Shown | None = None  # what the newest operation made
    dealing: Dealing = field(init=False)  # of weights that are whole only while a layer runs
    _begun: str = ""  # a layer of the model itself whose turn has begun before it runs

    def __post_init__(self) -> None:
        self.deferral = WatchedDeferral(self._put_off)
        self.dealing = Dealing(self)

    @property
    def phase(self) -> str:
        """Of the turn at hand."""
        return self._turns.now.phase

    def watch(self, model: LayeredModel) -> None:
        """See every pass through `model`, on a mesh of several axes what is between layers too."""
        mesh = model.site.mesh
        self.params = [param for _, param in model.named_params()]
        self.letters = Letters(tuple(a for a in mesh.sizes if mesh.sizes[a] > 1 and a != "pp") or (TP,))
        self.moves = Moves.of(model)
        self._turns.chunks = {name: number for number, chunk in enumerate(model.chunks) for name in chunk.names}
        observe(model, self)
        self.dealing.watch(model)

    def begin(self, name: str, phase: str, ctx: Any) -> None:
        """A layer of the model itself begins. `ctx`: what its backward is given."""
        if self._begun == name:
            self._begun = ""
        else:
            self._begin_turn(self._turns.of(name, phase, ctx))

    def begin_early(self, name: str, phase: str, ctx: Any) -> None:
        """Something is done for a layer of the model itself before it runs."""
        self.begin(name, phase, ctx)
        self._begun = name

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if self._stack:
            self._before(self._stack[-1], spot.name.rpartition(".")[2], given_type(spot, phase), args[0])
        else:
            self.begin(spot.name, phase, args[-1])
            self.dealing.entered(spot.name)
        frame = self._frame(spot, phase, args)
        self._stack.append(frame)
        result = run()
        self._stack.pop()
        if phase == FORWARD:
            self._held.keep(self._turns.now[1:], result[1])
            if not self._stack:
                self._turns.gave(spot.name, result[1])
            for name, (array, letter) in spot.layer.inside(result[1]).items():
                kind = spot.outgoing if letter == VARYING else spot.outgoing.changed(TP, letter)
                frame.inside.append(self.letters.shown(name, kind, picture_of(array), "mid"))
        made = result[0] if phase == FORWARD else result
        self._end(frame, made)
        self._name_made(spot.name)
        if not self._stack:
            self.dealing.left(spot.name)
        for parent in self._stack[-1:]:
            parent.newest, parent.began = made, time.perf_counter()
            if parent.spot.layer.algebra is None and self._last is not None:
                parent.shown["x" if phase == FORWARD else "dy"] = self._last
        return result

    def _name_made(self, name: str) -> None:
        """The layer that this one is of may show what it has made. It may run inside the pass of another one."""
        outer, _, child = name.rpartition(".")
        for frame in self._stack:
            if frame.spot.name == outer and self._last is not None:
                frame.shown[child] = replace(self._last, name=child)

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        moves = self.moves
        if self.outside is not None and not self._stack:
            return self._show_outside(self.outside, call, arrays, group, run)
        if moves is None or not (self._stack or self.is_open):
            return run()
        if call.op in ("send", "recv"):
            return self._message(moves, call, arrays, group, run)
        if not self._stack:
            return self._between(moves, call, arrays, group, run)
        if not (arrays or call.op in COLLECTIVES):
            return run()
        frame, op = self._stack[-1], f"{call.op} {call.detail}".strip()
        if call.op == "all_to_all":
            return self._exchange(moves, frame, arrays, group, run)
        if call.op == "all_gather" and (frame.algebra.gathered or frame.collectives >= len(frame.steps(Sum))):
            return self._gather(frame, op, moves.axis_of(group), arrays, run)
        count, sums, segments = frame.collectives, frame.steps(Sum), frame.steps(Segment)
        at = min(count, len(sums) - 1)
        step = sums[at] if sums else Sum("made", f"made = {op} of what is given")
        axis, ends = moves.axis_of(group), COLLECTIVES.get(call.op, (VARYING, VARYING))
        kinds = [self.letters.changed(self._kind_now(frame, axis), axis, letter) for letter in ends]
        given = self.letters.shown(
            segments[at].output if sums else "given", kinds[0], picture_of(joined(arrays, call.shape))
        )
        if count < len(sums):
            self._own_work(frame, segments[count], given)
        began, result = time.perf_counter(), run()
        if isinstance(result, np.ndarray | list):
            made = self.letters.shown(step.makes, kinds[1], picture_of(joined(result)))
            self.add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays).axis = axis
            self._last = frame.shown[made.name] = made
        frame.collectives, frame.began = count + 1, time.perf_counter()
        return result

    def _show_outside(
        self, outside: Outside, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]
    ) -> Any:
        """A sum may be written over what it was given, which is copied first."""
        assert self.moves is not None
        copies = tuple(array.copy() for array in arrays)
        began, result = time.perf_counter(), run()
        outside(call, copies, result, began, self.moves.axis_of(group))
        return result

    def _kind_now(self, frame: Frame, axis: str) -> ArrayType:
        """Of what a collective along `axis` is handed: along tp, where it is another one, as what was made last."""
        if axis == TP or self._last is None or not self._last.letters:
            return frame.kind
        return self.letters.changed(frame.kind, TP, dict(self._last.letters).get(TP, VARYING))

    def _gather(self, frame: Frame, op: str, axis: str, arrays: Arrays, run: Callable[[], Any]) -> Any:
        """What the layer was given becomes the rows of all ranks."""
        names = (frame.algebra.name("x" if frame.phase == FORWARD else "dy"), *frame.algebra.gathered)
        name = names[min(frame.gathers, len(names) - 1)]
        frame.gathers += 1
        began, result = time.perf_counter(), run()
        kinds = [self.letters.changed(frame.kind, axis, letter) for letter in (VARYING, REPLICATE)]
        given = self.letters.shown(name, kinds[0], picture_of(joined(arrays)))
        made = frame.shown[name] = self.letters.shown(name, kinds[1], picture_of(joined(result)))
        if frame.phase == FORWARD:
            self._inputs[frame.spot.name, frame.microbatch][-1][name] = made
        step = Sum(name, f"{name} = the rows of {name} of all ranks")
        self.add(frame.telling(step, collective=op), [_as_input(given), made], began, arrays).axis = axis
        self._last, frame.began = made, time.perf_counter()
        return result

    def around_start(self, call: Call, arrays: Arrays, group: ObservedGroup, start: Callable[[], Pending]) -> Pending:
        if call.op == "recv":  # told when it is waited for, as the ranks that send may come later
            pending = start()
            return Pending(lambda: self.around_collective(call, arrays, group, pending.wait), pending.test)
        if call.op == "send":
            return Pending(self.around_collective(call, arrays, group, start).wait)
        return Pending.done(self.around_collective(call, arrays, group, lambda: start().wait()))

    def _begin_turn(self, turn: Turn) -> None:
        """A layer of the model itself begins. When backward of a microbatch through a chunk is over, what was kept for
        it is let go of.
        """
        before = self._turns.now
        if turn != before and before.phase == BACKWARD:
            self._held.drop(before[1:])
        self._turns.now = turn

    def _message(self, moves: Moves, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """A send or a receive, between stages or inside a layer."""
        began, result = time.perf_counter(), run()
        frame, is_send = self._stack[-1] if self._stack else None, call.op == "send"
        phase, layer = (frame.phase, frame.spot.name) if frame else (moves.phase_of(call), "")
        message = moves.message(call, group)
        number, self._messages[message] = self._messages[message], self._messages[message] + 1
        name = moves.name_of(call, phase, layer, number)
        kind = frame.kind if frame else moves.kind_of(name)
        shown = self.letters.shown(name, kind, picture_of(arrays[0] if is_send else result), "in" if is_send else "out")
        telling = moves.message_telling(call, name, layer, phase)
        op = self.add(telling, [shown], began, arrays if is_send else ())
        op.axis, op.message = moves.axis_of(group), replace(message, number=number)
        if frame:
            frame.began = time.perf_counter()
        else:
            op.microbatch = moves.microbatch_of(call, self._turns.now.microbatch)
        return result

    def _between(self, moves: Moves, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """What no layer calls: weights and gradients on their way between replicas."""
        if self.dealing.is_on and call.op in DEALT:
            return self.dealing.tell(call, arrays, moves.axis_of(group), run)
        return self._gradients(moves, call, arrays, group, run) if call.op in SUMS else run()

    def _gradients(self, moves: Moves, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        """A sum of gradients over replicas, behind backward."""
        axis, kind = moves.axis_of(group), f"{call.op} {call.detail}" if call.op != "reduce_scatter" else call.op
        given, made = (self.letters.changed(moves.whole, axis, letter) for letter in COLLECTIVES[call.op])
        shown = self.letters.shown("dW_partial", given, picture_of(joined(arrays, call.shape)), "in")
        began, result = time.perf_counter(), run()
        name = next(self.in_order) if self.in_order is not None else ""
        telling = moves.in_order_telling(name, kind, axis) if name else moves.sum_telling(kind, axis, BACKWARD)
        self.add(telling, [shown, self.letters.shown("dW", made, picture_of(result))], began, arrays).axis = axis
        return result

    def _exchange(
        self, moves: Moves, frame: Frame, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]
    ) -> Any:
        """All-to-all: the blocks for all ranks, and those of all ranks, as rows or each as one row of numbers."""
        kind = self.letters.changed(frame.kind, moves.axis_of(group), VARYING)
        steps = frame.steps(Move)
        step = steps[frame.exchanges] if steps else None
        name = step.before.output if step is not None and step.before is not None else "given"
        given = self.letters.shown(name, kind, picture_of(stacked(arrays)))
        if step is not None and step.before is not None:
            self._own_work(frame, step.before, given)
        began, result = time.perf_counter(), run()
        made = self.letters.shown("made" if step is None else step.makes, kind, picture_of(stacked(result)))
        if step is None:
            telling = moves.exchange_telling(frame.spot.name, frame.phase, "all_to_all", frame.exchanges)
        else:
            telling = frame.telling(Sum(step.makes, step.equation, step.note), collective="all_to_all")
            frame.shown[made.name] = made
        self.add(telling, [_as_input(given), made], began, arrays).axis = moves.axis_of(group)
        frame.exchanges, frame.began = frame.exchanges + 1, time.perf_counter()
        return result

    def _frame(self, spot: Spot, phase: str, args: tuple[Any, ...]) -> Frame:
        algebra, number, array = algebra_of(spot.layer), self._turns.now.microbatch, args[0]
        inputs = self._inputs.setdefault((spot.name, number), [])
        if phase == FORWARD:
            inputs.append(self._inputs_of(spot, algebra, args))
        shown = dict(inputs[-1] if phase == FORWARD else inputs.pop())
        past = shown[algebra.name("x")]
        if phase == BACKWARD and array is not None:  # where ids came out there is no gradient
            name = algebra.name("dy")
            past = shown[name] = self.letters.shown(name, used_type(spot, algebra, phase), picture_of(array))
        return Frame(spot, phase, algebra, array, past, shown | self._params_of(spot, algebra), number)

    def _inputs_of(self, spot: Spot, algebra: Algebra, args: tuple[Any, ...]) -> dict[str, Shown]:
        """What forward is given: x, and what the algebra says to come behind it."""
        name = algebra.name("x")
        found = {name: self.letters.shown(name, used_type(spot, algebra, FORWARD), picture_of(args[0]))}
        for each, array in zip(algebra.beside, args[1:], strict=False):
            rows = array.reshape(len(array), -1)
            found[each] = self.letters.shown(each, spot.outgoing, picture_of(rows))
        return found

    def _end(self, frame: Frame, made: Array | None) -> None:
        """What comes after the last collective; where one rank alone sums nothing, the work that makes its summand."""
        kind, segments, sums = frame.kind, frame.steps(Segment), frame.steps(Sum)
        rest = segments[len(sums) :]
        if segments and not frame.collectives:
            rest = frame.alone(rest) or rest
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
        if child == frame.past_of:
            frame.past = self.letters.shown("x" if frame.phase == FORWARD else "dy", kind, picture_of(given))
        if frame.spot.layer.algebra is None and given is not frame.newest:
            segment = frame.steps(Segment)[0]
            self._own_work(frame, segment, self.letters.shown(segment.output, kind, picture_of(given)))

    def _own_work(self, frame: Frame, segment: Segment, out: Shown | None) -> None:
        if segment.grads and frame.put_off:
            segment = self._first_half(frame, segment)
            if out is None:
                return
        arrays = [_as_input(frame.shown[name]) for name in segment.inputs.split() if name in frame.shown]
        arrays += [*frame.inside, out] if out is not None else []
        if segment.grads:
            arrays += self._grads_of(frame)
        self.add(frame.telling(segment), arrays, frame.began)
        self._last = out or self._last

    def _put_off(self, task: Task) -> Task:
        """A layer has left a weight gradient for later; what it needs is kept until then."""
        frame = self._stack[-1]
        frame.put_off += 1
        self._held.keep(id(frame), captured(task))

        def later() -> None:
            began = time.perf_counter()
            task()
            frame.put_off -= 1
            if not frame.put_off:
                self._weight_grads(frame, began)

        return later

    def _first_half(self, frame: Frame, segment: Segment) -> Segment:
        """What is computed at once, where weight gradients are put off."""
        letters = [frame.algebra.name(name) for name in own_params(frame.spot.layer)]
        first, frame.later = halves(segment, letters, has_bias="b" in frame.shown)
        return first

    def _weight_grads(self, frame: Frame, began: float) -> None:
        """All that a pass through a layer has put off is done."""
        self._held.drop(id(frame))
        if frame.later is not None:
            arrays = [_as_input(frame.shown[name]) for name in frame.later.inputs.split() if name in frame.shown]
            telling = frame.telling(frame.later, title=WEIGHT_GRADS)
            op = self.add(telling, [*arrays, *self._grads_of(frame)], began)
            op.microbatch = frame.microbatch

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
        self.ops.append(RankOp(telling, arrays, self._memory(), seconds, size, microbatch=self._turns.now.microbatch))
        return self.ops[-1]

    def _params_of(self, spot: Spot, algebra: Algebra) -> dict[str, Shown]:
        shown = {}
        for name, param in own_params(spot.layer).items():
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
            for name, param in own_params(frame.spot.layer).items()
            if param.grad is not None
        ]

    def _memory(self) -> Memory:
        grads = sum(param.grad.nbytes for param in (*self.params, *self.pieces) if param.grad is not None)
        grads += sum(total.nbytes for total in self.totals.values())
        return Memory(
            sum(param.data.nbytes for param in self.params) + sum(self.dealing.beside.values()),
            grads,
            self._held.nbytes,
            self.moments,
        )


def _as_input(shown: Shown, name: str = "") -> Shown:
    return replace(shown, name=name or shown.name, role="in" if shown.role == "out" else shown.role)
