"""Token files: `tokens.bin` (unsigned little-endian integers, mapped into memory) with a `manifest.json` beside it.

The manifest says dtype, count and vocabulary, and the tokenizer's own files lie in `tokenizer/`, so a directory of
prepared data is complete by itself. A file that doesn't match its manifest is refused when it is opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from mpitp.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from mpitp.errors import FileError
from mpitp.files import os_failure, read_json, write_json

TOKENS = "tokens.bin"
MANIFEST = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
FORMAT = "mpitp-tokens-1"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPOT_CHECKS = 4096  # ids looked at when a file is opened
READ_BYTES = 1 << 20
CHUNK_BYTES = 1 << 26  # what one checksum covers


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a token file holds."""

    format: str
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    sha256: str  # of tokens.bin
    tokenizer_sha256: str  # of tokenizer/tokenizer.json
    sources: tuple[str, ...]
    crc32: tuple[int, ...] = ()  # of each chunk of tokens.bin, so that several ranks can check it together


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenFile:
    """A directory of prepared data, open for reading. `tokens` is an array mapped from the file."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).exists():
            raise FileError(_no_manifest_message(self.directory))
        self.manifest = _read_manifest(self.directory / MANIFEST)
        self.path = self.directory / TOKENS
        self.tokens = _map_tokens(self.path, self.manifest)
        self._spot_check()

    def __len__(self) -> int:
        return self.manifest.num_tokens

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length as int64. Raises FileError for an id outside the vocabulary."""
        ids = self.tokens[start : start + length].astype(np.int64)
        assert len(ids) == length, "a window beyond the end of the file"
        self._check_ids(ids, start)
        return ids

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the text was prepared with."""
        tokenizer = load_tokenizer(self.directory / TOKENIZER_DIRECTORY)
        if tokenizer.sha256 != self.manifest.tokenizer_sha256:
            raise FileError(
                f"{self.directory}: the tokenizer in {TOKENIZER_DIRECTORY}/ isn't the one the text was prepared with"
            )
        if tokenizer.vocab_size != self.manifest.vocab_size:
            raise FileError(
                f"{self.directory / MANIFEST}: vocab_size is {self.manifest.vocab_size}, but the tokenizer in "
                f"{TOKENIZER_DIRECTORY}/ has {tokenizer.vocab_size} tokens"
            )
        return tokenizer

    def check_sum(self) -> None:
        """Read the whole file and compare its hash with the manifest's. Raises FileError where they differ."""
        found = _sums(self.path)[0]
        if found != self.manifest.sha256:
            raise FileError(
                f"{self.path} is damaged: its sha256 is {found}, the manifest says {self.manifest.sha256}; prepare the "
                "text again"
            )

    def check_share(self, share: int, shares: int) -> None:
        """Read one of `shares` parts of the file and compare it with the manifest; all of them are the whole file.

        A manifest of an earlier version has no sums of chunks: the first share is the whole file then.
        """
        if not self.manifest.crc32:
            return self.check_sum() if share == 0 else None
        with _reading(self.path) as file:
            for chunk in range(share, len(self.manifest.crc32), shares):
                file.seek(chunk * CHUNK_BYTES)
                if _crc_of_next_chunk(file) != self.manifest.crc32[chunk]:
                    raise FileError(
                        f"{self.path} is damaged: what comes from byte {chunk * CHUNK_BYTES} on doesn't match the "
                        "manifest; prepare the text again"
                    )

    def shares(self, share: int, shares: int) -> Iterator[np.ndarray]:
        """One of `shares` parts of the tokens, chunk by chunk; all of them are the whole file."""
        step = CHUNK_BYTES // self.tokens.itemsize
        for start in range(share * step, len(self.tokens), shares * step):
            yield self.tokens[start : start + step]

    def identity(self) -> tuple[int, ...]:
        """What tells the file from another one; equal on all hosts that share it. Raises FileError where it's gone."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise os_failure("read", self.path, error) from error
        return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    def _spot_check(self) -> None:
        step = max(1, len(self.tokens) // SPOT_CHECKS)
        self._check_ids(self.tokens[::step], 0)

    def _check_ids(self, ids: np.ndarray, start: int) -> None:
        if ids.size and int(ids.max()) >= self.manifest.vocab_size:
            raise FileError(
                f"{self.path} holds the token id {int(ids.max())} (at or after token {start}), but the "
                f"manifest says vocab_size={self.manifest.vocab_size}: the file is damaged or of another dtype"
            )


class TokenWriter:
    """Appends token ids to a new file; the directory exists and is published by the caller."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.path = directory / TOKENS
        self.vocab_size = vocab_size
        self.dtype = dtype_for(vocab_size)
        self.num_tokens = 0
        try:
            self._file = open(self.path, "xb")  # noqa: SIM115 (closed by close, or by the with statement)
        except OSError as error:
            raise os_failure("create", self.path, error) from error

    def append(self, ids: Any) -> None:
        """Write ids (a list or an array of integers) at the end. Raises FileError for one outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.vocab_size):
            raise FileError(f"token id {int(array.max())} is outside the vocabulary of {self.vocab_size}")
        try:
            self._file.write(array.astype(DTYPES[self.dtype]).tobytes())
        except OSError as error:
            raise os_failure("write", self.path, error) from error
        self.num_tokens += len(array)

    def close(self) -> None:
        """Wait until all is on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise os_failure("write", self.path, error) from error
        finally:
            self._file.close()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def split_tail(directory: Path, tail_directory: Path, dtype: str, num_tail: int) -> None:
    """Move the last `num_tail` tokens of directory's file into a new file of `tail_directory`."""
    path = directory / TOKENS
    try:
        with open(path, "r+b") as source, open(tail_directory / TOKENS, "xb") as tail:
            start = source.seek(0, os.SEEK_END) - num_tail * DTYPES[dtype].itemsize
            source.seek(start)
            while chunk := source.read(READ_BYTES):
                tail.write(chunk)
            source.truncate(start)
            for file in (source, tail):
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise os_failure("split", path, error) from error


