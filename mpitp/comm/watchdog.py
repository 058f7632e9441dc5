"""Says which rank is late, and where, when a collective does not complete; ends the job when it still doesn't.

Each rank keeps, for each group, a ring of its last collectives, and a thread writes them every few seconds into a small
status file in a directory that all ranks share (in the run directory). MPI is not used for it: a rank that is stuck in
MPI, or stopped, could not answer. When this rank has been in one collective for `limit` seconds, it reads the others'
files; the lowest rank that is waiting like this prints the report. After twice the limit the job is ended.

A rank that is killed is another matter: the ranks of its machine learn of it at once (`deaths.py`), say in which
collective the job stood, and end it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mpitp.comm.abort import end_job
from mpitp.comm.deaths import PeerWatch, Process, this_process
from mpitp.comm.frames import frame_of
from mpitp.comm.group import Group
from mpitp.comm.observed import (
    Arrays,
    Call,
    GroupObserver,
    ObservedGroup,
    call_site,
    place_of,
    ranks_in_words,
)
from mpitp.comm.slip import Slip, SlipReader
from mpitp.error_stream import ErrorStream
from mpitp.errors import LaunchError, RankKilled

FOLDER = ".watchdog-"  # what a job's folder of status files begins with, in the run directory
RING = 16  # collectives of a group that are remembered
FIRST_SECONDS_BETWEEN_STATUSES, MOST_SECONDS_BETWEEN_STATUSES = 0.1, 5.0


@dataclass(slots=True)
class Entry:
    """One collective of this rank, the `number`-th of its group; `ended` 0: it is still in it.

    Times are seconds since the epoch. `call` is a text once it has been through a file.
    """

    number: int
    group: str
    call: Call | str
    site: str
    started: float
    ended: float = 0.0

    @property
    def is_message(self) -> bool:
        """Whether it is from one rank to another, so that the ranks' numbers don't say who is late."""
        return str(self.call).startswith(("send(", "recv(", "wait send(", "wait recv("))

    def __str__(self) -> str:
        return f"number {self.number} of group {self.group}, {self.call} at {self.site}"


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank wrote last: when, on which host, where its program was, and its newest collectives, oldest first.

    `members`: the ranks of those groups that don't hold all.
    """

    rank: int
    host: str
    pid: int
    written: float
    place: str = ""
    ring: tuple[Entry, ...] = ()
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    slip: str = ""  # where its newest collective stands to the last moment
    is_exact: bool = False  # taken from there: `ring` is that collective alone, as it stands now

    @property
    def last(self) -> Entry | None:
        """The newest collective."""
        return self.ring[-1] if self.ring else None

    def last_of(self, group: str) -> Entry | None:
        """The newest collective of one group."""
        return next((entry for entry in reversed(self.ring) if entry.group == group), None)

    def waiting_seconds(self, now: float) -> float:
        """How long the rank has been in its newest collective; 0: it isn't in one."""
        return now - self.last.started if self.last is not None and not self.last.ended else 0.0


