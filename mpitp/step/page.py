"""The film as one self-contained page: data, style and script in one file that loads nothing."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

from mpitp.errors import FileError
from mpitp.files import write_file
from mpitp.step.film import Film

_PLACE = "/*FILM*/null"


def check_page(path: Path) -> None:
    """Raise FileError, before anything is computed, when a page can't be written to `path`."""
    if path.is_dir():
        raise FileError(f"can't write the page to {path}: it is a directory")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"can't write the page to {path}: {path.parent} doesn't exist or can't be written")


def write_page(path: Path, film: Film) -> None:
    """Write the page. Raises FileError when it can't be written."""
    write_file(path, page_of(film))


def page_of(film: Film) -> str:
    """The page as text. "</" in the data would end the script it stands in."""
    data = json.dumps(film.as_dict(), separators=(",", ":")).replace("</", "<\\/")
    template = resources.files("mpitp.step").joinpath("page.html").read_text(encoding="utf-8")
    assert template.count(_PLACE) == 1
    return template.replace(_PLACE, data)
