"""Times every layer and every collective of one rank, from outside.

A `Tracer` stands around the group before the model is made (`watch`) and around the layers afterwards (`attach`). It
notes times and sizes and keeps no array. What a run without a tracer executes is not changed by its existence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from mpitp.comm.group import Group, Pending
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.layers.layer import FORWARD
from mpitp.models.layered import LayeredModel
from mpitp.trace.observe import LayerObserver, Spot, observe
from mpitp.trace.traffic import Work

MAX_EVENTS = 200_000  # a rank: about 40 MB of memory, and as much again in the file

_TRANSPARENT = tuple(str(Path(__file__).parent.parent / part) for part in ("comm", "trace", "layers/mappings.py"))


@dataclass(slots=True)
class Span:
    """One pass through a layer, or another piece of work, in seconds of the rank's own clock."""

    name: str
    phase: str
    start: float
    stop: float = 0.0


@dataclass(slots=True)
class Traffic:
    """One collective of one rank.

    `place` is the layer it belongs to, or the function that called it outside of layers (`phase` is then empty). Where
    it was started first and waited for later, `waits_from` .. `waits_to` is the second stay in it.
    """

    number: int  # counted in its group, the same on all of its ranks; -1 for send and recv
    group: str
    op: str
    detail: str
    shape: tuple[int, ...]
    dtype: str
    given_bytes: int
    place: str
    phase: str
    start: float
    stop: float = 0.0
    waits_from: float = 0.0
    waits_to: float = 0.0
    axis: str = ""  # of the mesh, along which the group's ranks lie; several as "dp+cp"
    members: tuple[int, ...] = ()  # the group's ranks, by their numbers in the job; () where that is all of them

    @property
    def kind(self) -> str:
        """The operation with its reduction: "all_reduce max"."""
        return f"{self.op} {self.detail}" if self.op == "all_reduce" else self.op


@dataclass(slots=True)
class Tracer(LayerObserver, GroupObserver):
    """Spans and collectives of one rank. It records from `attach` on, at most `max_events` (whole passes)."""

    max_events: int = MAX_EVENTS
    spans: list[Span] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    is_open: bool = False
    is_full: bool = False
    model: LayeredModel | None = None
    _stack: list[tuple[str, str]] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _axes: dict[str, str] = field(default_factory=dict)  # of a group by its name

    def watch(self, group: Group) -> Group:
        """`group`, its collectives seen by this tracer; make the model on it."""
        return ObservedGroup(group, self, f"all {group.size}", whole_sums=True)

    def attach(self, model: LayeredModel) -> None:
        """See every layer of `model` (made on a group from `watch`) from now on."""
        observe(model, self)
        self.model, self.is_open, self.work.entrance = model, True, model.entrance
        groups = [(axes, group) for axes, group in model.site.mesh.groups() if group.size > 1]
        self._axes = {self._name_of(group): "+".join(axes) for axes, group in groups}

    def axis_of(self, group: Group) -> str:
        """The axis along which a group of the model's mesh lies; several as "dp+cp"."""
        return self._axes.get(self._name_of(group), "")

    def _name_of(self, group: Any) -> str:
        """What a group is called where this tracer sees it; others may stand in front."""
        while group is not None and getattr(group, "observer", None) is not self:
            group = getattr(group, "inner", None)
        return "" if group is None else str(group.name)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, noted as a span of this name."""

        def around(*args: Any, **named: Any) -> Any:
            return self._in_span(name, "", lambda: call(*args, **named))

        return around

    def around_layer(self, spot: Spot, phase: str, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if phase == FORWARD and spot.name == self.work.entrance:
            self._close_when_full()
        result = self._in_span(spot.name, phase, run)
        if self.is_open and phase == FORWARD:
            handled, made = spot.layer.rows_sent(args[0], result[1]), result[0]
        else:
            handled, made = _rows(args[0]), result
        if self.is_open:
            self.work.count(spot.name, phase, handled, (_rows(args[0]), _rows(made)))
        return result

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if not self.is_open:
            return run()
        entry = self._begin(call, arrays, group)
        result = run()
        entry.stop = time.perf_counter()
        return result

    def around_start(self, call: Call, arrays: Arrays, group: ObservedGroup, start: Callable[[], Pending]) -> Pending:
        if not self.is_open:
            return start()
        entry = self._begin(call, arrays, group)
        pending = start()
        entry.stop = time.perf_counter()

        def wait() -> Any:
            entry.waits_from = time.perf_counter()
            result = pending.wait()
            entry.waits_to = time.perf_counter()
            return result

        return Pending(wait)

    def _in_span(self, name: str, phase: str, run: Callable[[], Any]) -> Any:
        if not self.is_open:
            return run()
        span = Span(name, phase, time.perf_counter())
        self.spans.append(span)
        self._stack.append((name, phase))
        try:
            return run()
        finally:
            self._stack.pop()
            span.stop = time.perf_counter()

    def _begin(self, call: Call, arrays: Arrays, group: ObservedGroup) -> Traffic:
        number = -1
        if call.op not in ("send", "recv"):
            number = self._numbers[group.name] = self._numbers.get(group.name, -1) + 1
        place, phase = self._stack[-1] if self._stack else (caller(), "")
        size = sum(array.nbytes for array in arrays)
        now = time.perf_counter()
        entry = Traffic(number, group.name, call.op, call.detail, call.shape, call.dtype, size, place, phase, now, now)
        entry.axis, entry.members = self._axes.get(group.name, ""), tuple(group.members or ())
        self.traffic.append(entry)
        return entry

    def _close_when_full(self) -> None:
        """Between two passes, at the same one on every rank: they all make the same calls."""
        if self.is_open and len(self.spans) + len(self.traffic) > self.max_events:
            self.is_open, self.is_full = False, True


def caller() -> str:
    """File and function of the code outside comm, trace and pairs that made the current call: "generate.choose"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_transparent(frame.f_code):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name.strip('_')}"


def _rows(array: Any) -> int:
    """Of an activation or a gradient; ids have none."""
    return 0 if array is None else len(array)


def _is_transparent(code: CodeType) -> bool:
    """Whether who called it is meant; a comprehension has a frame of its own up to Python 3.11."""
    return code.co_filename.startswith(_TRANSPARENT) or code.co_name in ("<listcomp>", "<dictcomp>", "<genexpr>")
