"""Notices a step that doesn't end: a rank that is stopped, that hangs on a disk, or that waits in another collective.

Every rank has one. On the first it runs while a step is computed; on the others from an order on until the first rank
says that there is nothing to do. The first rank's runs out first, so that it can tell the clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from mpitp.comm.deaths import Process, this_process

LATER_SECONDS = 3.0  # the other ranks': the first one's words to its clients take less


class StepWatch:
    """Calls `overdue()` in a thread when more than `limit` seconds lie behind `begin()` without `rest()` (0: never).

    A context manager.
    """

    def __init__(self, limit: float, overdue: Callable[[], None]) -> None:
        self.limit, self._overdue = limit, overdue
        self._since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpitp steps", daemon=True)

    def begin(self) -> None:
        """A step begins, and the one before is over."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """Nothing is to be done for a while."""
        self._since = None

    def __enter__(self) -> StepWatch:
        if self.limit:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        if self.limit:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self.limit / 8)):
            since = self._since
            if since is not None and time.monotonic() - since > self.limit:
                self._overdue()
                return


def stopped_ranks(processes: Sequence[Process]) -> list[int]:
    """Which of these are on this machine and stopped (SIGSTOP, a debugger)."""
    machine = this_process(0).machine
    return [process.rank for process in processes if process.machine == machine and _state(process.pid) in ("T", "t")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
