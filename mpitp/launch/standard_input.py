"""Standard input for ranks, by way of a file.

An mpiexec hands its standard input on to rank 0, in theory: Open MPI's loses the end of a short one, so that the rank
waits for ever, and MPICH's breaks off when the rank doesn't read fast enough. So `mpitp launch` reads it itself; and
likewise a pipe that it was handed open, as a shell's `<(...)`, which no rank has.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from mpitp.errors import FileError
from mpitp.files import is_handed_open, os_failure

# The options of each verb whose value is a file to read, or "-" for standard input.
INPUT_OPTIONS = {"generate": ("--prompts",), "embed": ("--file",), "classify": ("--file",)}


@contextlib.contextmanager
def from_file(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of a verb, each "-" or pipe from which it reads replaced by a file that holds what came from there.

    The file is the user's alone, and goes at the end and on a signal. It lies where temporary files do: rank 0 must run
    on this host, or see that directory. Raises FileError when nothing can be read or written.
    """
    sources = _sources(words)
    refuse_pipes(words, besides=sources)
    if not sources:
        yield list(words)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_leaving_on_signals())
        folder = stack.enter_context(_folder())
        files = {source: _fill(folder, source) for source in dict.fromkeys(sources.values())}
        yield [
            word.removesuffix(sources[place]) + str(files[sources[place]]) if place in sources else word
            for place, word in enumerate(words)
        ]


def refuse_pipes(words: Sequence[str], besides: Collection[int] = ()) -> None:
    """Raise FileError for a word that names what only this process has open: a rank would find nothing there."""
    for place, word in enumerate(words):
        for path in (word, word.partition("=")[2]):
            if place not in besides and is_handed_open(path):
                raise FileError(
                    f"{path} is open in this process only (a shell's <(...) is): the ranks can't read it; write what "
                    "comes from it to a file, and name that"
                )


def _sources(words: Sequence[str]) -> dict[int, str]:
    """The places of the words that say whence a verb reads what can be read once, with what they say: "-" or a pipe."""
    options = INPUT_OPTIONS.get(words[0], ())
    found = {}
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not equals:
            option, value = words[place - 1] if place else "", word
        if option in options and (value == "-" or is_handed_open(value)):
            found[place] = value
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="mpitp-")
    except OSError as error:
        raise os_failure("copy standard input to", tempfile.gettempdir(), error) from error
    with folder as path:
        yield Path(path)


def _fill(folder: Path, source: str) -> Path:
    """A file with all that comes from `source`."""
    path = folder / ("standard-input" if source == "-" else f"pipe-{Path(source).name}")
    try:
        with _opened(source) as stream, open(path, "xb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
    except OSError as error:
        what = "standard input" if source == "-" else source
        raise os_failure(f"copy {what} to", tempfile.gettempdir(), error) from error
    return path


def _opened(source: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if source != "-":
        return open(source, "rb")  # as long as the with statement of the caller
    if sys.stdin is None:
        raise FileError("can't read standard input: it is closed")
    return contextlib.nullcontext(sys.stdin.buffer)


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
