r"""The cost of a layout: seconds of a step by part, and bytes a rank. A pure function of model, machine and layout.

    seconds = start of the step
            + pipeline of m microbatches           each stage's F, I and W from its layers' rows (`anatomy.py`)
            + sums over replicas that aren't hidden
            + gradient norm, optimizer, and with ZeRO the new weights

m is that of the replica with most of the step's microbatches. With one stage the pipeline is m (F + I + W). With
several it is what `simulate` finds for the schedule's own lists, each stage with its own times; for long steps, and
where thousands of layouts are looked at, what `pipeline_form` says. The parts told are those of the dearest stage, and
the bubble is the rest of the pipeline's length.

The first microbatch's weight gradients are taken as they are, those of later ones added to them. Sums over replicas
start behind the last microbatch's backward, bucket by bucket (`optim/reduction.py`), into which gradients are copied;
as much of them is hidden as that backward lasts and the machine moves on behind products. A pipeline tells when all is
done, and hides nothing. Experts that are dealt over ep have their gradients summed over dp and cp alone, all other
weights over ep too; the rows' ways to experts and home are in `trips.py`. Memory is that of `plan memory`, of the rank
that holds most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitp.models.stages import TO_DECODER, Costs
from mpitp.pipeline.schedules import make_schedule, most_in_flight
from mpitp.pipeline.simulate import Durations, simulate
from mpitp.plan.anatomy import Anatomy, Cut, Held, Of
from mpitp.plan.balance import balanced
from mpitp.plan.layout import Layout
from mpitp.plan.stage_memory import Memory, stage_memory
from mpitp.plan.sums import Span

ADAMW_TOUCHES = 7  # arrays of the size of the weights: w, m and v read and written, the gradient read
STARTS_OF_PARAM = 6  # operations of the norm and the update on each parameter
AGREEMENTS = 4  # small collectives of all ranks in a step: what they have, the loss, the norm, one word for all
SMALL_BYTES = 64
MOST_SIMULATED = 2048  # passes through a chunk


@dataclass(frozen=True, slots=True)
class Step:
    """What a step is, whatever the layout: its sequences, and bytes of gradients that are summed at once."""

    sequences: int
    bucket_bytes: int = 4 << 20

    def microbatches(self, layout: Layout) -> int:
        """Of the replica that has most."""
        return math.ceil(math.ceil(self.sequences / layout.micro) / layout.deals)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by part, those hidden behind products (not in the total), and the memory of a rank."""

    layout: Layout
    parts: dict[str, float]
    hidden: dict[str, float]
    memory: Memory

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The part that takes longest: what would have to shrink."""
        return max(self.parts, key=self.parts.__getitem__)


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a layout: rows of passes and weights summed over each part's layers, [parts, columns]."""

    layout: Layout  # its stages named
    passes: np.ndarray
    weights: np.ndarray
    starts: tuple[int, ...]  # the first layer of each part, and the end
    turn: int = -1  # the layer where a decoder begins behind an encoder; -1: there is none

    def parts_of(self, stage: int) -> range:
        """Of the model, from the first chunk of a stage to its last."""
        return range(stage, self.layout.pp * self.layout.chunks, self.layout.pp)

    def reads_memory(self, part: int) -> bool:
        """Whether a part is handed an encoder's output beside its activations."""
        return 0 <= self.turn < self.starts[part]

    def per_stage(self, rows: np.ndarray) -> np.ndarray:
        """Sums over the chunks of each stage; part c * pp + s is stage s's chunk c."""
        return rows.reshape(self.layout.chunks, self.layout.pp, -1).sum(axis=0)


def cost_of(anatomy: Anatomy, step: Step, layout: Layout) -> StepCost:
    """Of a layout. Its `stages`, where they are empty, are dealt by time."""
    stages = stages_of(anatomy, layout)
    layout = stages.layout
    count = step.microbatches(layout)
    rows = with_added(stages.per_stage(stages.passes), layout, count)
    total, _, _ = times_of(rows)
    over = [over_replicas(anatomy, step, stages, stage, (layout.zero, count)) for stage in range(layout.pp)]
    extra = np.array([each.of_microbatch for each in over])
    durations = stage_durations(anatomy, stages, rows, extra)
    length = pipeline_seconds(layout.schedule, layout.chunks, count, durations)
    dearest = int(np.argmax(total + extra))
    last = max(range(layout.pp), key=lambda stage: over[stage].of_step)
    parts = _parts(rows[dearest], count) | {
        "sums over replicas": over[last].waited + count * extra[dearest],
        "bubble": length - count * float(total[dearest] + extra[dearest]),
        "optimizer": over[last].optimizer,
        "tied tables": max(tied_seconds(anatomy, stages)),
        "start of the step": start_seconds(anatomy, layout),
    }
    hidden = {
        "sums over tp": count * float(rows[dearest, Of.TP_HIDDEN]),
        "exchange over cp": count * float(rows[dearest, Of.CP_HIDDEN]),
        "exchange over ep": count * float(rows[dearest, Of.EP_HIDDEN]),
        "sums over replicas": over[last].hidden,
    }
    memory = stage_memory(anatomy, step.bucket_bytes, stages, count)
    return StepCost(layout, parts, {name: value for name, value in hidden.items() if value}, memory)


