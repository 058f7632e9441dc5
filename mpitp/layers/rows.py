"""What the rows of an activation [t, h] are: which sample and which positions of it, and where its keys are cached.

Runs of different lengths lie one after the other, without padding: position and attention are per run, every matrix
product sees t = sum of lengths rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitp.layers.partition import piece_of


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows: `length` positions of one sample from `first` on.

    `sample` is its index in the global batch of the step, whatever microbatch or rank it is dealt to. `slot`: where its
    keys and values lie in a cache.
    """

    sample: int
    first: int
    length: int
    slot: int

    @property
    def begins(self) -> bool:
        """Whether it has its sample's first row."""
        return self.first == 0 and self.length > 0

    @property
    def positions(self) -> range:
        """Of its rows in the sample."""
        return range(self.first, self.first + self.length)


@dataclass(frozen=True, slots=True)
class Rows:
    """The runs of one pass, in the order of their rows.

    `everyone`: where sequences are cut over ranks (`cut`), the runs of each of them; else ().
    """

    runs: tuple[Run, ...]
    everyone: tuple[tuple[Run, ...], ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], past: Sequence[int] = (), samples: Sequence[int] = ()) -> Rows:
        """Runs of these lengths: of samples 0, 1, ... from their beginning on, unless told otherwise."""
        firsts, numbers = past or [0] * len(lengths), samples or range(len(lengths))
        together = zip(numbers, firsts, lengths, strict=True)
        return cls(tuple(Run(sample, first, length, slot) for slot, (sample, first, length) in enumerate(together)))

    @property
    def num_tokens(self) -> int:
        """t, the rows of an activation."""
        return sum(run.length for run in self.runs)

    def places(self) -> Iterator[tuple[Run, slice]]:
        """Each run and its rows."""
        start = 0
        for run in self.runs:
            yield run, slice(start, start + run.length)
            start += run.length

    def positions(self) -> np.ndarray:
        """The position of every row in its sample, int64 [t]."""
        pieces = [np.arange(run.first, run.first + run.length, dtype=np.int64) for run in self.runs]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def part(self, rows: range) -> Rows:
        """What rows `rows.start` .. `rows.stop - 1` are: pieces of the runs, each with its own first position."""
        pieces = []
        for run, place in self.places():
            start, stop = max(place.start, rows.start), min(place.stop, rows.stop)
            if start < stop:
                pieces.append(replace(run, first=run.first + start - place.start, length=stop - start))
        return Rows(tuple(pieces))

    def first_rows(self) -> np.ndarray:
        """The first row of every sample that begins here, int64 [b]."""
        return np.array([place.start for run, place in self.places() if run.begins], np.int64)

    def heads(self) -> Rows:
        """The first row alone of every sample that begins here."""
        return Rows(tuple(replace(run, length=1) for run in self.runs if run.begins))

    def cut(self, rank: int, ranks: int) -> Rows:
        """A rank's rows where every run is cut over `ranks`: pieces number `rank` and 2 ranks - 1 - rank of 2 ranks, an
        early and a late one, neighbours; some may be empty. With a causal mask all ranks have as much to attend to.

        >>> [(run.first, run.length) for run in Rows.of([10]).cut(1, 2).runs]
        [(3, 3), (6, 2)]
        """
        everyone = tuple(tuple(_pieces(self.runs, each, ranks)) for each in range(ranks))
        return Rows(everyone[rank], everyone)

    def uncut(self) -> Rows:
        """The whole runs of which `cut` made these."""
        counts = range(len(self.runs) // 2)
        lengths = [sum(run.length for own in self.everyone for run in own[2 * i : 2 * i + 2]) for i in counts]
        firsts = [self.everyone[0][2 * i] for i in counts]
        return Rows(tuple(replace(run, length=length) for run, length in zip(firsts, lengths, strict=True)))

    def numbers_in(self, whole: Rows) -> np.ndarray:
        """Which of the rows of `whole`, which `cut` made these of, each row is, int64 [t]."""
        begins = [place.start - run.first for run, place in whole.places()]
        pieces = [np.arange(run.length) + run.first + begins[i // 2] for i, run in enumerate(self.runs)]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def last_rows(self) -> np.ndarray:
        """The last row of every run, int64 [b]."""
        return np.cumsum(np.array([run.length for run in self.runs], np.int64)) - 1


def _pieces(runs: Sequence[Run], rank: int, ranks: int) -> Iterator[Run]:
    """Early and late piece of each run that a rank has."""
    for run in runs:
        for number in (rank, 2 * ranks - 1 - rank):
            rows = piece_of(run.length, number, 2 * ranks)
            yield replace(run, first=run.first + rows.start, length=len(rows))
