"""The film of one pass: every operation, with the arrays of all ranks beside each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mpitp.errors import UsageError
from mpitp.layers import array_type as types
from mpitp.step.picture import Picture

REPLICATED, SHARDED, PARTIAL = "replicated", "sharded", "partial"
UPDATE = "update"  # the phase after forward and backward
WEIGHTS = "weights"  # the subject of what gathers them
WEIGHT_GRADS = "weight gradients"  # the title of those that were put off
# A letter: what it says of the ranks' arrays, in a line, and for who asks.
LETTERS = {
    types.INVARIANT: (REPLICATED, "the same on every rank", "the same on every rank; so is its gradient"),
    types.REPLICATE: (REPLICATED, "the same, for own work", "the same, for each rank's own work; its gradient is P"),
    types.VARYING: (SHARDED, "cut by {}", "each rank has its own part; so it has of its gradient"),
    types.PARTIAL: (PARTIAL, "to be summed over the ranks", "right only after the sum; its gradient is R"),
}


Letters = tuple[tuple[str, str], ...]  # an axis and the letter along it


@dataclass(frozen=True, slots=True)
class Shown:
    """One array on one rank. `role`: in, param, mid (made on the way), out or grad; `letter`: its type; `along`: what a
    V one is cut by.

    `letters`: where there are others than tp, the letter along each axis, of which `letter` is the last one's.
    """

    name: str
    role: str
    letter: str
    along: str
    picture: Picture
    letters: Letters = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank holds: parameters, their gradients, what forward has kept for backward, and what the optimizer
    keeps from step to step.
    """

    params: int
    grads: int
    activations: int
    moments: int = 0


@dataclass(slots=True)
class Telling:
    """An operation in words. `collective`: its kind, "" for a rank's own work.

    `subject`: what the layer is, by its algebra; `code`: where it is computed, "module:Class.method".
    """

    layer: str
    phase: str
    title: str
    equation: str
    note: str
    pair: str
    collective: str
    subject: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Of a send or a receive: its ends by their numbers in the job. `name`: of group and tag; `number`: how many such
    came before.
    """

    source: int
    dest: int
    name: str
    number: int = 0


@dataclass(slots=True)
class RankOp:
    """One operation as one rank sees it. `axis`: of a collective or message; `microbatch`: to which it belongs."""

    telling: Telling
    arrays: list[Shown]
    memory: Memory
    seconds: float
    given_bytes: int
    axis: str = "tp"
    microbatch: int = 0
    message: Message | None = None


@dataclass(frozen=True, slots=True)
class Array:
    """One array on all ranks."""

    name: str
    role: str
    letter: str
    along: str
    pictures: tuple[Picture, ...]
    letters: Letters = ()

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
        """What the letters say of the ranks' arrays: partial where one is P, else sharded where one is V."""
        found = [LETTERS[letter][0] for _, letter in self.letters or (("", self.letter),)]
        return next((placement for placement in (PARTIAL, SHARDED) if placement in found), REPLICATED)

    @property
    def placement_text(self) -> str:
        """The letter in words; where others than tp have several ranks, the letter along each."""
        if self.letters:
            return ", ".join(f"{letter} along {axis}" for axis, letter in self.letters)
        return f"{self.letter} {types.WORDS[self.letter]}: {LETTERS[self.letter][1].format(self.along)}"


@dataclass(slots=True, kw_only=True)
class Op(Telling):
    """One operation on all ranks that do it. `conjugate`: the number of its counterpart in the other pass, if any.

    `ranks`: who does it (arrays, memory and times are in their order); `groups`: those who do a collective together;
    `column`: when it can be at the earliest, counted in operations; `other_end`: of a send the number of its receive,
    of a receive that of its send, with the rank there of each rank here (`peers`).
    """

    number: int
    arrays: list[Array]
    memory: list[Memory]
    seconds: list[float]
    given_bytes: list[int]
    sent_bytes: list[float]
    conjugate: int | None = None
    ranks: list[int]
    axis: str
    microbatch: int
    groups: list[list[int]]
    column: int = 0
    other_end: int | None = None
    peers: list[int] = field(default_factory=list)

    @property
    def made(self) -> Array:
        """The array that the operation is about: what it makes."""
        outs = [array for array in self.arrays if array.role == "out"]
        return (outs or self.arrays)[-1 if not outs else 0]


@dataclass(slots=True)
class Film:
    """All operations of one forward and backward pass, and what was run.

    `places`: the coordinates of every rank, "pp 0, tp 1", where the mesh has more than the axis tp; else ().
    `words`: the text of token ids; `sizes`: of the model, for the page's sliders (`cuts.py`).
    """

    title: str
    ranks: int
    facts: list[str]
    ops: list[Op] = field(default_factory=list)
    places: tuple[str, ...] = ()
    words: dict[int, str] = field(default_factory=dict)
    invariant: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)

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
