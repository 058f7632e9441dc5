"""Sentences whose words have labels, in the columns of CoNLL: a word a line, an empty line between sentences.

    Ada TAB B-PER
    sleeps TAB O

Columns are parted by tabs, or by blanks where a line has no tab; the first is the word, the last its label, others
aren't looked at. Lines that begin with -DOCSTART- are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitp.data.line_file import class_of, read_line_file
from mpitp.errors import FileError

DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words with a label each; `line`: of the first word."""

    words: tuple[str, ...]
    labels: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class TaggedTexts:
    """Sentences in file order. `sha256`: of the file."""

    path: str
    sentences: tuple[Sentence, ...]
    sha256: str

    def classes(self) -> tuple[str, ...]:
        """The labels that occur, in alphabetical order."""
        return tuple(sorted({label for sentence in self.sentences for label in sentence.labels}))

    def targets(self, classes: Sequence[str]) -> list[list[int]]:
        """The class of each word. Raises FileError for a label that is none of them."""
        numbers = {name: i for i, name in enumerate(classes)}
        return [
            [class_of(label, numbers, f"{self.path}, line {line}") for line, label in enumerate(each.labels, each.line)]
            for each in self.sentences
        ]


def read_tagged(path: str | Path) -> TaggedTexts:
    """Read sentences with labels. Raises FileError for what is malformed, with its line."""
    file = read_line_file(path)
    sentences: list[Sentence] = []
    words: list[tuple[str, str]] = []
    for number, line in enumerate([*file.lines, ""], start=1):
        if line.strip() and not line.startswith(DOCUMENT):
            words.append(_of_line(line, file.place(number)))
        elif words:
            found, labels = zip(*words, strict=True)
            sentences.append(Sentence(found, labels, number - len(words)))
            words = []
    if not sentences:
        raise FileError(
            f"{path} holds no sentence; expected a word a line, WORD TAB LABEL, and an empty line between sentences"
        )
    return TaggedTexts(file.path, tuple(sentences), file.sha256)


def _of_line(line: str, where: str) -> tuple[str, str]:
    columns = line.split("\t") if "\t" in line else line.split()
    if len(columns) < 2:
        raise FileError(f"{where}: expected WORD TAB LABEL, found {line.strip()!r:.60} alone")
    word, label = columns[0].strip(), columns[-1].strip()
    if not word or not label:
        raise FileError(f"{where}: the {'label' if word else 'word'} is empty")
    return word, label
