"""Watches a training run beside its launcher, and says afterwards which rank died where the launcher doesn't.

MPICH's mpiexec kills all ranks the moment that one is killed, and then names a process and a host: not always the one
that died first. This process watches the ranks of its own machine itself, by what the ranks' watchdogs write into the
run directory; there it also says in which collective the job stood. Of other machines the launcher's word must do.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from mpitp.comm.job import Job
from mpitp.comm.peers import PeerWatch, Process, this_process
from mpitp.comm.watchdog import FOLDER, Status, death_report, read_statuses
from mpitp.config import TrainSection, load_run_config
from mpitp.errors import MpitpError

_DEATH = re.compile(r"PID (\d+) RUNNING AT (\S+)")


def run_and_explain(job: Job, run_dir: Path, ranks: int) -> int:
    """Run the job; its exit code, after a word on a rank that has died."""
    witness = Witness(run_dir, ranks)
    with witness:
        code = job.run()
    named = _DEATH.search(job.tail) if code else None
    text = witness.explain(int(named[1]), named[2]) if named else None
    if text:
        job.say(text)
    return code


class Witness:
    """Sees which of the ranks on this machine dies first. A context manager around the job."""

    AT_ONCE_SECONDS = 0.0002  # deaths that are seen together may have come in any order
    SOON_SECONDS = 0.04  # that of the rank which the launcher names may be seen so much later, on a busy machine

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._leftover = set(self._folders())  # of jobs before this one
        self._deaths: list[tuple[float, int]] = []  # when it was seen, which rank
        self._statuses: dict[int, Status] = {}
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

    def explain(self, pid: int, host: str) -> str | None:
        """Which rank has died, and where it and the job stood; None when nothing is known of this job's ranks.

        `pid`, `host`: what the launcher names, for a rank of another machine.
        """
        statuses = self._read_statuses()
        named = [rank for rank, status in statuses.items() if (status.pid, status.host) == (pid, host)]
        dead = [
            rank
            for seen, rank in self._deaths
            if seen - self._deaths[0][0] < (self.SOON_SECONDS if rank in named else self.AT_ONCE_SECONDS)
        ]
        dead = dead or named
        if not dead or dead[0] not in statuses:
            return None
        others = [status for rank, status in statuses.items() if rank not in dead and status.last is not None]
        first = statuses[dead[0]]
        furthest = max(others, key=lambda status: status.last.started if status.last else 0.0, default=first)
        text = death_report(Process(first.rank, first.host, first.pid, ""), first, furthest, time.time())
        doubt = [f"\n  (or rank {rank} before it: they died at about one time)" for rank in dead[1:]]
        return text + "".join(doubt)

    def _watch(self) -> None:
        while len(self._read_statuses()) < self._ranks:  # every rank writes one as it begins to train
            if self._stop.wait(0.2):
                return
        here = this_process(-1)
        processes = [
            Process(rank, status.host, status.pid, here.machine)
            for rank, status in self._read_statuses().items()
            if status.host == here.host
        ]
        with PeerWatch(here, processes, lambda process, living: self._saw(process)):
            self._stop.wait()

    def _saw(self, process: Process) -> None:
        self._deaths.append((time.monotonic(), process.rank))

    def _folders(self) -> Iterator[Path]:
        return self._run_dir.glob(f"{FOLDER}*")

    def _read_statuses(self) -> dict[int, Status]:
        for folder in self._folders():
            if folder not in self._leftover:
                self._statuses = read_statuses(folder) or self._statuses
        return self._statuses


def training(words: Sequence[str]) -> TrainSection | None:
    """How `train RUN.TOML ...` trains; None for other verbs and for what the verb itself will refuse."""
    if not words or words[0] != "train":
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run_file")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    parser.add_argument("--trace")
    try:
        known, _ = parser.parse_known_args(list(words[1:]))
        return load_run_config(known.run_file, known.set).train
    except (MpitpError, argparse.ArgumentError, SystemExit):
        return None
