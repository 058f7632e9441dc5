"""Standard input for ranks, by way of a file.

An mpiexec hands its standard input on to rank 0, in theory: Open MPI's loses the end of a short one, so that the rank
waits for ever, and MPICH's breaks off when the rank doesn't read fast enough. So `mpitp launch` reads it itself.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mpitp.errors import FileError
from mpitp.files import os_failure

# The options of each verb whose value is a file to read, or "-" for standard input.
INPUT_OPTIONS = {"generate": ("--prompts",)}


@contextlib.contextmanager
def from_file(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of a verb, "-" replaced by a file that holds our standard input.

    The file is the user's alone, and goes at the end and on a signal. It lies where temporary files do: rank 0 must run
    on this host, or see that directory. Raises FileError when nothing can be read or written.
    """
    place = _place_of_dash(words)
    if place is None:
        yield list(words)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_on_signals())
        path = stack.enter_context(_filled())
        word = words[place]
        yield [*words[:place], word[: len(word) - 1] + str(path), *words[place + 1 :]]


def _place_of_dash(words: Sequence[str]) -> int | None:
    for option in INPUT_OPTIONS.get(words[0], ()):
        for place, word in enumerate(words):
            if word == f"{option}=-" or (word == "-" and words[place - 1] == option):
                return place
    return None


@contextlib.contextmanager
def _filled() -> Iterator[Path]:
    if sys.stdin is None:
        raise FileError("can't read standard input: it is closed")
    with contextlib.ExitStack() as stack:
        try:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpitp-"))) / "standard-input"
            with open(path, "xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        except OSError as error:
            raise os_failure("copy standard input to", tempfile.gettempdir(), error) from error
        yield path


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """Signals that end a process do so by an exception, so that files are removed. A job has handlers of its own."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
