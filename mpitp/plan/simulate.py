r"""A step on thousands of simulated ranks: the schedules that training runs, collectives, shared links.

Each rank runs its stage's list of actions (`pipeline/schedules.py`), with the seconds that `cost.py` has for them:

    F(i, c)     [take x]  work forward  [meet tp]  [meet cp]  [send y]
    B(i, c)     [take dy] work backward [meet tp]  [meet cp]  [send dx]
    both        with experts over ep: meet ep, whose rows go from each rank to each other one, and home
    the end     meet the replicas (sums of gradients; of experts along dp and cp alone), meet all (the norm), update

Unlike the cost, which adds up, ranks here wait for one another as they come: one slow rank, an uneven stage, messages
and sums of many groups over one node's links at a time. What a collective takes alone is its machine's: a part within
nodes, and a part over links that it may have to share (`events.py`). Ranks that can't be told apart are simulated
once (`symmetry.py`), which changes nothing.

A rank with fewer microbatches than others goes along in their exchanges and in ZeRO's gathers, without rows of its own.
The sums of a microbatch's layers over tp, and its rows' ways over ep, count as one at the end of its pass: with ranks
of constant speed a rank waits as long in one as in many.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mpitp.errors import ConfigError
from mpitp.layers.partition import piece_of
from mpitp.models.config import DecoderConfig
from mpitp.pipeline.actions import Action, Grid, Kind, receive_before, send_after
from mpitp.pipeline.schedules import make_schedule
from mpitp.plan.anatomy import Anatomy, Held, Of
from mpitp.plan.cost import (
    OverReplicas,
    Step,
    message_seconds,
    over_replicas,
    spans_of_replicas,
    stages_of,
    tied_seconds,
    with_added,
)
from mpitp.plan.events import Meet, Op, Outcome, Program, Send, Simulation, Take, Work
from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine
from mpitp.plan.planned_models import PlannedConfig
from mpitp.plan.sums import Span
from mpitp.plan.symmetry import Classes, Places, classes_of

GROUPS = {"tp": ("tp",), "cp": ("cp",), "replicas": ("dp", "ep", "cp"), "all": ("pp", "dp", "ep", "cp", "tp")}
WITH_EXPERTS = {**GROUPS, "ep": ("ep",), "experts": ("dp", "cp")}
NORM_BYTES = 4096  # of the gradient norm's vector, about


@dataclass(frozen=True, slots=True)
class Troubles:
    """Ranks that are slower than others (rank: factor on its own work), and the moments at which ranks die."""

    slow: Mapping[int, float] = field(default_factory=dict)
    dies: Mapping[int, float] = field(default_factory=dict)

    def check(self, ranks: int) -> None:
        """Raise ConfigError for what can't be."""
        for rank, value in [*self.slow.items(), *self.dies.items()]:
            if not 0 <= rank < ranks:
                raise ConfigError(f"there is no rank {rank} among {ranks} (0 to {ranks - 1}) to be slow, or to die")
            if not 0 <= value < 1e9:
                raise ConfigError(f"rank {rank}: {value:g} is no factor or moment; expected a number from 0 up")
        for rank, factor in self.slow.items():
            if factor < 1e-3:
                raise ConfigError(f"rank {rank} would be {factor:g} times as slow; expected a factor such as 2")