class Watchdog(GroupObserver):
    """Watches the collectives of one rank, and speaks up when one takes longer than `limit` seconds.

    Use it as a context manager; `watch(group)` gives the group to hand to the model. `processes`: of all ranks, where
    they are processes whose end is to be noticed.
    """

    def __init__(self, directory: Path, rank: int, size: int, limit: float, processes: Sequence[Process] = ()) -> None:
        self.directory, self.rank, self.size, self.limit = directory, rank, size, limit
        self._own = this_process(rank)
        self._peers = PeerWatch(self._own, processes, self._died)
        self._rings: dict[str, deque[Entry]] = defaultdict(lambda: deque(maxlen=RING))
        self._numbers: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._members: dict[str, list[int]] = {}
        self._newest: Entry | None = None
        self._reported: Entry | None = None
        self._slip, self._others = Slip(), Slips()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpitp watchdog", daemon=True)
        self._watched_thread = 0

    def watch(self, group: Group, name: str) -> Group:
        """`group`, its collectives watched under `name`."""
        return ObservedGroup(group, self, name)

    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        if group.members is not None:
            self._members[group.name] = group.members
        entry = Entry(next(self._numbers[group.name]), group.name, call, call_site(), time.time())
        self._rings[group.name].append(entry)
        self._newest = entry
        self._slip.begin(entry.number, entry.started, entry.group, call, entry.site)
        result = run()
        entry.ended = time.time()
        self._slip.end(entry.ended)
        return result

    def __enter__(self) -> Watchdog:
        self._watched_thread = threading.get_ident()
        with contextlib.suppress(OSError):  # what can't be written here is found missing there
            self.directory.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        self._peers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._leave()
        self._peers.__exit__(kind, error, where)
        self._others.close()
        self._slip.close()

    def _leave(self) -> None:
        """Take this rank's file away: from here on its end is no news, or it says itself why it ends."""
        with contextlib.suppress(OSError):
            self._path(self.rank).unlink()
            self.directory.rmdir()  # the last rank to leave succeeds

    def _run(self) -> None:
        pause = FIRST_SECONDS_BETWEEN_STATUSES  # short at first: a run that dies young leaves a trace too
        while not self._stop.wait(pause := min(self.limit / 8, 1.5 * pause, MOST_SECONDS_BETWEEN_STATUSES)):
            self._write()
            if not self._others.have(peer.rank for peer in self._peers.peers):
                self._others.open(read_statuses(self.directory))
            entry = self._newest
            if entry is None or entry.ended or time.time() - entry.started < self.limit:
                continue
            if self._reported is not entry:
                self._reported = entry
                self._report()
            elif time.time() - entry.started > 2 * self.limit:
                self._leave()
                end_job(LaunchError(f"the collective {entry} did not complete in {2 * self.limit:g} s"))

    def _report(self) -> None:
        now = time.time()
        everyone = read_statuses(self.directory)
        waiting = [rank for rank, status in everyone.items() if status.waiting_seconds(now) > 0.75 * self.limit]
        if self.rank == min(set(waiting) - set(_silent(everyone, self.limit, now)), default=self.rank):
            _say(report(everyone, self.size, self.limit, now))

    def _died(self, process: Process, living: list[int]) -> None:
        """A rank's process on this machine has ended; unless in the ordinary way, say so and end the job."""
        if self._stop.is_set() or not self._path(process.rank).exists() or self.rank != living[0]:
            return
        statuses = self._others.exact(read_statuses(self.directory))
        text = death_report(process, statuses.get(process.rank), self._status(), time.time())
        self._leave()
        _say(text)  # at once: the launcher leaves little time
        end_job(RankKilled(f"rank {process.rank} has died"))

    def _status(self) -> Status:
        rings = [replace(e, call=str(e.call)) for ring in list(self._rings.values()) for e in tuple(ring)]
        rings.sort(key=lambda entry: entry.started)
        place = place_of(frame_of(self._watched_thread))
        own = self._own
        members = dict(self._members)
        return Status(self.rank, own.host, own.pid, time.time(), place, tuple(rings), members, self._slip.place)

    def _write(self) -> None:
        """Publish this rank's status by rename, so that readers never see half of one."""
        path = self._path(self.rank)
        with contextlib.suppress(OSError, RuntimeError):  # a full disk must not end the run
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(asdict(self._status())))
            temporary.rename(path)

    def _path(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"


class Slips:
    """The slips of other ranks of this machine, opened while they live."""

    def __init__(self) -> None:
        self._readers: dict[int, SlipReader] = {}

    def have(self, ranks: Iterable[int]) -> bool:
        """Whether those of all these ranks are open."""
        return all(rank in self._readers for rank in ranks)

    def open(self, statuses: Mapping[int, Status]) -> None:
        """Open those that are told of and aren't open yet."""
        host = socket.gethostname()
        for rank, status in statuses.items():
            if rank not in self._readers and status.slip and status.host == host:
                with contextlib.suppress(OSError):  # the rank has ended already, or lives in another container
                    self._readers[rank] = SlipReader(status.slip)

    def exact(self, statuses: Mapping[int, Status]) -> dict[int, Status]:
        """The statuses, each with its rank's newest collective alone where the slip tells it."""
        result = dict(statuses)
        for rank, reader in self._readers.items():
            newest = reader.read()
            if newest is not None and rank in result:
                number, group, call, site, started, ended = newest
                entry = Entry(number, group, call, site, started, ended)
                result[rank] = replace(result[rank], ring=(entry,), is_exact=True)
        return result

    def close(self) -> None:
        """Let them go."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


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
    """Which ranks wait, which are late, and where each late one is: of the group whose collective takes longest."""
    lines = [f"watchdog: a collective has not completed for {limit:g} s"]
    silent = _silent(statuses, limit, now)
    waits = {rank: status for rank, status in statuses.items() if status.waiting_seconds(now) and rank not in silent}
    if not waits:
        return "\n".join([*lines, "  no rank says that it waits in one"])
    longest = max(waits.values(), key=lambda status: status.waiting_seconds(now))
    assert longest.last is not None
    group = longest.last.group
    members = longest.members.get(group, range(size))
    furthest = max(last.number for status in statuses.values() if (last := status.last_of(group)))
    is_message = longest.last.is_message
    late = [rank for rank in members if rank in silent or _is_late(statuses.get(rank), group, furthest)]
    late = [rank for rank in members if rank in silent or rank not in waits] if is_message else late
    waiting = [rank for rank in members if rank not in late]
    collectives: dict[str, list[int]] = {}
    for rank in waiting:
        collectives.setdefault(str(statuses[rank].last_of(group)), []).append(rank)
    lines += [f"  waiting: {ranks_in_words(ranks)} in {collective}" for collective, ranks in collectives.items()]
    for rank in late:
        lines += _late_lines(rank, statuses.get(rank), rank in silent, now)
    if is_message and not late:
        lines.append("  every rank waits for a message that another has yet to send")
    elif len(collectives) > 1 and not is_message:
        lines.append("  the ranks disagree on what comes here; --debug-collectives finds the first place where they do")
    elif not late:
        lines.append("  every rank is in it: the network or the MPI library doesn't deliver")
    return "\n".join(lines)


def death_report(dead: Process, status: Status | None, own: Status, now: float) -> str:
    """Which rank has died, and in which collective the job stood, as another rank sees it."""
    lines = [f"rank {dead.rank} on {dead.host} (process {dead.pid}) has died: killed, or out of memory?"]
    if own.last is not None:
        state = "is in" if not own.last.ended else "was last in"
        lines.append(f"  rank {own.rank} {state} {own.last}")
    if status is not None and status.last is not None and status.is_exact:
        lines.append(f"  rank {dead.rank} died {'after' if status.last.ended else 'in'} {status.last}")
    elif status is not None and status.last is not None:
        lines.append(f"  rank {dead.rank}, {now - status.written:.1f} s ago, had begun {status.last}")
    return "\n".join(lines)


def _silent(statuses: Mapping[int, Status], limit: float, now: float) -> list[int]:
    """The ranks whose status is old although a healthy process renews it every few seconds."""
    return [rank for rank, status in statuses.items() if now - status.written > limit / 2]


def _is_late(status: Status | None, group: str, furthest: int) -> bool:
    last = None if status is None else status.last_of(group)
    return last is None or last.number < furthest or bool(last.ended)


def _late_lines(rank: int, status: Status | None, is_silent: bool, now: float) -> list[str]:
    if status is None:
        return [f"  late: rank {rank}, of which nothing is known (it has left no status file)"]
    alive = f"silent for {now - status.written:.0f} s: stopped, dead or cut off" if is_silent else "alive"
    lines = [f"  late: rank {rank} on {status.host} (process {status.pid}), {alive}"]
    if status.place:
        when = "was, when last heard of," if is_silent else "is"
        lines.append(f"    its program {when} at {status.place}; its last collectives:")
    for entry in status.ring[-3:]:
        state = f"ended {now - entry.ended:.0f} s ago" if entry.ended else "in it"
        lines.append(f"    {entry}: {state}")
    return lines


def _say(text: str) -> None:
    stream = ErrorStream()
    stream.write(f"\n{text}\n")
    stream.flush()
