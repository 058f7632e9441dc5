"""The lines of code that an operation runs, to be shown in place."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from functools import cache, reduce


@cache
def code_of(place: str) -> str:
    """The source of "module:Class.method" without its docstring's indentation; "" where there is none to be had."""
    module, _, path = place.partition(":")
    try:
        found = reduce(getattr, path.split("."), importlib.import_module(module))
        return textwrap.dedent(inspect.getsource(found)).rstrip()
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
