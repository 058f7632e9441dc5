"""Keys set in a run file as it stands: comments, order and all other lines stay, and the file is replaced by rename."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitp.errors import ConfigError
from mpitp.files import replace_file
from mpitp.plan.machine_file import toml_value
from mpitp.text import decode_text

Keys = Mapping[str, Mapping[str, Any]]
Dropped = Mapping[str, Sequence[str]]
DROPPED: Dropped = {
    "mesh": ("stages", "chunks", "schedule", "plan", "ep")
}  # of an earlier layout, where the new one doesn't have them


def edit_run_file(path: Path, keys: Keys, dropped: Dropped = DROPPED) -> None:
    """Set `keys` (section: key: value), and leave out those of `dropped` (section: keys) that aren't among them.

    Lines end as most of them did, in Windows' way too. Raises ConfigError, with the lines to write by hand, where the
    file is written in another way than sections of lines, or tables on a line each (`train = {steps = 5}`).
    """
    try:
        found = decode_text(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror or error}") from error
    before = found.replace("\r\n", "\n")
    end = "\r\n" if found.count("\r\n") * 2 > found.count("\n") else "\n"
    after = before
    for section, values in keys.items():
        for name in dropped.get(section, ()):
            if name not in values:
                after = _without(after, section, name)
        for name, value in values.items():
            after = _with(after, section, name, toml_value(value))
    if not _is_as_wished(before, after, keys, dropped):
        wished = "\n".join(f"[{section}]\n{_lines(values)}" for section, values in keys.items())
        raise ConfigError(
            f"{path} has these keys in another form than a line each below [section], or a table on one line; "
            f"write there:\n{wished}"
        )
    replace_file(path, after.replace("\n", end))


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name} = {toml_value(value)}" for name, value in values.items())


def _span(text: str, section: str) -> tuple[int, int] | None:
    """Where the lines of a section stand."""
    head = re.search(rf"^[ \t]*\[[ \t]*{section}[ \t]*\][ \t]*(#.*)?$\n?", text, re.MULTILINE)
    if head is None:
        return None
    following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, head.end())
    return head.end(), following.start() if following else len(text)


def _line(text: str, section: str, name: str) -> re.Match[str] | None:
    span = _span(text, section)
    pattern = re.compile(rf"^([ \t]*{name}[ \t]*=[ \t]*)([^\n#]*?)([ \t]*(?:#[^\n]*)?)$", re.MULTILINE)
    return pattern.search(text, *span) if span else None


def _table(text: str, section: str) -> re.Match[str] | None:
    """The line `section = {...}` above all sections: its beginning, what is between the braces, its end."""
    head = re.search(r"^[ \t]*\[", text, re.MULTILINE)
    pattern = re.compile(rf"^([ \t]*{section}[ \t]*=[ \t]*\{{)([^\n]*)(\}}[ \t]*(?:#[^\n]*)?)$", re.MULTILINE)
    return pattern.search(text, 0, head.start() if head else len(text))


def _in_table(table: re.Match[str], name: str, value: str | None) -> str:
    """The text with `name` set between the table's braces, or left out (None)."""
    entries = re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,"'\[{])+""", table[2])
    kept = [entry.strip() for entry in entries if entry.strip()]
    at = [entry.partition("=")[0].strip() for entry in kept]
    mine = [] if value is None else [f"{name} = {value}"]
    i = at.index(name) if name in at else len(kept)
    kept[i : i + 1] = mine
    return table.string[: table.start(2)] + ", ".join(kept) + table.string[table.end(2) :]


def _without(text: str, section: str, name: str) -> str:
    if table := _table(text, section):
        return _in_table(table, name, None)
    line = _line(text, section, name)
    return text if line is None else text[: line.start()] + text[line.end() + 1 :]


def _with(text: str, section: str, name: str, value: str) -> str:
    if table := _table(text, section):
        return _in_table(table, name, value)
    if line := _line(text, section, name):
        return text[: line.start()] + line[1] + value + line[3] + text[line.end() :]
    span = _span(text, section)
    if span is None:
        return text.rstrip("\n") + f"\n\n[{section}]\n{name} = {value}\n"
    at = span[0]  # behind the last line that is a key's: a comment before the next section is that one's
    for line in re.finditer(r"^[ \t]*[^#\s][^\n]*(\n|\Z)", text[span[0] : span[1]], re.MULTILINE):
        at = span[0] + line.end()
    start = "" if text[:at].endswith("\n") else "\n"
    return f"{text[:at]}{start}{name} = {value}\n{text[at:]}"


def _is_as_wished(before: str, after: str, keys: Keys, dropped: Dropped) -> bool:
    """Whether what was written is the same file but for these keys."""
    try:
        wished, found = tomllib.loads(before), tomllib.loads(after)
    except ValueError:
        return False
    for section, values in keys.items():
        table = wished.setdefault(section, {})
        for name in dropped.get(section, ()):
            table.pop(name, None)
        table.update(values)
    return wished == found
