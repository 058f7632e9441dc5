"""The bytes of UTF-8 that single tokens stand for: a token may be a part of a character, which has no text by itself.

Byte-level BPE writes bytes as the letters of `byte_letters`; SentencePiece's byte fallback as `<0xE2>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mpitp.data.tokenizer import TOKENIZER, Tokenizer, byte_letters

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
NEAR = 8  # tokens before one; they decide whether its first space is part of it


class TokenBytes:
    """Of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = set(_kinds(json.loads(tokenizer.files[TOKENIZER]).get("decoder")))
        self._letters = byte_letters() if "ByteLevel" in kinds else {}
        self._has_fallback = "ByteFallback" in kinds

    def of(self, token: int, context: Sequence[int] = ()) -> bytes:
        r"""The bytes of a token behind those in `context`; of special ones their spelling, of unknown ones none.

        >>> from mpitp.data.tokenizer import byte_tokenizer
        >>> TokenBytes(byte_tokenizer()).of(0xE2)
        b'\xe2'
        """
        spelling = self._tokenizer.token(token)
        if spelling is None:
            return b""
        if token in self._tokenizer.added_tokens:
            return spelling.encode()
        if self._letters and all(letter in self._letters for letter in spelling):
            return bytes(self._letters[letter] for letter in spelling)
        if self._has_fallback and (found := _FALLBACK.fullmatch(spelling)):
            return bytes.fromhex(found[1])
        return self._tokenizer.decode_after(context[-NEAR:], [token], skip_special_tokens=False).encode()


def shown(content: bytes) -> str:
    r"""The text of a token's bytes, or where they are no text, what OpenAI's API calls it.

    >>> print(shown(b"caf"), shown(b"\xc3"))
    caf bytes:\xc3
    """
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _kinds(decoder: Any) -> list[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return []
    return [str(decoder.get("type")), *(kind for each in decoder.get("decoders") or [] for kind in _kinds(each))]
