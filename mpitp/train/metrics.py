"""What a run tells: one JSON object a step in metrics.jsonl, and a progress bar for people. Rank 0 alone does both."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from mpitp.error_stream import ErrorStream
from mpitp.files import os_failure


class Metrics:
    """Writes metrics.jsonl line by line (each line whole and flushed) and moves the progress bar on stderr."""

    def __init__(self, path: Path | None, steps: int, first_step: int = 0) -> None:
        """`path` None: this rank says nothing."""
        self._file = None
        self._bar: tqdm[Any] | None = None
        self._stream = ErrorStream()
        if path is None:
            return
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise os_failure("write", path, error) from error
        self._bar = tqdm(
            total=steps, initial=first_step, unit="step", file=self._stream, dynamic_ncols=True, mininterval=0.3
        )

    def log(self, record: dict[str, Any]) -> None:
        """Append one object. Raises FileError when it can't be written (a full disk)."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise os_failure("write", self._file.name, error) from error

    def show(self, **facts: str) -> None:
        """Advance the bar by one step and show these facts beside it."""
        if self._bar is not None:
            self._bar.set_postfix(facts, refresh=False)
            self._bar.update()

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            with contextlib.suppress(OSError):  # of a line that couldn't be written, which has been said
                self._file.close()
