"""Text to token ids and back, by a Hugging Face tokenizer.json.

There is one kind of tokenizer, run by the `tokenizers` library. The built-in byte tokenizer is a tokenizer.json like
any other (byte-level BPE without merges, whose ids 0 to 255 are the bytes), so that every tool reads a model trained
with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from mpitp.data.added_tokens import add_declared_tokens, check_own_tokens, token_text
from mpitp.data.stream import StreamDecoder
from mpitp.errors import ConfigError, FileError, MpitpError
from mpitp.files import os_failure, read_regular, write_file
from mpitp.text import decode_text

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
ID_LIMIT = 1 << 32  # the library's ids have 32 bits
JSON_FILES = (TOKENIZER, CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
# all that belongs to a tokenizer and goes along with a saved model
FILES = (*JSON_FILES, "chat_template.jinja")

OWN_FIELDS = "[model]"  # where a run file's own fields are the model's config

BYTE_END_OF_TEXT = "<|endoftext|>"
_BEFORE_KEY, _BEFORE_VALUE = re.compile(r"\s*[{,]\s*"), re.compile(r"\s*:\s*")
_PROBE = "Bytes of  several words: é漢"


class Encoded(NamedTuple):
    """Token ids, and for each the characters [first, end) of the text that it stands for."""

    ids: Sequence[int] | np.ndarray
    spans: Sequence[tuple[int, int]]


class Tokenizer:
    """A tokenizer with its special tokens, made from the content of its files.

    files: name to content, `tokenizer.json` among them; where: what error messages call it. Raises FileError for files
    that are damaged or contradict one another.
    """

    def __init__(self, files: Mapping[str, bytes], where: str = "tokenizer") -> None:
        self.files, self._where = {name: files[name] for name in FILES if name in files}, where
        beside = {name: _parse_json(self.files.get(name, b"{}"), f"{where}/{name}") for name in JSON_FILES[1:]}
        config = beside[CONFIG]
        special = beside[SPECIAL_TOKENS] | config
        with _library(where):
            self._backend = _make_backend(self.files[TOKENIZER], where)
            add_declared_tokens(self._backend, config, beside[ADDED_TOKENS], special, where)
            added = self._backend.get_added_tokens_decoder()
            self._is_bytes = _is_byte_tokenizer(self._backend)
        self.added_tokens = {id_: token.content for id_, token in added.items()}
        self.special_tokens = {id_: token.content for id_, token in added.items() if token.special}
        self.bos_id = _special_id(special.get("bos_token"), "bos_token", self._backend, where)
        self.eos_id = _special_id(special.get("eos_token"), "eos_token", self._backend, where)
        self.mask_id = _special_id(special.get("mask_token"), "mask_token", self._backend, where)
        self._prefix, self._suffix = self._around(config.get("add_bos_token"))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def own_size(self) -> int:
        """The same without the tokens that were added to it."""
        return max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1) + 1

    @property
    def sha256(self) -> str:
        """Hash of tokenizer.json, to tell whether two tokenizers are one."""
        return hashlib.sha256(self.files[TOKENIZER]).hexdigest()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end of a text, where the tokenizer has one."""
        return () if self.eos_id is None else (self.eos_id,)

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """What is put before and behind a text."""
        return self._prefix, self._suffix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. With special tokens: what the tokenizer puts around a text (often a first bos), unless
        the text has it already.
        """
        ids = self._plain(text)
        if not add_special_tokens:
            return ids
        has_prefix = ids[: len(self._prefix)] == self._prefix
        return [*([] if has_prefix else self._prefix), *ids, *self._suffix]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts in parallel, each with what the tokenizer puts around one."""
        plain = [list(encoded.ids) for encoded in self.encode_spans(texts)]
        return [[*self._prefix, *ids, *self._suffix] for ids in plain]

    def shortened(self, ids: list[int], most: int) -> list[int]:
        """Ids of a text, cut where they are more than `most`; what the tokenizer puts behind a text stays."""
        return ids if len(ids) <= most else ids[: most - len(self._suffix)] + self._suffix

    def encode_spans(self, texts: Sequence[str], plain_specials: bool = False) -> list[Encoded]:
        """Token ids and the places in the text they come from, of several texts in parallel, nothing put around them.

        plain_specials: the spelling of a special token is text like any other.
        """
        if self._is_bytes and (plain_specials or not any(BYTE_END_OF_TEXT in text for text in texts)):
            return [_encode_bytes(text) for text in texts]
        with _library(self._where):
            self._backend.encode_special_tokens = plain_specials
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
            self._backend.encode_special_tokens = False
            return [Encoded(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids that begin a text; bytes that are no UTF-8 become U+FFFD."""
        with _library(self._where):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_after(self, context: Sequence[int], ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids that go on with a text: a first space stays."""
        stream = self.stream_decoder(skip_special_tokens, context)
        return "".join(stream.push(i) for i in ids) + stream.flush()

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Whether every id that both have stands for the same token, so that ids of one are read by the other."""
        own, others = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        common = own.items() & others.items()
        return len(common) == min(len(own), len(others))

    def has_token(self, id_: int) -> bool:
        """Whether an id stands for anything; a model's vocabulary may have more ids, and there may be gaps."""
        return self.token(id_) is not None

    def token(self, id_: int) -> str | None:
        """The token of an id, as tokenizer.json spells it; None where there is none."""
        return self._backend.id_to_token(id_) if 0 <= id_ < ID_LIMIT else None

    def stream_decoder(self, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one stream of tokens, which goes on with the text of the tokens in `context`."""
        return StreamDecoder(lambda ids: self.decode(ids, skip_special_tokens), context)

    def _plain(self, text: str) -> list[int]:
        if self._is_bytes and BYTE_END_OF_TEXT not in text:
            return list(text.encode())
        with _library(self._where):
            return self._backend.encode(text, add_special_tokens=False).ids

    def _around(self, add_bos: bool | None) -> tuple[list[int], list[int]]:
        """What is put before and after a text. `add_bos_token` in tokenizer_config.json, where it stands, overrules
        tokenizer.json, as in transformers.
        """
        if add_bos is not None and not isinstance(add_bos, bool):
            raise FileError(f"{self._where}/{CONFIG}: add_bos_token must be true or false, got {add_bos!r:.60}")
        with _library(self._where):
            probe = self._backend.encode("a", add_special_tokens=True)
        inner = [place for place, added in enumerate(probe.special_tokens_mask) if not added]
        first, last = (inner[0], inner[-1] + 1) if inner else (len(probe.ids), len(probe.ids))
        prefix, suffix = probe.ids[:first], probe.ids[last:]
        if outside := [i for i in (*prefix, *suffix) if i >= self.vocab_size]:
            raise FileError(
                f"{self._where}/{TOKENIZER}: its post_processor adds the id {outside[0]}, outside its vocabulary of "
                f"{self.vocab_size}"
            )
        bos = [] if self.bos_id is None else [self.bos_id]
        if add_bos and prefix[:1] != bos:
            return bos + prefix, suffix
        if add_bos is False and bos and prefix[:1] == bos:
            return prefix[1:], suffix
        return prefix, suffix


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (or of prepared data). Raises FileError where there is none."""
    path = Path(directory)
    if not (path / TOKENIZER).exists():
        if not path.is_dir():
            raise FileError(f"tokenizer directory {directory} {'is a file' if path.exists() else 'does not exist'}")
        raise FileError(
            f"{directory} holds no {TOKENIZER}; other tokenizer files aren't read (transformers makes one: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    files = {}
    for name in FILES:
        try:
            files[name] = read_regular(path / name)
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
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_letters(), merges=[]))
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
    """Raise ConfigError where a model with `vocab_size` rows can't be the tokenizer's: it has more tokens of its own.

    Tokens that were added to it may lack a row as long as no text has them: `check_rows`.
    """
    if tokenizer.own_size > vocab_size:
        raise ConfigError(
            f"the tokenizer in {where} has ids up to {tokenizer.own_size - 1}, but the model's vocab_size is "
            f"{vocab_size}: it is another model's"
        )


def check_rows(tokenizer: Tokenizer, texts: Iterable[Sequence[int]], vocab_size: int, where: str) -> None:
    """Raise ConfigError for a text with a token that the model in `where`, with `vocab_size` rows, has none for."""
    for number, ids in enumerate(texts, start=1):
        if len(ids) and np.max(ids) >= vocab_size:
            found = next(id_ for id_ in ids if id_ >= vocab_size)
            raise ConfigError(f"text {number} has {without_row(tokenizer, found, vocab_size, where)}")


def without_row(tokenizer: Tokenizer, id_: int, vocab_size: int, where: str) -> str:
    """What is said of an id that the model has no row for, and the way out."""
    way = "raise vocab_size" if where == OWN_FIELDS else f"mpitp convert --resize-vocabulary {where} NEW_DIR"
    return (
        f"the token {tokenizer.token(id_)!r:.60} (id {id_}), which was added to the tokenizer: the model in {where} "
        f"has {vocab_size} rows and none for it; give it one: {way}"
    )


def byte_letters() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2): printable Latin-1 stands for itself, the other bytes
    for the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}


