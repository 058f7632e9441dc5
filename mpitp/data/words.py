"""Words of a sentence among its tokens: the sentence is the words with a blank between, and a word is told by its first
token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mpitp.data.tokenizer import Encoded, Tokenizer


@dataclass(frozen=True, slots=True)
class PlacedWords:
    """Token ids of a sentence; `firsts`: where each word's first token is among them, None for a word that has none or
    was cut off.
    """

    ids: list[int]
    firsts: tuple[int | None, ...]

    def spread(self, numbers: Sequence[int], otherwise: int) -> np.ndarray:
        """A number for each token: that of the word which it begins, or `otherwise`."""
        found = np.full(len(self.ids), otherwise, np.int64)
        for number, place in zip(numbers, self.firsts, strict=True):
            if place is not None:
                found[place] = number
        return found


def place_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], most: int) -> list[PlacedWords]:
    """Sentences of words as tokens, with what the tokenizer puts around a text, cut to `most`."""
    prefix, suffix = tokenizer.around
    texts = [" ".join(words) for words in sentences]
    placed = []
    for words, text, encoded in zip(sentences, texts, tokenizer.encode_spans(texts), strict=True):
        ids = tokenizer.shortened([*prefix, *map(int, encoded.ids), *suffix], most)
        end = len(ids) - len(suffix)
        firsts: dict[int, int] = {}
        for place, word in _beginnings(words, text, encoded):
            if len(prefix) + place < end:
                firsts.setdefault(word, len(prefix) + place)
        placed.append(PlacedWords(ids, tuple(firsts.get(word) for word in range(len(words)))))
    return placed


def _beginnings(words: Sequence[str], text: str, encoded: Encoded) -> Iterator[tuple[int, int]]:
    """Each token with the word in which it begins; a blank before that is nobody's."""
    starts = [0, *accumulate(len(word) + 1 for word in words)]
    for place, (first, end) in enumerate(encoded.spans):
        while first < end and text[first] == " ":
            first += 1
        if first < end:
            yield place, bisect_right(starts, first) - 1
