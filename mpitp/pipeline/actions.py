"""What a pipeline stage does, one action at a time, and the messages that follow from it.

A model is cut into `stages * chunks` consecutive parts. Stage s (a rank of the axis pp) holds `chunks` of them: its
chunk c is part `c * stages + s`, so that a microbatch goes round all stages once for each chunk.

**How a runner does it without deadlock.** Every stage walks through its list in order. Before an action it waits for
`receive_before`, after it it *starts* `send_after` (MPI_Isend) and walks on; the buffer is kept until the send is done,
at the latest until the end of the step. As no send is ever waited for in between, a stage stands still only for what
another has yet to compute: the job ends if and only if `simulate` ends. Receives may be started as early as one likes
(MPI_Irecv), for every message has a tag of its own: none can be taken for that of another microbatch, chunk or pass,
in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The four things that a stage computes for a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of the input and of the weights in one go
    INPUT_GRAD = "I"  # backward's first half: the stage before waits for it
    WEIGHT_GRAD = "W"  # its second half: nobody waits for it


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch through one chunk of the stage in whose list this stands."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Actions = Sequence[Sequence[Action]]  # for every stage what it does, in order


@dataclass(frozen=True, slots=True)
class Grid:
    """How many stages there are and how many chunks of the model each of them holds."""

    stages: int
    chunks: int = 1

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model, counted from the embedding, this chunk is."""
        return chunk * self.stages + stage

    def place(self, part: int) -> tuple[int, int] | None:
        """(stage, chunk) of a part; None outside the model."""
        if not 0 <= part < self.stages * self.chunks:
            return None
        return part % self.stages, part // self.stages


@dataclass(frozen=True, slots=True)
class Message:
    """An activation (of a forward pass) or a gradient (of a backward pass) between this stage and `peer`."""

    peer: int
    tag: int  # below 2 * microbatches * chunks; MPI allows 32767 at least


Task = tuple[int, Action]  # what is done, and on which stage


def grid_of(actions: Actions) -> Grid:
    """The stages and chunks that these lists are for."""
    return Grid(len(actions), 1 + max((action.chunk for own in actions for action in own), default=0))


def waits_for(action: Action, stage: int, grid: Grid, split: bool) -> list[Task]:
    """What must be done before `action` of `stage` can begin, besides what stands before it in the stage's own list.

    `split`: whether backward comes as INPUT_GRAD and WEIGHT_GRAD.
    """
    upstream = Kind.INPUT_GRAD if split else Kind.BACKWARD
    if action.kind is Kind.WEIGHT_GRAD:
        return [(stage, Action(Kind.INPUT_GRAD, action.microbatch, action.chunk))]
    part = grid.part(stage, action.chunk)
    if action.kind is Kind.FORWARD:
        return _at(grid.place(part - 1), Kind.FORWARD, action.microbatch)
    own = (stage, Action(Kind.FORWARD, action.microbatch, action.chunk))
    return [own, *_at(grid.place(part + 1), upstream, action.microbatch)]


def receive_before(action: Action, stage: int, grid: Grid) -> Message | None:
    """The message that `action` needs; None where its input is on this stage already (or is the batch, or the loss)."""
    step = {Kind.FORWARD: -1, Kind.WEIGHT_GRAD: None}.get(action.kind, +1)
    source = None if step is None else grid.place(grid.part(stage, action.chunk) + step)
    if source is None or source[0] == stage:
        return None
    return Message(source[0], _tag(action.kind, action.microbatch, action.chunk, grid))


def send_after(action: Action, stage: int, grid: Grid) -> Message | None:
    """The message that `action` gives rise to; None where nobody else waits for what it makes."""
    step = {Kind.FORWARD: +1, Kind.WEIGHT_GRAD: None}.get(action.kind, -1)
    target = None if step is None else grid.place(grid.part(stage, action.chunk) + step)
    if target is None or target[0] == stage:
        return None
    return Message(target[0], _tag(action.kind, action.microbatch, target[1], grid))


def _at(place: tuple[int, int] | None, kind: Kind, microbatch: int) -> list[Task]:
    return [] if place is None else [(place[0], Action(kind, microbatch, place[1]))]


def _tag(kind: Kind, microbatch: int, receiving_chunk: int, grid: Grid) -> int:
    """A number that no other message between the same two stages has."""
    return 2 * (microbatch * grid.chunks + receiving_chunk) + (kind is not Kind.FORWARD)


@dataclass(frozen=True, slots=True)
class Carried:
    """What the tag of a message says: an activation or a gradient of a microbatch, for a chunk of who receives it."""

    microbatch: int
    receiving_chunk: int
    is_gradient: bool


def carried_by(tag: int, chunks: int) -> Carried:
    """What a message with this tag carries, between stages of so many chunks."""
    number, is_gradient = divmod(tag, 2)
    return Carried(*divmod(number, chunks), bool(is_gradient))
