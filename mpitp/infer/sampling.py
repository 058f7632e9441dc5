"""Choosing the next token from logits: greedy, or by temperature, top-k, top-p (nucleus; Holtzman et al. 2020), min-p.

Before that, logits may be changed: by a bias, and by what the text says already. For a token that occurs in the prompt
or the text, the repetition penalty r (Keskar et al. 2019) divides a positive logit and multiplies a negative one; for
one that occurs n > 0 times in the new text, the frequency penalty takes off n times its value, the presence penalty
once.

The random number for position i of a sequence is drawn at index i of a counter-based stream, so a text depends on the
seed, its own prompt and its own position only: not on the rank count, nor on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpitp.backend.rng import philox4x32, stream_key
from mpitp.errors import UsageError

MOST_REPETITION = 100.0
FIRST_CANDIDATES = 1024  # are sorted first; mostly the token is among them


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a text says already counts against saying it again; `bias` is added to the logits of single tokens."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 / MOST_REPETITION <= self.repetition <= MOST_REPETITION:  # its inverse is a factor too
            raise UsageError(
                f"a repetition penalty must lie in {1 / MOST_REPETITION:g} .. {MOST_REPETITION:g} (1: none), got "
                f"{self.repetition}"
            )
        for name, value in (("presence", self.presence), ("frequency", self.frequency)):
            if not math.isfinite(value):
                raise UsageError(f"a {name} penalty must be a finite number (0: none), got {value}")
        if not all(math.isfinite(value) for value in self.bias.values()):
            raise UsageError("a logit bias must be a finite number")

    def applied(self, logits: np.ndarray, prompt: Sequence[int], new: Sequence[int]) -> np.ndarray:
        """Changed logits [v], float64, behind a prompt and the tokens that have been chosen since."""
        changed = logits.astype(np.float64)
        if self.repetition != 1:
            seen = np.unique(np.array([*prompt, *new], np.int64))
            changed[seen] *= np.where(changed[seen] > 0, 1 / self.repetition, self.repetition)
        if self.presence or self.frequency:
            said, times = np.unique(np.array(new, np.int64), return_counts=True)
            changed[said] -= self.frequency * times + self.presence
        for token, value in self.bias.items():
            changed[token] += value
        return changed


NO_PENALTIES = Penalties()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave every token possible.

    min_p: only tokens at least so many times as probable as the likeliest one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    penalties: Penalties = NO_PENALTIES

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be a finite number of at least 0 (0: greedy), got {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top-k must be at least 0 (0: all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must lie in (0, 1] (1: all tokens), got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p must lie in [0, 1] (0: all tokens), got {self.min_p}")

    def choose(self, logits: np.ndarray, draw: float) -> int:
        """The token for logits [v] and a uniform number `draw` in [0, 1). Ties go to the lowest id.

        A logit of minus infinity is a token that must not come; one at least must be finite.
        """
        if not self.temperature:
            return int(np.argmax(logits))
        below_best = logits.astype(np.float64) - logits.max()
        with np.errstate(over="ignore"):  # a tiny temperature: minus infinity, which has the weight 0
            scaled = below_best / self.temperature
        count = len(scaled) if not self.top_k else min(self.top_k, len(scaled))
        total = np.exp(scaled).sum() if not self.top_k else None
        for size in (FIRST_CANDIDATES, count):
            token = self._among(scaled, min(size, count), total, draw, is_all=size >= count)
            if token is not None:
                return token
        raise AssertionError("all candidates were looked at")

    def _among(self, scaled: np.ndarray, size: int, total: float | None, draw: float, *, is_all: bool) -> int | None:
        """The token, if it is sure to be among the `size` likeliest ones; `total`: the weight of all that may come,
        None: of these.
        """
        order = _likeliest(scaled, size)
        weights = np.exp(scaled[order])
        cumulative = np.cumsum(weights)
        whole = cumulative[-1] if is_all or total is None else total
        if total is None and not is_all:
            return None  # what the others weigh isn't known
        if self.min_p and (is_all or weights[-1] < self.min_p):
            keep = max(1, int(np.searchsorted(-weights, -self.min_p, side="right")))
            order, cumulative = order[:keep], cumulative[:keep]
            whole, is_all = cumulative[-1], True
        if self.top_p < 1:  # the smallest set whose probability reaches top_p
            keep = int(np.searchsorted(cumulative, self.top_p * whole)) + 1
            if keep > len(order) and not is_all:
                return None
            order, cumulative = order[:keep], cumulative[:keep]
            whole = cumulative[-1]
        place = int(np.searchsorted(cumulative, draw * whole, side="right"))
        if place >= len(order) and not is_all and self.top_p == 1:
            return None
        return int(order[min(place, len(order) - 1)])


def _likeliest(scaled: np.ndarray, size: int) -> np.ndarray:
    """The `size` likeliest tokens, most likely first; of equally likely ones, the lowest ids."""
    if size >= len(scaled):
        return np.argsort(-scaled, kind="stable")
    bar = np.partition(scaled, len(scaled) - size)[len(scaled) - size]
    above, ties = np.flatnonzero(scaled > bar), np.flatnonzero(scaled == bar)
    found = np.sort(np.concatenate((above, ties[: size - len(above)])))
    return found[np.argsort(-scaled[found], kind="stable")]


def likelihoods(logits: np.ndarray, token: int, count: int) -> Likelihoods:
    """Of the model's own logits [v]: the log-probability of `token`, and the `count` best tokens with theirs."""
    wide = logits.astype(np.float64)
    log_total = float(wide.max() + np.log(np.exp(wide - wide.max()).sum()))
    best = _likeliest(wide, count) if count else np.zeros(0, np.int64)
    return Likelihoods(float(wide[token]) - log_total, tuple((int(i), float(wide[i]) - log_total) for i in best))


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Natural logarithms of probabilities: of the chosen token, and of the best ones (token, logarithm)."""

    chosen: float
    best: tuple[tuple[int, float], ...]


def uniform_draw(seed: int, occurrence: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position`.

    `occurrence` counts equal prompts in a batch, so that they get different texts.
    """
    zero = np.zeros(1, np.uint32)
    counter = (np.array([position], np.uint32), np.array([occurrence], np.uint32), zero, zero)
    high, low, _, _ = philox4x32(counter, stream_key(seed, "sampling"))
    return ((int(high[0]) >> 5) * 2**26 + (int(low[0]) >> 6)) / 2**53
