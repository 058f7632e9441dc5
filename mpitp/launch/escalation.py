"""Ctrl-C ends a job: where a launcher or a rank makes nothing of the signal, stronger ones follow."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

# Seconds after the one before, and what is sent then. MPICH's mpiexec takes a second INT for "force abort".
STEPS = ((5.0, signal.SIGINT), (3.0, signal.SIGTERM), (3.0, signal.SIGKILL))


class Escalation:
    """What follows an INT, one step after another, until the job has ended. `send`: a signal to the job."""

    def __init__(self, send: Callable[[signal.Signals], None]) -> None:
        self._send = send
        self._left = list(STEPS)
        self._since: float | None = None

    def begin(self) -> None:
        """An INT has been sent now."""
        if self._since is None:
            self._since = time.monotonic()

    def go_on(self) -> None:
        """Send what is due. To be called now and then while the job lives."""
        if self._since is None or not self._left:
            return
        seconds, number = self._left[0]
        if time.monotonic() - self._since >= seconds:
            self._left.pop(0)
            self._since = time.monotonic()
            self._send(number)
