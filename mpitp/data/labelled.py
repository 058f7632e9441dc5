"""Labelled texts: one a line, `label TAB text`, or a JSON object with `label` and `text`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitp.data.line_file import class_of, json_line, read_line_file
from mpitp.errors import FileError


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
        numbers = {name: i for i, name in enumerate(classes)}
        places = zip(self.labels, self.numbers, strict=True)
        return [class_of(label, numbers, f"{self.path}, line {line}") for label, line in places]


def read_labelled(path: str | Path) -> LabelledTexts:
    """Read labelled texts, empty lines passed over. Raises FileError for what is malformed, with its line."""
    file = read_line_file(path)
    found = [(*_of_line(line, file.place(number)), number) for number, line in file.filled()]
    if not found:
        raise FileError(f"{path} holds no labelled text; expected one a line: label TAB text, or a JSON object")
    labels, texts, numbers = zip(*found, strict=True)
    return LabelledTexts(file.path, labels, texts, numbers, file.sha256)


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
    value = json_line(line, where)
    label, text = value.get("label"), value.get("text")
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    if not isinstance(label, str) or not isinstance(text, str):
        raise FileError(f'{where}: expected a JSON object with "label" and "text", both words')
    return label.strip(), text
