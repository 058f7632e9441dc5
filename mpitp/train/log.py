"""The loss log as a file: how many lines of which steps it has, and what is left out when steps are taken again."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from mpitp.errors import FileError
from mpitp.files import os_failure, write_file


def truncate_metrics(path: Path, step: int) -> None:
    """Leave out the lines of steps after `step`: they belong to steps that are lost and will be taken again."""
    path = Path(os.path.realpath(path))  # a link to a log elsewhere stays one
    temporary = path.with_suffix(".new")
    try:
        kept = _lines_up_to(path, step) if path.exists() else []
        write_file(temporary, "".join(f"{line}\n" for line in kept))
        temporary.rename(path)
    except OSError as error:
        raise os_failure("write", path, error) from error


def count_lines(path: Path, step: float = math.inf) -> int:
    """How many whole lines of steps up to `step` a log has; 0 for one that isn't there."""
    try:
        return len(_lines_up_to(path, step)) if path.is_file() else 0
    except OSError as error:
        raise os_failure("read", path, error) from error


def check_log(path: Path, step: int, lines: int, checkpoint: Path) -> None:
    """Raise FileError where a log has fewer than `lines` lines up to `step`, as it had when `checkpoint` was saved."""
    found = count_lines(path, step)
    if found < lines:
        raise FileError(
            f"{path} has {found} lines up to step {step}, but had {lines} when {checkpoint} was saved: it was removed, "
            f"cut, or is of another run. Bring it back, or begin a directory of its own: --resume {checkpoint} --set "
            "train.run_dir=ANOTHER"
        )


def _lines_up_to(path: Path, step: float) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.split("\n") if math.isfinite(own := _step_of(line)) and own <= step]


def _step_of(line: str) -> float:
    """The step of a line of the log; infinity for a line cut short when the run was killed."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf
