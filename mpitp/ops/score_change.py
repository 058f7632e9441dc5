"""What models do to attention's scores between scale and softmax (a bias, a cap), tile by tile."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpitp.backend.arrays import Array, array_module


class ScoreChange(ABC):
    """Changes a tile of scores [queries, keys], which are scaled already, in place.

    `head` is the query head's number on this rank; `queries` and `keys` are positions in the sequence. What is hidden
    from a query is changed with the rest of its tile, and hidden afterwards.
    """

    uses_scores: ClassVar[bool] = True  # whether backward looks at them

    @abstractmethod
    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        """scores become those that the softmax takes."""

    @abstractmethod
    def backward(self, dscores: Array, scores: Array | None, head: int, queries: range, keys: range) -> None:
        """dscores, the gradient of what forward made, become that of what it was given; gradients of parameters are
        added up. `scores`: what forward was given; None unless it `uses_scores`.
        """


@dataclass(frozen=True, slots=True)
class ScoreCap(ScoreChange):
    """cap tanh(S / cap): scores stay below a cap (Gemma 2). dS = dS' (1 - tanh^2(S / cap))."""

    cap: float

    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        scores /= self.cap
        array_module(scores).tanh(scores, out=scores)
        scores *= self.cap

    def backward(self, dscores: Array, scores: Array | None, head: int, queries: range, keys: range) -> None:
        assert scores is not None
        ratio = array_module(scores).tanh(scores / self.cap)
        ratio *= ratio
        dscores *= 1.0 - ratio


@dataclass(frozen=True, slots=True)
class Alibi(ScoreChange):
    """S - slope_h (p - u) for the query at position p and the key at u: what is far counts less (Press et al. 2022).

    slopes: of this rank's query heads.
    """

    uses_scores = False
    slopes: Sequence[float]

    def forward(self, scores: Array, head: int, queries: range, keys: range) -> None:
        xp, slope = array_module(scores), self.slopes[head]
        scores += (xp.arange(keys.start, keys.stop, dtype=scores.dtype) * slope)[None, :]
        scores -= (xp.arange(queries.start, queries.stop, dtype=scores.dtype) * slope)[:, None]

    def backward(self, dscores: Array, scores: Array | None, head: int, queries: range, keys: range) -> None:
        """A constant was added: nothing changes."""


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of every query head of a model: 2^(-8/n), 2^(-16/n), ... of n heads, n a power of two; what heads there
    are beyond take every second one of twice as many.

    >>> alibi_slopes(2)
    (0.0625, 0.00390625)
    """
    n = 1 << int(math.log2(heads))
    first = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    more = [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return tuple(first + more)
