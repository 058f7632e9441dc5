"""Which sequences the rows of an activation [t, h] belong to, and what of each is already in a cache.

Sequences of different lengths lie one after the other, without padding: position and attention are per sequence, every
matrix product sees t = sum of lengths rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.rng import stream_key

Array = Any


@dataclass(frozen=True, slots=True)
class DropoutState:
    """What decides the dropout masks of one pass; with it backward draws the same masks again.

    `samples` are the sequences' indices in the global batch of optimizer step `step`, so that the masks don't depend on
    how the batch is cut into microbatches or dealt to ranks.
    """

    seed: int
    step: int
    samples: tuple[int, ...]

    def key(self, name: str) -> tuple[int, int]:
        """The generator's key for the dropout called `name`."""
        return stream_key(self.seed, f"dropout/{name}/step {self.step}")


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one pass: `lengths` new tokens each, after `past` tokens already seen (in a KV cache)."""

    lengths: tuple[int, ...]
    past: tuple[int, ...] = ()
    dropout: DropoutState | None = None  # None: no dropout (evaluation)
    rotation: tuple[Array, Array] | None = None  # cos, sin [t, d/2] of the rows' positions, for models with RoPE

    @property
    def num_tokens(self) -> int:
        """t, the rows of an activation."""
        return sum(self.lengths)

    def past_of(self, index: int) -> int:
        """Tokens of sequence `index` seen before this pass."""
        return self.past[index] if self.past else 0

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Each sequence's index and its rows."""
        start = 0
        for index, length in enumerate(self.lengths):
            yield index, slice(start, start + length)
            start += length

    def positions(self) -> np.ndarray:
        """The position of every row in its sequence, int64 [t]."""
        pieces = [np.arange(self.past_of(i), self.past_of(i) + length) for i, length in enumerate(self.lengths)]
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)

    def last_rows(self) -> np.ndarray:
        """The row of every sequence's last token, int64 [b]."""
        return np.cumsum(np.asarray(self.lengths, np.int64)) - 1
