"""Text files that are read line by line: what files of labelled texts, of pairs and of tagged words have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.errors import FileError
from mpitp.files import os_failure, read_regular
from mpitp.text import decode_text, lines_of

MOST_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class LineFile:
    """The lines of a file. `sha256`: of its bytes."""

    path: str
    lines: tuple[str, ...]
    sha256: str

    def place(self, number: int) -> str:
        """Where a line is, counted from 1, for messages."""
        return f"{self.path}, line {number}"

    def filled(self) -> list[tuple[int, str]]:
        """The lines that aren't empty, with their numbers."""
        return [(number, line) for number, line in enumerate(self.lines, start=1) if line.strip()]


def read_line_file(path: str | Path) -> LineFile:
    """Read a whole text file. Raises FileError where it can't be read or is no text."""
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise os_failure("read", path, error) from error
    return LineFile(str(path), tuple(lines_of(decode_text(content, path))), hashlib.sha256(content).hexdigest())


def json_line(line: str, where: str) -> dict[str, Any]:
    """The object of a line that begins with a brace. Raises FileError for one that is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is not JSON: {error}") from error


def class_of(label: str, numbers: Mapping[str, int], where: str) -> int:
    """The number of a label's class. Raises FileError for a label that is none of them."""
    if label not in numbers:
        raise FileError(
            f"{where}: label {label!r:.60} is none of the {len(numbers)} classes "
            f"({', '.join(list(numbers)[:8])}{', ...' if len(numbers) > 8 else ''})"
        )
    return numbers[label]
