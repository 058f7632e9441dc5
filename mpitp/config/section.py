"""A section of keys: a frozen dataclass that checks every value when it is made, in Python or from a table."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from mpitp.config.rules import Rule
from mpitp.config.values import convert, kinds_of, show, type_hint, type_words
from mpitp.errors import ConfigError


def key(help: str, default: Any = dataclasses.MISSING, rule: Rule | None = None, *, is_path: bool = False) -> Any:
    """A dataclass field with its one-line meaning and its rule; without a default the key is required."""
    return dataclasses.field(default=default, metadata={"help": help, "rule": rule, "is_path": is_path})


class Section:
    """Checks every field of a section against its type and rule, once, when it is made."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        types_by_name = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "rule" not in field.metadata:
                continue
            label = f"{self.section}.{key_name(field)}"
            value = _checked(label, getattr(self, field.name), types_by_name[field.name], field)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Rules that involve several keys; a section without such rules keeps this one."""

    @classmethod
    def take_extras(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What a table has beside the section's keys, taken out of `values`, as arguments; most sections take none."""
        return {}


def make_section(cls: type[Section], table: Mapping[str, Any]) -> Section:
    """A checked section from its table, as TOML gives it. Raises ConfigError for unknown, missing and wrong keys."""
    known = {key_name(field): field for field in own_fields(cls)}
    values = dict(table)
    arguments = cls.take_extras(values)
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown key {cls.section}.{name}{nearest(name, known)}; {listed('keys', known)}")
    arguments.update({known[name].name: value for name, value in values.items()})
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{cls.section}.{name} is missing: {field.metadata['help']}")
    return cls(**arguments)


def keys_of(cls: type[Section], wanted: Callable[[dataclasses.Field[Any], Any], bool]) -> list[str]:
    """The keys of a section whose field and type `wanted` accepts."""
    hints = typing.get_type_hints(cls)
    return [key_name(field) for field in own_fields(cls) if wanted(field, hints[field.name])]


def own_fields(cls: type[Section]) -> list[dataclasses.Field[Any]]:
    """The fields of a section that are keys, in order."""
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]  # type: ignore[arg-type]


def key_name(field: dataclasses.Field[Any]) -> str:
    """What a field is called in a run file."""
    return field.name.rstrip("_")  # `from` is a word of Python, so its field is `from_`


def _checked(label: str, value: Any, wanted: Any, field: dataclasses.Field[Any]) -> Any:
    """The value in its field's type, or a ConfigError that says what was expected and what came."""
    rule: Rule | None = field.metadata["rule"]
    kind, *others = kinds_of(wanted)
    if value is None and types.NoneType in others:
        return None
    converted = convert(value, kind)
    if converted is None or (rule and not rule.holds(converted)):
        expected = type_words(kind) + (f" {rule.words}" if rule else "")
        raise ConfigError(
            f"{label} = {show(value)}: expected {expected}{type_hint(value, kind)} ({field.metadata['help']})"
        )
    return converted


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: which known one is meant, where one is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f': did you mean "{close[0]}"?' if close else ""


def listed(what: str, known: Iterable[str]) -> str:
    """All known names, for a message about an unknown one."""
    return f"known {what} are {', '.join(known)}"
