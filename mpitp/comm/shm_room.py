"""Whether /dev/shm has room for the MPI library, looked at before it maps anything there.

MPICH makes its buffers between the ranks of a host in /dev/shm without asking whether they fit: the first touch of a
page too much is a bus error, and one that can't be written ends in its own words. Open MPI looks, and goes other ways.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

DIRECTORY = "/dev/shm"
MPICH_BYTES_A_RANK = 1100 << 10  # measured, MPICH 5.0: 1033 KiB a rank; what else it could use it does without
MOST_BYTES_A_RANK = 6 << 20  # measured: 5.2 MiB a rank where there is room
CURE = "in a container: --shm-size=1g or --ipc=host; else remove what jobs that were killed have left there"


@dataclass(frozen=True, slots=True)
class ShmRoom:
    """Of /dev/shm."""

    total_bytes: int
    free_bytes: int
    is_writable: bool


def shm_room(directory: str = DIRECTORY) -> ShmRoom | None:
    """What there is; None where there is no such directory (not Linux), and libraries go other ways."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    return ShmRoom(total, free, os.access(directory, os.W_OK | os.X_OK))


def shm_failure(library: str, ranks: int, room: ShmRoom | None, *, has_begun: bool) -> str:
    """What is wrong with `room` for `ranks` ranks of this host; "": nothing.

    `has_begun`: ranks of this job may be using theirs already, so that little free room alone means nothing.
    """
    if not library.startswith("MPICH") or room is None:
        return ""
    if not room.is_writable:
        return f"{DIRECTORY} can't be written, and MPICH needs it; mount it writable ({CURE})"
    needed = ranks * MPICH_BYTES_A_RANK
    others = room.total_bytes - room.free_bytes - (ranks * MOST_BYTES_A_RANK if has_begun else 0)
    free = min(room.total_bytes, room.free_bytes if others > 0 or not has_begun else room.total_bytes)
    if free >= needed:
        return ""
    return (
        f"{DIRECTORY} has {room.free_bytes >> 10} KiB free of {room.total_bytes >> 10}, and MPICH needs "
        f"{needed >> 10} for {ranks} ranks on one host; make it larger ({CURE})"
    )