@dataclass(frozen=True, slots=True)
class Alone:
    """How what is waited for in a collective divides: within nodes, and over links where nobody else uses them."""

    local: float
    wide: float

    @classmethod
    def of(cls, machine: Machine, num_bytes: float, span: Span) -> Alone:
        """Shares of the seconds that the machine has for a sum of so many bytes."""
        if span.nodes == 1 or machine.between_nodes is None:
            return cls(1.0, 0.0)
        whole = machine.sum_seconds(num_bytes, span.in_node, span.nodes)
        level = machine.between_nodes
        lanes = min(span.in_node, level.links)
        alone = level.latency(span.nodes) + level.transfer(num_bytes / lanes, span.nodes)
        own = machine.in_node
        return cls((own.latency(span.in_node) + own.transfer(num_bytes, span.in_node)) / whole, alone / whole)

    @classmethod
    def of_exchange(cls, machine: Machine, num_bytes: float, span: Span) -> Alone:
        """The same of an exchange, in which each rank has so many bytes for all: a message to each other one, whose
        latency keeps nobody else from the links.
        """
        if span.nodes == 1 or machine.between_nodes is None:
            return cls(1.0, 0.0)
        level, each = machine.between_nodes, num_bytes / span.size
        whole, others = machine.all_to_all_seconds(num_bytes, span.in_node, span.nodes), span.size - span.in_node
        crowd = max(1.0, span.in_node / level.links)  # of the group's own ranks on a node
        local = (span.in_node - 1) * machine.in_node.send_seconds(each) + others * level.latency_seconds
        return cls(local / whole, others * crowd * each / level.send_bytes_per_second / whole)

    def meet(self, kind: str, seconds: float, label: str) -> Iterator[Meet]:
        """Nothing where nothing is waited for."""
        if seconds > 0:
            yield Meet(kind, self.local * seconds, self.wide * seconds, label)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a step, and of what."""

    layout: Layout
    places: Places
    classes: Classes
    outcome: Outcome

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.outcome.length

    def mean_spent(self) -> dict[tuple[str, str], float]:
        """Seconds of a rank by (work, wait or transfer; what), the mean of all ranks."""
        total: dict[tuple[str, str], float] = {}
        for count, spent in zip(self.classes.count, self.outcome.spent, strict=True):
            for key, seconds in spent.items():
                total[key] = total.get(key, 0.0) + seconds * count / self.places.ranks
        return total


class StepSimulator:
    """Steps of one layout on one machine."""

    def __init__(self, anatomy: Anatomy, step: Step, layout: Layout) -> None:
        self.anatomy, self.step, self.stages = anatomy, step, stages_of(anatomy, layout)
        self.layout: Layout = self.stages.layout
        self.machine = anatomy.machine
        if layout.ranks > self.machine.most_ranks:
            raise ConfigError(
                f"{layout.ranks} ranks need several nodes, and the machine file has no [between_nodes]: it tells of "
                f"one node of {self.machine.machine.ranks_per_node} ranks"
            )
        sizes = {axis: getattr(self.layout, axis) for axis in ("pp", "dp", "ep", "cp", "tp")}
        self.groups = WITH_EXPERTS if self.layout.ep > 1 else GROUPS
        self.places = Places(sizes, self.machine.machine.ranks_per_node)
        self.microbatches = -(-step.sequences // layout.micro)
        self._lists: dict[int, list[list[Action]]] = {}

    def run(self, troubles: Troubles = Troubles(), *, fold: bool = True, keeps_stays: bool = False) -> Simulated:  # noqa: B008  (frozen)
        """A step."""
        troubles.check(self.layout.ranks)
        work = [self._work_of(rank, troubles) for rank in range(self.layout.ranks)]
        classes = classes_of(self.places, work, list(self.groups.values()), fold=fold)
        wide = self.machine.between_nodes
        engine = Simulation(self.places, classes, self.groups, wide.links if wide else 1, keeps_stays=keeps_stays)
        made: dict[Hashable, Program] = {}
        for rank in classes.first:
            if work[rank] not in made:
                made[work[rank]] = self.program(rank, troubles.slow.get(rank, 1.0))
        programs = [made[work[rank]] for rank in classes.first]
        dies = {each: troubles.dies[rank] for each, rank in enumerate(classes.first) if rank in troubles.dies}
        return Simulated(self.layout, self.places, classes, engine.run(programs, dies))

    def _work_of(self, rank: int, troubles: Troubles) -> Hashable:
        """Ranks for which this is the same have the same program."""
        stage = self.places.coordinate(rank, "pp")
        counts = self._own(rank), self._count(rank)
        return stage, counts, troubles.slow.get(rank, 1.0), troubles.dies.get(rank, -1.0)

    def _own(self, rank: int, ep: int | None = None) -> int:
        """Microbatches of a rank, or of another one of those that share its experts."""
        layout, place = self.layout, self.places.coordinate
        deal = place(rank, "dp") * layout.ep + (place(rank, "ep") if ep is None else ep)
        return len(piece_of(self.microbatches, deal, layout.deals))

    def _count(self, rank: int) -> int:
        """Microbatches that a rank goes through, those without rows of its own included."""
        return max(self._own(rank, ep) for ep in range(self.layout.ep))

    def program(self, rank: int, slow: float = 1.0) -> Program:
        """What a rank does in a step."""
        stage, layout = self.places.coordinate(rank, "pp"), self.layout
        ops: list[Op] = [Work(self.machine.compute.step_seconds * slow, "start")]
        own, count = self._own(rank), self._count(rank)
        over = self._over[stage]
        for action in self._actions(stage, count):
            ops += self._action(action, stage, slow, own)
        for _ in range(2 * (self.step.microbatches(layout) - count) if layout.pp == 1 else 0):
            ops += self._sums(stage, over.of_microbatch / 2)
        ops += self._sums(stage, over.waited)
        if tied := self._tied[stage]:
            ops.append(Work(tied, "tied tables"))
        if layout.ranks > 1:
            span = Span.of(layout.ranks, 1, self.machine.machine.ranks_per_node)
            seconds = self.machine.sum_seconds(NORM_BYTES, span.in_node, span.nodes)
            ops += Alone.of(self.machine, NORM_BYTES, span).meet("all", seconds, "gradient norm")
        return [*ops, Work(over.optimizer * slow, "optimizer")]

    def _actions(self, stage: int, count: int) -> Sequence[Action]:
        layout = self.layout
        if layout.pp > 1:
            if count not in self._lists:
                self._lists[count] = make_schedule(layout.schedule, layout.pp, count, layout.chunks)
            return self._lists[count][stage]
        return [Action(kind, i) for i in range(count) for kind in (Kind.FORWARD, Kind.BACKWARD)]

    def _action(self, action: Action, stage: int, slow: float, count: int) -> Iterator[Op]:
        """Of a rank with so many microbatches; those behind are there for their collectives alone, without rows."""
        grid, is_idle = Grid(self.layout.pp, self.layout.chunks), action.microbatch >= count
        row = self.stages.passes[grid.part(stage, action.chunk)]
        coming, going = receive_before(action, stage, grid), send_after(action, stage, grid)
        if coming is not None:
            yield Take(-1 if action.kind is Kind.FORWARD else 1, coming.tag, "messages")
        if not is_idle:
            yield Work(_seconds(with_added(row[None], self.layout, count)[0], action.kind) * slow, NAMES[action.kind])
        for kind, (first, label) in MET.items():
            if kind == "ep" or not is_idle:
                yield from self._alone[kind].meet(kind, _waited(row, first, action.kind), label)
        if action.kind is not Kind.WEIGHT_GRAD:
            yield from self._sums(stage, self._over[stage].of_microbatch / (2 * grid.chunks))
        if going is not None:
            yield Send(1 if action.kind is Kind.FORWARD else -1, going.tag, self._messages[stage], "messages")

    def _sums(self, stage: int, seconds: float) -> Iterator[Op]:
        """Over the replicas of a stage, of experts by themselves."""
        experts, (every, own) = self._over[stage].experts, self._of_replicas(stage)
        yield from every.meet("replicas", (1 - experts) * seconds, "sums over replicas")
        yield from own.meet("experts", experts * seconds, "sums over replicas of experts")

    @cached_property
    def _over(self) -> list[OverReplicas]:
        most = self.step.microbatches(self.layout)
        return [
            over_replicas(self.anatomy, self.step, self.stages, stage, (self.layout.zero, most))
            for stage in range(self.layout.pp)
        ]

    @cached_property
    def _messages(self) -> list[float]:
        return message_seconds(self.anatomy, self.stages)

    @cached_property
    def _tied(self) -> list[float]:
        return tied_seconds(self.anatomy, self.stages)

    @cached_property
    def _alone(self) -> dict[str, Alone]:
        """Of sums of a microbatch's activations, and of its rows' ways to their experts."""
        layout, facts = self.layout, self.anatomy.facts
        rows = layout.micro * facts.seq_len / layout.cp
        num_bytes = rows * facts.model.hidden_size * np.dtype(facts.dtype).itemsize
        spans = {"tp": self._span(layout.tp, 1), "cp": self._span(layout.cp, layout.tp)}
        found = {kind: Alone.of(self.machine, num_bytes, span) for kind, span in spans.items()}
        experts = self._span(layout.ep, layout.cp * layout.tp)
        return found | {"ep": Alone.of_exchange(self.machine, _experts_a_token(facts.model) * num_bytes, experts)}

    def _span(self, size: int, stride: int) -> Span:
        return Span.of(size, stride, self.machine.machine.ranks_per_node)

    def _of_replicas(self, stage: int) -> tuple[Alone, Alone]:
        """Of the sums over all replicas, and of those of experts."""
        layout, row = self.layout, self.stages.per_stage(self.stages.weights)[stage]
        spans = spans_of_replicas(layout, self.machine.machine.ranks_per_node)
        sizes = float(row[Held.WIDE] - row[Held.DEALT_WIDE]), float(row[Held.DEALT_WIDE])
        own = [Alone.of(self.machine, size, span) for size, span in zip(sizes, spans, strict=False)]
        return own[0], own[-1]


MET = {
    "tp": (Of.TP, "sums over tp"),
    "cp": (Of.CP, "exchange over cp"),
    "ep": (Of.EP, "exchange over ep"),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradients",
    Kind.WEIGHT_GRAD: "weight gradients",
}


def _experts_a_token(model: PlannedConfig) -> int:
    mixture = model.traits.mixture if isinstance(model, DecoderConfig) else None
    return mixture.top_k if mixture else 0


def _seconds(row: np.ndarray, kind: Kind) -> float:
    """A rank's own work in an action."""
    columns = {
        Kind.FORWARD: (Of.FORWARD,),
        Kind.BACKWARD: (Of.INPUT_GRAD, Of.WEIGHT_GRAD, Of.AGAIN),
        Kind.INPUT_GRAD: (Of.INPUT_GRAD, Of.AGAIN),
        Kind.WEIGHT_GRAD: (Of.WEIGHT_GRAD,),
    }[kind]
    return float(row[list(columns)].sum())


