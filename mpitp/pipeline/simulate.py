"""A schedule on an ideal machine: when everything starts and stops, who is idle, how much is held. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.errors import ConfigError
from mpitp.pipeline.actions import Action, Actions, Grid, Kind, Task, grid_of, waits_for


class Deadlock(ConfigError):
    """No stage can go on, and not all is done: every stage waits for what stands later in a list, or in none."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Times of one microbatch through one whole stage (a chunk takes its share of it), and of one message. Any unit."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    send: float = 0.0

    @property
    def total(self) -> float:
        """A stage's work for one microbatch."""
        return self.forward + self.input_grad + self.weight_grad

    def of(self, kind: Kind) -> float:
        """An action's time, with one chunk a stage."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input_grad + self.weight_grad,
            Kind.INPUT_GRAD: self.input_grad,
            Kind.WEIGHT_GRAD: self.weight_grad,
        }[kind]


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its place and time."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What `simulate` found."""

    grid: Grid
    timed: list[list[Timed]]  # for every stage, in order
    length: float  # of the step: until the last stage is done
    in_flight: list[int]  # for every stage the most activations (of one chunk each) held at one time

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they are idle, 0 to 1."""
        busy = sum(timed.stop - timed.start for own in self.timed for timed in own)
        return 1.0 - busy / (self.length * self.grid.stages) if self.length else 0.0


def simulate(actions: Actions, durations: Durations | Sequence[Durations] = Durations()) -> Timeline:  # noqa: B008 (it is frozen)
    """Start every action as soon as its stage is free and what it waits for has come. Raises Deadlock.

    `durations`: of all stages, or of each; a message takes what its sender's says.
    """
    grid = grid_of(actions)
    clock = _Clock(actions, grid, [durations] * grid.stages if isinstance(durations, Durations) else durations)
    while any([clock.advance(stage) for stage in range(grid.stages)]):  # a list: every stage gets its turn
        pass
    if stuck := [stage for stage, own in enumerate(actions) if len(clock.timed[stage]) < len(own)]:
        raise Deadlock(_who_waits(clock, stuck))
    length = max((own[-1].stop for own in clock.timed if own), default=0.0)
    return Timeline(grid, clock.timed, length, [_most_held(own) for own in actions])


class _Clock:
    """What each stage has done so far, and when it was done."""

    def __init__(self, actions: Actions, grid: Grid, durations: Sequence[Durations]) -> None:
        self.actions, self.grid, self.durations = actions, grid, durations
        self.split = any(action.kind is Kind.INPUT_GRAD for own in actions for action in own)
        self.timed: list[list[Timed]] = [[] for _ in actions]
        self.done: dict[Task, float] = {}

    def next(self, stage: int) -> Action | None:
        """What a stage does next; None at the end of its list."""
        place = len(self.timed[stage])
        return self.actions[stage][place] if place < len(self.actions[stage]) else None

    def missing(self, stage: int, action: Action) -> list[Task]:
        """What an action waits for and nobody has done yet."""
        return [task for task in waits_for(action, stage, self.grid, self.split) if task not in self.done]

    def advance(self, stage: int) -> bool:
        """Do all that a stage can do now; whether that was anything."""
        before = len(self.timed[stage])
        while (action := self.next(stage)) is not None and not self.missing(stage, action):
            own = self.timed[stage]
            start = max([own[-1].stop if own else 0.0, *self.arrivals(stage, action)])
            stop = start + self.durations[stage].of(action.kind) / self.grid.chunks
            own.append(Timed(stage, action, start, stop))
            self.done[stage, action] = stop
        return len(self.timed[stage]) > before

    def arrivals(self, stage: int, action: Action) -> list[float]:
        """When what an action waits for is there."""
        tasks = waits_for(action, stage, self.grid, self.split)
        return [self.done[task] + (self.durations[task[0]].send if task[0] != stage else 0.0) for task in tasks]


def _most_held(own: Sequence[Action]) -> int:
    """An activation is held from its forward until its BACKWARD or its WEIGHT_GRAD is done."""
    held = most = 0
    for action in own:
        held += action.kind is Kind.FORWARD
        most = max(most, held)
        held -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    return most


def _who_waits(clock: _Clock, stuck: list[int]) -> str:
    """Each stage that stands still, and for what."""
    listed = Counter((stage, action) for stage, own in enumerate(clock.actions) for action in own)
    lines = []
    for stage in stuck:
        action = clock.next(stage)
        assert action is not None
        for other, task in clock.missing(stage, action):
            where = f"stage {other}" if listed[other, task] else f"stage {other}, in whose list it isn't"
            lines.append(f"stage {stage} waits, before {_words(action)}, for {_words(task)} of {where}")
    return "this pipeline schedule can't end:\n" + "\n".join(lines)


def _words(action: Action) -> str:
    chunk = f" through chunk {action.chunk}" if action.chunk else ""
    return f"{action.kind.name.lower()} of microbatch {action.microbatch}{chunk}"
