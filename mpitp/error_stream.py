"""Standard error for what is told beside the work, such as progress: closed or full, the work goes on without it.

And what becomes of letters that a stream's encoding lacks.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

ON_TERMINAL = "MPITP_ON_TERMINAL"  # set by `mpitp launch` for its ranks, which write into pipes


def escape_what_streams_lack() -> None:
    r"""Let standard output and error write what their encoding lacks as escapes, instead of losing all or failing.

    In an ASCII or Latin-1 terminal a letter such as U+6F22 is written \u6f22, as in JSON and Python; of a name that
    isn't text each byte is written \xff.
    """
    codecs.register_error(_ESCAPES, _escaped)
    codecs.register_error(_BYTES_OR_ESCAPES, _bytes_or_escaped)
    now = {"strict": _ESCAPES, "backslashreplace": _ESCAPES, "surrogateescape": _BYTES_OR_ESCAPES}
    for stream in (sys.stdout, sys.stderr):
        errors = getattr(stream, "errors", None)
        if errors in now and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=now[errors])


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """The handler of encoding errors; file names' bytes that are no text come as U+DC80 to U+DCFF."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    with contextlib.suppress(UnicodeError):
        letters = letters.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return letters.encode("ascii", "backslashreplace").decode(), error.end


def _bytes_or_escaped(error: UnicodeError) -> tuple[bytes | str, int]:
    """The same where Python lets a name's bytes pass as they are: in the locale C."""
    if isinstance(error, UnicodeEncodeError) and 0xDC80 <= ord(error.object[error.start]) <= 0xDCFF:
        return bytes([ord(error.object[error.start]) - 0xDC00]), error.start + 1
    return _escaped(error)


_ESCAPES, _BYTES_OR_ESCAPES = "mpitp.escapes", "mpitp.bytes-or-escapes"


def tell(lines: Iterable[str]) -> None:
    """Say each of these lines on standard error; one rank of a job does so."""
    for line in lines:
        print(f"mpitp: {line}", file=ErrorStream())


class ErrorStream:
    """Hands on to standard error what can be handed on. A reader that has left (BrokenPipeError) is told of."""

    def __init__(self) -> None:
        self._stream: Any = _nowhere() if sys.stderr is None else sys.stderr  # None: it was closed in the beginning

    def write(self, text: str) -> int:
        """Write, or lose, the text."""
        with _unless_reader_left():
            self._stream.write(text)
        return len(text)

    def leads_to_terminal(self) -> bool:
        """Whether somebody may be watching: it is a terminal, or `mpitp launch` hands it on to one."""
        return bool(self._stream.isatty()) or os.environ.get(ON_TERMINAL) == "1"

    def flush(self) -> None:
        """Hand on what is buffered, or lose it."""
        with _unless_reader_left():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@cache
def _nowhere() -> Any:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)


@contextlib.contextmanager
def _unless_reader_left() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass
