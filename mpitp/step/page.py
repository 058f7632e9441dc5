"""Films as one self-contained page: data, style and script in one file that loads nothing.

The parts lie in `web/` and are joined here: the script's in the order of `SCRIPTS`, in one scope.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mpitp.files import check_place, write_file
from mpitp.step.code import code_of, example_text, example_title, first_line_of, told_place
from mpitp.step.film import Film, Op
from mpitp.step.guide import EXAMPLES
from mpitp.step.products import products_of
from mpitp.step.questions import question_about
from mpitp.step.sends import CONJUGATES, schedules
from mpitp.step.tiny_model import tiny_model
from mpitp.step.tour import guide

SCRIPTS = (
    "base.js", "timeline.js", "mesh.js", "lights.js", "matrix.js", "sends.js", "collective.js", "arrays.js", "about.js",
    "walk.js", "predict.js", "sliders.js", "layouts.js", "tiny.js", "owntext.js", "present.js", "main.js",
)  # fmt: skip
MOST_RANKS = 8  # for which the sends of collectives are drawn, and to which the sliders go
_STYLE, _SCRIPT, _DATA = "/*STYLE*/", "/*SCRIPT*/", "/*DATA*/null"


@dataclass(frozen=True, slots=True)
class Start:
    """How the page opens: at operation `at`, with these breakpoints, asking before each step forwards or not."""

    at: int = 1
    breaks: tuple[str, ...] = ()
    predicts: bool = False


def check_page(path: Path) -> None:
    """Raise FileError, before anything is computed, when a page can't be written to `path`."""
    check_place(path, "write the page to")


def write_page(path: Path, films: Sequence[Film], start: Start = Start()) -> None:
    """Write the page. Raises FileError when it can't be written."""
    write_file(path, page_of(films, start))


def page_of(films: Film | Sequence[Film], start: Start = Start()) -> str:
    """The page as text; the first film is shown first. "</" in the data would end the script it stands in."""
    shown = [films] if isinstance(films, Film) else list(films)
    data = {
        "films": [_film(film) for film in shown],
        "start": {"at": start.at, "breaks": start.breaks, "predicts": start.predicts},
        "code": {op.code: _code(op.code) for film in shown for op in film.ops},
        "chapters": EXAMPLES,
        "examples": _examples(shown),
        "schedules": {ranks: schedules(ranks) for ranks in range(1, max(MOST_RANKS, *(f.ranks for f in shown)) + 1)},
        "conjugates": CONJUGATES,
        "most_ranks": MOST_RANKS,
        "tiny": tiny_model(),
        "layouts": json.loads(_part("layouts.json")),
    }
    page = _part("page.html")
    text = json.dumps(data, separators=(",", ":"), sort_keys=False).replace("</", "<\\/")
    script = "\n".join(_part(name) for name in SCRIPTS)
    for place, filling in ((_STYLE, _part("style.css")), (_SCRIPT, script), (_DATA, text)):
        assert page.count(place) == 1
        page = page.replace(place, filling)
    return page


def _part(name: str) -> str:
    return resources.files("mpitp.step").joinpath("web", name).read_text(encoding="utf-8")


def _code(place: str) -> dict[str, Any]:
    """Lines of the library, and where they stand."""
    return {"text": code_of(place), "first": first_line_of(place), "place": told_place(place)}


def _examples(films: Sequence[Film]) -> dict[str, dict[str, str]]:
    """The scripts that teach what these films show."""
    names = {name for film in films for op in film.ops for name in guide(op).examples}
    return {name: {"text": example_text(name), "title": example_title(name)} for name in sorted(names)}


def _film(film: Film) -> dict[str, Any]:
    """With what only the page tells."""
    shown = film.as_dict()
    for op, plain in zip(film.ops, shown["ops"], strict=True):
        told = guide(op)
        plain |= {"question": _question(op), "chapter": told.chapter, "why": told.why, "without": told.without}
        plain["products"] = [asdict(each) for each in products_of(op.equation, [array.name for array in op.arrays])]
    return shown


def _question(op: Op) -> dict[str, Any]:
    """What predict mode asks before this operation."""
    asked = question_about(op)
    told = {"text": asked.text, "right": asked.right, "answer": asked.answer}
    return told | {"form": asked.form.pattern, "hint": asked.hint}
