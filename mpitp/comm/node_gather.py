r"""All-gather through the shared memory of a node: each rank lays its piece there, everybody copies all pieces.

    rank r     piece and note (its length, what one unit holds) into slot n mod 3; tell ready = n
               wait until every rank is ready, read all notes
               all pieces fit: copy them; tell done = n
               one is too large for the slots: nobody copies; larger slots, or the library, for this one

Lengths may differ from rank to rank, so no rank can know alone whether all pieces fit. It is decided from the notes,
which are the same for everybody. The slots are apart from those of the sums: an operand of the next sum may lie
half made in one of those while values are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.group import Pending
from mpitp.comm.shared_memory import SharedMemory

READY, DONE = 0, 2  # the counters
NOTE_NUMBERS = 3  # length along the dim, elements of one unit of it, bytes of an element
NOTE_BYTES = 64  # the piece starts here in its slot


class NodeGather:
    """The gathers of one rank. `map_memory(piece bytes)` makes the memory, a collective that gives None on all ranks
    where it can't be had; `library` gathers what the memory isn't for.
    """

    def __init__(
        self,
        map_memory: Callable[[int], SharedMemory | None],
        library: Callable[[Array, int], Array],
        largest_bytes: int,
    ) -> None:
        self._map, self._library, self._largest_bytes = map_memory, library, largest_bytes
        self._memory: SharedMemory | None = None
        self._failed = False
        self._count = 0
        self._pending: dict[int, Pending] = {}

    def start(self, x: Array, dim: int) -> Pending:
        """Lay x where the others see it; `wait` gathers. Raises RuntimeError on every rank when pieces don't fit."""
        dim = dim % x.ndim
        memory = self._memory or self._enlarge(0)
        if memory is None:
            return Pending.done(self._library(x, dim))
        number = self._count + 1
        if number > memory.slots:
            self._finish_before(number - memory.slots + 1)
            if self._memory is not memory:  # one of them was too large for it
                return self.start(x, dim)
            memory.wait(DONE, number - memory.slots)
        self._count = number
        self._lay(memory, number, x, dim)
        pending = Pending(lambda: self._finish(memory, number, x, dim))
        self._pending[number] = pending
        return pending

    def _lay(self, memory: SharedMemory, number: int, x: Array, dim: int) -> None:
        rest = prod(x.shape[:dim] + x.shape[dim + 1 :])
        self._note(memory, number, memory.rank)[:] = x.shape[dim], rest, x.dtype.itemsize
        if x.nbytes <= memory.slot_bytes - NOTE_BYTES:
            self._piece(memory, number, memory.rank, x.shape, x.dtype)[...] = x
        memory.tell(READY, number)

    def _finish(self, memory: SharedMemory, number: int, x: Array, dim: int) -> Array:
        """Gathers that were started earlier end first."""
        self._finish_before(number)
        memory.wait(READY, number)
        notes = np.array([self._note(memory, number, rank) for rank in range(memory.ranks)])
        largest = int(notes.prod(axis=1).max())
        fits = (notes[:, 1:] == notes[0, 1:]).all()
        has_room = fits and largest <= memory.slot_bytes - NOTE_BYTES
        joined = self._join(memory, number, x, dim, notes[:, 0].tolist()) if has_room else None
        del self._pending[number]
        memory.tell(DONE, number)
        if not fits:
            like = f"{tuple(x.shape)} {x.dtype}"
            raise RuntimeError(f"all_gather along dim {dim}: the ranks' arrays don't fit; this rank has {like}")
        return self._gather_large(x, dim, largest) if joined is None else joined

    def _join(self, memory: SharedMemory, number: int, x: Array, dim: int, lengths: list[int]) -> Array:
        shapes = [x.shape[:dim] + (length,) + x.shape[dim + 1 :] for length in lengths]
        out = np.empty(x.shape[:dim] + (sum(lengths),) + x.shape[dim + 1 :], x.dtype)
        start = 0
        for rank, (length, shape) in enumerate(zip(lengths, shapes, strict=True)):
            part = (slice(None),) * dim + (slice(start, start + length),)
            out[part] = self._piece(memory, number, rank, shape, x.dtype)
            start += length
        return out

    def _gather_large(self, x: Array, dim: int, largest: int) -> Array:
        """Some rank's piece is larger than the slots, as all ranks know."""
        if largest > self._largest_bytes:
            return self._library(x, dim)
        self._finish_before(self._count + 1)  # what they need is made once
        if self._memory is None or largest > self._memory.slot_bytes - NOTE_BYTES:
            self._enlarge(largest)
        return self.start(x, dim).wait()

    def _enlarge(self, nbytes: int) -> SharedMemory | None:
        """Slots for pieces of `nbytes`; a collective. Gathers that are under way are ended first, in the old memory."""
        if self._failed:
            return None
        self._finish_before(self._count + 1)
        self._memory = self._map(nbytes + NOTE_BYTES)
        self._failed = self._memory is None
        self._count = 0
        return self._memory

    def _finish_before(self, number: int) -> None:
        """One that is too large may end others on its way."""
        while self._pending and (first := min(self._pending)) < number:
            self._pending[first].wait()

    def _note(self, memory: SharedMemory, number: int, rank: int) -> np.ndarray:
        return memory.operand(rank, number % memory.slots, NOTE_NUMBERS, np.int64)

    def _piece(
        self, memory: SharedMemory, number: int, rank: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        size = NOTE_BYTES + prod(shape) * dtype.itemsize
        return memory.operand(rank, number % memory.slots, size, np.uint8)[NOTE_BYTES:].view(dtype).reshape(shape)
