"""The film as one self-contained page: data, style and script in one file that loads nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mpitp.errors import FileError
from mpitp.files import write_file
from mpitp.step.film import Film, Op
from mpitp.step.questions import question_about

_PLACE, _MESH = "/*FILM*/null", "/*MESH*/"


@dataclass(frozen=True, slots=True)
class Start:
    """How the page opens: at operation `at`, with these breakpoints, asking before each step forwards or not."""

    at: int = 1
    breaks: tuple[str, ...] = ()
    predicts: bool = False


def check_page(path: Path) -> None:
    """Raise FileError, before anything is computed, when a page can't be written to `path`."""
    if path.is_dir():
        raise FileError(f"can't write the page to {path}: it is a directory")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"can't write the page to {path}: {path.parent} doesn't exist or can't be written")


def write_page(path: Path, film: Film, start: Start = Start()) -> None:
    """Write the page. Raises FileError when it can't be written."""
    write_file(path, page_of(film, start))


def page_of(film: Film, start: Start = Start()) -> str:
    """The page as text. "</" in the data would end the script it stands in."""
    shown = film.as_dict() | {"start": {"at": start.at, "breaks": start.breaks, "predicts": start.predicts}}
    for op, plain in zip(film.ops, shown["ops"], strict=True):
        plain["question"] = _question(op)
    data = json.dumps(shown, separators=(",", ":")).replace("</", "<\\/")
    template, mesh = (_resource(name) for name in ("page.html", "mesh.js"))
    assert template.count(_PLACE) == template.count(_MESH) == 1
    return template.replace(_MESH, mesh).replace(_PLACE, data)


def _resource(name: str) -> str:
    return resources.files("mpitp.step").joinpath(name).read_text(encoding="utf-8")


def _question(op: Op) -> dict[str, Any]:
    """What predict mode asks before this operation."""
    asked = question_about(op)
    told = {"text": asked.text, "right": asked.right, "answer": asked.answer}
    return told | {"form": asked.form.pattern, "hint": asked.hint}
