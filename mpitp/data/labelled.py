"""Labelled texts: one a line, `label TAB text`, or a JSON object with `label` and `text`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitp.errors import FileError
from mpitp.files import os_failure, read_regular
from mpitp.text import decode_text, lines_of

MOST_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts with their labels in file order; `numbers`: the line of each. `sha256`: of the file."""

    path: str
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    sha256: str

    def classes(self) -> tuple[str, ...]:
        """The labels that occur, in alphabetical order."""
        return tuple(sorted(set(self.labels)))

    def targets(self, classes: Sequence[str]) -> list[int]:
        """The class of each text. Raises FileError for a label that is none of them."""
        number_of = {name: i for i, name in enumerate(classes)}
        for label, line in zip(self.labels, self.numbers, strict=True):
            if label not in number_of:
                raise FileError(
                    f"{self.path}, line {line}: label {label!r:.60} is none of the {len(classes)} classes "
                    f"({', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''})"
                )
        return [number_of[label] for label in self.labels]


def read_labelled(path: str | Path) -> LabelledTexts:
    """Read labelled texts, empty lines passed over. Raises FileError for what is malformed, with its line."""
    try:
        content = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise os_failure("read", path, error) from error
    found: list[tuple[str, str, int]] = []
    for number, line in enumerate(lines_of(decode_text(content, path)), start=1):
        if line.strip():
            label, text = _of_line(line, f"{path}, line {number}")
            found.append((label, text, number))
    if not found:
        raise FileError(f"{path} holds no labelled text; expected one a line: label TAB text, or a JSON object")
    labels, texts, numbers = zip(*found, strict=True)
    return LabelledTexts(str(path), labels, texts, numbers, hashlib.sha256(content).hexdigest())


def _of_line(line: str, where: str) -> tuple[str, str]:
    label, text = _of_json(line, where) if line.lstrip().startswith("{") else _of_words(line, where)
    if not label:
        raise FileError(f"{where}: the label is empty")
    if not text.strip():
        raise FileError(f"{where}: the text is empty")
    return label, text


def _of_words(line: str, where: str) -> tuple[str, str]:
    label, tab, text = line.partition("\t")
    if not tab:
        raise FileError(f"{where}: expected label TAB text (or a JSON object), found no tab")
    return label.strip(), text


def _of_json(line: str, where: str) -> tuple[str, str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is not JSON: {error}") from error
    label, text = value.get("label"), value.get("text")
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    if not isinstance(label, str) or not isinstance(text, str):
        raise FileError(f'{where}: expected a JSON object with "label" and "text", both words')
    return label.strip(), text
