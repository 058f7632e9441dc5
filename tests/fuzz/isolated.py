"""One case in a process of its own, forked from one that has imported everything, within limits of time and memory."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 2 << 30  # of memory above what the interpreter has already
CPU_SECONDS, WALL_SECONDS = 20, 240  # the latter for what waits; a busy machine isn't a hang
MOST_MESSAGE = 9000
MESSAGE = re.compile(r"^(UsageError|ConfigError|FileError|NumericError|LaunchError|MemoryError): ", re.MULTILINE)


@dataclass
class Outcome:
    """How a process ended: its exit code (minus the signal's number), its words, its greatest resident memory."""

    code: int
    out: str
    err: str
    peak_bytes: int
    timed_out: bool

    def faults(self, codes: tuple[int, ...]) -> list[str]:
        """What a user may never see, whatever the input was."""
        said = self.out + self.err
        found = [word for word in ("Traceback (most recent", "panicked at") if word in said]
        if self.timed_out or self.code in (-signal.SIGXCPU, -signal.SIGKILL):
            found.append("it did not end in time")
        elif self.code not in codes:
            found.append(f"exit code {self.code}")
        elif self.code and len(MESSAGE.findall(self.err)) != 1:
            found.append(f"{len(MESSAGE.findall(self.err))} messages")
        if len(self.err) > MOST_MESSAGE and self.code:
            found.append(f"a message of {len(self.err)} characters")
        return found


def run_isolated(action: Callable[[], int], folder: Path, words: Path) -> Outcome:
    """Call `action` in `folder` in a child; its exit code is what it returns. Its words go to files in `words`."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _be_the_child(action, folder, words)
    end, status, usage = time.monotonic() + WALL_SECONDS, None, None
    pause = 0.001
    while time.monotonic() < end:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        time.sleep(pause := min(2 * pause, 0.02))
    else:
        os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        return Outcome(-signal.SIGKILL, *_said(words), usage.ru_maxrss << 10, True)
    return Outcome(os.waitstatus_to_exitcode(status), *_said(words), usage.ru_maxrss << 10, False)


def _said(words: Path) -> list[str]:
    return [(words / name).read_text("utf-8", errors="replace") for name in ("out", "err")]


def _be_the_child(action: Callable[[], int], folder: Path, words: Path) -> None:
    code = 99
    try:
        _enter(folder, words)
        code = action()
    except BaseException:  # the parent goes on after this very call; the child must not
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _enter(folder: Path, words: Path) -> None:
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(words / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", errors=errors))
    with open("/proc/self/statm") as file:
        base = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (base + MOST_BYTES, base + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
