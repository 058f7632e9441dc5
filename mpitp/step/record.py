"""Records every operation of one rank through stand-ins for its layers and its group (`mpitp.trace`).

A pass through a layer is cut into segments by its collectives. The table of `operations.py` says what a segment
computes and which arrays to show; here the arrays are found. Everything shown is what the layers really got and made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from mpitp.comm.group import Group, Pending
from mpitp.comm.wrapped import Call
from mpitp.layers.attention import SelfAttention
from mpitp.layers.block import TransformerBlock
from mpitp.layers.dropout import Dropout
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.param import Param
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.step.film import PARTIAL, REPLICATED, SHARDED, Memory, RankOp, Shown
from mpitp.step.operations import BETWEEN, HEADS, RESIDUAL, Kind, Segment, kind_of
from mpitp.step.picture import Picture, picture_of
from mpitp.trace.group import Arrays, GroupObserver, TracedGroup
from mpitp.trace.stand_in import BACKWARD, FORWARD, LayerObserver, Spot, attach

Array = Any
LETTERS = {"weight": "W", "bias": "b"}


def record_pass(group: Group, make_model: Callable[[Group], CausalLM], batch: Batch) -> list[RankOp]:
    """Every operation of a forward and a backward pass over `batch` on this rank. A collective."""
    recorder = Recorder()
    model = make_model(TracedGroup(group, recorder, "all"))
    recorder.begin(model)
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0 / batch.num_targets)
    return recorder.ops


@dataclass(slots=True)
class Frame:
    """A layer's pass under way: what it was given, and how many of its collectives are over."""

    spot: Spot
    phase: str
    kind: Kind | None
    sources: dict[str, Shown]
    collectives: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What the layer does in this pass."""
        if self.kind is None:
            return ()
        return self.kind.forward if self.phase == FORWARD else self.kind.backward


@dataclass(slots=True)
class Recorder(LayerObserver, GroupObserver):
    """The operations of one rank, in the order in which they happened."""

    ops: list[RankOp] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    between: dict[str, Kind] = field(default_factory=dict)
    is_open: bool = False
    _stack: list[Frame] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)  # bytes of each array kept for backward, by its identity
    _weights: dict[int, Picture] = field(default_factory=dict)
    _last: Shown | None = None  # what the newest operation made
    _past: Shown | None = None  # what goes past the branch of a residual connection
    _kept: dict[str, Shown] = field(default_factory=dict)  # the newest array of each name that was made

    def begin(self, model: CausalLM) -> None:
        """Record `model` from now on."""
        self.params = [param for _, param in model.named_params()]
        for i, block in enumerate(model.blocks):
            self.between[f"blocks.{i}.attention.heads"] = BETWEEN[type(block.attention)]
            self.between[f"blocks.{i}.mlp.activation"] = BETWEEN[type(block.mlp)]
        attach(model, self)
        self.is_open = True

    # What the stand-ins report

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        self._before(spot, phase, args[0])
        frame = self._frame(spot, phase, args)
        self._stack.append(frame)
        result = run()
        self._stack.pop()
        if phase == FORWARD:
            self._hold(result[1])
        made = result[0] if phase == FORWARD else result
        self._end(frame, made)
        self._after(spot, phase, made)
        return result

    def around_collective(self, call: Call, arrays: Arrays, group: TracedGroup, run: Callable[[], Any]) -> Any:
        if not self.is_open or not self._stack:
            return run()
        frame = self._stack[-1]
        kind = HEADS if isinstance(frame.spot.layer, SelfAttention) else frame.kind
        if kind is None:
            return run()
        layer = self._layer_of(frame)
        segments = kind.forward if frame.phase == FORWARD else kind.backward
        given = self._given(segments[0 if kind is HEADS else frame.collectives].output, arrays)
        if kind is not HEADS or not frame.collectives:
            self._own_work(frame, kind, segments[frame.collectives], given, layer)
        began = time.perf_counter()
        result = run()
        name, told = kind.sums[frame.phase][0 if kind is HEADS else frame.collectives]
        equation, _, note = told.partition(": ")
        made = Shown(name, "out", REPLICATED, "", picture_of(result))
        op = f"{call.op} {call.detail}"
        self._add(frame.phase, layer, kind, op, equation, note, [_as_input(given), made], began, op, arrays)
        self._last = self._kept[name] = made
        frame.collectives, frame.began = frame.collectives + 1, time.perf_counter()
        return result

    def around_start(self, call: Call, arrays: Arrays, group: TracedGroup, start: Callable[[], Pending]) -> Pending:
        return Pending.done(self.around_collective(call, arrays, group, lambda: start().wait()))

    # Passes through layers

    def _frame(self, spot: Spot, phase: str, args: tuple[Any, ...]) -> Frame:
        kind = kind_of(spot.layer)
        if kind is None:
            return Frame(spot, phase, None, {})
        parts = spot.x_parts if phase == FORWARD else spot.y_parts
        name = {"embedding": "ids", "positions": "positions", "loss": "logits"}.get(spot.name, "x")
        names = {FORWARD: name, BACKWARD: "dloss" if spot.name == "loss" else "dy"}
        given = self._shown(names[phase], "in", parts, spot, args[0])
        sources = {"x" if phase == FORWARD else "dy": given}
        kept = getattr(args[1], "x", None) if phase == BACKWARD else None
        if kept is not None:
            sources["x"] = self._shown("x", "in", spot.x_parts, spot, kept)
        return Frame(spot, phase, kind, sources | self._params_of(spot))

    def _end(self, frame: Frame, made: Array) -> None:
        """The segment after the last collective, where there is one."""
        if frame.kind is None:
            return
        for segment in frame.segments[frame.collectives :][:1]:
            if segment.if_bias and "b" not in frame.sources:
                continue
            out = None
            if segment.output:
                parts = frame.spot.y_parts if frame.phase == FORWARD else frame.spot.x_parts
                name = {"loss": "loss" if frame.phase == FORWARD else "dlogits"}.get(frame.spot.name, segment.output)
                out = self._shown(name, "out", parts, frame.spot, made)
            self._own_work(frame, frame.kind, segment, out, frame.spot.name)

    def _own_work(self, frame: Frame, kind: Kind, segment: Segment, out: Shown | None, layer: str) -> None:
        sources = self._kept | frame.sources
        if kind is HEADS:  # its gradient comes from the layer after it
            sources["do"] = _as_input(self._kept["dx"], "do")
        arrays = [_as_input(sources[name]) for name in segment.inputs if name in sources]
        arrays += [out] if out is not None else []
        if segment.grads:
            arrays += self._grads_of(frame.spot)
        equation = segment.equation_of("b" in frame.sources)
        self._add(frame.phase, layer, kind, kind.title, equation, segment.note, arrays, frame.began)
        if out is not None:
            self._last = self._kept[out.name] = out

    def _before(self, spot: Spot, phase: str, given: Array) -> None:
        """What lies between layers shows in what the next one is given."""
        if phase == FORWARD and spot.before is not None:
            self._between(spot.before, phase, self._shown("", "out", spot.x_parts, spot, given))
        if phase == BACKWARD and spot.after is not None:
            self._between(spot.after, phase, self._shown("", "out", spot.y_parts, spot, given))
        block = spot.name.rpartition(".")[0]
        if isinstance(spot.layer, TransformerBlock):
            self._past = self._shown("", "in", None, spot, given)
        if phase == FORWARD and spot.name.endswith("norm2"):
            self._residual(f"{block}.residual1", phase, self._shown("y", "out", None, spot, given))
        if phase == BACKWARD and isinstance(spot.layer, SelfAttention):
            self._residual(f"{block}.residual1", phase, self._shown("dx", "out", None, spot, given))

    def _after(self, spot: Spot, phase: str, made: Array) -> None:
        if isinstance(spot.layer, TransformerBlock):
            place, name = {FORWARD: ("residual2", "y"), BACKWARD: ("input", "dx")}[phase]
            self._residual(f"{spot.name}.{place}", phase, self._shown(name, "out", None, spot, made))

    def _between(self, name: str, phase: str, made: Shown) -> None:
        kind = self.between[name]
        segment = kind.forward[0] if phase == FORWARD else kind.backward[-1]
        out = Shown(segment.output, "out", made.placement, made.along, made.picture)
        arrays = [_as_input(self._kept["y" if phase == FORWARD else "dx"], segment.inputs[0])]
        if self._last is not None and self._last.name == "dkv":
            arrays.append(_as_input(self._last))
        self._add(phase, name, kind, kind.title, segment.equation, segment.note, [*arrays, out], self._stack[-1].began)
        self._last = out

    def _residual(self, layer: str, phase: str, made: Shown) -> None:
        segment = RESIDUAL.forward[0] if phase == FORWARD else RESIDUAL.backward[0]
        assert self._last is not None and self._past is not None
        arrays = [_as_input(self._past, segment.inputs[0]), _as_input(self._last, segment.inputs[1]), made]
        self._add(phase, layer, RESIDUAL, RESIDUAL.title, segment.equation, segment.note, arrays, time.perf_counter())
        self._last = self._past = made

    # Arrays

    def _add(
        self, phase: str, layer: str, kind: Kind, title: str, equation: str, note: str, arrays: list[Shown],
        began: float, collective: str = "", given: Sequence[Array] = (),
    ) -> None:  # fmt: skip
        seconds, size = time.perf_counter() - began, sum(array.nbytes for array in given)
        op = RankOp(layer, phase, title, equation, note, kind.pair, arrays, self._memory(), seconds, collective, size)
        self.ops.append(op)

    def _layer_of(self, frame: Frame) -> str:
        return f"{frame.spot.name}.heads" if isinstance(frame.spot.layer, SelfAttention) else frame.spot.name

    def _shown(self, name: str, role: str, parts: Any, spot: Spot, array: Array) -> Shown:
        return Shown(name, role, SHARDED if parts else REPLICATED, along(spot) if parts else "", picture_of(array))

    def _given(self, name: str, arrays: Arrays) -> Shown:
        """What goes into a collective; in the invariant layout several partials, or none, one below the other."""
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.zeros((0, 1), np.float32)
        return Shown(name, "out", PARTIAL, "", picture_of(array))

    def _params_of(self, spot: Spot) -> dict[str, Shown]:
        if isinstance(spot.layer, Dropout | VocabParallelCrossEntropy):
            return {}
        shown = {}
        for name, param in spot.layer.params().items():
            if id(param) not in self._weights:
                self._weights[id(param)] = picture_of(param.data)
            shown[LETTERS[name]] = _param_shown(_letter(name, spot), "param", param, spot, self._weights[id(param)])
        return shown

    def _grads_of(self, spot: Spot) -> list[Shown]:
        return [
            _param_shown(f"d{_letter(name, spot)}", "grad", param, spot, picture_of(param.grad))
            for name, param in spot.layer.params().items()
            if param.grad is not None
        ]

    # Memory

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
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_in(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from arrays_in(getattr(value, each.name))


def _letter(name: str, spot: Spot) -> str:
    """As the layer's equations call a parameter."""
    return {"embedding": "E", "positions": "P"}.get(spot.name, LETTERS[name])


def along(spot: Spot) -> str:
    """What the arrays of a place are cut by."""
    return "heads" if ".attention" in spot.name else "FFN columns" if ".mlp" in spot.name else "vocabulary"


def _param_shown(name: str, role: str, param: Param, spot: Spot, picture: Picture) -> Shown:
    """Every rank's whole or its share. With one rank all is whole, but stays cut in the reader's mind."""
    is_cut = any(part.name for part in param.spec.parts)
    return Shown(name, role, SHARDED if is_cut else REPLICATED, along(spot) if is_cut else "", picture)


def _as_input(shown: Shown, name: str | None = None) -> Shown:
    role = "in" if shown.role == "out" else shown.role
    return Shown(name or shown.name, role, shown.placement, shown.along, shown.picture)