def stages_of(anatomy: Anatomy, layout: Layout, rank: int | None = None) -> Stages:
    """The stages, of the rank of tp with most of everything (or of one rank)."""
    cut = Cut.of(layout)
    kinds = anatomy.kinds_of_rank(layout.tp) if rank is None else [rank]
    passes = _largest([anatomy.passes(cut, kind, layout.recompute) for kind in kinds])
    if not layout.stages and layout.pp > 1:
        layout = _dealt(anatomy, layout, passes)
    starts = _starts(anatomy, layout)
    turn = anatomy.names.index(TO_DECODER) if TO_DECODER in anatomy.names else -1
    sums = np.add.reduceat(passes, starts[:-1])
    return Stages(layout, sums, _weights_of(anatomy, layout, kinds, starts), starts, turn)


def _largest(tables: Sequence[np.ndarray]) -> np.ndarray:
    return tables[0] if len(tables) == 1 else np.maximum.reduce(list(tables))


def _dealt(anatomy: Anatomy, layout: Layout, passes: np.ndarray) -> Layout:
    sums = np.concatenate([[0.0], np.cumsum(times_of(passes)[0])])
    units = sums[anatomy.unit_starts]
    costs = Costs(float(units[0]), tuple(map(float, np.diff(units))), float(sums[-1] - units[-1]))
    return replace(layout, stages=balanced(costs, layout.pp * layout.chunks))


def _starts(anatomy: Anatomy, layout: Layout) -> tuple[int, ...]:
    """The first layer of each part, and the end."""
    units = anatomy.unit_starts
    stops = np.cumsum(layout.stages or (len(units) - 1,))
    return (0, *(units[stop] for stop in stops[:-1]), len(anatomy.names))


