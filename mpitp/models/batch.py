"""What goes into a model: token ids, what the rows are, the targets, and what is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from mpitp.errors import ConfigError
from mpitp.layers.passes import DropoutState
from mpitp.layers.rows import Rows

IGNORED = -1  # a target that doesn't count (any negative one does not)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids of one or several sequences, one after the other. Equal on every rank of a tensor-parallel group.

    tokens: int64 [t]. targets: int64 [t] or None; a negative target doesn't count. Both in host memory. dropout: None
    for none (evaluation). types: of the tokens, int64 [t], where the model has several kinds; None: all 0. A model that
    says one thing of a whole sequence takes a target a sequence [b]. source: what an encoder reads, whose runs are of
    the same samples, where the model has both an encoder and a decoder.
    """

    tokens: np.ndarray
    rows: Rows
    targets: np.ndarray | None = None
    dropout: DropoutState | None = None
    types: np.ndarray | None = None
    source: Batch | None = None
    counted: int | None = None  # targets of the whole batch of which this is a rank's part; None: it is whole
    is_idle: bool = False  # no rows: a pass for its collectives alone, which other ranks need

    @classmethod
    def of_rows(
        cls, tokens: Any, targets: Any = None, dropout: DropoutState | None = None, samples: Sequence[int] = ()
    ) -> Batch:
        """Sequences of one length: tokens [b, s], targets [b, s] or None. `samples`: their indices in the global batch,
        0, 1, ... unless told otherwise.
        """
        ids = np.asarray(tokens, np.int64)
        flat_targets = None if targets is None else np.asarray(targets, np.int64).reshape(-1)
        rows = Rows.of((ids.shape[1],) * ids.shape[0], samples=samples)
        return cls(ids.reshape(-1), rows, flat_targets, dropout)

    @classmethod
    def of_lists(cls, sequences: Sequence[Sequence[int]], past: tuple[int, ...] = ()) -> Batch:
        """Sequences of any lengths, each after `past` tokens already in the cache."""
        flat = np.asarray([token for sequence in sequences for token in sequence], np.int64)
        return cls(flat, Rows.of([len(sequence) for sequence in sequences], past))

    @classmethod
    def idle(cls) -> Batch:
        """No rows, where other ranks have some."""
        return cls(np.zeros(0, np.int64), Rows(()), np.zeros(0, np.int64), is_idle=True)

    def cut(self, rank: int, ranks: int) -> Batch:
        """A rank's part where every sequence is cut over `ranks` (`Rows.cut`): its tokens and the targets of them, and
        of a pair a part of the source.
        """
        if ranks == 1:
            return self
        rows = self.rows.cut(rank, ranks)
        own, firsts = rows.numbers_in(self.rows), self.rows.first_rows()
        later = np.setdiff1d(np.arange(self.rows.num_tokens), firsts)
        return replace(
            self,
            tokens=_values_of(own, self.tokens, self.rows, later),  # an image has none at its class token
            rows=rows,
            targets=None if self.targets is None else _values_of(own, self.targets, self.rows, firsts),
            types=None if self.types is None else self.types[own],
            source=None if self.source is None else self.source.cut(rank, ranks),
            counted=self.whole_targets,
        )

    @property
    def whole_targets(self) -> int:
        """How many targets of the whole batch count, where this is a part of one."""
        return self.num_targets if self.counted is None else self.counted

    @property
    def num_targets(self) -> int:
        """How many targets count."""
        return 0 if self.targets is None else int((self.targets >= 0).sum())


def _values_of(own: np.ndarray, values: np.ndarray, rows: Rows, some: np.ndarray) -> np.ndarray:
    """Those of the rows `own`, of values that all rows of `rows` have, one each, or else `some` of them alone."""
    if len(values) == rows.num_tokens:
        return values[own]
    assert len(values) == len(some), "values of neither all rows nor those that may have some"
    numbers = np.full(rows.num_tokens, -1)
    numbers[some] = np.arange(len(some))
    picked = numbers[own]
    return values[picked[picked >= 0]]


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise ConfigError for a token id outside the vocabulary."""
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise ConfigError(
            f"token id {bad[0]} lies outside the model's vocabulary of {vocab_size}; "
            "was the text prepared with this model's tokenizer?"
        )


def check_lengths(rows: Rows, most: int, what: str, cure: str) -> None:
    """Raise ConfigError for rows of a `what` without tokens, or longer than `most` positions; `cure`: what to do."""
    if not rows.runs or (not rows.everyone and min(run.length for run in rows.runs) < 1):
        raise ConfigError(f"a {what} without tokens; every {what} needs at least one")
    longest = max(run.first + run.length for run in chain(rows.runs, *rows.everyone))  # alike on all ranks
    if longest > most:
        raise ConfigError(f"a {what} of {longest} tokens exceeds the model's {most} positions; {cure}")
