"""Sees which rank of a job dies first, and says so where the launcher doesn't, or names another.

MPICH's mpiexec kills all ranks the moment that one is killed, and then names a process and a host: not always the one
that died first. This process watches the ranks of its own machine itself, from the moment that they are there; where
they train, their watchdogs' files in the run directory tell in which collective the job stood, and name the ranks of
other machines, for which the launcher's word must do.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from mpitp.comm.deaths import Process
from mpitp.comm.watchdog import FOLDER, Slips, Status, death_report, read_statuses
from mpitp.launch.descendants import descendants
from mpitp.launch.mpiexec import KILLED, Job

MPICH_LOST_HELPER = 255  # what its mpiexec leaves with when it notices
_DEATH = re.compile(r"PID (\d+) RUNNING AT (\S+)")


def run_and_explain(job: Job, run_dir: Path | None, ranks: int) -> int:
    """Run the job; its exit code, after a word on a rank that has died. `run_dir`: where it trains."""
    witness = Witness(job, run_dir, ranks)
    with witness:
        code = job.run()
    if witness.lost_helper and (code == MPICH_LOST_HELPER or job.was_ended_here) and not job.was_told_to_end:
        job.say(f"the launcher's helper (process {witness.lost_helper}) has died: killed, or out of memory?")
        return KILLED + signal.SIGKILL
    if job.was_told_to_end and job.ranks_heeded_signal and code > KILLED:
        number = signal.Signals(code - KILLED)
        job.say("interrupted" if number == signal.SIGINT else f"ended by {number.name}")
        return code
    named = _DEATH.search(job.tail) if code else None
    if named is None and (code < KILLED or job.was_told_to_end or job.was_killed):
        return code
    text = witness.explain(int(named[1]) if named else 0, named[2] if named else "")
    if text:
        job.say(text)
    return code


class Witness:
    """Watches the ranks on this machine. A context manager around the job."""

    AT_ONCE_SECONDS = 0.0002  # deaths that are seen together may have come in any order
    SOON_SECONDS = 0.04  # that of the rank which the launcher names may be seen so much later, on a busy machine
    LOOK_SECONDS = 0.05  # between looks for ranks that aren't there yet
    MOST_SECONDS = 0.5  # between looks for what the ranks write
    TOGETHER_SECONDS = 0.3  # in which a job that is ended is gone
    AFTERLIFE_SECONDS = 10.0  # of a launcher whose ranks have all ended

    def __init__(self, job: Job, run_dir: Path | None, ranks: int) -> None:
        self._job, self._run_dir, self._ranks = job, run_dir, ranks
        self._leftover = set(self._folders())  # of jobs before this one
        self._deaths: list[tuple[float, int]] = []  # when it was seen, which rank
        self._statuses: dict[int, Status] = {}
        self._processes: dict[int, int] = {}  # of this machine, by rank
        self._slips = Slips()
        self._pause, self._next_slips = 0.1, 0.0
        self._helpers: set[int] = set()
        self.lost_helper = 0  # the process between launcher and ranks that died before them
        self._watched: dict[int, tuple[str, int]] = {}  # descriptor: ("rank", its number) or ("helper", its process)
        self._poll = select.poll()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpitp witness", daemon=True)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    def explain(self, pid: int, host: str) -> str | None:
        """Which rank has died, and where it and the job stood; None when nothing is known of this job's ranks.

        `pid`, `host`: what the launcher names, for a rank of another machine.
        """
        statuses = self._slips.exact(self._read_statuses())
        named = [rank for rank, status in statuses.items() if (status.pid, status.host) == (pid, host)]
        named += [rank for rank, process in self._processes.items() if process == pid and host == socket.gethostname()]
        dead = self._dead_first(named) or named[:1]
        if not dead:
            return None
        others = [status for rank, status in statuses.items() if rank not in dead and status.last is not None]
        first = statuses.get(dead[0])
        process = self._process_of(dead[0], first)
        nothing = Status(process.rank, process.host, process.pid, 0.0)
        furthest = max(others, key=lambda status: status.last.started if status.last else 0.0, default=first or nothing)
        text = death_report(process, first, furthest, time.time())
        doubt = [f"\n  (or rank {rank} before it: they died at about one time)" for rank in dead[1:]]
        return text + "".join(doubt)

    def _dead_first(self, named: list[int]) -> list[int]:
        """The ranks that may have died first, the first that was seen before the others; of those that were seen in one
        look those that the launcher names.
        """
        in_order = sorted(self._deaths, key=lambda death: (death[0], death[1] not in named))
        return [
            rank
            for seen, rank in in_order
            if seen - self._deaths[0][0] < (self.SOON_SECONDS if rank in named else self.AT_ONCE_SECONDS)
        ]

    def _process_of(self, rank: int, status: Status | None) -> Process:
        if rank in self._processes or status is None:
            return Process(rank, socket.gethostname(), self._processes.get(rank, 0), "")
        return Process(rank, status.host, status.pid, "")

    def _watch(self) -> None:
        while not self._stop.is_set():
            if len(self._processes) < self._ranks and self._job.pid is not None:
                self._look(self._job.pid)
            self._open_slips()
            ended = [descriptor for descriptor, _ in self._poll.poll(1000 * self.LOOK_SECONDS)]
            seen = time.monotonic()
            for descriptor in ended:
                self._has_ended(descriptor, seen)
            if not self._watched:
                self._stop.wait(self.LOOK_SECONDS)

    def _open_slips(self) -> None:
        """Hold open what tells where each rank is; looked for seldom, as a run directory may lie far away."""
        if self._slips.have(self._processes) or time.monotonic() < self._next_slips:
            return
        self._slips.open(self._read_statuses())
        self._pause = min(1.2 * self._pause, self.MOST_SECONDS)
        self._next_slips = time.monotonic() + self._pause

    def _look(self, launcher: int) -> None:
        """Watch the ranks that have come since the last look."""
        found = descendants(launcher)
        for rank, pid in found.ranks.items():
            if rank not in self._processes:
                self._processes[rank] = pid
                self._follow(pid, ("rank", rank))
        for pid in found.helpers:
            if pid not in self._helpers and found.ranks:
                self._helpers.add(pid)
                self._follow(pid, ("helper", pid))

    def _follow(self, pid: int, what: tuple[str, int]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # an old kernel; a process that has ended already
            descriptor = os.pidfd_open(pid)
            self._watched[descriptor] = what
            self._poll.register(descriptor, select.POLLIN)

    def _has_ended(self, descriptor: int, seen: float) -> None:
        """`seen`: when we looked; those that one look finds may have ended in any order."""
        self._poll.unregister(descriptor)
        kind, number = self._watched.pop(descriptor)
        os.close(descriptor)
        if kind == "rank":
            self._deaths.append((seen, number))
        elif not self._deaths and any(other == "rank" for other, _ in self._watched.values()):
            self._lose_helper(number)
        if self._deaths and not self._watched and len(self._processes) == self._ranks:
            self._end_launcher()

    def _lose_helper(self, pid: int) -> None:
        """MPICH's mpiexec doesn't always notice that what stood between it and the ranks is gone: they would go on.

        When a rank has ended the job, the helper goes as well, at about one time with the ranks.
        """
        if self._stop.wait(self.TOGETHER_SECONDS) or not self._any_rank_lives():
            return
        self.lost_helper = pid
        if self._stop.wait(1.0):  # it has noticed
            return
        for rank, process in self._processes.items():
            if ("rank", rank) in self._watched.values():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGTERM)

    def _any_rank_lives(self) -> bool:
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        return any(kind == "rank" and descriptor not in ended for descriptor, (kind, _) in self._watched.items())

    def _end_launcher(self) -> None:
        """End a launcher that doesn't notice that it has nothing left to wait for."""
        if not self._stop.wait(self.AFTERLIFE_SECONDS):
            self._job.say("all ranks have ended, and the launcher has not: it is ended")
            self._job.kill()

    def _folders(self) -> Iterator[Path]:
        return iter(()) if self._run_dir is None else self._run_dir.glob(f"{FOLDER}*")

    def _read_statuses(self) -> dict[int, Status]:
        for folder in self._folders():
            if folder not in self._leftover:
                self._statuses |= read_statuses(folder)  # a rank that ends in the ordinary way takes its own away
        return self._statuses
