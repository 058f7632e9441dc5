"""Says which rank is late, and where, when a collective does not complete; ends the job when it still doesn't.

Each rank keeps a ring of its last collectives, and a thread writes a small status file every few seconds into a
directory that all ranks share (in the run directory). MPI is not used for it: a rank that is stuck in MPI, or
stopped, could not answer. When this rank has been in one collective for `limit` seconds, it reads the others' files;
the lowest rank that is waiting like this prints the report. After twice the limit the job is ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mpitp.comm.abort import end_job
from mpitp.comm.group import Group
from mpitp.comm.wrapped import Call, WrappedGroup, call_site
from mpitp.errors import LaunchError

RING = 16  # collectives remembered


@dataclass(slots=True)
class Entry:
    """One collective of this rank; `ended` 0: it is still in it. Times are seconds since the epoch."""

    number: int
    group: str
    call: str
    site: str
    started: float
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank wrote last: when, on which host, and its newest collectives."""

    rank: int
    host: str
    pid: int
    written: float
    ring: tuple[Entry, ...]

    @property
    def last(self) -> Entry | None:
        """The newest collective."""
        return self.ring[-1] if self.ring else None

    def waiting_seconds(self, now: float) -> float:
        """How long the rank has been in its newest collective; 0: it isn't in one."""
        return now - self.last.started if self.last is not None and not self.last.ended else 0.0


class Watchdog:
    """Watches the collectives of one rank, and speaks up when one takes longer than `limit` seconds.

    Use it as a context manager; `watch(group)` gives the group to hand to the model.
    """

    def __init__(self, directory: Path, rank: int, size: int, limit: float) -> None:
        self.directory, self.rank, self.size, self.limit = directory, rank, size, limit
        self._ring: deque[Entry] = deque(maxlen=RING)
        self._numbers = itertools.count(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpitp watchdog", daemon=True)
        self._reported = 0

    def watch(self, group: Group, name: str) -> Group:
        """`group`, its collectives watched under `name`."""
        return WatchedGroup(group, self, name)

    def begin(self, call: Call, group: str) -> Entry:
        """A collective begins."""
        entry = Entry(next(self._numbers), group, str(call), call_site(), time.time())
        self._ring.append(entry)
        return entry

    def __enter__(self) -> Watchdog:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path(self.rank).unlink()
            self.directory.rmdir()  # the last rank to leave succeeds

    def _run(self) -> None:
        while not self._stop.wait(min(self.limit / 8, 5.0)):
            self._write()
            entry = self._ring[-1] if self._ring else None
            if entry is None or entry.ended or time.time() - entry.started < self.limit:
                continue
            if self._reported != entry.number:
                self._reported = entry.number
                self._report()
            elif time.time() - entry.started > 2 * self.limit:
                end_job(LaunchError(f"{entry.call} did not complete in {2 * self.limit:.0f} s (at {entry.site})"))

    def _report(self) -> None:
        now = time.time()
        everyone = read_statuses(self.directory)
        waiting = [rank for rank, status in everyone.items() if status.waiting_seconds(now) > 0.75 * self.limit]
        if self.rank == min(waiting, default=self.rank):
            sys.stderr.write("\n" + report(everyone, self.size, self.limit, now) + "\n")
            sys.stderr.flush()

    def _write(self) -> None:
        """Publish this rank's status by rename, so that readers never see half of one."""
        status = Status(self.rank, socket.gethostname(), os.getpid(), time.time(), tuple(self._ring))
        path = self._path(self.rank)
        with contextlib.suppress(OSError, RuntimeError):  # a full disk must not end the run
            self.directory.mkdir(parents=True, exist_ok=True)  # a rank that has failed may have taken it away
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(asdict(status)))
            temporary.rename(path)

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"


class WatchedGroup(WrappedGroup):
    """Tells the watchdog when each collective begins and ends."""

    def __init__(self, inner: Group, watchdog: Watchdog, name: str) -> None:
        super().__init__(inner)
        self._watchdog, self._name = watchdog, name

    def _around(self, call: Call, run: Callable[[], Any]) -> Any:
        entry = self._watchdog.begin(call, self._name)
        result = run()
        entry.ended = time.time()
        return result

    def _wrap_split(self, inner: Group) -> Group:
        return WatchedGroup(inner, self._watchdog, f"{self._name}, split")


def read_statuses(directory: Path) -> dict[int, Status]:
    """Every rank's newest status file, by rank."""
    statuses = {}
    for path in directory.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads(path.read_text())
            ring = tuple(Entry(**entry) for entry in raw.pop("ring"))
            statuses[raw["rank"]] = Status(**raw, ring=ring)
    return statuses


def report(statuses: Mapping[int, Status], size: int, limit: float, now: float) -> str:
    """Which ranks wait, which are late, and where each late one was last."""
    furthest = max((status.last.number for status in statuses.values() if status.last), default=0)
    late = [rank for rank in range(size) if _is_late(statuses.get(rank), furthest)]
    waiting = [rank for rank in range(size) if rank not in late]
    lines = [f"watchdog: a collective has not completed for {limit:.0f} s"]
    if waiting:
        last = statuses[waiting[0]].last
        assert last is not None
        lines.append(f"  waiting: {_ranks(waiting)} in number {last.number}, {last.call} ({last.group}) at {last.site}")
    for rank in late:
        lines += _late_lines(rank, statuses.get(rank), now)
    if not late:
        lines.append("  every rank is in it: the network or the MPI library doesn't deliver")
    return "\n".join(lines)


def _is_late(status: Status | None, furthest: int) -> bool:
    return status is None or status.last is None or status.last.number < furthest or bool(status.last.ended)


def _late_lines(rank: int, status: Status | None, now: float) -> list[str]:
    if status is None:
        return [f"  late: rank {rank}, of which nothing is known (it has left no status file)"]
    silent = now - status.written
    alive = f"silent for {silent:.0f} s: stopped, dead or cut off" if silent > 10 else "alive"
    lines = [f"  late: rank {rank} on {status.host} (process {status.pid}), {alive}; its last collectives:"]
    for entry in status.ring[-3:]:
        state = f"ended {now - entry.ended:.0f} s ago" if entry.ended else "in it"
        lines.append(f"    number {entry.number}, {entry.call} ({entry.group}) at {entry.site}: {state}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
