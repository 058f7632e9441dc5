"""The fastest layouts that fit, out of all, and the front of time and memory: best first, pruned by bounds.

A group is all layouts that cut a microbatch alike. It gets a bound of its seconds (its stages are never faster than
their mean) and of its bytes (the states of the mean stage, with most of ZeRO, of the rank of tp where they are most):
no layout of it is below either. Groups are opened in the order of the seconds, unless their bounds lose already against
what was found. In a group every layout's stages are dealt and its seconds and bytes estimated in closed form. Nothing
is sampled; a test holds the search to all layouts tried one by one.

What is told in the end, the fastest and the front, is looked at once more by `cost_of`, with the pipeline simulated and
the memory of the schedule's own lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mpitp.errors import ConfigError
from mpitp.pipeline.schedules import most_in_flight
from mpitp.plan.anatomy import Anatomy, Cut, Held, Of
from mpitp.plan.cost import (
    Stages,
    Step,
    StepCost,
    cost_of,
    over_replicas,
    pipeline_form,
    stage_durations,
    stages_of,
    start_seconds,
    tied_seconds,
    times_of,
    with_added,
)
from mpitp.plan.layout import Layout
from mpitp.plan.space import RECOMPUTES, Units, check_ranks, cuts_of, schedules_of, zeros_of
from mpitp.plan.stage_memory import states_of

SLACK = 1 - 1e-9  # bounds are sums in another order
SPARE = 4  # estimates kept for each layout that is wanted: some may not fit when looked at exactly
FRONT_SECONDS, FRONT_BYTES = 1.5, 0.98  # the front ends at so many times the least seconds, and goes in such steps

Filter = Callable[[Layout], bool]
Loses = Callable[[float, float], bool]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a layout takes: seconds in closed form, bytes without what is recomputed and on its way."""

    seconds: float
    num_bytes: float
    without_zero: Layout
    zero: int = 0

    @property
    def layout(self) -> Layout:
        """Whose it is."""
        return replace(self.without_zero, zero=self.zero)


@dataclass(slots=True)
class Best:
    """The fastest estimates so far, and the front: those that no other beats in both."""

    keep: int
    longest: float = math.inf  # seconds from which on nobody asks
    has_front: bool = True
    fastest: list[Estimate] = field(default_factory=list)
    front: list[Estimate] = field(default_factory=list)
    opened: int = 0
    seen: int = 0

    def loses(self, seconds: float, num_bytes: float) -> bool:
        """Whether what takes at least so much can neither be among the fastest nor on the front."""
        if seconds > self.longest:
            return True
        if len(self.fastest) < self.keep or (seconds, num_bytes) < _order(self.fastest[-1]):
            return False
        if not self.has_front:
            return True
        if seconds > FRONT_SECONDS * self.fastest[0].seconds:
            return True
        return any(one.seconds <= seconds and FRONT_BYTES * one.num_bytes <= num_bytes for one in self.front)

    def take(self, estimate: Estimate) -> None:
        """Note one."""
        self.seen += 1
        if self.loses(estimate.seconds, estimate.num_bytes):
            return
        self.fastest = sorted([*self.fastest, estimate], key=_order)[: self.keep]
        if self.has_front and not any(_beats(one, estimate) for one in self.front):
            self.front = sorted([*(one for one in self.front if not _beats(estimate, one)), estimate], key=_order)


def _order(one: Estimate) -> tuple[float, float]:
    return one.seconds, one.num_bytes


def _beats(one: Estimate, other: Estimate) -> bool:
    """At least as good in both."""
    return one.seconds <= other.seconds and one.num_bytes <= other.num_bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """What is searched: a model on a machine, a step, the units there are, bytes that a rank may take."""

    anatomy: Anatomy
    units: Units
    step: Step
    limit: float = math.inf


@dataclass(slots=True)
class Found:
    """The fastest layouts that fit, in order, and the front, looked at exactly; how many were estimated."""

    best: list[StepCost]
    front: list[StepCost]
    estimated: int


