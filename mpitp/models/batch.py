"""What goes into a model: token ids, the sequences that they form, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.layers.sequences import DropoutState, Sequences

IGNORED = -1  # a target that doesn't count (any negative one does not)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids of one or several sequences, one after the other. Equal on every rank of a tensor-parallel group.

    tokens: int64 [t]. targets: int64 [t] or None; a negative target doesn't count. Both in host memory.
    """

    tokens: np.ndarray
    seqs: Sequences
    targets: np.ndarray | None = None

    @classmethod
    def of_rows(cls, tokens: Any, targets: Any = None, dropout: DropoutState | None = None) -> Batch:
        """Sequences of one length: tokens [b, s], targets [b, s] or None."""
        rows = np.asarray(tokens, np.int64)
        flat_targets = None if targets is None else np.asarray(targets, np.int64).reshape(-1)
        return cls(rows.reshape(-1), Sequences((rows.shape[1],) * rows.shape[0], dropout=dropout), flat_targets)

    @classmethod
    def of_lists(cls, sequences: Sequence[Sequence[int]], past: tuple[int, ...] = ()) -> Batch:
        """Sequences of any lengths, each after `past` tokens already in the cache."""
        flat = np.asarray([token for sequence in sequences for token in sequence], np.int64)
        return cls(flat, Sequences(tuple(len(sequence) for sequence in sequences), past))

    @property
    def num_targets(self) -> int:
        """How many targets count."""
        return 0 if self.targets is None else int((self.targets >= 0).sum())
