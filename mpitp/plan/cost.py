r"""The cost of a layout: seconds of a step by part, and bytes a rank. A pure function of model, machine and layout.

    seconds = start of the step
            + pipeline of m microbatches           each stage's F, I and W from its layers' rows (`anatomy.py`)
            + sums over replicas that aren't hidden
            + gradient norm, optimizer, and with ZeRO the new weights

m is that of the replica with most of the step's microbatches. With one stage the pipeline is m (F + I + W). With
several it is what `simulate` finds for the schedule's own lists, each stage with its own times; for long steps, and
where thousands of layouts are looked at, what `pipeline_form` says. The parts told are those of the dearest stage, and
the bubble is the rest of the pipeline's length.

Sums over replicas start behind the last microbatch's backward, bucket by bucket (`optim/reduction.py`), so that as much
of them is hidden as that backward lasts and the machine moves on behind products; a pipeline tells when all is done,
and hides nothing. Experts that are dealt over ep have their gradients summed over dp and cp alone, all other weights
over ep too; the rows' ways to experts and home are in `trips.py`. Memory is that of `plan memory`, of the rank that
holds most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.models.stages import Costs
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

    def per_stage(self, rows: np.ndarray) -> np.ndarray:
        """Sums over the chunks of each stage; part c * pp + s is stage s's chunk c."""
        return rows.reshape(self.layout.chunks, self.layout.pp, -1).sum(axis=0)


