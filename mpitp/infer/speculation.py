r"""Tokens that may come next, tried together: a step then writes several tokens of a text, and they are the same ones.

    known tokens ... t     drafts d1 d2 d3         one pass over  t d1 d2 d3  gives the logits behind each of them

The token behind t is chosen as ever. If it is d1, the logits behind d1 are those of this very text, so the next token
is chosen from them, and so on; the first that isn't its draft is still right, and what stands behind it in the cache is
written over. One pass over few rows takes little longer than over one, since it reads the weights once.

Nothing is changed about a text: each token is chosen by the same logits and, where it is drawn, by the random number of
its own place. This is the rule of Leviathan et al. 2023 (algorithm 1, where the draft is certain: q(d) = 1): d is kept
with probability p(d), its own, and else the token is distributed as p without d. In the invariant mode the logits are
the same to the bit; in the plain mode they differ by rounding, as in another company.

Drafts come from the text itself (`lookup`: what followed the last time; Saxena 2023), or from a small model beside the
large one (`Drafter`), which is laid on the same ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitp.infer.orders import TextRun
from mpitp.infer.texts import Text
from mpitp.models.model import CausalLM

LONGEST_ENDING = 4  # tokens that are looked up; what follows a longer ending is likelier to come again
SHORTEST_ENDING = 2
DRAFTED_ROWS = 8  # of a step with drafts (one core, float32: 4 rows take 1.35 times as long as one, 8 rows 2.2 times)
Drafts = dict[int, tuple[int, ...]]  # by the number of a text
Compute = Callable[[Sequence[TextRun]], np.ndarray]


class Speculator(ABC):
    """Where drafts come from, on rank 0."""

    @abstractmethod
    def most(self, text: Text, room: int) -> int:
        """How many drafts of a text there can be, of at most `room`."""

    @abstractmethod
    def drafts(self, texts: Sequence[Text], runs: Sequence[TextRun], counts: Mapping[int, int], do: Compute) -> Drafts:
        """So many drafts of texts by their numbers. `runs`: what the step computes of each of `texts` that is known;
        `do(runs)`: what the drafting model says to runs of its own, on all ranks.
        """


def lookup(tokens: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` tokens that followed the last time when the tokens ended as they do now.

    The longest ending counts that occurred before, of LONGEST_ENDING to SHORTEST_ENDING tokens; then the latest place.

    >>> lookup([1, 2, 3, 4, 5, 9, 2, 3], 2)
    [4, 5]
    """
    best, found, place = SHORTEST_ENDING - 1, -1, -1
    last, end = tokens[-1], len(tokens) - 1
    while (place := _index(tokens, last, place + 1, end)) >= 0:
        length = 1
        while length < min(LONGEST_ENDING, place + 1) and tokens[place - length] == tokens[end - length]:
            length += 1
        if length >= max(best, SHORTEST_ENDING):
            best, found = length, place
    return tokens[found + 1 : found + 1 + most] if found >= 0 else []


def _index(tokens: Sequence[int], token: int, start: int, stop: int) -> int:
    try:
        return tokens.index(token, start, stop)
    except ValueError:
        return -1


@dataclass(frozen=True, slots=True)
class Lookup(Speculator):
    """Drafts that repeat the text."""

    def most(self, text: Text, room: int) -> int:
        return len(lookup(text.known, room))

    def drafts(self, texts: Sequence[Text], runs: Sequence[TextRun], counts: Mapping[int, int], do: Compute) -> Drafts:
        return {text.number: tuple(lookup(text.known, counts[text.number])) for text in texts if text.number in counts}


@dataclass(frozen=True, slots=True)
class Drafter(Speculator):
    """Drafts of a second model, which follows all texts: it computes what the first one does, into places of the same
    numbers in a cache of its own. So what is shared, copied and found again of a text holds for both.

    It chooses as the request does, by the same random numbers. A text longer than its `positions`, or with an id
    that it has no row for, gets no drafts.
    """

    vocab_size: int  # of the first model
    own_vocab_size: int
    positions: int

    def most(self, text: Text, room: int) -> int:
        return max(0, min(room, self.positions - len(text.known)))

    def drafts(self, texts: Sequence[Text], runs: Sequence[TextRun], counts: Mapping[int, int], do: Compute) -> Drafts:
        found: dict[int, list[int]] = {number: [] for number in counts}
        by_number = {text.number: text for text in texts}
        todo = [self._caught_up(by_number[run.text], run, int(run.text in counts)) for run in runs]
        todo = [run for run in todo if self._can_read(run)]
        while todo:
            logits = do(todo)
            for run in todo:
                by_number[run.text].followed = run.first + len(run.tokens)
            wanting = [run for run in todo if run.wanted]
            for run, row in zip(wanting, logits, strict=True):
                text = by_number[run.text]
                found[run.text].append(text.request.pick(self._fitted(row), [*text.new, *found[run.text]]))
            todo = [
                replace(run, first=run.first + len(run.tokens), tokens=(found[run.text][-1],))
                for run in wanting
                if len(found[run.text]) < counts[run.text]
            ]
        return {number: tuple(tokens) for number, tokens in found.items()}

    def _can_read(self, run: TextRun) -> bool:
        return run.first + len(run.tokens) <= self.positions and max(run.tokens) < self.own_vocab_size

    def _caught_up(self, text: Text, run: TextRun, wanted: int) -> TextRun:
        """What the first model computes of a text, and what this one lacks before it."""
        stop = run.first + len(run.tokens)
        return replace(run, first=text.followed, tokens=tuple(text.known[text.followed : stop]), wanted=wanted)

    def _fitted(self, logits: np.ndarray) -> np.ndarray:
        """Over the first model's vocabulary: padding differs between models of one family."""
        fitted = np.full(self.vocab_size, -np.inf, logits.dtype)
        common = min(len(logits), self.vocab_size)
        fitted[:common] = logits[:common]
        return fitted


@dataclass(frozen=True, slots=True)
class Speculation:
    """What is asked for: at most `tokens` drafts of a text in a step, by `draft` (None: by lookup)."""

    tokens: int
    draft: CausalLM | None = None

    @property
    def rows(self) -> int:
        """Of a step with drafts, at most: among many texts they cost more than they bring."""
        return max(DRAFTED_ROWS, 1 + self.tokens)

    def speculator(self, vocab_size: int) -> Speculator:
        """For the engine of a model with this vocabulary."""
        if self.draft is None:
            return Lookup()
        config = self.draft.config
        return Drafter(vocab_size, config.vocab_size, config.cached_positions)
