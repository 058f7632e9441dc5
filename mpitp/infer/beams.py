"""Which of many continuations to go on with: one (the likeliest token, or a drawn one), or several beams at once.

    candidates    log p(text) + log p(token | text) of all beams and tokens: the best max(2, 1 + ends) * beams
    goes on       the best `beams` of them that haven't ended
    has ended     of the best `beams` candidates those whose token ends them (or that have their most tokens), with
                  score = log p / length^penalty; the best `beams` of all such are kept
    is over       when no beam that goes on can beat the worst that has ended, as far as `early` wants to know it

That is transformers' way (its `_beam_search`), heuristics of `early` included, for one text; a text's result doesn't
depend on others. Pure functions of numbers: one rank runs them, and tells the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from mpitp.errors import UsageError
from mpitp.infer.sampling import Sampling, uniform_draw

FAR = -1e9  # the score of a beam that hasn't begun: below every text's
Applied = Callable[[np.ndarray, list[int]], np.ndarray]  # (scores [v], text) -> scores, -inf for what may not come


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """`count` 1: no beams. `length_penalty`: what a text's length is raised to before it divides its log-probability
    (above 0, long texts gain). `early`: stop when `count` texts have ended (True), when no running one is better at its
    own length (False), or when none could ever become better ("never").
    """

    count: int = 1
    length_penalty: float = 1.0
    early: bool | str = False

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 1000:
            raise UsageError(f"beams must lie in 1 .. 1000, got {self.count}")
        if not abs(self.length_penalty) < 1000:
            raise UsageError(f"a length penalty must lie between -1000 and 1000, got {self.length_penalty}")


@dataclass(slots=True)
class Moves:
    """How a text goes on: for each of its rows, the row before that it continues, and its new token. It may be over."""

    rows: list[int]
    tokens: list[int]


class Search(ABC):
    """One text that grows."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many continuations are under way."""

    @abstractmethod
    def step(self, logits: np.ndarray) -> Moves:
        """Take logits [rows, v] behind every row; without rows in the answer the text is over."""

    @abstractmethod
    def best(self) -> list[int]:
        """The text, with the id that ends it."""


@dataclass(slots=True)
class OneByOne(Search):
    """The likeliest token each time, or one that is drawn."""

    sampling: Sampling
    applied: Applied
    ends: Collection[int]
    most: int
    occurrence: int = 0
    text: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return 1

    def step(self, logits: np.ndarray) -> Moves:
        scores = self.applied(logits[0], self.text)
        draw = uniform_draw(self.sampling.seed, self.occurrence, len(self.text)) if self.sampling.temperature else 0.0
        token = self.sampling.choose(scores, draw)
        self.text.append(token)
        is_over = token in self.ends or len(self.text) == self.most
        return Moves([], []) if is_over else Moves([0], [token])

    def best(self) -> list[int]:
        return self.text


@dataclass(slots=True)
class BeamSearch(Search):
    """`beams.count` texts at once; `most`: tokens that one may have."""

    beams: BeamSettings
    applied: Applied
    ends: Collection[int]
    most: int
    running: list[tuple[float, list[int]]] = field(default_factory=list)  # log-probability and text, the best first
    ended: list[tuple[float, list[int]]] = field(default_factory=list)  # score and text, the best first
    can_improve: bool = True

    def __post_init__(self) -> None:
        self.running = [(0.0 if i == 0 else FAR, []) for i in range(self.beams.count)]

    @property
    def rows(self) -> int:
        return self.beams.count

    def step(self, logits: np.ndarray) -> Moves:
        candidates = self._candidates(logits)
        length = len(self.running[0][1]) + 1
        is_ended = [token in self.ends or length == self.most for _, _, token in candidates]
        self._collect(candidates, is_ended, length)
        going = [each for each, ended in zip(candidates, is_ended, strict=True) if not ended][: self.beams.count]
        if len(going) < self.beams.count:  # it has its most tokens
            return Moves([], [])
        self.running = [(score, [*self.running[row][1], token]) for score, row, token in going]
        self._look_ahead(length)
        if not self.can_improve or (self.beams.early is True and len(self.ended) == self.beams.count):
            return Moves([], [])
        return Moves([row for _, row, _ in going], [token for _, _, token in going])

    def _candidates(self, logits: np.ndarray) -> list[tuple[float, int, int]]:
        """(log-probability, row, token), the best first; of equal ones the first row and lowest token."""
        wide = logits.astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
        for row, (score, text) in enumerate(self.running):
            wide[row] = self.applied(wide[row], text) + score
        flat, vocab = wide.reshape(-1), wide.shape[1]
        count = min(max(2, 1 + len(self.ends)) * self.beams.count, len(flat))
        bar = np.partition(flat, len(flat) - count)[len(flat) - count]
        found = np.flatnonzero(flat >= bar)
        chosen = found[np.argsort(-flat[found], kind="stable")][:count]
        return [(float(flat[place]), int(place) // vocab, int(place) % vocab) for place in chosen]

    def _collect(self, candidates: list[tuple[float, int, int]], is_ended: list[bool], length: int) -> None:
        """Keep what has ended among the best candidates, if it may still count."""
        is_full = len(self.ended) == self.beams.count
        if not self.can_improve or (is_full and self.beams.early is True):
            return
        for (score, row, token), ended in list(zip(candidates, is_ended, strict=True))[: self.beams.count]:
            if ended:
                self.ended.append((score / length**self.beams.length_penalty, [*self.running[row][1], token]))
        self.ended = sorted(self.ended, key=lambda each: -each[0])[: self.beams.count]

    def _look_ahead(self, length: int) -> None:
        """Whether a running text could still become better than the worst that has ended."""
        if len(self.ended) < self.beams.count:
            return
        penalty = self.beams.length_penalty
        reach = self.most if self.beams.early == "never" and penalty > 0 else length
        self.can_improve = self.can_improve and self.running[0][0] / reach**penalty > self.ended[-1][0]

    def best(self) -> list[int]:
        return self.ended[0][1]
