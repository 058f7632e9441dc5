"""Puts the ranks' operations beside each other, and those of the stages of a pipeline into one order.

The ranks of a stage do the same operations in the same order; they are one operation each. A stage waits for another
only where it receives, so that each operation has a time at which it can be at the earliest, counted in operations
(Lamport 1978):

    column = 1 + the larger of: column of the stage's operation before, column of the send of what it receives

A collective over all stages (the gradient norm's) is one operation, as soon as the last of them has come to it.

A *turn* is what a stage does for one microbatch in one pass. A reader walks from turn to turn, in the order in which
they begin, and through each to its end; so a receive always comes after its send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpitp.step.film import WEIGHTS, Array, Film, Message, Op, RankOp
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
    _Clock(stages).run()
    _join_stages(stages, places)
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


class _Clock:
    """Gives every operation its column: stage after stage goes as far as it can, until all are done."""

    def __init__(self, stages: Sequence[Log]) -> None:
        self.stages = stages
        self.sent: dict[Message, int] = {}
        self.columns, self.done = [0] * len(stages), [0] * len(stages)

    def run(self) -> None:
        """All stages to their ends."""
        while any([self._go_on(number) for number in range(len(self.stages))] + [self._meet()]):
            pass
        assert self.done == [len(stage) for stage in self.stages], "a receive without its send"

    def _go_on(self, number: int) -> bool:
        """One stage as far as it can; whether it was any."""
        begin, stage = self.done[number], self.stages[number]
        while self.done[number] < len(stage):
            op, messages = stage[self.done[number]]
            receives = messages if op.collective == "recv" else []
            if _is_joint(op) or any(message not in self.sent for message in receives):
                break
            latest = max((self.sent[message] for message in receives), default=0)
            self._place(number, 1 + max(self.columns[number], latest))
            self.sent |= {message: op.column for message in messages if op.collective == "send"}
        return self.done[number] > begin

    def _meet(self) -> bool:
        """A collective of all stages, where all have come to one."""
        nexts = [stage[done][0] for stage, done in zip(self.stages, self.done, strict=True) if done < len(stage)]
        if len(nexts) < len(self.stages) or not all(map(_is_joint, nexts)):
            return False
        column = 1 + max(self.columns)
        for number in range(len(self.stages)):
            self._place(number, column)
        return True

    def _place(self, number: int, column: int) -> None:
        self.stages[number][self.done[number]][0].column = self.columns[number] = column
        self.done[number] += 1


def _is_joint(op: Op) -> bool:
    """A collective over ranks of several stages."""
    return "pp" in op.axis.split("+") and not _is_message(op)


def _is_message(op: Op) -> bool:
    return op.collective in _OTHER


def _join_stages(stages: Sequence[Log], places: Coordinates) -> None:
    """Make one operation of each collective of all stages; it stands in the log of each."""
    for entries in zip(*([at for at, (op, _) in enumerate(stage) if _is_joint(op)] for stage in stages), strict=True):
        ops = [stage[at][0] for stage, at in zip(stages, entries, strict=True)]
        for stage, at in zip(stages, entries, strict=True):
            stage[at] = (_joined(ops, places), []) if stage is stages[0] else (stages[0][entries[0]][0], [])


def _joined(ops: Sequence[Op], places: Coordinates) -> Op:
    """What the stages see of one collective, beside each other in the order of their ranks."""
    first, ranks = ops[0], [rank for op in ops for rank in op.ranks]
    arrays = [
        replace(array, pictures=tuple(picture for op in ops for picture in op.arrays[place].pictures))
        for place, array in enumerate(first.arrays)
    ]
    lists: dict[str, Any] = {
        name: [each for op in ops for each in getattr(op, name)]
        for name in ("memory", "seconds", "given_bytes", "ranks")
    }
    groups = _groups(ranks, first.axis, places)
    kind = first.collective.partition(" ")[0]
    sent = [wire_bytes(kind, len(groups[0]), each, each) for each in lists["given_bytes"]]
    return replace(first, arrays=arrays, groups=groups, sent_bytes=sent, **lists)


def _walk(stages: Sequence[Log]) -> Iterator[tuple[int, int, Op]]:
    """Every operation with the column in which its turn begins, and its stage; what all stages do, once."""
    for number, stage in enumerate(stages):
        turn, begin = None, 0
        for op, messages in stage:
            is_from_elsewhere = op.collective == "recv" and any(m.source not in op.ranks for m in messages)
            if (op.phase, op.microbatch) != turn or is_from_elsewhere or _is_joint(op):
                turn, begin = (op.phase, op.microbatch), op.column
            if number == 0 or not _is_joint(op):
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
    for op in sorted((op for op in ops if not _is_again(op)), key=lambda op: not op.collective):
        first.setdefault((op.layer, op.phase, op.microbatch), op)
    messages = {(op.layer, op.phase, op.microbatch, op.collective): op for op in ops if op.collective in _OTHER}
    for op in ops:
        phase = "backward" if op.phase == "forward" else "forward"
        place = op.layer, phase, op.microbatch
        other = messages.get((*place, _OTHER[op.collective])) if op.collective in _OTHER else first.get(place)
        if op.collective and other is not None and not _is_again(op):
            op.conjugate = other.number
            other.conjugate = other.conjugate or op.number


def _is_again(op: Op) -> bool:
    """Weights that backward gathers once more (ZeRO-3): the conjugate of forward's gather is the scatter of dW."""
    return op.subject == WEIGHTS and op.phase == "backward"


_OTHER = {"send": "recv", "recv": "send"}
