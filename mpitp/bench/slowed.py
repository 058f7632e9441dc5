"""A process that runs only part of the time, as one that shares its core: stopped and let go by a helper of its own.

    run [on] stop [off] run [on] stop [off] ...        on / (on + off) is the part

Control groups limit a process's seconds too, but their files are root's on most machines, and their periods of 0.1 s
are longer than what lies between two sums of a step: a rank then waits through whole periods, whatever its share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PERIOD_SECONDS = 0.004


@contextlib.contextmanager
def slowed(part: float) -> Iterator[None]:
    """This process runs only `part` of the time (1: all of it) for as long as the context lasts."""
    if part == 1:
        yield
        return
    words = [sys.executable, "-S", "-P", __file__, str(os.getpid()), str(part)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as helper:
        try:
            yield
        finally:
            helper.terminate()


def stop_and_go(pid: int, part: float) -> None:
    """Stop the parent process `pid` and let it go in turns until SIGTERM; it runs when this returns."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    while not ended and os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(PERIOD_SECONDS * (1 - part))
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(PERIOD_SECONDS * part)


if __name__ == "__main__":
    stop_and_go(int(sys.argv[1]), float(sys.argv[2]))
