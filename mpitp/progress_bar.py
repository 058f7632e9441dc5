"""How far a program is, on standard error: a bar that moves on a terminal, else whole lines, rarely.

A file or a pipe keeps every state of a bar; of a long run these are many thousand, in one line.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

from mpitp.error_stream import ErrorStream

FIRST_SECONDS, MOST_SECONDS = 5.0, 60.0  # until the first line; between two. In between each wait is twice the last
_FORMAT = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_FORMAT_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]"


class ProgressBar(Protocol):
    """What both kinds can do."""

    def update(self, count: int = 1) -> Any:
        """So many more are done."""

    def reset(self, total: int | None = None) -> Any:
        """Begin again, with another total."""

    def say(self, line: str) -> None:
        """A line of its own, above a bar."""

    def show(self, facts: dict[str, str]) -> None:
        """What stands beside the count from the next update on."""

    def close(self) -> Any:
        """The last state, once."""

    def __enter__(self) -> ProgressBar: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


def progress_bar(
    label: str, unit: str, total: int | None = None, *, first: int = 0, scale: bool = False
) -> ProgressBar:
    """A bar, or lines, for `total` units of which `first` are done; `scale`: large counts as 12.3k."""
    stream = ErrorStream()
    kind: type[Bar] | type[Lines] = Bar if stream.leads_to_terminal() else Lines
    return kind(stream, label, unit, total, first, scale)


class Bar:
    """A bar on a terminal."""

    def __init__(self, stream: Any, label: str, unit: str, total: int | None, first: int, scale: bool) -> None:
        options: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.3, "unit_scale": scale, "file": stream}
        self._stream = stream
        self._bar = tqdm(desc=label, unit=unit, total=total, initial=first, **options)

    def update(self, count: int = 1) -> None:
        """Move the bar."""
        self._bar.update(count)

    def reset(self, total: int | None = None) -> None:
        """Begin again."""
        self._bar.reset(total)

    def say(self, line: str) -> None:
        """Write above the bar."""
        self._bar.write(line, file=self._stream)

    def show(self, facts: dict[str, str]) -> None:
        """Beside the bar."""
        self._bar.set_postfix(facts, refresh=False)

    def close(self) -> None:
        """Leave the bar where it is."""
        self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class Lines:
    """Whole lines for a file or a pipe: after 5 seconds, after as many more, ... then every minute, and at the end."""

    def __init__(self, stream: Any, label: str, unit: str, total: int | None, first: int, scale: bool) -> None:
        self._stream, self._total, self._first = stream, total, first
        self._format: dict[str, Any] = {"prefix": label, "unit": unit, "unit_scale": scale}
        self._done, self._told, self._facts = first, -1, ""
        self._began = time.monotonic()
        self._next = self._began + FIRST_SECONDS

    def update(self, count: int = 1) -> None:
        """A line, if it is time for one."""
        self._done += count
        now = time.monotonic()
        if now >= self._next:
            self._tell(now)
            self._next = now + min(now - self._began, MOST_SECONDS)

    def reset(self, total: int | None = None) -> None:
        """Begin again."""
        self._done, self._total = 0, total

    def say(self, line: str) -> None:
        """A line among the others."""
        print(line, file=self._stream, flush=True)

    def show(self, facts: dict[str, str]) -> None:
        """In the lines to come."""
        self._facts = ", ".join(f"{name}={value}" for name, value in facts.items())

    def close(self) -> None:
        """The last line, unless it stands there already or nothing has happened."""
        if self._done not in (self._told, self._first):
            self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        layout = _FORMAT if self._total else _FORMAT_WITHOUT_TOTAL
        options = {**self._format, "initial": self._first, "postfix": self._facts, "bar_format": layout}
        self.say(tqdm.format_meter(self._done, self._total or 0, now - self._began, **options))
        self._told = self._done

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
