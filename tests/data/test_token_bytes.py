"""Bytes of single tokens, of each kind of tokenizer: a part of a character too, and a space at a token's beginning."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from mpitp.data.token_bytes import TokenBytes, shown
from mpitp.data.tokenizer import Tokenizer, byte_letters, byte_tokenizer


def made(backend: Backend, **config: str) -> Tokenizer:
    """A tokenizer of one file."""
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return Tokenizer(files)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: pieces with U+2581 for a space, bytes for what has no piece."""
    pieces = ["<unk>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return made(backend, eos_token="</s>")


def test_bytes_of_byte_level_tokens() -> None:
    vocabulary = byte_letters()
    inverse = {byte: letter for letter, byte in vocabulary.items()}
    vocabulary["".join(inverse[byte] for byte in " né".encode())] = 300
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["éé"])  # letters that stand for bytes in other tokens
    of = TokenBytes(made(backend)).of
    assert [of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert of(300) == " né".encode() and of(257) == "éé".encode()
    assert of(299) == b"" and of(10**6) == b"", "no token has this id"
    assert TokenBytes(byte_tokenizer()).of(256) == b"<|endoftext|>"


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = sentencepiece()
    of = TokenBytes(tokenizer).of
    assert of(1) == b"the", "the first space of a text is none"
    assert of(2, [1]) == b" cat" and of(3, [1, 2]) == b"s"
    assert b"".join(of(4 + byte, [1]) for byte in "é漢".encode()) == "é漢".encode()
    assert of(260, [1]) == b"</s>"


@pytest.mark.parametrize(
    ("content", "text"), [(b"", ""), ("é".encode(), "é"), (b"\xe2\x80", r"bytes:\xe2\x80"), (b" a", " a")]
)
def test_what_is_shown(content: bytes, text: str) -> None:
    assert shown(content) == text
