"""The tokens of a long text, from pieces of it: equal to those of the whole, wherever it is cut.

The text is cut into windows that overlap. Near its ends a window's tokens can be others than the whole's: a word is
cut there, or the tokenizer puts a space before the first. Within the overlap the tokens of both windows are compared,
and where both have the same two neighbours the one goes over into the other. For BPE this is exact: a row of tokens is
its encoding when every pair of neighbours is one that BPE leaves unmerged, and each pair of the result is such a pair
of one of the windows.

Where they nowhere agree (a letter repeated for pages may be grouped from another beginning), the later window is
encoded once more from where a token of the earlier one begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mpitp.data.tokenizer import Encoded, Tokenizer

PIECE_CHARACTERS = 1 << 18
OVERLAP_CHARACTERS = 1024  # on each side of a cut; some times the longest token there is
PIECES_AT_ONCE = 8
NEW_BEGINNINGS, MOST_BACK = 8, 17  # tokens from which a window is tried anew, and characters before them


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the text and the place of its first character in the whole."""

    start: int
    text: str

    @property
    def end(self) -> int:
        """The place after its last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [first, ...) of a window's encoding."""

    window: Window
    encoded: Encoded
    first: int = 0

    def begin(self, token: int) -> int:
        """The place in the whole text where a token begins."""
        return self.window.start + self.encoded.spans[token][0]

    def token_at(self, place: int) -> int:
        """The first token that begins at `place` or after."""
        return bisect_left(self.encoded.spans, place - self.window.start, lo=self.first, key=lambda span: span[0])

    def pair(self, token: int) -> tuple[Any, ...]:
        """A token and the one before it, with their places."""
        spans, ids, start = self.encoded.spans, self.encoded.ids, self.window.start
        return tuple((int(ids[i]), spans[i][0] + start, spans[i][1] + start) for i in (token - 1, token))


def token_ids(
    tokenizer: Tokenizer, chunks: Iterable[str], *, plain_specials: bool = False, limit: int = 0
) -> Iterator[Sequence[int] | np.ndarray]:
    """Token ids of a stream of text, in order, in pieces of about `limit` characters (0: PIECE_CHARACTERS)."""
    runs = _runs(tokenizer, windows(chunks, limit or PIECE_CHARACTERS), plain_specials)
    left = next(runs, None)
    for right in runs:
        assert left is not None
        end, right = _join(tokenizer, left, right, plain_specials)
        yield left.encoded.ids[left.first : end]
        left = right
    if left is not None:
        yield left.encoded.ids[left.first :]


def windows(chunks: Iterable[str], limit: int = PIECE_CHARACTERS) -> Iterator[Window]:
    """Cut a stream of text into windows of about `limit` characters, each reaching over the cuts on both its sides."""
    over = min(OVERLAP_CHARACTERS, limit // 3)
    start, text = 0, ""
    for chunk in chunks:
        text += chunk
        while len(text) > limit + 2 * over:
            yield Window(start, text[: limit + over])
            start, text = start + limit - over, text[limit - over :]
    if text:
        yield Window(start, text)


def _runs(tokenizer: Tokenizer, parts: Iterator[Window], plain_specials: bool) -> Iterator[Run]:
    while some := list(islice(parts, PIECES_AT_ONCE)):
        encodings = tokenizer.encode_spans([window.text for window in some], plain_specials)
        yield from (Run(*both) for both in zip(some, encodings, strict=True))


def _join(tokenizer: Tokenizer, left: Run, right: Run, plain_specials: bool) -> tuple[int, Run]:
    """The token of `left` that is no longer taken, and what follows it."""
    for only_places in (False, True):  # if need be other tokens than the whole's, but of the same text
        if place := _agreement(left, right, only_places):
            return place[0], Run(right.window, right.encoded, place[1])
        for begin in _new_beginnings(left, right.window):
            head = _from(tokenizer, begin, right.window, plain_specials, 2 * (left.window.end - begin))
            if _agreement(left, head, only_places):
                again = _from(tokenizer, begin, right.window, plain_specials)
                if place := _agreement(left, again, only_places):
                    return place[0], Run(again.window, again.encoded, place[1])
    return len(left.encoded.ids), _from(tokenizer, left.window.end, right.window, plain_specials)


def _new_beginnings(left: Run, window: Window) -> Iterator[int]:
    """Places from which a window is tried anew: where a token of the earlier one begins, or a little before.

    Before, since the tokenizer may put a space in front, and what the space takes shifts all that follows.
    """
    first, last = left.token_at(window.start + 1), len(left.encoded.ids)
    tokens = [token for token in range(first, last) if _begins_alone(left, token)][:NEW_BEGINNINGS]
    for token in tokens:
        for back in range(min(MOST_BACK, left.begin(token) - window.start)):
            yield left.begin(token) - back


def _agreement(left: Run, right: Run, only_places: bool = False) -> tuple[int, int] | None:
    """A token of each from which both go on alike, as near to the middle of the overlap as can be; or None.

    only_places: it is enough that in both a token begins there.
    """
    begin, end = right.window.start, left.window.end
    middle = left.token_at((begin + end) // 2)
    first, last = left.token_at(begin + 1), len(left.encoded.ids)
    for token in sorted(range(max(first, left.first + 1), last), key=lambda token: abs(token - middle)):
        if _begins_alone(left, token):
            same = right.token_at(left.begin(token))
            if 0 < same < len(right.encoded.ids) and _agree(left, token, right, same, only_places):
                return token, same
    return None


def _agree(left: Run, token: int, right: Run, same: int, only_places: bool) -> bool:
    if only_places:
        return right.begin(same) == left.begin(token) and _begins_alone(right, same)
    return right.pair(same) == left.pair(token)


def _begins_alone(run: Run, token: int) -> bool:
    """Whether a token begins after the one before it has ended: not so for the bytes of one character."""
    spans = run.encoded.spans
    return token > run.first and spans[token - 1][1] <= spans[token][0] and spans[token - 1][0] < spans[token][0]


def _from(tokenizer: Tokenizer, place: int, window: Window, plain_specials: bool, most: int | None = None) -> Run:
    """A window's tokens once more, from a place within it; of `most` characters."""
    rest = Window(place, window.text[place - window.start :][:most])
    return Run(rest, tokenizer.encode_spans([rest.text], plain_specials)[0])
