"""The one way in which text is read: UTF-8, a byte order mark skipped; what else it is, is named with the cure.

Config files, run files, prompts and texts come from editors and systems that write UTF-16, or are still compressed.
Some of that is valid UTF-8 by chance (UTF-16 without a mark: letters with NULs between), and would be read as nonsense.
"""

from __future__ import annotations

import os
import re

from mpitp.errors import FileError

MARK = "\ufeff"
SAMPLE_BYTES = 4096  # at the beginning, by which the kind of a file is told

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -c"),
    b"BZh": ("bzip2", "bunzip2 -c"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
_WIDE_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f]")  # control characters that texts don't have


def decode_text(content: bytes, name: str | os.PathLike[str]) -> str:
    """The text of a file called `name` in messages. Raises FileError for what isn't UTF-8, with the place."""
    check_encoding(content[:SAMPLE_BYTES], name)
    try:
        return content.decode().removeprefix(MARK)
    except UnicodeDecodeError as error:
        raise not_utf8(name, error.reason, error.start, content[error.start]) from error


def check_encoding(start: bytes, name: str | os.PathLike[str]) -> None:
    """Raise FileError where the first bytes of a file show that it is compressed, or in UTF-16 or UTF-32."""
    path = os.fspath(name)
    for magic, (kind, tool) in _COMPRESSED.items():
        if start.startswith(magic):
            raise FileError(f"{path} is compressed ({kind}), expected plain text; unpack it: {tool} {path} > NEW")
    if wide := _wide_encoding(start):
        raise FileError(f"{path} is {wide} text, expected UTF-8; convert it: iconv -f {wide} -t UTF-8 {path} > NEW")


def not_utf8(name: str | os.PathLike[str], reason: str, position: int, byte: int) -> FileError:
    """The error for a byte that is no UTF-8."""
    return FileError(
        f"{os.fspath(name)} is not UTF-8: {reason} at byte {position} (0x{byte:02x}); convert it, for example by "
        "`iconv -f latin1 -t utf-8`"
    )


def lines_of(text: str) -> list[str]:
    """The lines of a text, cut at line feeds alone, each without a carriage return at its end.

    Python's own splitlines cuts at form feeds, U+0085, U+2028 and others too, which are characters of a line here.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _wide_encoding(start: bytes) -> str | None:
    """The encoding of two or four bytes a character that the first bytes show, by a mark or by what text never has."""
    for mark, name in _WIDE_MARKS.items():
        if start.startswith(mark):
            return name
    if len(start) >= 8 and any(start):  # zeros alone are no text at all
        for name, empty in (("UTF-32LE", (2, 3)), ("UTF-32BE", (0, 1))):
            if all(start[place::4].count(0) == len(start[place::4]) for place in empty):
                return name
    even, odd = (len(_NO_TEXT.findall(start[parity::2])) for parity in (0, 1))
    half = len(start) / 2
    if odd >= max(2, 0.1 * half) and even <= 0.01 * half:
        return "UTF-16LE"
    if even >= max(2, 0.1 * half) and odd <= 0.01 * half:
        return "UTF-16BE"
    return None