def _waited(row: np.ndarray, first: int, kind: Kind) -> float:
    """What is waited for in an action's collectives along an axis, whose columns begin at `first`."""
    if kind is Kind.WEIGHT_GRAD:
        return 0.0
    forward = float(row[first + 1])
    return forward if kind is Kind.FORWARD else float(row[first]) - forward


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a job goes on after a rank has died: steps between checkpoints, seconds of one, seconds until the death is
    noticed, and from there until the job runs again.
    """

    every: int = 100
    save_seconds: float = 0.0
    notice_seconds: float = 10.0
    restart_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """Some steps, of which one was broken off: moments at which steps ended, and where the time went."""

    steps: int
    step_seconds: float
    seconds: float
    undisturbed: float
    died_in: int  # step, counted from 0; -1: nobody died
    standstill: float  # from the death until nothing moved any more
    redone: int

    @property
    def lost(self) -> float:
        """Beside what the steps and checkpoints take anyway."""
        return self.seconds - self.undisturbed


def simulate_job(simulator: StepSimulator, steps: int, troubles: Troubles, recovery: Recovery) -> Job:
    """Steps with the slow ranks of `troubles`, and the first of its deaths, counted from the start of the job.

    The broken step goes as far as it can: ranks run on until each waits for what will never come.
    """
    whole = simulator.run(Troubles(troubles.slow)).seconds
    saves = steps // recovery.every * recovery.save_seconds
    undisturbed = steps * whole + saves
    if not troubles.dies:
        return Job(steps, whole, undisturbed, undisturbed, -1, 0.0, 0)
    rank, moment = min(troubles.dies.items(), key=lambda item: item[1])
    number, within = _step_at(moment, whole, recovery)
    if number >= steps:
        return Job(steps, whole, undisturbed, undisturbed, -1, 0.0, 0)
    broken = simulator.run(Troubles(troubles.slow, {rank: within}), keeps_stays=True).outcome
    moves = [stay.stop for stays in broken.stays for stay in stays if stay.kind != "wait"]
    standstill = max([within, *moves]) - within
    redone = number % recovery.every
    again = standstill + recovery.notice_seconds + recovery.restart_seconds + within + redone * whole
    return Job(steps, whole, undisturbed + again, undisturbed, number, standstill, redone)


def _step_at(moment: float, step_seconds: float, recovery: Recovery) -> tuple[int, float]:
    """Which step a moment of the job lies in, and how far; one within a checkpoint counts as the next step's start."""
    round_seconds = recovery.every * step_seconds + recovery.save_seconds
    rounds, rest = divmod(moment, round_seconds)
    number = int(min(rest // step_seconds, recovery.every))
    within = rest - number * step_seconds if number < recovery.every else 0.0
    return int(rounds) * recovery.every + number, within
