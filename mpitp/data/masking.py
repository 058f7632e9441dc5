"""Which tokens a masked language model has to tell, and what it sees in their place (Devlin et al. 2019, section 3.1).

Of each sample every token that is no special one is chosen with probability `rate`; of the chosen, 80 % become the
mask, 10 % any token, 10 % stay. What becomes of position i of sample n is a function of (seed, n, i): the same however
samples are dealt to microbatches and ranks, and another one each time an epoch shows the text under another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.backend.rng import stream_key, words_at
from mpitp.models.batch import IGNORED

_WHOLE = 2**32
_MASKED, _RANDOM = int(0.8 * _WHOLE), int(0.9 * _WHOLE)


@dataclass(frozen=True, slots=True)
class Masking:
    """How tokens are hidden. `name`: of the stream of random numbers. `special`: ids that are never hidden."""

    rate: float
    mask_id: int
    vocab_size: int
    special: tuple[int, ...]
    seed: int
    name: str = "train"

    def apply(self, tokens: np.ndarray, samples: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """What the model sees, and its targets: two int64 arrays [len(samples), s] of tokens of that shape."""
        index = np.asarray(samples, np.uint64)[:, None] << np.uint64(32) | np.arange(tokens.shape[1], dtype=np.uint64)
        choice, kind, other, _ = words_at(index, stream_key(self.seed, f"mask/{self.name}"))
        chosen = (choice < int(self.rate * _WHOLE)) & ~np.isin(tokens, self.special)
        others = other.astype(np.int64) % self.vocab_size
        seen = np.where(chosen & (kind < _MASKED), self.mask_id, tokens)
        seen = np.where(chosen & (kind >= _MASKED) & (kind < _RANDOM), others, seen)
        return seen.astype(np.int64), np.where(chosen, tokens, IGNORED)
