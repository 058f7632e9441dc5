"""Choosing the next token from logits: greedy, or by temperature, top-k and top-p (nucleus; Holtzman et al. 2020).

The random number for position i of a sequence is drawn at index i of a counter-based stream, so a text depends on the
seed, its own prompt and its own position only: not on the rank count, nor on what else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpitp.backend.rng import philox4x32, stream_key
from mpitp.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave every token possible."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature must be a finite number of at least 0 (0: greedy), got {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"top-k must be at least 0 (0: all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must lie in (0, 1] (1: all tokens), got {self.top_p}")

    def choose(self, logits: np.ndarray, draw: float) -> int:
        """The token for logits [v] and a uniform number `draw` in [0, 1). Ties go to the lowest id."""
        if not self.temperature:
            return int(np.argmax(logits))
        below_best = logits.astype(np.float64) - logits.max()
        with np.errstate(over="ignore"):  # a tiny temperature: minus infinity, which has the weight 0
            scaled = below_best / self.temperature
        order = np.argsort(-scaled, kind="stable")  # most likely first
        if self.top_k:
            order = order[: self.top_k]
        weights = np.exp(scaled[order])
        cumulative = np.cumsum(weights)
        if self.top_p < 1:  # the smallest set whose probability reaches top_p
            keep = int(np.searchsorted(cumulative, self.top_p * cumulative[-1])) + 1
            order, cumulative = order[:keep], cumulative[:keep]
        place = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
        return int(order[min(place, len(order) - 1)])


def uniform_draw(seed: int, occurrence: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position`.

    `occurrence` counts equal prompts in a batch, so that they get different texts.
    """
    zero = np.zeros(1, np.uint32)
    counter = (np.array([position], np.uint32), np.array([occurrence], np.uint32), zero, zero)
    high, low, _, _ = philox4x32(counter, stream_key(seed, "sampling"))
    return ((int(high[0]) >> 5) * 2**26 + (int(low[0]) >> 6)) / 2**53
