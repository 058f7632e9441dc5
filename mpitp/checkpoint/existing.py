"""The checkpoints that a run's directory holds: which they are, which is whole, which are set aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpitp.checkpoint.manifest import STATE, check_format, damage, refuse_newer_format
from mpitp.checkpoint.together import on_first_rank
from mpitp.comm.group import Group
from mpitp.errors import FileError
from mpitp.files import os_failure, read_json, remove

ASIDE = "aside-"  # before the name of a checkpoint that the run didn't go on from


def checkpoints(root: Path) -> list[Path]:
    """The directories that look like checkpoints, newest first; whether they are whole is another question."""
    found = [path for path in root.glob("step-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of, reverse=True)


def set_aside(paths: Sequence[Path]) -> None:
    """Rename checkpoints, so that a run that goes on from an earlier step doesn't mix with them."""
    for path in paths:
        target = path.with_name(f"{ASIDE}{path.name}")
        remove(target)
        try:
            path.rename(target)
        except OSError as error:
            raise os_failure("rename", path, error) from error


def newest_whole(root: Path, group: Group, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that matches its manifest; damaged ones are skipped with a notice. A collective.

    Raises FileError when the newest is of a format that this version doesn't know: it isn't damaged.
    """
    for path in group.broadcast_object(checkpoints(root)):
        on_first_rank(group, partial(refuse_newer_format, path))
        found = find_damage(path, group)
        if found is None:
            return path
        notice(f"{path} is skipped: {found}")
    return None


def find_damage(path: Path, group: Group) -> str | None:
    """What is wrong with a checkpoint; None: it is whole. Each rank checks its share of the chunks. A collective."""
    problem = None
    try:
        problem = damage(path, group.rank, group.size)
    except (FileError, OSError) as error:
        problem = str(error)
    return next((text for text in group.all_gather_objects(problem) if text is not None), None)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises FileError for a directory that is none, or of a newer format."""
    if not (path / STATE).exists():
        raise FileError(f"{path} holds no {STATE}, so it is no checkpoint of a training run")
    state = read_json(path / STATE)
    check_format(path / STATE, state.get("format"))
    if type(state.get("step")) is not int or state["step"] < 1:
        raise FileError(f"{path / STATE}: step is {state.get('step')!r}, expected a whole number of at least 1")
    named = max(step_of(path.resolve()), step_of(path.resolve(), ASIDE))
    if named >= 0 and named != state["step"]:
        raise FileError(
            f"{path / STATE} is of step {state['step']}, but the directory's name is of step {named}: it was renamed, "
            "or its files were mixed; give it the name that fits, or move it away"
        )
    return state


def step_of(path: Path, prefix: str = "") -> int:
    """The step of a directory's name behind `prefix`; -1: it isn't a checkpoint's."""
    digits = path.name.removeprefix(f"{prefix}step-")
    return int(digits) if digits.isascii() and digits.isdecimal() else -1


def directory_name(step: int) -> str:
    """What the directory of a step's checkpoint is called."""
    return f"step-{step:08}"
