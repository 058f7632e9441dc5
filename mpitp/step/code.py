"""The lines of code that an operation runs, and the examples that teach it, to be shown in place."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from functools import cache, reduce
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
EXAMPLES = PACKAGE.parent / "examples"  # beside the package in a checkout; an installed one has none


@cache
def code_of(place: str) -> str:
    """The source of "module:Class.method" without its docstring's indentation; "" where there is none to be had."""
    try:
        return textwrap.dedent(inspect.getsource(_found(place))).rstrip()
    except (ImportError, AttributeError, OSError, TypeError):
        return ""


@cache
def first_line_of(place: str) -> int:
    """The number of the source's first line in its file; 0 where there is none to be had."""
    try:
        return inspect.getsourcelines(_found(place))[1]
    except (ImportError, AttributeError, OSError, TypeError):
        return 0


def told_place(place: str) -> str:
    """As "mpitp/layers/linear.py, line 93: ColumnParallelLinear.forward"; where there is no source, the name alone."""
    module, _, path = place.partition(":")
    number = first_line_of(place)
    return f"{module.replace('.', '/')}.py, line {number}: {path}" if number else f"{module}, {path}"


@cache
def example_text(name: str) -> str:
    """The script of the course of that name; "" where it isn't at hand."""
    path = EXAMPLES / name
    return path.read_text(encoding="utf-8").rstrip() if path.is_file() else ""


def example_title(name: str) -> str:
    """The first line of its docstring, "01  Four ways to cut a product"; its name where it isn't at hand."""
    return example_text(name).partition("\n")[0].strip('". ') or name


def _found(place: str) -> Any:
    module, _, path = place.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(module))
