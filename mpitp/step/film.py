"""The film of one pass: every operation, with the arrays of all ranks beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpitp.errors import UsageError
from mpitp.layers import array_type as types
from mpitp.step.picture import Picture
from mpitp.trace.traffic import wire_bytes

REPLICATED, SHARDED, PARTIAL = "replicated", "sharded", "partial"
# A letter: what it says of the ranks' arrays, in a line, and for who asks.
LETTERS = {
    types.INVARIANT: (REPLICATED, "the same on every rank", "the same on every rank; so is its gradient"),
    types.REPLICATE: (REPLICATED, "the same, for own work", "the same, for each rank's own work; its gradient is P"),
    types.VARYING: (SHARDED, "cut by {}", "each rank has its own part; so it has of its gradient"),
    types.PARTIAL: (PARTIAL, "to be summed over the ranks", "right only after the sum; its gradient is R"),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """One array on one rank. `role`: in, param, out or grad; `letter`: its type; `along`: what a V one is cut by."""

    name: str
    role: str
    letter: str
    along: str
    picture: Picture


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank holds: parameters, their gradients, and what forward has kept for backward."""

    params: int
    grads: int
    activations: int


@dataclass(slots=True)
class Telling:
    """An operation in words. `collective`: its kind, "" for a rank's own work."""

    layer: str
    phase: str
    title: str
    equation: str
    note: str
    pair: str
    collective: str


@dataclass(slots=True)
class RankOp:
    """One operation as one rank sees it."""

    telling: Telling
    arrays: list[Shown]
    memory: Memory
    seconds: float
    given_bytes: int


@dataclass(frozen=True, slots=True)
class Array:
    """One array on all ranks."""

    name: str
    role: str
    letter: str
    along: str
    pictures: tuple[Picture, ...]

    @property
    def shape_text(self) -> str:
        """The shape; a dim that differs between ranks as 4|2|2."""
        shapes = [picture.shape for picture in self.pictures]
        dims = [sorted(set(sizes)) for sizes in zip(*shapes, strict=True)]
        texts = [
            str(sizes[0]) if len(sizes) == 1 else "|".join(str(shape[dim]) for shape in shapes)
            for dim, sizes in enumerate(dims)
        ]
        return f"[{', '.join(texts)}]"

    @property
    def placement(self) -> str:
        """What the letter says of the ranks' arrays."""
        return LETTERS[self.letter][0]

    @property
    def placement_text(self) -> str:
        """The letter in words."""
        return f"{self.letter} {types.WORDS[self.letter]}: {LETTERS[self.letter][1].format(self.along)}"


@dataclass(slots=True, kw_only=True)
class Op(Telling):
    """One operation on all ranks. `conjugate`: the number of its counterpart in the other pass, None: it has none."""

    number: int
    arrays: list[Array]
    memory: list[Memory]
    seconds: list[float]
    given_bytes: list[int]
    sent_bytes: list[float]
    conjugate: int | None = None

    @property
    def made(self) -> Array:
        """The array that the operation is about: what it makes."""
        outs = [array for array in self.arrays if array.role == "out"]
        return (outs or self.arrays)[-1 if not outs else 0]


@dataclass(slots=True)
class Film:
    """All operations of one forward and backward pass, and what was run."""

    title: str
    ranks: int
    facts: list[str]
    ops: list[Op] = field(default_factory=list)

    def op(self, number: int) -> Op:
        """Operation `number`, from 1. Raises UsageError for one that there isn't."""
        if not 1 <= number <= len(self.ops):
            raise UsageError(f"there is no operation {number}: they are numbered 1 to {len(self.ops)}")
        return self.ops[number - 1]

    def as_dict(self) -> dict[str, Any]:
        """For the page."""
        film = asdict(self)
        for op, shown in zip(self.ops, film["ops"], strict=True):
            for array, plain in zip(op.arrays, shown["arrays"], strict=True):
                plain |= {name: getattr(array, name) for name in ("placement", "shape_text", "placement_text")}
        return film | {"legend": legend()}


def legend() -> list[str]:
    """What each letter says."""
    return [f"{letter} {types.WORDS[letter]}: {text}" for letter, (_, _, text) in LETTERS.items()]


def assemble(title: str, facts: list[str], logs: Sequence[Sequence[RankOp]]) -> Film:
    """Put the ranks' operations, which are the same ones in the same order, beside each other."""
    names = [[(op.telling.layer, op.telling.phase, op.telling.collective) for op in log] for log in logs]
    assert all(other == names[0] for other in names), "the ranks did different things"
    ops = [_beside(number, ranks) for number, ranks in enumerate(zip(*logs, strict=True), start=1)]
    _link(ops)
    return Film(title, len(logs), facts, ops)


def _beside(number: int, ranks: Sequence[RankOp]) -> Op:
    telling, given = ranks[0].telling, [op.given_bytes for op in ranks]
    arrays = [
        Array(shown.name, shown.role, shown.letter, shown.along, tuple(op.arrays[i].picture for op in ranks))
        for i, shown in enumerate(ranks[0].arrays)
    ]
    kind = telling.collective.partition(" ")[0]
    sent = [wire_bytes(kind, len(ranks), size, size) if kind else 0.0 for size in given]
    costs: dict[str, Any] = {"memory": [op.memory for op in ranks], "seconds": [op.seconds for op in ranks]}
    return Op(number=number, arrays=arrays, given_bytes=given, sent_bytes=sent, **costs, **asdict(telling))


def _link(ops: list[Op]) -> None:
    """A collective and the first collective of its layer in the other pass, or else the first operation of it there,
    belong together.
    """
    first: dict[tuple[str, str], Op] = {}
    for op in sorted(ops, key=lambda op: not op.collective):
        first.setdefault((op.layer, op.phase), op)
    for op in ops:
        other = first.get((op.layer, "backward" if op.phase == "forward" else "forward"))
        if op.collective and other is not None:
            op.conjugate = other.number
            other.conjugate = other.conjugate or op.number
