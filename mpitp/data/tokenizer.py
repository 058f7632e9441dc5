"""Text to token ids and back, by a Hugging Face tokenizer.json.

There is one kind of tokenizer, run by the `tokenizers` library. The built-in byte tokenizer is a tokenizer.json like
any other (byte-level BPE without merges, whose ids 0 to 255 are the bytes), so that every tool reads a model trained
with it.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mpitp.errors import ConfigError, FileError
from mpitp.files import os_failure, write_file

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
# all that belongs to a tokenizer and goes along with a saved model
FILES = (TOKENIZER, CONFIG, SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja")

BYTE_END_OF_TEXT = "<|endoftext|>"
REPLACEMENT = "\ufffd"  # what undecodable bytes become
MAX_CHARACTER_BYTES = 4


class Tokenizer:
    """A tokenizer with its special tokens, made from the content of its files.

    files: name to content, `tokenizer.json` among them; where: what error messages call it. Raises FileError for files
    that are damaged or contradict one another.
    """

    def __init__(self, files: Mapping[str, bytes], where: str = "tokenizer") -> None:
        self.files = {name: files[name] for name in FILES if name in files}
        self._backend = _parse_tokenizer(self.files[TOKENIZER], where)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        config = _parse_json(self.files.get(CONFIG, b"{}"), f"{where}/{CONFIG}")
        special = _parse_json(self.files.get(SPECIAL_TOKENS, b"{}"), f"{where}/{SPECIAL_TOKENS}") | config
        self.bos_id = _special_id(special.get("bos_token"), "bos_token", vocabulary, where)
        self.eos_id = _special_id(special.get("eos_token"), "eos_token", vocabulary, where)
        self._add_bos = config.get("add_bos_token")
        self._is_bytes = _is_byte_tokenizer(self._backend, vocabulary)

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json, to tell whether two tokenizers are one."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With special tokens: what the tokenizer puts around a text (often a first bos)."""
        if self._is_bytes and BYTE_END_OF_TEXT not in text:
            return list(text.encode())
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self._with_special(text, ids) if add_special_tokens else ids

    def encode_pieces(self, pieces: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Token ids of neighbouring pieces of one text, each given as (context, piece), without special tokens.

        The context is the end of what came before. It is tokenized along and its tokens dropped, so that a piece's
        first token is what it would be within the text. The pieces are tokenized in parallel.
        """
        if self._is_bytes and not any(BYTE_END_OF_TEXT in piece for _, piece in pieces):
            return [list(piece.encode()) for _, piece in pieces]
        encodings = self._backend.encode_batch([context + piece for context, piece in pieces], add_special_tokens=False)
        return [self._without_context(*both) for both in zip(encodings, pieces, strict=True)]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for one stream of tokens."""
        return StreamDecoder(self, skip_special_tokens)

    def _with_special(self, text: str, plain: list[int]) -> list[int]:
        """`add_bos_token` in tokenizer_config.json, where it stands, overrules tokenizer.json, as in transformers."""
        ids = self._backend.encode(text, add_special_tokens=True).ids
        if self.bos_id is None or self._add_bos is None:
            return ids
        bos = [self.bos_id]
        if self._add_bos and ids[:1] != bos:
            return bos + ids
        if not self._add_bos and ids[:1] == bos and plain[:1] != bos:
            return ids[1:]
        return ids

    def _without_context(self, encoding: Any, context_and_piece: tuple[str, str]) -> list[int]:
        context, piece = context_and_piece
        before = bisect_left(encoding.offsets, len(context), key=lambda span: span[0])
        if before and encoding.offsets[before - 1][1] > len(
            context
        ):  # a token lies across the cut: nothing may be lost
            return self._backend.encode(piece, add_special_tokens=False).ids
        return encoding.ids[before:]


class StreamDecoder:
    """Decodes tokens one by one into text that is never taken back: a character cut across tokens waits for its rest.

    A window of the last tokens is decoded again with each new one, since a token's text can depend on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that are out
        self._waiting = 0  # tokens since the last that came out whole

    def push(self, token: int) -> str:
        """The text that became certain with this token; often "" within a character."""
        self._window.append(int(token))
        self._waiting += 1
        text = self._text()
        if not text.endswith(REPLACEMENT):
            return self._emit(text, whole=True)
        # A character has at most four bytes and a token at least one: what has waited longer is no beginning of one.
        certain = len(text) - 1 if self._waiting >= MAX_CHARACTER_BYTES else len(text.rstrip(REPLACEMENT))
        return self._emit(text[:certain], whole=False)

    def flush(self) -> str:
        """The rest at the end of the stream, an incomplete character as U+FFFD."""
        return self._emit(self._text(), whole=True)

    def _emit(self, text: str, whole: bool) -> str:
        fresh = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        if whole:
            keep = self._window[-self._waiting :] if self._waiting else self._window
            if len(keep) < len(self._window):  # the tokens before them can't change any more
                self._window = keep
                self._emitted = len(self._text())
            self._waiting = 0
        return fresh

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (or of prepared data). Raises FileError where there is none."""
    path = Path(directory)
    if not (path / TOKENIZER).is_file():
        if not path.is_dir():
            raise FileError(f"tokenizer directory {directory} {'is a file' if path.exists() else 'does not exist'}")
        raise FileError(
            f"{directory} holds no {TOKENIZER}; other tokenizer files aren't read (transformers makes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    files = {}
    for name in FILES:
        try:
            files[name] = (path / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise os_failure("read", path / name, error) from error
    return Tokenizer(files, str(directory))


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write the tokenizer's files, as they were read, into an existing directory."""
    for name, content in tokenizer.files.items():
        write_file(Path(directory) / name, content)


def byte_tokenizer() -> Tokenizer:
    """The built-in tokenizer: ids 0 to 255 are the bytes of UTF-8, 256 is the end of a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([BYTE_END_OF_TEXT])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BYTE_END_OF_TEXT,
        "eos_token": BYTE_END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    documents = {TOKENIZER: json.loads(backend.to_str()), CONFIG: config}
    files = {name: json.dumps(document, ensure_ascii=False, indent=1).encode() for name, document in documents.items()}
    return Tokenizer(files, "byte tokenizer")


def tokenizer_from(name: str) -> Tokenizer:
    """The tokenizer that a command line names: "bytes", or a directory."""
    if name == "bytes" and not Path(name).exists():
        return byte_tokenizer()
    return load_tokenizer(name)


def check_fits(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raise ConfigError when the tokenizer gives ids that a model with `vocab_size` rows doesn't have."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {where} has ids up to {tokenizer.vocab_size - 1}, but the model's vocab_size is "
            f"{vocab_size}"
        )


def _byte_vocabulary() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2): printable Latin-1 stands for itself, the other bytes
    for the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


def _is_byte_tokenizer(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether a tokenizer is the byte tokenizer, which a line of Python does far faster than the library."""
    if backend.normalizer is not None or getattr(backend.pre_tokenizer, "add_prefix_space", True):
        return False
    return dict(vocabulary) == {**_byte_vocabulary(), BYTE_END_OF_TEXT: 256}


def _parse_tokenizer(content: bytes, where: str) -> tokenizers.Tokenizer:
    _parse_json(content, f"{where}/{TOKENIZER}")
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises Exception itself
        raise FileError(f"{where}/{TOKENIZER} is not understood by the tokenizers library: {error}") from error
    backend.no_truncation()  # some files carry the settings of their training
    backend.no_padding()
    return backend


def _parse_json(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise FileError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{where} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def _special_id(token: Any, role: str, vocabulary: Mapping[str, int], where: str) -> int | None:
    """The id of a special token, given as text or as an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    if text not in vocabulary:
        raise FileError(f"{where}: {role} is {text!r}, which {TOKENIZER} doesn't know")
    return vocabulary[text]
