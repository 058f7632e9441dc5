"""Token files: `tokens.bin` (unsigned little-endian integers, mapped into memory) with a `manifest.json` beside it.

The manifest says dtype, count and vocabulary, and the tokenizer's own files lie in `tokenizer/`, so a directory of
prepared data is complete by itself. A file that doesn't match its manifest is refused when it is opened.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

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
READ_BYTES = 1 << 22


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


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenFile:
    """A directory of prepared data, open for reading. `tokens` is an array mapped from the file."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / MANIFEST).is_file():
            raise FileError(_no_manifest_message(self.directory))
        self.manifest = _read_manifest(self.directory / MANIFEST)
        self.tokens = _map_tokens(self.directory / TOKENS, self.manifest)
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
        return tokenizer

    def check_sum(self) -> None:
        """Read the whole file and compare its hash with the manifest's."""
        found = hash_file(self.directory / TOKENS)
        if found != self.manifest.sha256:
            raise FileError(
                f"{self.directory / TOKENS} is damaged: its sha256 is {found}, the manifest says {self.manifest.sha256}"
            )

    def _spot_check(self) -> None:
        step = max(1, len(self.tokens) // SPOT_CHECKS)
        self._check_ids(self.tokens[::step], 0)

    def _check_ids(self, ids: np.ndarray, start: int) -> None:
        if ids.size and int(ids.max()) >= self.manifest.vocab_size:
            raise FileError(
                f"{self.directory / TOKENS} holds the token id {int(ids.max())} (at or after token {start}), but the "
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
    manifest = Manifest(
        format=FORMAT,
        dtype=dtype_for(tokenizer.vocab_size),
        num_tokens=num_tokens,
        num_documents=num_documents,
        vocab_size=tokenizer.vocab_size,
        sha256=hash_file(directory / TOKENS),
        tokenizer_sha256=tokenizer.sha256,
        sources=sources,
    )
    (directory / TOKENIZER_DIRECTORY).mkdir()
    save_tokenizer(tokenizer, directory / TOKENIZER_DIRECTORY)
    write_json(directory / MANIFEST, asdict(manifest))
    return manifest


def hash_file(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise os_failure("read", path, error) from error


def _read_manifest(path: Path) -> Manifest:
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise FileError(
            f"{path}: format is {raw.get('format')!r}, expected {FORMAT!r}; prepare the text with this version"
        )
    names = {field.name for field in fields(Manifest)}
    if set(raw) != names:
        odd = sorted(set(raw) ^ names)
        raise FileError(f"{path}: keys missing or unknown: {', '.join(odd)}")
    if raw["dtype"] not in DTYPES:
        raise FileError(f"{path}: dtype is {raw['dtype']!r}, expected one of {', '.join(DTYPES)}")
    for name in ("num_tokens", "num_documents", "vocab_size"):
        if type(raw[name]) is not int or raw[name] < 1:
            raise FileError(f"{path}: {name} is {raw[name]!r}, expected a whole number of at least 1")
    if raw["vocab_size"] > 1 << (8 * DTYPES[raw["dtype"]].itemsize):
        raise FileError(f"{path}: vocab_size={raw['vocab_size']} doesn't fit {raw['dtype']}")
    return Manifest(**raw | {"sources": tuple(raw["sources"])})


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
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise os_failure("read", path, error) from error


def _no_manifest_message(directory: Path) -> str:
    if not directory.is_dir():
        return f"prepared data {directory} {'is a file, not a directory' if directory.exists() else 'does not exist'}"
    parts = [part for part in ("train", "valid") if (directory / part / MANIFEST).is_file()]
    if parts:
        return f"{directory} holds the parts {' and '.join(parts)}: name one of them, such as {directory / parts[0]}"
    return f"{directory} holds no {MANIFEST}, so it was not made by `mpitp data prepare`"