def cost_of(anatomy: Anatomy, step: Step, layout: Layout) -> StepCost:
    """Of a layout. Its `stages`, where they are empty, are dealt by time."""
    stages = stages_of(anatomy, layout)
    layout = stages.layout
    count = step.microbatches(layout)
    rows = stages.per_stage(stages.passes)
    total, _, _ = times_of(rows)
    over = [over_replicas(anatomy, step, stages, stage, (layout.zero, count)) for stage in range(layout.pp)]
    extra = np.array([each.of_microbatch for each in over])
    durations = stage_durations(anatomy, layout, rows, extra)
    length = pipeline_seconds(layout.schedule, layout.chunks, count, durations)
    dearest = int(np.argmax(total + extra))
    last = max(range(layout.pp), key=lambda stage: over[stage].of_step)
    parts = _parts(rows[dearest], count) | {
        "sums over replicas": over[last].waited + count * extra[dearest],
        "bubble": length - count * float(total[dearest] + extra[dearest]),
        "optimizer": over[last].optimizer,
        "tied tables": tied_seconds(anatomy, layout),
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
    weights = _largest([anatomy.weights(layout.tp, kind, layout.replicas, layout.ep) for kind in kinds])
    if not layout.stages and layout.pp > 1:
        layout = _dealt(anatomy, layout, passes)
    starts = _starts(anatomy, layout)
    return Stages(layout, np.add.reduceat(passes, starts[:-1]), _weights_of(anatomy, layout, weights, starts), starts)


def _largest(tables: Sequence[np.ndarray]) -> np.ndarray:
    return tables[0] if len(tables) == 1 else np.maximum.reduce(list(tables))


def _dealt(anatomy: Anatomy, layout: Layout, passes: np.ndarray) -> Layout:
    from dataclasses import replace

    seconds = times_of(passes)[0]
    blocks = anatomy.blocks
    costs = Costs(
        float(seconds[: blocks.start].sum()),
        tuple(map(float, seconds[blocks.start : blocks.stop])),
        float(seconds[blocks.stop :].sum()),
    )
    return replace(layout, stages=balanced(costs, layout.pp * layout.chunks))


def _starts(anatomy: Anatomy, layout: Layout) -> tuple[int, ...]:
    """The first layer of each part, and the end."""
    counts = layout.stages or (len(anatomy.blocks),)
    stops = anatomy.blocks.start + np.cumsum(counts)
    return (0, *(int(stop) for stop in stops[:-1]), len(anatomy.names))


def _weights_of(anatomy: Anatomy, layout: Layout, weights: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """A tied table lies on one stage once."""
    rows = np.add.reduceat(weights, starts[:-1])
    rows[:, Held.LARGEST] = np.maximum.reduceat(weights[:, Held.LARGEST], starts[:-1])
    if layout.pp == 1 and anatomy.facts.decoder.tied:
        rows[0, : Held.LARGEST] -= weights[0, : Held.LARGEST]
    return rows


def times_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a microbatch: all, its forward, its weight gradients."""
    forward = rows[:, (Of.FORWARD, Of.TP_FORWARD, Of.CP_FORWARD, Of.EP_FORWARD)].sum(axis=1)
    columns = (Of.FORWARD, Of.INPUT_GRAD, Of.WEIGHT_GRAD, Of.AGAIN, Of.TP, Of.CP, Of.EP)
    return rows[:, columns].sum(axis=1), forward, rows[:, Of.WEIGHT_GRAD]


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
    """Seconds of a stage: what replicas wait for in each microbatch and behind all, hidden; norm and update."""

    of_microbatch: float
    waited: float
    hidden: float
    optimizer: float

    @property
    def of_step(self) -> float:
        """Behind all microbatches."""
        return self.waited + self.optimizer


def over_replicas(anatomy: Anatomy, step: Step, stages: Stages, stage: int, how: tuple[int, int]) -> OverReplicas:
    """Of a stage; `how`: with which level of ZeRO, and its microbatches."""
    layout, machine, (zero, count) = stages.layout, anatomy.machine, how
    row, passes = stages.per_stage(stages.weights)[stage], stages.per_stage(stages.passes)[stage]
    spans = _spans(layout, machine.machine.ranks_per_node)
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
    if zero == 3:
        return OverReplicas(2 * sum(each(stored, 0.5)) + sum(each(wide, 0.5)), 0.0, 0.0, float(optimizer))
    gather = sum(each(stored, 0.5)) if zero else 0.0
    scatters = each(wide, 0.5 if zero else 1.0)
    scatter, movable = sum(scatters), sum(x * machine.overlap(s.nodes) for x, s in zip(scatters, spans, strict=True))
    backward = float(passes[[Of.INPUT_GRAD, Of.WEIGHT_GRAD, Of.AGAIN]].sum()) if layout.pp == 1 else 0.0
    hidden = min(movable, backward)
    if zero == 2 and layout.pp == 1:
        return OverReplicas(scatter - hidden, gather, count * hidden, float(optimizer))
    return OverReplicas(0.0, scatter - hidden + gather, hidden, float(optimizer))


def _spans(layout: Layout, ranks_per_node: int) -> list[Span]:
    """The ranks over which gradients are summed; behind them, with ep, those of experts: along dp and cp alone."""
    every = Span.of(layout.replicas, layout.tp, ranks_per_node)
    if layout.ep == 1:
        return [every]
    near = Span.of(layout.cp, layout.tp, ranks_per_node)
    far = Span.of(layout.dp, layout.ep * layout.cp * layout.tp, ranks_per_node)
    experts = Span(near.in_node * far.in_node, near.nodes * far.nodes)
    return [every, experts] if experts.size > 1 else [every]


def stage_durations(anatomy: Anatomy, layout: Layout, rows: np.ndarray, extra: np.ndarray) -> list[Durations]:
    """Of a microbatch on each stage; `extra`: seconds of each that replicas wait for."""
    total, forward, weight_grad = times_of(rows)
    send = message_seconds(anatomy, layout) if layout.pp > 1 else 0.0
    each = zip(forward + extra / 2, total - forward - weight_grad + extra / 2, weight_grad, strict=True)
    return [Durations(float(f), float(i), float(w), send) for f, i, w in each]


def start_seconds(anatomy: Anatomy, layout: Layout) -> float:
    """Of a step before and beside its microbatches, what all ranks agree on included."""
    machine = anatomy.machine
    span = Span.of(layout.ranks, 1, machine.machine.ranks_per_node)
    agreed = AGREEMENTS * machine.sum_seconds(SMALL_BYTES, span.in_node, span.nodes) if layout.ranks > 1 else 0.0
    return machine.compute.step_seconds + agreed


def tied_seconds(anatomy: Anatomy, layout: Layout) -> float:
    """Of the message each way with which the first and the last stage add up the gradient of a table that both have."""
    if layout.pp == 1 or not anatomy.facts.decoder.tied:
        return 0.0
    table = float(anatomy.weights(layout.tp, 0, layout.replicas, layout.ep)[0, Held.WIDE])
    return anatomy.machine.send(table, is_wide=_is_wide(anatomy, layout))


def _is_wide(anatomy: Anatomy, layout: Layout) -> bool:
    """Whether stages lie on different nodes."""
    return Span.of(layout.pp, layout.ranks // layout.pp, anatomy.machine.machine.ranks_per_node).nodes > 1


def message_seconds(anatomy: Anatomy, layout: Layout) -> float:
    """Of one microbatch's activations from stage to stage."""
    facts, machine = anatomy.facts, anatomy.machine
    rows = layout.micro * facts.seq_len / layout.cp / (layout.tp if layout.sequence_parallel else 1)
    num_bytes = rows * facts.decoder.hidden_size * np.dtype(facts.dtype).itemsize
    return machine.send(num_bytes, is_wide=_is_wide(anatomy, layout))


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
    split, stages, send = schedule == "zb", len(durations), durations[0].send
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
