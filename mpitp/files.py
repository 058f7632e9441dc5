"""Reading and publishing files safely: what is read is of a kind and a size that can be read; what is published is
written beside its place under another name, made durable, then put there by one rename.

A reader, or a run that comes after a crash, sees either the old file or directory or the whole new one, never a half.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import grp
import json
import os
import pwd
import re
import shutil
import signal
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mpitp.errors import FileError
from mpitp.text import decode_text

Pipes = Literal["refused", "opened", "any"]
MOST_JSON_BYTES = 1 << 28  # far more than any config, index or tokenizer has


def os_failure(doing: str, path: str | os.PathLike[str], error: OSError) -> FileError:
    """The FileError for an operating system error: what was being done, on which path, and what the system said.

    Where a right is missing, it says whose file or folder it is, and what its owner can do.
    """
    owner = _whose(Path(path), os.R_OK if doing == "read" else os.W_OK) if isinstance(error, PermissionError) else ""
    return FileError(f"can't {doing} {os.fspath(path)}: {error.strerror or error}{owner}")


def _whose(path: Path, right: int) -> str:
    """The owner of the file or folder to which the right is missing; "" where it isn't known or is this user."""
    for place in (path, *path.absolute().parents):
        try:
            found = place.stat()
        except OSError:  # not there, or not to be seen: then the folder above says why
            continue
        if os.access(place, right | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0)):
            continue
        if found.st_uid == os.geteuid():
            return f" ({place} is yours, with mode {stat.filemode(found.st_mode)})"
        return (
            f" ({place} belongs to {user_name(found.st_uid)}, group {_group_name(found.st_gid)}, mode "
            f"{stat.filemode(found.st_mode)}; you are {user_name(os.geteuid())}): its owner can open it to the group "
            f"(chmod g+{'r' if right == os.R_OK else 'w'} {place}; a umask of 002 does so from the beginning), or "
            "choose another place"
        )
    return ""


def user_name(number: int) -> str:
    """What a user is called; the number of one without a name, as in a container."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a new file and wait until it is on the disk. OSErrors become FileErrors that name the file."""
    # names that aren't UTF-8 come as lone surrogates: escaped, as JSON has it, they stay what they are
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
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


_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_HANDED_OPEN = re.compile(r"/dev/(fd/\d+|stdin)|/proc/[^/]+/fd/\d+")


def is_handed_open(path: str) -> bool:
    """Whether a path stands for what this process was handed open, as a shell's `<(...)` does: no other can open it."""
    return _HANDED_OPEN.fullmatch(path) is not None


def check_regular(path: str | os.PathLike[str], pipes: Pipes = "refused") -> os.stat_result:
    """What the system says of a file; FileError for a device, a pipe or a socket, OSError where there is none.

    Opening a device can do things, opening a pipe by its name waits for its writer, and reading from either may never
    end. `pipes`: "opened" lets those pass that this process was handed open (as a shell's `<(...)`), "any" all.
    """
    found = os.stat(path)
    is_opened = is_handed_open(os.fspath(path))
    if stat.S_ISFIFO(found.st_mode) and (pipes == "any" or (pipes == "opened" and is_opened)):
        return found
    for is_kind, words in _SPECIAL:
        if is_kind(found.st_mode):
            raise FileError(f"{os.fspath(path)} is {words}, expected a regular file{_pipe_cure(words, path)}")
    return found


def _pipe_cure(words: str, path: str | os.PathLike[str]) -> str:
    return f": write what comes from it to one (cat {os.fspath(path)} > FILE)" if words == "a pipe" else ""


def read_regular(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES, pipes: Pipes = "refused") -> bytes:
    """The whole of a regular file; FileError for one of another kind or beyond `most_bytes`, and OSErrors as they come.

    The limit is held by counting: files that the system makes up (as in /proc) say that they have 0 bytes.
    """
    check_regular(path, pipes)
    content = bytearray()
    with open(path, "rb", buffering=0) as file:
        while len(content) <= most_bytes and (piece := file.read(1 << 20)):
            content += piece
    if len(content) > most_bytes:
        raise FileError(f"{os.fspath(path)} has more than {most_bytes} bytes, the most that is read of such a file")
    return bytes(content)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a FileError names the file and, where it isn't JSON, the line."""
    try:
        value = json.loads(decode_text(read_regular(path), path))
    except OSError as error:
        raise os_failure("read", path, error) from error
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
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


def check_place(path: str | os.PathLike[str], doing: str) -> None:
    """Raise FileError, before anything is computed, where a file can't be written to `path`; `doing`: as "draw to"."""
    path = Path(path)
    if path.is_dir():
        raise FileError(f"can't {doing} {path}: it is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise FileError(f"can't {doing} {path}: {path.parent} doesn't exist or can't be written")


def check_target(target: Path, overwrite: bool, patterns: Sequence[str]) -> None:
    """Refuse a target that exists, unless it is an empty directory or may be overwritten.

    Only a directory in which every name fits one of `patterns` is overwritten: a slip of the path must not replace
    somebody's home directory, nor a file that was put beside ours.
    """
    if not os.path.exists(target):
        return
    if os.path.ismount(target):
        raise FileError(
            f"{target} is where a file system begins, which can't be replaced as a whole; name a folder inside it"
        )
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

    One that was killed between the two renames of `publish` has left no target: then the old one gets its name back.
    Call it only where no other process can be doing that now.
    """
    target = _behind_links(target)
    for old in target.parent.glob(f".{target.name}.*.old"):
        is_whole = old.is_dir() and not old.is_symlink() and any(old.iterdir())
        if is_whole and not os.path.lexists(target):
            old.rename(target)
        else:
            discard(old)
    for leftover in target.parent.glob(f".{target.name}.*.partial"):
        discard(leftover)


def make_staging(target: Path, overwrite: bool = False, patterns: Sequence[str] = ()) -> Path:
    """A new empty directory beside `target`, to be filled and then given to `publish` or `discard`.

    Of a link it is beside the place that the link leads to: there the new one will lie, and the link stays. Folders
    above it that aren't there are made; `folders_to_make` tells them beforehand.
    """
    made = folders_to_make(target)
    try:
        place = _behind_links(target)
        staging = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.partial")
        check_target(target, overwrite, patterns)
        if place.parent.exists() and not place.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        place.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        remove_empty(made)
        raise os_failure("create", target, error) from error
    return staging


def folders_to_make(target: Path) -> list[Path]:
    """The folders above `target`, or above what it links to, that aren't there, the innermost first: what goes again
    (`remove_empty`) where nothing comes of the target.
    """
    return [folder for folder in Path(os.path.realpath(target)).parents if not os.path.lexists(folder)]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first; those that something lies in stay."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def scratch_beside(target: Path, prefix: str) -> Iterator[Path]:
    """A folder for what is needed until `target` is there, on its disk; it goes at the end. On an error no folder stays
    that was made for it.
    """
    place, made = Path(os.path.realpath(target)).parent, folders_to_make(target)
    try:
        try:
            place.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=place, prefix=prefix))
        except OSError as error:
            raise os_failure("create", target, error) from error
        try:
            yield scratch
        finally:
            discard(scratch)
    finally:
        remove_empty(made)


def _behind_links(target: Path) -> Path:
    """The place that is meant: a user's link to another disk is where things go, never what is replaced."""
    place = Path(os.path.realpath(target))
    if place.is_symlink():
        raise FileError(f"{target} is a link that leads back to itself")
    return place


def publish(staging: Path, target: Path) -> None:
    """Put the filled `staging` in the place of `target`, or of what that links to.

    What was there goes only when the new one is whole.
    """
    place = _behind_links(target)
    old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.old")
    sync_directory(staging)
    try:
        kept = os.path.lexists(place)
        if kept:
            place.rename(old)
        try:
            staging.rename(place)
        except OSError:
            if kept:
                old.rename(place)
            raise
    except OSError as error:
        raise os_failure("publish", target, error) from error
    sync_directory(place.parent)
    if kept:
        shutil.rmtree(old, ignore_errors=True)  # the new one is published: what stays of the old takes room, no more


def replace_file(target: Path, content: bytes | str) -> None:
    """Write bytes or a text under a name of its own and put it in the place of `target`, or of what that links to, by
    rename.

    Who may read it stays as it was.
    """
    replace_by(target, lambda staging: write_file(staging, content))


def replace_by(target: Path, write: Callable[[Path], None]) -> None:
    """The same of a file that `write` makes under the name it is given."""
    place = _behind_links(target)
    staging = place.with_name(f".{place.name[:200]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        write(staging)
        if place.exists():
            shutil.copymode(place, staging)
        staging.rename(place)
    except OSError as error:
        raise os_failure("write", target, error) from error
    finally:
        staging.unlink(missing_ok=True)


def discard(staging: Path) -> None:
    """Remove a staging directory that won't be published, as far as that is possible.

    It comes after an error, which must not give way to another one, or for leftovers, which are in nobody's way.
    """
    if staging.is_symlink():
        with contextlib.suppress(OSError):
            staging.unlink()
    else:
        shutil.rmtree(staging, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a link (never what it leads to) or a whole directory. Raises FileError for what stays."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise os_failure("remove", _whole_path(path, error.filename), error) from error


def _whole_path(directory: Path, told: str | None) -> Path:
    """The path that a failed removal is about: below a directory the system tells the last part of it alone."""
    if told is None or os.path.isabs(told):
        return Path(told or directory)
    return next(directory.rglob(glob.escape(Path(told).name)), directory)


@contextlib.contextmanager
def publishing(target: Path, overwrite: bool = False, patterns: Sequence[str] = ()) -> Iterator[Path]:
    """For one process: fill the directory given; it becomes `target` at the end, or is removed on any error, and when
    the process is asked to end (TERM, HUP).
    """
    made = folders_to_make(target)
    with _ending_in_order():
        staging = make_staging(target, overwrite, patterns)
        try:
            yield staging
            publish(staging, target)
        except BaseException:
            discard(staging)
            remove_empty(made)
            raise


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Signals that would end the process at once end it by SystemExit (128 + signal), so that it can clean up.

    Only those that nobody listens to already, and in the main thread, which alone gets signals.
    """

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    is_main = threading.current_thread() is threading.main_thread()
    unheard = [s for s in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(s) is signal.SIG_DFL]
    for each in unheard:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in unheard:
            signal.signal(each, signal.SIG_DFL)
