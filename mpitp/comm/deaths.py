"""Notices at once when a process of this job on this machine dies.

A rank that is killed (by hand, or by the system when memory runs out) says nothing. The launcher names a process; this
lets the ranks that live on say which rank it was and in which collective the job stood, where the launcher leaves them
the time. The kernel tells the end of a process through a descriptor of it (pidfd, Linux 5.3); without, nothing is
watched and the launcher's word must do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process. `machine`: equal for processes that can see one another under their numbers."""

    rank: int
    host: str
    pid: int
    machine: str


def this_process(rank: int) -> Process:
    """This process as `rank`."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # two containers on one host don't see one another's processes
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return Process(rank, socket.gethostname(), os.getpid(), machine)


class PeerWatch:
    """Calls `on_death(process, living)` in a thread when a process dies; `living`: the ranks of this machine left.

    A context manager. `processes`: of all ranks; those of other machines, and this one, aren't watched.
    """

    def __init__(
        self, own: Process, processes: Sequence[Process], on_death: Callable[[Process, list[int]], None]
    ) -> None:
        self._own, self._on_death = own, on_death
        self.peers = [p for p in processes if p.machine == own.machine and p.pid != own.pid]
        self._watched: dict[int, Process] = {}
        self._poll = select.poll()
        self._read_end, self._write_end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="mpitp peers", daemon=True)

    def __enter__(self) -> PeerWatch:
        self._poll.register(self._read_end, select.POLLIN)
        for peer in self.peers:
            with contextlib.suppress(OSError, AttributeError):  # an old kernel; a process that has ended already
                descriptor = os.pidfd_open(peer.pid)
                self._watched[descriptor] = peer
                self._poll.register(descriptor, select.POLLIN)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.write(self._write_end, b"x")
        self._thread.join()
        for descriptor in (self._read_end, self._write_end, *self._watched):
            os.close(descriptor)

    def _run(self) -> None:
        while True:
            ended = [descriptor for descriptor, _ in self._poll.poll()]
            if self._read_end in ended:
                return
            for descriptor in ended:
                self._poll.unregister(descriptor)
                dead = self._watched.pop(descriptor)
                os.close(descriptor)
                self._on_death(dead, sorted([self._own.rank, *(p.rank for p in self._watched.values())]))


def end_with_parent() -> None:
    """In the child: be told to stop when this process is killed, so that the job doesn't go on without its head."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
