"""Memory of the rank of a layout that holds most: the formulas of `memory.py` on sums of layers' rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitp.layers.attention import AttentionHeads
from mpitp.layers.layer import walk
from mpitp.pipeline.actions import Action, Kind
from mpitp.pipeline.schedules import make_schedule, most_in_flight
from mpitp.plan.anatomy import Anatomy, Cut, Held, Of
from mpitp.plan.kept import memory_bytes

if TYPE_CHECKING:
    from mpitp.plan.cost import Stages


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the height of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"total": self.total}


def stage_memory(anatomy: Anatomy, bucket_bytes: int, stages: Stages, count: int) -> Memory:
    """Of the rank that holds most."""
    from mpitp.plan.cost import stages_of

    kinds = anatomy.kinds_of_rank(stages.layout.tp)
    every = [stages if len(kinds) == 1 else stages_of(anatomy, stages.layout, kind) for kind in kinds]
    found = [
        _of_stage(anatomy, bucket_bytes, own, stage, kind, count)
        for own, kind in zip(every, kinds, strict=True)
        for stage in range(own.layout.pp)
    ]
    return max(found, key=lambda memory: memory.total)


def _of_stage(anatomy: Anatomy, bucket_bytes: int, stages: Stages, stage: int, kind: int, count: int) -> Memory:
    layout = stages.layout
    row = stages.per_stage(stages.weights)[stage : stage + 1]
    parts = stages.parts_of(stage)
    passes = anatomy.passes(Cut.of(layout), kind, layout.recompute)
    again = max(float(passes[stages.starts[part] : stages.starts[part + 1], Of.KEPT_AGAIN].max()) for part in parts)
    weights, grads, states = map(float, states_of(row, layout.zero, is_half=anatomy.is_half)[:, 0])
    return Memory(
        weights,
        grads,
        states,
        _activations(anatomy, stages, stage, kind, count),
        again,
        _buffers(anatomy, bucket_bytes, stages, parts, kind) if layout.replicas > 1 else 0.0,
    )


def states_of(rows: np.ndarray, zero: int, *, is_half: bool) -> np.ndarray:
    """[3, stages]: bytes of weights, gradients and optimizer of some stages."""
    stored = rows[:, Held.OWN_STORED if zero == 3 else Held.STORED]
    grads = rows[:, Held.OWN_WIDE if zero >= 2 else Held.WIDE]
    return np.array([stored, grads, (2 + is_half) * rows[:, Held.OWN_WIDE if zero else Held.WIDE]])


def _activations(anatomy: Anatomy, stages: Stages, stage: int, kind: int, count: int) -> float:
    layout = stages.layout
    parts = list(stages.parts_of(stage))
    beside = [_tables(anatomy, stages, part, kind) + _memory(anatomy, stages, part, kind) for part in parts]
    full = stages.passes[parts, Of.KEPT] + np.array(beside)
    if layout.pp == 1:
        return float(full[0])
    left = stages.passes[parts, Of.PUT_OFF]
    held = heights(layout.schedule, layout.pp, count, layout.chunks)[stage]
    return float((held @ np.concatenate([full, left])).max())


def _tables(anatomy: Anatomy, stages: Stages, part: int, kind: int) -> float:
    """One pair of rotary tables for all layers of a part that turn alike."""
    layout = stages.layout
    tables = anatomy.tables(Cut.of(layout), kind)
    if not tables:
        return 0.0
    model, _ = anatomy.layers(layout.tp, kind, layout.cp, layout.sequence_parallel, layout.ep)
    own = {anatomy.like[name] for name in anatomy.names[stages.starts[part] : stages.starts[part + 1]]}
    found = {x.rotary for name in own for _, x in walk({"": model.layers[name]}) if isinstance(x, AttentionHeads)}
    return sum(tables[rotary] for rotary in found if rotary)


def _memory(anatomy: Anatomy, stages: Stages, part: int, kind: int) -> float:
    """An encoder's output that a part is handed."""
    return memory_bytes(anatomy.sizes(Cut.of(stages.layout), kind)) if stages.reads_memory(part) else 0.0


def _buffers(anatomy: Anatomy, bucket_bytes: int, stages: Stages, parts: range, kind: int) -> float:
    layout = stages.layout
    row = stages.weights[parts].sum(axis=0)
    if layout.zero == 3:
        table = anatomy.weights(layout.tp, kind, layout.replicas, layout.ep)
        layers = np.concatenate([table[stages.starts[part] : stages.starts[part + 1]] for part in parts])
        each = np.append(layers[:, Held.STORED] + layers[:, Held.WIDE], 0.0)
        return float((each[:-1] + each[1:]).max())
    wide, largest = float(row[Held.WIDE]), float(stages.weights[parts, Held.LARGEST].max())
    return [max(largest, min(bucket_bytes, wide)), float(row[Held.OWN_WIDE]), wide][layout.zero]


@lru_cache(maxsize=1 << 10)
def heights(schedule: str, stages: int, microbatches: int, chunks: int) -> list[np.ndarray]:
    """For each stage, what is held at one time or another: rows of the passes of each chunk that are whole, then of
    those of which only weight gradients are left to do.
    """
    if schedule in ("gpipe", "1f1b"):
        return [np.array([[held, 0.0]]) for held in most_in_flight(schedule, stages, microbatches)]
    few = min(microbatches, (2 + chunks) * stages)  # from then on it goes round
    return [_heights_of(own, chunks) for own in make_schedule(schedule, stages, few, chunks)]


def _heights_of(actions: Iterable[Action], chunks: int) -> np.ndarray:
    held, seen = [0] * (2 * chunks), set()
    for action in actions:
        whole, rest = action.chunk, chunks + action.chunk
        if action.kind is Kind.WEIGHT_GRAD:
            held[rest] -= 1
        else:
            held[whole] += 1 if action.kind is Kind.FORWARD else -1
            held[rest] += action.kind is Kind.INPUT_GRAD
            seen.add(tuple(held))
    return np.array(list(seen), float)