def search(problem: Problem, ranks: int, keep: int = 5) -> Found:
    """The `keep` fastest layouts on so many ranks, and the front.

    Raises ConfigError where none fits: with the least memory that one needs, and which.
    """
    check_ranks(problem.units, ranks)
    wanted = SPARE * keep
    while True:
        best = explore(problem, ranks, wanted)
        costs = [cost_of(problem.anatomy, problem.step, one.layout) for one in best.fastest]
        fitting = sorted((c for c in costs if c.memory.total <= problem.limit), key=lambda cost: cost.seconds)
        if len(fitting) >= keep or len(best.fastest) < wanted:
            break
        wanted *= SPARE
    if not fitting:
        raise ConfigError(_none_fits(problem, ranks))
    front = [cost_of(problem.anatomy, problem.step, one.layout) for one in best.front]
    return Found(fitting[:keep], _front_of([*fitting, *front], problem.limit), best.seen)


def fastest(
    problem: Problem, ranks: int, wanted: Filter = lambda layout: True, longest: float = math.inf
) -> StepCost | None:
    """The fastest layout that fits, of cuts (axes, microbatch, sequence parallelism) that are wanted; None where there
    is none, or none whose estimate is at most `longest` seconds.
    """
    best = _explored(problem, ranks, Best(SPARE, longest, has_front=False), wanted)
    costs = [cost_of(problem.anatomy, problem.step, one.layout) for one in best.fastest]
    return min((c for c in costs if c.memory.total <= problem.limit), key=lambda cost: cost.seconds, default=None)


def explore(problem: Problem, ranks: int, keep: int) -> Best:
    """Estimates of all layouts that may be among the `keep` fastest or on the front."""
    return _explored(problem, ranks, Best(keep), lambda layout: True)


def _explored(problem: Problem, ranks: int, best: Best, wanted: Filter) -> Best:
    groups = [group for group in _groups(problem, ranks, wanted) if group.num_bytes <= problem.limit]
    for group in sorted(groups, key=_order):
        if not best.loses(group.seconds, group.num_bytes):
            best.opened += 1
            for estimate in estimates_of(problem, group.without_zero, best.loses):
                best.take(estimate)
    return best


def _groups(problem: Problem, ranks: int, wanted: Filter) -> Iterator[Estimate]:
    """The bounds of each group."""
    anatomy, start = problem.anatomy, problem.anatomy.machine.compute.step_seconds
    for cut in cuts_of(problem.units, ranks):
        kinds = anatomy.kinds_of_rank(cut.tp)
        states = np.array([_least_states(anatomy, cut, kind) for kind in kinds])
        if states.max() > problem.limit or not wanted(cut):
            continue
        for recompute in RECOMPUTES:
            rows = anatomy.totals(Cut.of(cut), recompute)
            seconds = problem.step.microbatches(cut) * float(times_of(rows)[0][0]) / cut.pp + start
            kept = [anatomy.kept(Cut.of(cut), kind, recompute) if cut.pp == 1 else 0.0 for kind in kinds]
            least = float((states + SLACK * np.array(kept)).max())
            yield Estimate(SLACK * seconds, SLACK * least, replace(cut, recompute=recompute))


def _least_states(anatomy: Anatomy, cut: Layout, kind: int) -> float:
    """Bytes of weights, gradients and optimizer that the heaviest stage of a rank of tp has at least: the mean, with
    most of ZeRO.
    """
    key = cut.tp, kind, cut.replicas, cut.ep
    total = anatomy.weights(*key).sum(axis=0) - anatomy.counted_again(*key)
    states = states_of(total[None, :], 3 if cut.replicas > 1 else 0, is_half=anatomy.is_half)
    return SLACK * float(states.sum()) / cut.pp


def never(seconds: float, num_bytes: float) -> bool:
    """Loses in no case."""
    return False


def estimates_of(problem: Problem, group: Layout, loses: Loses = never) -> Iterator[Estimate]:
    """Of every layout of a group that may fit, but for those of whose bounds `loses` says that they needn't be seen."""
    made: dict[int, tuple[Stages, list[Stages]]] = {}
    for layout in schedules_of(problem.units, group):
        parts = layout.pp * layout.chunks
        if parts not in made:
            dealt = stages_of(problem.anatomy, layout)
            made[parts] = dealt, _of_each_kind(problem.anatomy, dealt)
        stages, each = made[parts]
        yield from _of_family(problem, replace(stages, layout=layout), each, loses)


def _of_each_kind(anatomy: Anatomy, stages: Stages) -> list[Stages]:
    """The stages of a rank of tp of each kind. One may have most of the weights and another most of what is kept, so
    that no rank has as much as both together.
    """
    kinds = anatomy.kinds_of_rank(stages.layout.tp)
    return [stages] if len(kinds) == 1 else [stages_of(anatomy, stages.layout, kind) for kind in kinds]


