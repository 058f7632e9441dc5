"""Memory that all ranks of one node see: slots for operands, and counters by which the ranks tell one another how far
they are.

It never has a name where the ranks may open one another's descriptors (Linux, one user, no walls between them), so a
killed job leaves nothing. Else it is a file in /dev/shm that loses its name as soon as every rank has mapped it. Its
pages are reserved when it is made: too little memory is an answer then, not a bus error later.

A rank that sees a counter must see what was written before it. Python has no fence to ask for that; x86 processors show
one core's stores to another in the order in which they were made, and read in order too (Intel's manual, volume 3,
"Memory ordering"). Others (Arm's in Grace and Fugaku, POWER) may not, so there the MPI library is used instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import time
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.comm.progress import Need

DIRECTORY = "/dev/shm"
LINE = 64  # bytes; each counter has a cache line of its own
COUNTERS = 3
SPINS = 2000  # looks at a counter before the core is offered to others
YIELDS = 200  # offers before the rank sleeps between looks
NAP_SECONDS = 50e-6
KEPT_VIEWS = 256
ORDERED_MACHINES = ("x86_64", "amd64", "i386", "i686")  # as `platform.machine()` calls them, in small letters


def orders_stores() -> bool:
    """Whether this machine's cores see one another's stores in the order in which they were made."""
    return platform.machine().lower() in ORDERED_MACHINES


class SharedMemory:
    """`slots` slots of `slot_bytes` for each of `ranks` ranks, as many for results, and three counters a rank."""

    def __init__(self, mapping: mmap.mmap, rank: int, ranks: int, slots: int, slot_bytes: int, *, spin: bool) -> None:
        self.rank, self.ranks, self.slots, self.slot_bytes = rank, ranks, slots, slot_bytes
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._counters = memoryview(mapping).cast("q")  # 64 bits, aligned: written and read in one piece
        self._spins = SPINS if spin else 1
        self._views: dict[tuple[int, int, Any], np.ndarray] = {}

    def operand(self, rank: int, slot: int, size: int, dtype: Any) -> np.ndarray:
        """The first `size` elements of rank's slot."""
        return self._at(self._header() + (slot * (self.ranks + 1) + rank) * self.slot_bytes, size, dtype)

    def result(self, slot: int, size: int, dtype: Any) -> np.ndarray:
        """The first `size` elements of the slot for the result."""
        return self.operand(self.ranks, slot, size, dtype)

    def tell(self, counter: int, value: int) -> None:
        """Set this rank's counter. Whoever sees the new value sees what this rank wrote before (`orders_stores`)."""
        self._counters[self._place(counter, self.rank)] = value

    def need(self, counter: int, value: int) -> Need:
        """That every rank's counter is at least `value`."""
        places = [self._place(counter, rank) for rank in range(self.ranks)]
        return Need(lambda: all(self._counters[place] >= value for place in places), lambda: self.wait(counter, value))

    def wait(self, counter: int, value: int) -> None:
        """Return when every rank's counter is at least `value`: spin briefly, then yield the core, then nap."""
        for rank in range(self.ranks):
            place, looks = self._place(counter, rank), 0
            while self._counters[place] < value:
                looks += 1
                if looks > self._spins + YIELDS:
                    time.sleep(NAP_SECONDS)
                elif looks > self._spins:
                    os.sched_yield()

    def _header(self) -> int:
        return self.ranks * COUNTERS * LINE

    def _place(self, counter: int, rank: int) -> int:
        return (rank * COUNTERS + counter) * (LINE // 8)

    def _at(self, offset: int, size: int, dtype: Any) -> np.ndarray:
        """The same view object for the same place: making one takes as long as a small collective's sum."""
        key = (offset, size, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            view = self._bytes[offset : offset + size * np.dtype(dtype).itemsize].view(dtype)
            self._views[key] = view
        return view


def map_shared(group: Group, slots: int, slot_bytes: int, *, spin: bool) -> SharedMemory | None:
    """Shared memory for the ranks of `group`, all on one node; None on every rank where it can't be had."""
    if not all(group.all_gather_objects(orders_stores())):
        return None
    total = group.size * COUNTERS * LINE + slots * (group.size + 1) * slot_bytes
    for create in (_nameless, _named):
        file = create(total) if group.rank == 0 else None
        place = group.broadcast_object(file.place() if file is not None else None)
        mapping = _map(place, total) if place is not None else None
        everywhere = all(group.all_gather_objects(mapping is not None))
        if file is not None:
            file.forget()
        if everywhere and mapping is not None:
            return SharedMemory(mapping, group.rank, group.size, slots, slot_bytes, spin=spin)
    return None


_Place = tuple[str, tuple[int, int]]  # a path, and the identity of the file that must lie there


@dataclass(frozen=True, slots=True)
class _File:
    """An open file, the path by which other processes find it, and whether that is a name that stays."""

    descriptor: int
    path: str
    is_named: bool

    @classmethod
    def reserved(cls, descriptor: int, path: str, size: int, *, is_named: bool) -> _File | None:
        """The file with its pages reserved; None where there is no room."""
        file = cls(descriptor, path, is_named)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            file.forget()
            return None
        return file

    def place(self) -> _Place:
        """For the other processes."""
        return self.path, _identity(self.descriptor)

    def forget(self) -> None:
        """Nobody finds it any more; who has mapped it keeps it."""
        os.close(self.descriptor)
        if self.is_named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def _nameless(size: int) -> _File | None:
    try:
        descriptor = os.memfd_create("mpitp")
    except (AttributeError, OSError):  # not Linux, or an old one
        return None
    return _File.reserved(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", size, is_named=False)


def _named(size: int) -> _File | None:
    path = os.path.join(DIRECTORY, f"mpitp-{os.getpid()}-{uuid.uuid4().hex}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    return _File.reserved(descriptor, path, size, is_named=True)


def _map(place: _Place, size: int) -> mmap.mmap | None:
    """None where there is no such file, or another one: process numbers differ between containers."""
    path, identity = place
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(descriptor, size) if _identity(descriptor) == identity else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    """Device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
