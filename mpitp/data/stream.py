"""Tokens one by one into text, as it will stand: a token's text can depend on those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"  # what undecodable bytes become
MAX_CHARACTER_BYTES = 4


class StreamDecoder:
    """Decodes tokens one by one into text that is never taken back: a character cut across tokens waits for its rest.

    decode: token ids to text. context: the tokens before the stream, a prompt's; their text isn't given out again, but
    it decides how the stream goes on: SentencePiece's decoders drop the first space of what they are given.

    A window of the last tokens is decoded again with each new one. It always begins with tokens that have a text, so
    that no token within the stream is decoded as if it were the first.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _last_with_text(decode, list(context), 1)
        self._emitted = len(decode(self._window))  # characters of the window's text that are out
        self._waiting = 0  # tokens since the last that came out whole

    def push(self, token: int) -> str:
        """The text that became certain with this token; often "" within a character."""
        self._window.append(int(token))
        self._waiting += 1
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._emit(text, whole=True)
        # A character has at most four bytes and a token at least one: what has waited longer is no beginning of one.
        certain = len(text) - 1 if self._waiting >= MAX_CHARACTER_BYTES else len(text.rstrip(REPLACEMENT))
        return self._emit(text[:certain], whole=False)

    def flush(self) -> str:
        """The rest at the end of the stream, an incomplete character as U+FFFD."""
        return self._emit(self._decode(self._window), whole=True)

    def _emit(self, text: str, whole: bool) -> str:
        fresh = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        if whole:
            keep = _last_with_text(self._decode, self._window, max(self._waiting, 1))
            if len(keep) < len(self._window):  # the tokens before them can't change any more
                self._window = keep
                self._emitted = len(self._decode(keep))
            self._waiting = 0
        return fresh


def _last_with_text(decode: Decode, tokens: list[int], count: int) -> list[int]:
    """The last `count` tokens, or so many more that they have a text (special ones, or a single space, may have none)
    and don't begin within a character.
    """
    while count < len(tokens) and decode(tokens[-count:])[:1] in ("", REPLACEMENT):
        count *= 2
    return tokens[-count:]
