"""The film of one pass: every operation, with the arrays of all ranks beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpitp.errors import UsageError
from mpitp.step.picture import Picture
from mpitp.trace.traffic import wire_bytes

REPLICATED, SHARDED, PARTIAL = "replicated", "sharded", "partial"


@dataclass(frozen=True, slots=True)
class Shown:
    """One array on one rank. `role`: in, param, out or grad; `along`: what a sharded one is cut by."""

    name: str
    role: str
    placement: str
    along: str
    picture: Picture


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank holds: parameters, their gradients, and what forward has kept for backward."""

    params: int
    grads: int
    activations: int


@dataclass(slots=True)
class RankOp:
    """One operation as one rank sees it."""

    layer: str
    phase: str
    title: str
    equation: str
    note: str
    pair: str
    arrays: list[Shown]
    memory: Memory
    seconds: float
    collective: str = ""  # its kind, "" for a rank's own work
    given_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Array:
    """One array on all ranks."""

    name: str
    role: str
    placement: str
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
    def placement_text(self) -> str:
        """In words."""
        return {
            REPLICATED: "replicated: the same on every rank",
            SHARDED: f"sharded by {self.along}",
            PARTIAL: "partial: to be summed over the ranks",
        }[self.placement]


@dataclass(slots=True)
class Op:
    """One operation on all ranks. `conjugate`: the number of its counterpart in the other pass, None: it has none."""

    number: int
    layer: str
    phase: str
    title: str
    equation: str
    note: str
    pair: str
    collective: str
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
                plain |= {"shape_text": array.shape_text, "placement_text": array.placement_text}
        return film


def assemble(title: str, facts: list[str], logs: Sequence[Sequence[RankOp]]) -> Film:
    """Put the ranks' operations, which are the same ones in the same order, beside each other."""
    names = [[(op.layer, op.phase, op.collective) for op in log] for log in logs]
    assert all(other == names[0] for other in names), "the ranks did different things"
    film = Film(title, len(logs), facts)
    for number, together in enumerate(zip(*logs, strict=True), start=1):
        first = together[0]
        arrays = [
            Array(shown.name, shown.role, shown.placement, shown.along, tuple(op.arrays[i].picture for op in together))
            for i, shown in enumerate(first.arrays)
        ]
        given = [op.given_bytes for op in together]
        sent = [wire_bytes(first.collective, len(logs), size, size) if first.collective else 0.0 for size in given]
        film.ops.append(
            Op(
                number,
                first.layer,
                first.phase,
                first.title,
                first.equation,
                first.note,
                first.pair,
                first.collective,
                arrays,
                [op.memory for op in together],
                [op.seconds for op in together],
                given,
                sent,
            )  # fmt: skip
        )
    _link(film.ops)
    return film


def _link(ops: list[Op]) -> None:
    """A collective and the first operation of its layer in the other pass belong together."""
    first: dict[tuple[str, str], Op] = {}
    for op in ops:
        first.setdefault((op.layer, op.phase), op)
    for op in ops:
        other = first.get((op.layer, "backward" if op.phase == "forward" else "forward"))
        if op.collective and other is not None:
            op.conjugate = other.number
            other.conjugate = other.conjugate or op.number
