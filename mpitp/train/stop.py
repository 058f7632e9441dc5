"""When a run should stop early: a signal came, its time is up, or the job's time nearly is.

A handler only sets a flag. The ranks agree on it at the next step's boundary, save, and leave with exit code 75: a rank
that is inside a collective runs its handler when the collective returns, and a signal may reach one rank only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from mpitp.comm.group import Group

MOST_DIGITS = 12  # of a time in seconds
Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Turns signals into a flag while a `with` block lasts; the handlers that were there come back after it.

    A program's own handler goes on being called meanwhile (but not Python's for Ctrl-C, which would end the run).

    Signals can be handled in the main thread only; elsewhere (a run in a thread of a larger program) nothing is
    installed, and the program's own handlers stay as they are. A handler that isn't Python's stays too: it could be
    neither called nor put back from here.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._signals = [signal.Signals[f"SIG{name}"] for name in names]
        self._before: dict[signal.Signals, Handler] = {}
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        try:
            for number in self._signals:
                if signal.getsignal(number) is not None:
                    self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        earlier = self._before.get(signal.Signals(number))
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


class Deadline:
    """The moment before which a run must have saved: the earlier of `stop_after` and the job's own end.

    Time for a checkpoint is kept back: one minute, or as long as two steps and two saves take if that is more.
    `ignored`: what the environment says that can't be ("": nothing).
    """

    RESERVE_SECONDS = 60.0

    def __init__(self, stop_after: float | None, environ: Mapping[str, str] = os.environ) -> None:
        now = time.time()
        self._own = None if stop_after is None else now + stop_after
        self._job, self.ignored = job_end_time(environ, now)
        self.slowest_step = self.slowest_save = 0.0

    def reason(self) -> str | None:
        """Why it is time to stop; None: it isn't."""
        now = time.time()
        if self._own is not None and now >= self._own:
            return "train.stop_after has passed"
        reserve = max(self.RESERVE_SECONDS, 2 * (self.slowest_step + self.slowest_save))
        if self._job is not None and now >= self._job - reserve:
            return f"the job ends in {max(self._job - now, 0):.0f} s"
        return None


def job_end_time(environ: Mapping[str, str], now: float) -> tuple[float | None, str]:
    """When SLURM will end the job, seconds since the epoch; None where it doesn't say. What was ignored comes second.

    A time before `now`, when the run begins, is of another job (this shell has outlived it), or the job got more time.
    """
    value = environ.get("SLURM_JOB_END_TIME", "")
    if not value:
        return None, ""
    if not value.isdecimal() or len(value) > MOST_DIGITS:
        return None, f"ignored: SLURM_JOB_END_TIME={value} is no time in seconds since 1970"
    if float(value) <= now:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(value)))
        return None, f"ignored: SLURM_JOB_END_TIME={value} ({when}) has passed already"
    return float(value), ""


def agreed_reason(group: Group, reason: str | None) -> str | None:
    """The reason to stop of the lowest rank that has one, on every rank. A collective: one number, a text if needed."""
    if not group.all_reduce(np.array([reason is not None], np.int32), op="max")[0]:
        return None
    return next(text for text in group.all_gather_objects(reason) if text is not None)