def _of_family(problem: Problem, stages: Stages, each: Sequence[Stages], loses: Loses) -> Iterator[Estimate]:
    """Layouts that differ in ZeRO alone. None is faster than its microbatches without what replicas add to them.
    `each`: the stages of ranks of tp of each kind.
    """
    anatomy, layout = problem.anatomy, stages.layout
    count, weights = problem.step.microbatches(layout), stages.per_stage(stages.weights)
    held = [(own.per_stage(own.weights), _held(layout, count, own.passes)) for own in each]
    zeros = zeros_of(problem.units, layout)
    sizes = {zero: max(_largest(*own, zero, anatomy.is_half) for own in held) for zero in zeros}
    fitting = {zero: size for zero, size in sizes.items() if size <= problem.limit}
    rows = stages.per_stage(stages.passes)
    start = start_seconds(anatomy, layout) + max(tied_seconds(anatomy, stages))
    least = SLACK * (count * float(times_of(rows)[0].max()) + start)
    if not fitting or loses(least, min(fitting.values())):
        return

    def length_with(zero: int, of_microbatch: float) -> float:
        own = with_added(rows, replace(layout, zero=zero), count)
        durations = stage_durations(anatomy, stages, own, np.full(layout.pp, of_microbatch))
        return pipeline_form(layout.schedule, layout.chunks, count, durations)

    least, heaviest = length_with(3, 0.0), int(weights[:, Held.WIDE].argmax())
    for zero, size in fitting.items():
        if not loses(SLACK * (least + start), size):
            over = over_replicas(anatomy, problem.step, stages, heaviest, (zero, count))
            yield Estimate(length_with(zero, over.of_microbatch) + over.of_step + start, size, layout, zero)


def _held(layout: Layout, count: int, passes: np.ndarray) -> np.ndarray:
    """Bytes of activations that each stage holds at the height, at least."""
    kept = passes[:, Of.KEPT].reshape(layout.chunks, layout.pp).min(axis=0)
    if layout.pp == 1:
        return kept
    schedule = "1f1b" if layout.schedule == "zb" else layout.schedule  # it holds as many whole ones, and rests
    return kept * np.array(most_in_flight(schedule, layout.pp, count, layout.chunks))


def _largest(weights: np.ndarray, held: np.ndarray, zero: int, is_half: bool) -> float:
    return SLACK * float((states_of(weights, zero, is_half=is_half).sum(axis=0) + held).max())


def _front_of(costs: list[StepCost], limit: float) -> list[StepCost]:
    """Those that fit and no other beats, the fastest first."""
    front: list[StepCost] = []
    for cost in sorted(costs, key=lambda cost: (cost.seconds, cost.memory.total)):
        if cost.memory.total <= limit and (not front or cost.memory.total < front[-1].memory.total):
            front.append(cost)
    return front


def smallest(problem: Problem, ranks: int) -> StepCost:
    """The layout that needs least memory."""
    best: StepCost | None = None
    anyway = replace(problem, limit=math.inf)
    for group in sorted(_groups(anyway, ranks, lambda layout: True), key=lambda group: group.num_bytes):
        if best is not None and group.num_bytes >= best.memory.total:
            break
        estimates = sorted(estimates_of(anyway, group.without_zero), key=lambda one: one.num_bytes)
        for estimate in estimates:
            if best is None or estimate.num_bytes < best.memory.total:
                cost = cost_of(problem.anatomy, problem.step, estimate.layout)
                best = cost if best is None or cost.memory.total < best.memory.total else best
    assert best is not None, "a space without layouts"
    return best


def _none_fits(problem: Problem, ranks: int) -> str:
    nearest = smallest(problem, ranks)
    sizes = nearest.memory.as_dict()
    parts = ", ".join(f"{name} {in_units(size)}" for name, size in sizes.items() if size and name != "total")
    return (
        f"no layout on {ranks} ranks fits into {in_units(problem.limit)} a rank: the least is "
        f"{in_units(nearest.memory.total)}, of {nearest.layout} ({parts}); take more ranks, ranks with more memory, or "
        "shorter sequences"
    )


def in_units(num_bytes: float) -> str:
    """Bytes, readable."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
