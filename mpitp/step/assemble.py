"""Puts the ranks' operations beside each other, and those of the stages of a pipeline into one order.

The ranks of a stage do the same operations in the same order; they are one operation each. A stage waits for another
only where it receives, so that each operation has a time at which it can be at the earliest, counted in operations
(Lamport 1978):

    column = 1 + the larger of: column of the stage's operation before, column of the send of what it receives

A *turn* is what a stage does for one microbatch in one pass. A reader walks from turn to turn, in the order in which
they begin, and through each to its end; so a receive always comes after its send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mpitp.step.film import Array, Film, Message, Op, RankOp
from mpitp.trace.traffic import wire_bytes

Coordinates = Sequence[Mapping[str, int]]
Log = list[tuple[Op, list[Message]]]  # what a stage does, with the messages of its ranks


def assemble(
    title: str, facts: list[str], logs: Sequence[Sequence[RankOp]], coordinates: Coordinates | None = None
) -> Film:
    """The film of all ranks' operations. `coordinates`: every rank's place along the axes that have several ranks, the
    slowest first; None: all lie along tp.
    """
    places = coordinates or [{"tp": rank} for rank in range(len(logs))]
    stages = [_stage(logs, ranks, places) for ranks in _stages(places)]
    _link_messages(stages)
    ops = [op for _, _, op in sorted(_walk(stages), key=lambda each: each[:2])]
    for number, op in enumerate(ops, start=1):
        op.number = number
    for stage in stages:
        _link([op for op, _ in stage])
    _name_ends(stages)
    told = [", ".join(f"{axis} {number}" for axis, number in place.items()) for place in places]
    return Film(title, len(logs), facts, ops, tuple(told) if any(set(place) - {"tp"} for place in places) else ())


def _stages(places: Coordinates) -> list[list[int]]:
    """The ranks of each stage."""
    count = 1 + max(place.get("pp", 0) for place in places)
    return [[rank for rank, place in enumerate(places) if place.get("pp", 0) == stage] for stage in range(count)]


def _stage(logs: Sequence[Sequence[RankOp]], ranks: list[int], places: Coordinates) -> Log:
    own = [logs[rank] for rank in ranks]
    names = [[(op.telling.layer, op.telling.phase, op.telling.collective) for op in log] for log in own]
    assert all(other == names[0] for other in names), "the ranks did different things"
    return [(_beside(ranks, ops, places), [o.message for o in ops if o.message]) for ops in zip(*own, strict=True)]


def _beside(ranks: list[int], ops: Sequence[RankOp], places: Coordinates) -> Op:
    telling, given = ops[0].telling, [op.given_bytes for op in ops]
    arrays = [
        Array(each.name, each.role, each.letter, each.along, tuple(op.arrays[i].picture for op in ops), each.letters)
        for i, each in enumerate(ops[0].arrays)
    ]
    groups = _groups(ranks, ops[0].axis, places) if telling.collective else []
    kind = telling.collective.partition(" ")[0]
    size = len(groups[0]) if groups else 1
    sent = [wire_bytes(kind, size, each, each) if kind else 0.0 for each in given]
    costs: dict[str, Any] = {"memory": [op.memory for op in ops], "seconds": [op.seconds for op in ops]}
    where: dict[str, Any] = {"ranks": ranks, "axis": ops[0].axis, "microbatch": ops[0].microbatch, "groups": groups}
    return Op(number=0, arrays=arrays, given_bytes=given, sent_bytes=sent, **costs, **where, **asdict(telling))


def _groups(ranks: list[int], axis: str, places: Coordinates) -> list[list[int]]:
    """Those of a stage's ranks that differ only along the axis (several as "dp+cp")."""
    along = axis.split("+")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        others = tuple(number for name, number in places[rank].items() if name not in along)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def _link_messages(stages: Sequence[Log]) -> None:
    """Columns of all operations, stage after stage as far as each can go."""
    sent: dict[Message, int] = {}
    columns, done = [0] * len(stages), [0] * len(stages)
    moved = True
    while moved:
        moved = False
        for number, stage in enumerate(stages):
            while done[number] < len(stage):
                op, messages = stage[done[number]]
                if op.collective == "recv" and any(message not in sent for message in messages):
                    break
                latest = max((sent[message] for message in messages), default=0) if op.collective == "recv" else 0
                op.column = columns[number] = 1 + max(columns[number], latest)
                sent |= {message: op.column for message in messages if op.collective == "send"}
                done[number], moved = done[number] + 1, True
    assert done == [len(stage) for stage in stages], "a receive without its send"


def _walk(stages: Sequence[Log]) -> Iterator[tuple[int, int, Op]]:
    """Every operation with the column in which its turn begins, and its stage."""
    for number, stage in enumerate(stages):
        turn, begin = None, 0
        for op, messages in stage:
            is_from_elsewhere = op.collective == "recv" and any(m.source not in op.ranks for m in messages)
            if (op.phase, op.microbatch) != turn or is_from_elsewhere:
                turn, begin = (op.phase, op.microbatch), op.column
            yield begin, number, op


def _name_ends(stages: Sequence[Log]) -> None:
    """Tell each send and each receive where its other end is."""
    ends = {
        (message, op.collective): op
        for stage in stages
        for op, messages in stage
        for message in messages
    }  # fmt: skip
    for stage in stages:
        for op, messages in stage:
            if messages:
                other = ends[messages[0], "recv" if op.collective == "send" else "send"]
                op.other_end = other.number
                op.peers = [m.dest if op.collective == "send" else m.source for m in messages]


def _link(ops: list[Op]) -> None:
    """A collective and the first collective of its layer in the other pass, or else the first operation of it there,
    belong together; a send and the last receive there, a receive and the last send.
    """
    first: dict[tuple[str, str, int], Op] = {}
    for op in sorted(ops, key=lambda op: not op.collective):
        first.setdefault((op.layer, op.phase, op.microbatch), op)
    messages = {(op.layer, op.phase, op.microbatch, op.collective): op for op in ops if op.collective in _OTHER}
    for op in ops:
        phase = "backward" if op.phase == "forward" else "forward"
        place = op.layer, phase, op.microbatch
        other = messages.get((*place, _OTHER[op.collective])) if op.collective in _OTHER else first.get(place)
        if op.collective and other is not None:
            op.conjugate = other.number
            other.conjugate = other.conjugate or op.number


_OTHER = {"send": "recv", "recv": "send"}
