"""Reading a run file: one TOML file, changed by `--set`, its paths expanded; every mistake is one ConfigError."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitp.config import MOST_WHOLE, SECTIONS, RunConfig, keys_of, run_config_from
from mpitp.errors import ConfigError, FileError
from mpitp.files import Pipes, read_regular
from mpitp.paths import encodable, expand_path
from mpitp.text import decode_text

MOST_BYTES = 1 << 24


def load_run_config(path: str | Path, overrides: Sequence[str] = (), *, ranks: int = 1) -> RunConfig:
    """Read a run file and apply overrides such as "train.steps=100".

    `ranks`: how many processes read it. One can read it from a pipe that it was handed open, as a shell's `<(...)`.
    """
    tables = _read_tables(path, pipes="opened" if ranks == 1 else "refused")
    for override in overrides:
        _apply_override(tables, override)
    try:
        return _checked(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def make_run_config(tables: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A run without a file, from the tables that one would have."""
    for override in overrides:
        _apply_override(tables, override)
    return _checked(tables)


def _checked(tables: dict[str, Any]) -> RunConfig:
    _check_whole_numbers(tables)
    _expand_paths(tables)
    return run_config_from(tables)


def _read_tables(path: str | Path, pipes: Pipes) -> dict[str, Any]:
    try:
        content = read_regular(path, MOST_BYTES, pipes)
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror or error}") from error
    except FileError as error:
        raise ConfigError(f"the run file: {error}") from error
    try:
        return tomllib.loads(decode_text(content, path))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a whole number of thousands of digits, ...
        raise ConfigError(f"{path} is not a TOML file: {error}") from error


def _check_whole_numbers(value: Any, label: str = "") -> None:
    """TOML's whole numbers have 64 bits; Python's reader takes any."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_whole_numbers(inner, f"{label}.{name}" if label else name)
    elif isinstance(value, list):
        for inner in value:
            _check_whole_numbers(inner, label)
    elif isinstance(value, int) and not -MOST_WHOLE <= value <= MOST_WHOLE:
        raise ConfigError(f"{label}: a whole number of {value.bit_length()} bits; expected one below 2^63")


def _expand_paths(tables: dict[str, Any]) -> None:
    """Replace `~` and `$NAME` in the values of all keys that are paths."""
    for section, cls in SECTIONS.items():
        table = tables.get(section)
        for name in keys_of(cls, lambda field, kind: field.metadata["is_path"]):
            if isinstance(table, dict) and isinstance(table.get(name), str):
                table[name] = _expanded(f"{section}.{name}", table[name])


def _expanded(label: str, path: str) -> str:
    try:
        return encodable(expand_path(path))
    except ValueError as error:
        raise ConfigError(f"{label} = {error}") from None


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is read as TOML, and as a bare string where it isn't TOML."""
    name, equals, text = override.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f'--set {override}: expected SECTION.KEY=VALUE, such as "train.steps=100"')
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
    table[parts[-1]] = _override_value(parts, text.strip())


def _override_value(parts: Sequence[str], text: str) -> Any:
    if _is_text_key(parts) and text[:1] not in ("'", '"'):
        return text  # a directory named 1 is still a directory
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, or a whole number of thousands of digits
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _is_text_key(parts: Sequence[str]) -> bool:
    cls = SECTIONS.get(parts[0])
    if cls is None or len(parts) != 2:
        return False
    return parts[1] in keys_of(cls, lambda field, kind: kind in (str, str | None))
