r"""How rows reach the experts that they go to, and come back: nobody moves, or an all-to-all over ep.

Experts are dealt to the ranks of ep raggedly (`split_evenly`: any number of experts on any number of ranks; some may
have none). Each of these ranks has tokens of its own, other microbatches, as the ranks of dp have (Lepikhin et al.
2020; Fedus et al. 2022): attention and all else is done once a token. A rank's rows, sorted by expert, are cut where
the next rank's experts begin:

    there    rows [n, h] sorted by expert  -- all-to-all -->  all ranks' rows for own experts, sorted by expert
    back     the same way home

Forward goes there with x and back with y, backward there with dy and back with dx: each is the other's conjugate, a
permutation of rows (V to V). How many rows go from whom to whom depends on the routing, and is said first: one number
an expert. A rank without a token sends empty blocks, a hot expert's rank gets many rows, and all ranks make the same
calls in either case. A rank that has no microbatch left while others do joins with an empty one (`Batch.idle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.comm.group import Group
from mpitp.errors import PlacementError
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.placement import Cut


@dataclass(frozen=True, slots=True)
class Trip:
    """Where rows have gone. counts: rows of each own expert, int64 in host memory.

    by_expert: the arrived rows' numbers, sorted by expert; by_source: the way back. sent, arrived: rows a rank.
    """

    counts: np.ndarray
    by_expert: np.ndarray | None = None
    by_source: np.ndarray | None = None
    sent: tuple[int, ...] = ()
    arrived: tuple[int, ...] = ()


class Exchange(ABC):
    """Takes sorted rows to their experts."""

    @abstractmethod
    def plan(self, counts: np.ndarray) -> Trip:
        """For rows of which each expert has so many, int64 [e]. A collective."""

    @abstractmethod
    def there(self, rows: Array, trip: Trip) -> Array:
        """rows [n, h], sorted by expert -> those of the own experts, sorted by expert."""

    @abstractmethod
    def back(self, rows: Array, trip: Trip) -> Array:
        """The other way."""

    @abstractmethod
    def check(self, rows: ArrayType, experts: Cut) -> None:
        """Refuse rows that don't reach experts which are dealt like `experts`."""

    @abstractmethod
    def sends(self, width: int, top_k: int) -> tuple[Send, ...]:
        """What it sends for rows of `width`, `top_k` a token."""


@dataclass(frozen=True, slots=True)
class StayHere(Exchange):
    """Every rank has all experts, or its columns of all."""

    def plan(self, counts: np.ndarray) -> Trip:
        return Trip(counts)

    def there(self, rows: Array, trip: Trip) -> Array:
        return rows

    def back(self, rows: Array, trip: Trip) -> Array:
        return rows

    def check(self, rows: ArrayType, experts: Cut) -> None:
        if not experts.is_whole:
            raise PlacementError(
                f"this rank has {len(experts.held)} of {experts.size} experts, and rows for all of them",
                rows.made_by,
                f"exchange the rows along {experts.axis}",
            )

    def sends(self, width: int, top_k: int) -> tuple[Send, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class ExchangeOverEp(Exchange):
    """Rank r of `group` has experts `spans[r]`."""

    group: Group
    spans: tuple[range, ...]
    axis: str = "ep"

    def plan(self, counts: np.ndarray) -> Trip:
        theirs = self.group.all_to_all([counts[span.start : span.stop] for span in self.spans])
        of_source = np.stack(theirs)  # [ranks, own experts]
        experts = np.tile(np.arange(of_source.shape[1]), len(theirs))
        by_expert = np.argsort(np.repeat(experts, of_source.reshape(-1)), kind="stable")
        by_source = np.empty_like(by_expert)
        by_source[by_expert] = np.arange(len(by_expert))
        sent = tuple(int(counts[span.start : span.stop].sum()) for span in self.spans)
        return Trip(of_source.sum(axis=0), by_expert, by_source, sent, tuple(of_source.sum(axis=1).tolist()))

    def there(self, rows: Array, trip: Trip) -> Array:
        return self._exchanged(rows, trip.sent)[_index(trip.by_expert, rows)]

    def back(self, rows: Array, trip: Trip) -> Array:
        return self._exchanged(rows[_index(trip.by_source, rows)], trip.arrived)

    def _exchanged(self, rows: Array, counts: Sequence[int]) -> Array:
        """Blocks of `counts` rows to the ranks in their order; theirs one after the other."""
        ends = np.cumsum(counts)
        blocks = [rows[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]
        return array_module(rows).concatenate(self.group.all_to_all(blocks))

    def check(self, rows: ArrayType, experts: Cut) -> None:
        rows.expect(self.axis, VARYING, "what is exchanged for experts", "each rank sends its own tokens")

    def sends(self, width: int, top_k: int) -> tuple[Send, ...]:
        """Forward how many rows go where; forward and backward every row there and back. How many a rank hands in on
        their way back, the routing says: all ranks of ep together as many as on the way there.
        """
        numbers = Send(FORWARD, "all_to_all", 0, "k t h s", self.axis, fixed_bytes=8 * self.spans[-1].stop)
        rows = [
            Send(phase, "all_to_all", width * top_k, "k t h s", self.axis, calls=2) for phase in (FORWARD, BACKWARD)
        ]
        return numbers, *rows


def _index(numbers: np.ndarray | None, rows: Array) -> Array:
    assert numbers is not None, "a trip of another kind of exchange"
    return from_host(numbers, array_module(rows))