def _weights_of(anatomy: Anatomy, layout: Layout, kinds: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """A tied table lies on one stage once: it counts with the first of its layers there."""
    keys = [(layout.tp, kind, layout.replicas, layout.ep) for kind in kinds]
    weights = _largest([anatomy.weights(*key) for key in keys])
    rows = np.add.reduceat(weights, starts[:-1])
    rows[:, Held.LARGEST] = np.maximum.reduceat(weights[:, Held.LARGEST], starts[:-1])
    tied = [anatomy.tied_weights(*key) for key in keys]
    for first, parts in _parts_with(anatomy.tied, starts).items():
        own = _largest([each[first] for each in tied])
        seen: set[int] = set()
        for part in parts:
            if part % layout.pp in seen:
                rows[part, : Held.LARGEST] -= own[: Held.LARGEST]
            seen.add(part % layout.pp)
    return rows


def _parts_with(tied: Mapping[str, Sequence[int]], starts: Sequence[int]) -> dict[str, list[int]]:
    """The part of each use of each tied parameter."""
    return {first: [bisect_right(starts, place) - 1 for place in places] for first, places in tied.items()}


def times_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a microbatch: all, its forward, its weight gradients."""
    forward = rows[:, (Of.FORWARD, Of.TP_FORWARD, Of.CP_FORWARD, Of.EP_FORWARD)].sum(axis=1)
    columns = (Of.FORWARD, Of.INPUT_GRAD, Of.WEIGHT_GRAD, Of.AGAIN, Of.TP, Of.CP, Of.EP)
    return rows[:, columns].sum(axis=1), forward, rows[:, Of.WEIGHT_GRAD]


def with_added(rows: np.ndarray, layout: Layout, count: int) -> np.ndarray:
    """Stages' rows with the mean seconds that each of so many microbatches takes to add its gradients to the others'.
    The first one's are taken as they are; so are all where they leave the rank microbatch by microbatch.
    """
    leaves = layout.zero == 3 or (layout.zero == 2 and layout.pp == 1)
    if leaves or count == 1:
        return rows
    rows = rows.copy()
    rows[:, Of.WEIGHT_GRAD] += (count - 1) / count * rows[:, Of.ADDED]
    return rows


def _parts(row: np.ndarray, count: int) -> dict[str, float]:
    """Of m microbatches through one stage."""
    own = row[[Of.FORWARD, Of.INPUT_GRAD, Of.WEIGHT_GRAD]].sum()
    named = {
        "products": row[Of.PRODUCTS],
        "attention": row[Of.ATTENTION],
        "passes": own - row[[Of.PRODUCTS, Of.ATTENTION, Of.EXPS, Of.STARTS]].sum(),
        "exponentials": row[Of.EXPS],
        "starts": row[Of.STARTS],
        "recompute": row[Of.AGAIN],
        "sums over tp": row[Of.TP],
        "exchange over cp": row[Of.CP],
        "exchange over ep": row[Of.EP],
    }
    return {name: count * float(seconds) for name, seconds in named.items()}


@dataclass(frozen=True, slots=True)
class OverReplicas:
    """Seconds of a stage: what replicas wait for in each microbatch and behind all, hidden; norm and update. `experts`:
    the part of what is waited for that goes over the replicas of experts, where these are fewer.
    """

    of_microbatch: float
    waited: float
    hidden: float
    optimizer: float
    experts: float = 0.0

    @property
    def of_step(self) -> float:
        """Behind all microbatches."""
        return self.waited + self.optimizer


def over_replicas(anatomy: Anatomy, step: Step, stages: Stages, stage: int, how: tuple[int, int]) -> OverReplicas:
    """Of a stage; `how`: with which level of ZeRO, and its microbatches."""
    layout, machine, (zero, count) = stages.layout, anatomy.machine, how
    row, passes = stages.per_stage(stages.weights)[stage], stages.per_stage(stages.passes)[stage]
    spans = spans_of_replicas(layout, machine.machine.ranks_per_node)
    stored = row[Held.STORED] - row[Held.DEALT_STORED], row[Held.DEALT_STORED]
    wide = row[Held.WIDE] - row[Held.DEALT_WIDE], row[Held.DEALT_WIDE]

    def seconds(num_bytes: float, span: Span, share: float) -> float:
        calls = max(1, math.ceil(num_bytes / step.bucket_bytes))
        return calls * machine.sum_seconds(num_bytes / calls, span.in_node, span.nodes, share)

    def each(kinds: tuple[float, float], share: float) -> list[float]:
        return [seconds(float(size), span, share) for size, span in zip(kinds, spans, strict=False)]

    own_wide = row[Held.OWN_WIDE] if zero else row[Held.WIDE]
    own_stored = row[Held.OWN_STORED] if zero else row[Held.STORED]
    touched = ADAMW_TOUCHES * own_wide + (own_stored if anatomy.is_half else 0.0)
    compute = machine.compute
    optimizer = touched / compute.optimizer_bytes_per_second + compute.pass_seconds(own_wide)
    optimizer += STARTS_OF_PARAM * row[Held.COUNT] * compute.operation_seconds
    if layout.replicas == 1:
        return OverReplicas(0.0, 0.0, 0.0, float(optimizer))
    packed = _laid(anatomy, float(row[Held.WIDE]), step.bucket_bytes)
    scatters = each(wide, 0.5 if zero else 1.0)
    experts = scatters[1] / sum(scatters) if len(scatters) > 1 else 0.0
    rest = float(optimizer) + packed * (count if zero == 2 and layout.pp == 1 else 1), experts
    if zero == 3:
        return OverReplicas(2 * sum(each(stored, 0.5)) + sum(scatters), 0.0, 0.0, *rest)
    gather = sum(each(stored, 0.5)) if zero else 0.0
    scatter, movable = sum(scatters), sum(x * machine.overlap(s.nodes) for x, s in zip(scatters, spans, strict=True))
    backward = float(passes[[Of.INPUT_GRAD, Of.WEIGHT_GRAD, Of.AGAIN]].sum()) if layout.pp == 1 else 0.0
    hidden = min(movable, backward)
    if zero == 2 and layout.pp == 1:
        return OverReplicas(scatter - hidden, gather, count * hidden, *rest)
    return OverReplicas(0.0, scatter - hidden + gather, hidden, *rest)


def _laid(anatomy: Anatomy, num_bytes: float, bucket_bytes: int) -> float:
    """Seconds of copying gradients into their buckets; told with the optimizer's."""
    calls = max(1, math.ceil(num_bytes / bucket_bytes))
    return calls * anatomy.machine.compute.pass_seconds(2 * num_bytes / calls)


def spans_of_replicas(layout: Layout, ranks_per_node: int) -> list[Span]:
    """The ranks over which gradients are summed; behind them, with ep, those of experts: along dp and cp alone."""
    every = Span.of(layout.replicas, layout.tp, ranks_per_node)
    if layout.ep == 1:
        return [every]
    near = Span.of(layout.cp, layout.tp, ranks_per_node)
    far = Span.of(layout.dp, layout.ep * layout.cp * layout.tp, ranks_per_node)
    experts = Span(near.in_node * far.in_node, near.nodes * far.nodes)
    return [every, experts] if experts.size > 1 else [every]


def stage_durations(anatomy: Anatomy, stages: Stages, rows: np.ndarray, extra: np.ndarray) -> list[Durations]:
    """Of a microbatch on each stage; `extra`: seconds of each that replicas wait for."""
    total, forward, weight_grad = times_of(rows)
    sends = message_seconds(anatomy, stages)
    each = zip(forward + extra / 2, total - forward - weight_grad + extra / 2, weight_grad, sends, strict=True)
    return [Durations(float(f), float(i), float(w), send) for f, i, w, send in each]


def start_seconds(anatomy: Anatomy, layout: Layout) -> float:
    """Of a step before and beside its microbatches, what all ranks agree on included."""
    machine = anatomy.machine
    span = Span.of(layout.ranks, 1, machine.machine.ranks_per_node)
    agreed = AGREEMENTS * machine.sum_seconds(SMALL_BYTES, span.in_node, span.nodes) if layout.ranks > 1 else 0.0
    return machine.compute.step_seconds + agreed


def tied_seconds(anatomy: Anatomy, stages: Stages) -> list[float]:
    """Of each stage's messages to the others that have a tied table, with which its gradient is added up."""
    layout, seconds = stages.layout, [0.0] * stages.layout.pp
    if layout.pp == 1:
        return seconds
    rows, is_wide = anatomy.tied_weights(layout.tp, 0, layout.replicas, layout.ep), _is_wide(anatomy, layout)
    for first, parts in _parts_with(anatomy.tied, stages.starts).items():
        holders = {part % layout.pp for part in parts}
        for stage in holders:
            seconds[stage] += (len(holders) - 1) * anatomy.machine.send(float(rows[first][Held.WIDE]), is_wide=is_wide)
    return seconds


def _is_wide(anatomy: Anatomy, layout: Layout) -> bool:
    """Whether stages lie on different nodes."""
    return Span.of(layout.pp, layout.ranks // layout.pp, anatomy.machine.machine.ranks_per_node).nodes > 1


def message_seconds(anatomy: Anatomy, stages: Stages) -> list[float]:
    """Of one microbatch's activations from each stage to its neighbours, and of an encoder's output beside them."""
    layout = stages.layout
    if layout.pp == 1:
        return [0.0]
    facts, machine = anatomy.facts, anatomy.machine
    rows = layout.micro * facts.seq_len / layout.cp / (layout.tp if layout.sequence_parallel else 1)
    num_bytes = rows * facts.model.hidden_size * np.dtype(facts.dtype).itemsize
    arrays = [1 + any(stages.reads_memory(part) for part in stages.parts_of(stage)) for stage in range(layout.pp)]
    return [machine.send(count * num_bytes, is_wide=_is_wide(anatomy, layout)) for count in arrays]


def pipeline_seconds(schedule: str, chunks: int, count: int, durations: Sequence[Durations]) -> float:
    """Until the last stage is done: as `simulate` finds, or for long steps as the closed form says."""
    if len(durations) * chunks * count > MOST_SIMULATED:
        return pipeline_form(schedule, chunks, count, durations)
    return simulate(make_schedule(schedule, len(durations), count, chunks), durations).length


def pipeline_form(schedule: str, chunks: int, count: int, durations: Sequence[Durations]) -> float:
    """The same in closed form. With T_d = F + I + W of stage d, e of a message, v chunks, m microbatches:

        max over d of   sum over s < d of (through_s / v + 2 e)   +   max(m T_d, m loop_d / k_d)

    A stage has m T_d to do behind what must come through the stages before it and go back through them: T_s, or with
    `zb`, whose weight gradients fill the gap, max(I - W, 0, I - F) + F. And the k_d microbatches that it holds at most
    go round through all stages behind it before as many more can: loop_d of their times (without W with `zb`) and
    messages. Exact for equal stages and messages that take no time.
    """
    split, stages, send = schedule == "zb", len(durations), max(each.send for each in durations)
    total = np.array([each.total for each in durations])
    forward = np.array([each.forward for each in durations])
    input_grad = np.array([each.input_grad for each in durations])
    weight_grad = total - forward - input_grad
    idle = np.maximum(forward + input_grad - weight_grad, np.maximum(forward, input_grad))
    through = (idle if split else total) / chunks + 2 * send
    behind = np.arange(stages)[::-1]
    round_trip = np.cumsum((forward + input_grad if split else total)[::-1])[::-1] / chunks
    loop = round_trip + total.sum() * (chunks - 1) / chunks + 2 * (behind + (chunks - 1) * stages) * send
    held = np.array(most_in_flight("1f1b" if split else schedule, stages, count, chunks)) / chunks
    own = np.maximum(count * total, count / held * loop)
    return float((np.cumsum(through) - through + own).max())
