"""A value that someone gave, in the type of its key; and how types and values are said in messages."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

Table = tuple[tuple[float, ...], ...]  # rows of numbers
Shares = str | dict[str, tuple[float, ...]]  # a word, or weights of the ranks by axis
SHARED_AXES = ("pp", "dp", "ep", "tp")
MOST_WHOLE = 2**63 - 1  # as TOML has it
MOST_NUMBER = sys.float_info.max


def kinds_of(wanted: Any) -> tuple[Any, ...]:
    """What a key of type `wanted` takes: the type itself, or the parts of a union such as `int | None`."""
    is_union = isinstance(wanted, types.UnionType) and wanted != Shares
    return typing.get_args(wanted) if is_union else (wanted,)


def convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`, or None where it isn't one. Integers count as floats; booleans are never numbers."""
    if kind == tuple[str, ...]:
        are_words = isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)
        return tuple(value) if are_words else None
    if kind == tuple[int, ...]:
        counts = [convert(x, int) for x in value] if isinstance(value, list | tuple) else [None]
        return None if None in counts else tuple(counts)
    if kind == Table:
        rows = [_floats(row) for row in value] if isinstance(value, list | tuple) else [None]
        return None if None in rows else tuple(rows)
    if kind == Shares:
        return _shares(value)
    if typing.get_origin(kind) is tuple:
        numbers = _floats(value)
        return numbers if numbers is not None and len(numbers) == len(typing.get_args(kind)) else None
    if isinstance(value, bool) and kind is not bool:
        return None
    if kind is float:
        return float(value) if isinstance(value, int | float) and abs(value) <= MOST_NUMBER else None
    if kind is int and isinstance(value, int) and not -MOST_WHOLE <= value <= MOST_WHOLE:
        return None
    return value if isinstance(value, kind) else None


def _floats(value: Any) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple):
        return None
    numbers = [number for x in value if (number := convert(x, float)) is not None]
    return tuple(numbers) if len(numbers) == len(value) else None


def _shares(value: Any) -> Shares | None:
    """A list alone is that of tp."""
    if isinstance(value, str):
        return value if value in ("equal", "measured") else None
    if not isinstance(value, Mapping):
        value = {"tp": value}
    found = {axis: _floats(own) for axis, own in value.items()}
    return None if set(found) - set(SHARED_AXES) or not all(found.values()) else found  # type: ignore[return-value]


def type_words(kind: Any) -> str:
    """What a value of this kind is called: "a whole number"."""
    if kind == tuple[str, ...]:
        return "a list of words"
    if kind == tuple[int, ...]:
        return "a list of whole numbers"
    if kind == Table:
        return "a list of rows of numbers"
    if kind == Shares:
        axes = ", ".join(SHARED_AXES)
        return f'"equal", "measured", a list of one weight for each rank along tp, or such lists for {axes} in a table,'
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))} numbers"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
    return words[kind]


def type_hint(value: Any, kind: Any) -> str:
    """How a value that is nearly one of this kind has to be written; empty for what isn't near."""
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= MOST_WHOLE:
        return f", written {int(value)}"
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_WHOLE:
        return ", below 2^63"
    return ""


def show(value: Any) -> str:
    """A value as a run file would have it, cut to 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = f'"{value}"' if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "a whole number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
