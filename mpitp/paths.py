"""Paths as people write them: `~` and `$NAME` stand for what they stand for in a shell.

A shell expands them only where they stand alone and unquoted: not in `--model=~/m`, not in a run file, not in what
another program starts. Left as they are, they would become folders called `~` and `$HOME`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping

MOST_PATH_BYTES, MOST_NAME_BYTES = 4095, 255  # of Linux
_DOLLAR = re.compile(r"\$(?:\$|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)


def expand_path(path: str, environ: Mapping[str, str] = os.environ) -> str:
    """`path` with `~`, `~user`, `$NAME` and `${NAME}` replaced; `$$` is one dollar sign, any other `$` stays.

    Raises ValueError, in words for the user, for a variable that isn't set, or is empty, and for an unknown user.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if not environ.get(name):
            state = "empty" if name in environ else "not set"
            raise ValueError(f'"{path}": the variable {name} is {state}; set it, or write $$ where a $ is meant')
        return environ[name]

    home, rest = _split_home(path, environ)
    return _checked(home + _DOLLAR.sub(value, rest))


def path_option(path: str) -> str:
    """An option's path, expanded (for argparse: `type=path_option`)."""
    try:
        return expand_path(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def input_path(path: str) -> str:
    """A file to read, of which a shell's `*` may have given the name: as written where there is one, else expanded."""
    return path if os.path.lexists(path) else path_option(path)


def encodable(path: str) -> str:
    """A path that a file's text names, as the system takes it: by its UTF-8 bytes where the locale lacks a letter."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return os.fsdecode(path.encode(errors="surrogateescape"))
    return path


def _checked(path: str) -> str:
    """The path, if a file system can have it; else ValueError."""
    if "\0" in path:
        raise ValueError(f'"{path[:40]!a}": a path has no NUL character')
    if len(path.encode(errors="replace")) > MOST_PATH_BYTES:
        raise ValueError(f'"{path[:40]}...": a path has at most {MOST_PATH_BYTES} bytes')
    longest = max(path.split("/"), key=lambda name: len(name.encode(errors="replace")))
    if len(longest.encode(errors="replace")) > MOST_NAME_BYTES:
        raise ValueError(f'"...{longest[:40]}...": a name in a path has at most {MOST_NAME_BYTES} bytes')
    return path


def _split_home(path: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The home directory that a path begins with ("": none), and what follows."""
    if not path.startswith("~"):
        return "", path
    user, slash, rest = path.partition("/")
    home = environ["HOME"] if user == "~" and "HOME" in environ else os.path.expanduser(user)
    if not home or home == user:
        who = "the home directory isn't known (HOME)" if user == "~" else f"there is no user {user[1:]}"
        raise ValueError(f'"{path}": {who}; write ./{path} where a name that begins with ~ is meant')
    return home, slash + rest
