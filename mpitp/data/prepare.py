"""Texts to token files: read, checked and tokenized in pieces, so that the size of a text doesn't matter."""

from __future__ import annotations

import codecs
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpitp.data.pieces import token_ids
from mpitp.data.token_file import (
    MANIFEST,
    TOKENIZER_DIRECTORY,
    TOKENS,
    Manifest,
    TokenWriter,
    split_tail,
    write_manifest,
)
from mpitp.data.tokenizer import Tokenizer
from mpitp.errors import FileError, UsageError
from mpitp.files import check_regular, os_failure, publishing
from mpitp.text import MARK, SAMPLE_BYTES, check_encoding, not_utf8

# what prepared data holds and what may be replaced when overwriting is asked
DATA_FILES = ("train", "valid", TOKENS, MANIFEST, TOKENIZER_DIRECTORY)
READ_BYTES = 1 << 18


def check_texts(texts: Sequence[Path]) -> int:
    """Bytes of all texts together. Raises FileError for one that is not there, can't be opened or is empty."""
    total = 0
    for path in texts:
        try:
            found = check_regular(path, "any")
            if not stat.S_ISFIFO(found.st_mode):  # opening a pipe and closing it again would end its writer
                open(path, "rb").close()
        except OSError as error:
            raise os_failure("read", path, error) from error
        if stat.S_ISREG(found.st_mode):
            if not found.st_size:
                raise FileError(f"{path} holds no text (0 bytes)")
            total += found.st_size
    return total


@dataclass(slots=True)
class Specials:
    """What becomes of the spelling of a special token within a text: the token, or letters where `stay_text`.

    `counts`: how many of each id have become tokens.
    """

    stay_text: bool = False
    counts: Counter[int] = field(default_factory=Counter)


def prepare(
    texts: Sequence[Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    valid_fraction: float = 0.0,
    overwrite: bool = False,
    specials: Specials | None = None,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> dict[str, Manifest]:
    """Tokenize UTF-8 texts, each a document that ends in the tokenizer's end of text, into the directory `out`.

    With valid_fraction, `out` gets the parts `train` and `valid`, the latter the last tokens of all. progress is called
    with the number of bytes read. Raises FileError, and leaves nothing behind, for a text that is empty or not UTF-8.
    Returns the manifest of each part ("" for the whole).
    """
    specials = specials or Specials()
    if not 0 <= valid_fraction < 1:
        raise UsageError(f"--valid-fraction {valid_fraction}: expected a number from 0 up to, but not including, 1")
    with publishing(out, overwrite, DATA_FILES) as staging:
        first = staging / "train" if valid_fraction else staging
        first.mkdir(exist_ok=True)
        with TokenWriter(first, tokenizer.vocab_size) as writer:
            for path in texts:
                for ids in _document_ids(path, tokenizer, specials, progress):
                    writer.append(ids)
        return _finish(staging, writer, tokenizer, texts, valid_fraction)


def _finish(
    staging: Path, writer: TokenWriter, tokenizer: Tokenizer, texts: Sequence[Path], valid_fraction: float
) -> dict[str, Manifest]:
    sources = tuple(str(path) for path in texts)
    if not valid_fraction:
        return {"": write_manifest(staging, tokenizer, writer.num_tokens, len(texts), sources)}
    num_valid = round(writer.num_tokens * valid_fraction)
    if not 0 < num_valid < writer.num_tokens:
        raise UsageError(
            f"--valid-fraction {valid_fraction} of {writer.num_tokens} tokens leaves one part empty; give more text or "
            "another fraction"
        )
    train, valid = staging / "train", staging / "valid"
    valid.mkdir()
    split_tail(train, valid, writer.dtype, num_valid)
    return {
        "train": write_manifest(train, tokenizer, writer.num_tokens - num_valid, len(texts), sources),
        "valid": write_manifest(valid, tokenizer, num_valid, len(texts), sources),
    }


def _document_ids(
    path: Path, tokenizer: Tokenizer, specials: Specials, progress: Callable[[int], object]
) -> Iterator[Sequence[int] | np.ndarray]:
    """Token ids of one text, in pieces; the end-of-text id comes last, where the tokenizer has one."""
    for ids in token_ids(tokenizer, _read_text(path, progress), plain_specials=specials.stay_text):
        specials.counts.update(_special_ids(tokenizer, ids))
        yield ids
    if tokenizer.eos_id is not None:
        yield [tokenizer.eos_id]


def _special_ids(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[int]:
    """Those of `ids` that are special tokens."""
    array = np.asarray(ids)
    return array[np.isin(array, list(tokenizer.special_tokens))].tolist()


def _read_text(path: Path, progress: Callable[[int], object]) -> Iterator[str]:
    """The text of a file in chunks, strictly UTF-8; an error says at which byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # bytes given to the decoder
    unsaid = 0  # of these, not reported yet: what follows, or is missing, may show that they are no text
    some = False
    try:
        with open(path, "rb") as file:
            while True:
                data = file.read(READ_BYTES)
                if position == 0:
                    check_encoding(data[:SAMPLE_BYTES], path)
                waiting = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    at, byte = position - waiting + error.start, error.object[error.start]
                    raise not_utf8(path, error.reason, at, byte) from error
                if position == 0:
                    text = text.removeprefix(MARK)
                position += len(data)
                some = some or bool(text.strip())
                yield text
                if not data:
                    break
                if unsaid:
                    progress(unsaid)
                unsaid = len(data)
    except OSError as error:
        raise os_failure("read", path, error) from error
    if not some:
        raise FileError(f"{path} holds no text ({position} bytes)")
    progress(unsaid)