def write_manifest(
    directory: Path, tokenizer: Tokenizer, num_tokens: int, num_documents: int, sources: tuple[str, ...]
) -> Manifest:
    """Describe the finished tokens.bin of `directory`, and put the tokenizer beside it."""
    sha256, crc32 = _sums(directory / TOKENS)
    manifest = Manifest(
        format=FORMAT,
        dtype=dtype_for(tokenizer.vocab_size),
        num_tokens=num_tokens,
        num_documents=num_documents,
        vocab_size=tokenizer.vocab_size,
        sha256=sha256,
        tokenizer_sha256=tokenizer.sha256,
        sources=sources,
        crc32=crc32,
    )
    (directory / TOKENIZER_DIRECTORY).mkdir()
    save_tokenizer(tokenizer, directory / TOKENIZER_DIRECTORY)
    write_json(directory / MANIFEST, asdict(manifest))
    return manifest


def _sums(path: Path) -> tuple[str, tuple[int, ...]]:
    """sha256 of a file, and CRC-32 of each of its chunks."""
    sha, crcs = hashlib.sha256(), []
    with _reading(path) as file:
        while file.peek(1):
            crcs.append(_crc_of_next_chunk(file, sha.update))
    return sha.hexdigest(), tuple(crcs)


def _crc_of_next_chunk(file: BinaryIO, also: Callable[[bytes], None] = lambda piece: None) -> int:
    value, left = 0, CHUNK_BYTES
    while left and (piece := file.read(min(left, READ_BYTES))):
        also(piece)
        value, left = zlib.crc32(piece, value), left - len(piece)
    return value


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[io.BufferedReader]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise os_failure("read", path, error) from error


def _read_manifest(path: Path) -> Manifest:
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise FileError(
            f"{path}: format is {raw.get('format')!r}, expected {FORMAT!r}; prepare the text with this version"
        )
    raw = {"crc32": []} | raw  # came later
    odd = sorted(set(raw) ^ {field.name for field in fields(Manifest)})
    if odd:
        raise FileError(f"{path}: keys missing or unknown: {', '.join(odd)}")
    for name, (holds, expected) in _FIELDS.items():
        if not holds(raw[name]):
            raise FileError(f"{path}: {name} is {_short(raw[name])}, expected {expected}")
    if raw["vocab_size"] > 1 << (8 * DTYPES[raw["dtype"]].itemsize):
        raise FileError(f"{path}: vocab_size={raw['vocab_size']} doesn't fit {raw['dtype']}")
    return Manifest(**raw | {name: tuple(raw[name]) for name in ("sources", "crc32")})


_COUNT = (lambda x: type(x) is int and x >= 1, "a whole number of at least 1")
_HASH = (lambda x: isinstance(x, str) and re.fullmatch(r"[0-9a-f]{64}", x) is not None, "a sha256 (64 hex digits)")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # what each may hold, and how that is said
    "dtype": (lambda x: isinstance(x, str) and x in DTYPES, f"one of {', '.join(DTYPES)}"),
    "num_tokens": _COUNT,
    "num_documents": _COUNT,
    "vocab_size": (lambda x: type(x) is int and 1 <= x <= 1 << 32, "a whole number from 1 to 2^32"),
    "sha256": _HASH,
    "tokenizer_sha256": _HASH,
    "crc32": (lambda x: isinstance(x, list) and all(type(y) is int for y in x), "a list of whole numbers"),
    "sources": (lambda x: isinstance(x, list) and all(isinstance(y, str) for y in x), "a list of names"),
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _map_tokens(path: Path, manifest: Manifest) -> np.ndarray:
    dtype = DTYPES[manifest.dtype]
    try:
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise FileError(
                f"{path} has {size} bytes, which is no whole number of {manifest.dtype} tokens ({dtype.itemsize} bytes "
                f"each): it is damaged, or of another dtype than {MANIFEST} says"
            )
        if size != manifest.num_tokens * dtype.itemsize:
            raise FileError(
                f"{path} has {size} bytes, expected {manifest.num_tokens * dtype.itemsize} ({manifest.num_tokens} "
                f"tokens of {manifest.dtype}): it is truncated, or of another dtype than {MANIFEST} says"
            )
        _check_layout(path.with_name(MANIFEST), manifest, size)
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise os_failure("read", path, error) from error


def _check_layout(path: Path, manifest: Manifest, size: int) -> None:
    """What the manifest says of the file beside its size, which fits."""
    if manifest.dtype != dtype_for(manifest.vocab_size):
        raise FileError(
            f"{path}: dtype is {manifest.dtype!r}, but ids of a vocabulary of {manifest.vocab_size} are stored as "
            f"{dtype_for(manifest.vocab_size)}"
        )
    chunks = -(-size // CHUNK_BYTES)
    if manifest.crc32 and len(manifest.crc32) != chunks:
        raise FileError(f"{path}: crc32 has {len(manifest.crc32)} sums, expected {chunks} of {CHUNK_BYTES} bytes each")


def _no_manifest_message(directory: Path) -> str:
    if not directory.is_dir():
        return f"prepared data {directory} {'is a file, not a directory' if directory.exists() else 'does not exist'}"
    parts = [part for part in ("train", "valid") if (directory / part / MANIFEST).is_file()]
    if parts:
        return f"{directory} holds the parts {' and '.join(parts)}: name one of them, such as {directory / parts[0]}"
    return f"{directory} holds no {MANIFEST}, so it was not made by `mpitp data prepare`"
