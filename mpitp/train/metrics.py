"""What a run tells: one JSON object a step in metrics.jsonl, and how far it is for people. Rank 0 alone does both."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from mpitp.files import os_failure
from mpitp.progress_bar import ProgressBar, progress_bar
from mpitp.train.log import count_lines


class Metrics:
    """Writes metrics.jsonl line by line (each line whole and flushed) and moves the progress bar on stderr.

    `num_lines`: how many lines the log has; 0 on ranks that say nothing.
    """

    def __init__(self, path: Path | None, steps: int, first_step: int = 0) -> None:
        """`path` None: this rank says nothing."""
        self._file = None
        self._bar: ProgressBar | None = None
        self.num_lines = 0
        if path is None:
            return
        try:
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise os_failure("write", path, error) from error
        self.num_lines = count_lines(path)
        self._bar = progress_bar("training", " steps", steps, first=first_step)

    def log(self, record: dict[str, Any]) -> None:
        """Append one object. Raises FileError when it can't be written (a full disk)."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise os_failure("write", self._file.name, error) from error
        self.num_lines += 1

    def begin_again(self) -> None:
        """The log has been emptied: this run's first line comes next."""
        self.num_lines = 0

    def show(self, **facts: str) -> None:
        """One more step is done; show these facts beside it."""
        if self._bar is not None:
            self._bar.show(facts)
            self._bar.update()

    def say(self, line: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar.say(line)

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