def _is_byte_tokenizer(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is the byte tokenizer, which a line of Python does far faster than the library."""
    if backend.get_vocab_size(with_added_tokens=True) != 257:  # most aren't, and have many tokens to look at
        return False
    if backend.normalizer is not None or getattr(backend.pre_tokenizer, "add_prefix_space", True):
        return False
    if backend.get_vocab(with_added_tokens=True) != {**byte_letters(), BYTE_END_OF_TEXT: 256}:
        return False
    if not isinstance(backend.model, tokenizers.models.BPE) or list(backend.get_added_tokens_decoder()) != [256]:
        return False
    # settings of the model may still add to words what the vocabulary lacks
    return backend.encode(_PROBE, add_special_tokens=False).ids == list(_PROBE.encode())


def _encode_bytes(text: str) -> Encoded:
    """What the library gives for the byte tokenizer: the bytes of a character all stand for the whole of it."""
    data = np.frombuffer(text.encode(), np.uint8)
    first = np.cumsum((data & 0xC0) != 0x80) - 1  # other bytes than 10xxxxxx begin a character
    return Encoded(data, _CharacterSpans(first))


class _CharacterSpans(Sequence[tuple[int, int]]):
    """One character for each byte."""

    def __init__(self, first: np.ndarray) -> None:
        self._first = first

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return _CharacterSpans(self._first[place])
        return int(self._first[place]), int(self._first[place]) + 1


@contextmanager
def _library(where: str) -> Iterator[None]:
    """Errors of the tokenizers library as FileErrors: it raises Exception itself, and its panics aren't Exceptions."""
    try:
        yield
    except MpitpError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileError(
            f"{where}/{TOKENIZER}: its parts don't fit together; the tokenizers library says: {error}"
        ) from error


def _make_backend(content: bytes, where: str) -> tokenizers.Tokenizer:
    path = f"{where}/{TOKENIZER}"
    own = _own_tokens(content, path)
    try:
        backend = tokenizers.Tokenizer.from_str(decode_text(content, where))
    except Exception as error:  # the library raises Exception itself
        _parse_json(content, path)
        raise FileError(f"{path} is not understood by the tokenizers library: {error}") from error
    check_own_tokens(backend, own, where)
    backend.no_truncation()  # some files carry the settings of their training
    backend.no_padding()
    if isinstance(backend.model, tokenizers.models.BPE):
        backend.model.dropout = None  # merges left out at random: every rank would read a prompt in its own way
    return backend


def _own_tokens(content: bytes, where: str) -> Any:
    """`added_tokens` of a tokenizer.json. They stand before the vocabulary and its merges, which take a while to parse
    and are left out then.
    """
    text, decode, place = decode_text(content, where), json.JSONDecoder().raw_decode, 0
    try:
        while before := _BEFORE_KEY.match(text, place):
            key, place = decode(text, before.end())
            colon = _BEFORE_VALUE.match(text, place)
            if colon is None or key == "model":
                break
            value, place = decode(text, colon.end())
            if key == "added_tokens":
                return value
    except (ValueError, RecursionError):
        pass  # the parser of the whole tells what is wrong, and where
    return _parse_json(content, where).get("added_tokens")


def _parse_json(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(decode_text(content, where))
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{where} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def _special_id(token: Any, role: str, backend: tokenizers.Tokenizer, where: str) -> int | None:
    """The id of a special token, given as text or as an object with its `content`."""
    text = token_text(token)
    if text is None:
        return None
    id_: int | None = backend.token_to_id(text)
    if id_ is None:
        raise FileError(f"{where}: {role} is {text!r}, which {TOKENIZER} doesn't know")
    return id_
