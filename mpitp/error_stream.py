"""Standard error for what is told beside the work, such as progress: closed or full, the work goes on without it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class ErrorStream:
    """Hands on to standard error what can be handed on. A reader that has left (BrokenPipeError) is told of."""

    def __init__(self) -> None:
        self._stream: Any = sys.stderr
        if self._stream is None:  # closed when this process began
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)

    def write(self, text: str) -> int:
        """Write, or lose, the text."""
        with _unless_reader_left():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered, or lose it."""
        with _unless_reader_left():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _unless_reader_left() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass
