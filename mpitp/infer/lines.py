"""Texts from the command line, files and standard input, and lines to standard output; every mishap is one message."""

from __future__ import annotations

import mimetypes
import os
import sys
from typing import Any

from mpitp.comm.group import Group
from mpitp.errors import FileError, UsageError
from mpitp.files import os_failure, read_regular
from mpitp.text import decode_text, lines_of

MOST_BYTES = 1 << 28  # of a file with texts


def from_words(word: str) -> str:
    """A word of the command line; its UTF-8 bytes where the locale couldn't read them (LC_ALL=C)."""
    try:
        return os.fsencode(word).decode() if any(map(is_surrogate, word)) else word
    except UnicodeError:
        return word


def is_surrogate(character: str) -> bool:
    """Whether it stands for a byte that is no UTF-8."""
    return "\ud800" <= character <= "\udfff"


def read_lines(path: str, what: str) -> list[str] | FileError:
    """The lines of a file ("-": standard input), each a `what`, or the error to be raised on every rank."""
    if path == "-" and sys.stdin is None:
        return FileError("can't read standard input: it is closed")
    try:
        raw = sys.stdin.buffer.read() if path == "-" else read_regular(path, MOST_BYTES, "opened")
        lines = lines_of(decode_text(raw, "standard input" if path == "-" else path))
    except FileError as error:
        return error
    except OSError as error:
        return FileError(f"can't read {path}: {error.strerror}")
    return lines if lines else FileError(f"{path} holds no {what}; expected one a line")


def given_texts(words: list[str], file: str | None, group: Group) -> list[str]:
    """Texts given as words of the command line, or a line each in a file or standard input, which rank 0 reads; the
    same on every rank. A collective.
    """
    if file is None:
        lines: list[str] | FileError = [from_words(text) for text in words]
        _refuse_images(group.broadcast_object(next(filter(_is_image_file, words), None)))
    else:
        lines = group.broadcast_object(read_lines(file, "text") if group.rank == 0 else None)
    if isinstance(lines, FileError):
        raise lines
    for index, text in enumerate(lines):
        if not text.strip():
            raise UsageError(f"text {index + 1} is empty; every text needs some words")
        if any(map(is_surrogate, text)):
            raise UsageError(f"text {index + 1} is not UTF-8 text")
    return lines


def _is_image_file(word: str) -> bool:
    """Whether a text is the name of an image that is there, and so hardly meant as a text."""
    kind, _ = mimetypes.guess_type(word)
    return (kind or "").startswith("image/") and os.path.isfile(word)


def _refuse_images(found: str | None) -> None:
    if found is not None:
        raise UsageError(
            f"{found} is an image file, and this model reads texts; images go to mpitp classify with a vision "
            "transformer (vit, dinov2)"
        )


def write_out(text: str) -> None:
    """Print at once. Raises FileError where that can't be done, BrokenPipeError where the reader has left."""
    if sys.stdout is None:
        raise FileError("can't write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except UnicodeEncodeError as error:
        letter = error.object[error.start]
        raise FileError(
            f"can't write {ascii(letter)} to standard output, whose encoding is {error.encoding}: choose a UTF-8 "
            "locale, or set PYTHONIOENCODING=utf-8"
        ) from error
    except BrokenPipeError:
        raise  # the reader has left, as in `mpitp ... | head`
    except OSError as error:
        raise os_failure("write to", "standard output", error) from error


def takes_every_letter(stream: Any) -> bool:
    """Whether a stream writes UTF-8 or the like."""
    return (getattr(stream, "encoding", None) or "").lower().startswith("utf")
