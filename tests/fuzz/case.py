"""A case, a reader, and what several readers need."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import damage_bytes, damage_json

ERRORS = (2, 3, 4, 5)


@dataclass
class Case:
    """One damaged input: where it lies, what was run, what that said, and what the whole input of the base gave."""

    folder: Path
    base: Path
    commands: list[list[str]]
    told: str = ""
    outputs: list[str] = field(default_factory=list)
    whole: Any = None  # what `Reader.result` gave for the base


@dataclass(frozen=True)
class Reader:
    """A kind of input. `damage` changes the case's folder (or commands) and says what it did in `told`.

    `result` is what the commands made, to be compared; `check` gives the faults of an input that was accepted.
    """

    name: str
    bases: tuple[str, ...]
    commands: tuple[str, ...]
    damage: Callable[[random.Random, Case], None]
    check: Callable[[Case], list[str]]
    result: Callable[[Case], Any] = lambda case: None
    codes: tuple[int, ...] = ERRORS
    asks_for_sizes: bool = False  # what is read says how large a model is made, so that memory may not suffice


def rewrite(path: Path, rng: random.Random, json_share: float = 0.75) -> str:
    """Damage a JSON file, as a document or as bytes."""
    content = path.read_bytes()
    if rng.random() >= json_share:
        path.write_bytes(damage_bytes(rng, content))
        return f"{path.name}: bytes"
    text, told = damage_json(rng, content.decode())
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"{path.name}: {told}"


def json_of(path: Path) -> Any:
    return json.loads(path.read_text("utf-8-sig"))


def tokens(case: Case) -> Any:
    return json.loads(case.outputs[-1])["tokens"]


def is_other_kind(before: Any, now: Any) -> bool:
    """Whether a value is of another type than is read there; whole numbers pass as numbers, null as the default."""
    if now is None or type(now) is type(before):
        return False
    return not (type(now) in (int, float) and type(before) is float)
