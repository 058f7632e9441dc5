"""Publishing files safely: written beside their place under another name, made durable, then put there by one rename.

A reader, or a run that comes after a crash, sees either the old file or directory or the whole new one, never a half.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpitp.errors import FileError


def os_failure(doing: str, path: str | os.PathLike[str], error: OSError) -> FileError:
    """The FileError for an operating system error: what was being done, on which path, and what the system said."""
    return FileError(f"can't {doing} {os.fspath(path)}: {error.strerror or error}")


def write_file(path: Path, content: bytes | str) -> None:
    """Write a new file and wait until it is on the disk. OSErrors become FileErrors that name the file."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise os_failure("write", path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a final newline."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a FileError names the file and, where it isn't JSON, the line."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise os_failure("read", path, error) from error
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 are both ValueErrors
        raise FileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path} must hold a JSON object ({{...}}), but holds a {type(value).__name__}")
    return value


def sync_file(path: Path) -> None:
    """Wait until what was written to a file is on the disk, whoever wrote it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise os_failure("write", path, error) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; file systems that can't are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_target(target: Path, overwrite: bool, patterns: Sequence[str]) -> None:
    """Refuse a target that exists, unless it is an empty directory or may be overwritten.

    Only a directory in which every name fits one of `patterns` is overwritten: a slip of the path must not replace
    somebody's home directory, nor a file that was put beside ours.
    """
    if not os.path.lexists(target):
        return
    names = sorted(path.name for path in target.iterdir())  # NotADirectoryError for a file
    if names and not overwrite:
        raise FileError(f"{target} exists and is not empty; choose another place, or replace it (--overwrite)")
    strange = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if strange:
        raise FileError(
            f"{target} holds {strange[0]}, which isn't of what is about to be written; it won't be overwritten"
        )


def discard_leftovers(target: Path) -> None:
    """Remove what a process that was killed while it filled or published `target` has left beside it.

    Call it only where no other process can be doing that now.
    """
    for pattern in (f".{target.name}.*.partial", f".{target.name}.*.old"):
        for leftover in target.parent.glob(pattern):
            discard(leftover)


def make_staging(target: Path, overwrite: bool = False, patterns: Sequence[str] = ()) -> Path:
    """A new empty directory beside `target`, to be filled and then given to `publish` or `discard`."""
    target = Path(os.path.abspath(target))
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        check_target(target, overwrite, patterns)
        if target.parent.exists() and not target.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise os_failure("create", target, error) from error
    return staging


def publish(staging: Path, target: Path) -> None:
    """Put the filled `staging` in the place of `target`; what was there goes only when the new one is whole."""
    target = Path(os.path.abspath(target))
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    sync_directory(staging)
    try:
        kept = os.path.lexists(target)
        if kept:
            target.rename(old)
        try:
            staging.rename(target)
        except OSError:
            if kept:
                old.rename(target)
            raise
    except OSError as error:
        raise os_failure("publish", target, error) from error
    sync_directory(target.parent)
    if kept:
        shutil.rmtree(old, ignore_errors=True)


def discard(staging: Path) -> None:
    """Remove a staging directory that won't be published."""
    shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def publishing(target: Path, overwrite: bool = False, patterns: Sequence[str] = ()) -> Iterator[Path]:
    """For one process: fill the directory given; it becomes `target` at the end, or is removed on any error."""
    staging = make_staging(target, overwrite, patterns)
    try:
        yield staging
        publish(staging, target)
    except BaseException:
        discard(staging)
        raise
