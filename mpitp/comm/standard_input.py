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
    """The words of a verb, each "-" that stands for our standard input replaced by one file that holds it.

    The file is the user's alone, and goes at the end and on a signal. It lies where temporary files do: rank 0 must run
    on this host, or see that directory. Raises FileError when nothing can be read or written.
    """
    places = _places_of_dash(words)
    if not places:
        yield list(words)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_on_signals())
        path = stack.enter_context(_filled())
        yield [word[:-1] + str(path) if place in places else word for place, word in enumerate(words)]


def _places_of_dash(words: Sequence[str]) -> set[int]:
    options = INPUT_OPTIONS.get(words[0], ())
    before = dict(enumerate(words, 1))  # the word before the one at a place
    return {
        place
        for place, word in enumerate(words)
        if any(word == f"{option}=-" or (word == "-" and before.get(place) == option) for option in options)
    }


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
