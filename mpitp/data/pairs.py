"""Pairs of texts: one a line, `source TAB target`, or a JSON object with `source` and `target`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpitp.data.line_file import json_line, read_line_file
from mpitp.errors import FileError


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sources with their targets in file order. `sha256`: of the file."""

    path: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    sha256: str


def read_pairs(path: str | Path) -> Pairs:
    """Read pairs, empty lines passed over. Raises FileError for what is malformed, with its line."""
    file = read_line_file(path)
    found = [_of_line(line, file.place(number)) for number, line in file.filled()]
    if not found:
        raise FileError(f"{path} holds no pairs; expected one a line: source TAB target, or a JSON object")
    sources, targets = zip(*found, strict=True)
    return Pairs(file.path, sources, targets, file.sha256)


def _of_line(line: str, where: str) -> tuple[str, str]:
    source, target = _of_json(line, where) if line.lstrip().startswith("{") else _of_words(line, where)
    for what, text in (("source", source), ("target", target)):
        if not text.strip():
            raise FileError(f"{where}: the {what} is empty")
    return source, target


def _of_words(line: str, where: str) -> tuple[str, str]:
    source, tab, target = line.partition("\t")
    if not tab:
        raise FileError(f"{where}: expected source TAB target (or a JSON object), found no tab")
    if "\t" in target:
        raise FileError(f"{where}: more than one tab; a JSON object with source and target can hold such texts")
    return source, target


def _of_json(line: str, where: str) -> tuple[str, str]:
    value = json_line(line, where)
    source, target = value.get("source"), value.get("target")
    if not isinstance(source, str) or not isinstance(target, str):
        raise FileError(f'{where}: expected a JSON object with "source" and "target", both texts')
    return source, target
