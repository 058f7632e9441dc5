r"""How rows reach the experts that they go to, and come back: nobody moves, or an all-to-all over ep.

Experts are dealt to the ranks of ep raggedly (any number of experts on any number of ranks; some may have none). Each
of these ranks has tokens of its own, other microbatches, as the ranks of dp have (Lepikhin et al. 2020; Fedus et al.
2022): attention and all else is done once a token. A rank's rows, sorted by expert, are cut where the next rank's
experts begin:

    there    rows [n, h] sorted by expert  -- all-to-all -->  all ranks' rows for own experts, sorted by expert
    back     the same way home

Forward goes there with x and back with y, backward there with dy and back with dx: each is the other's conjugate, a
permutation of rows (V to V). How many rows go from whom to whom depends on the routing, and is said first: one number
an expert. A rank without a token sends empty blocks, a hot expert's rank gets many rows, and all ranks make the same
calls in either case. A rank that has no microbatch left while others do joins with an empty one (`Batch.idle`).

Between nodes, where messages move on while the rank computes, rows travel in *legs*, each with the rows for some of
every rank's experts: the second leg is on its way while the first one's experts multiply, and what these have made goes
home while the second one's multiply (the pipelining of Tutel: Hwang et al. 2023, by experts and not by tokens). An
expert's rows stay together, so that its products, and all numbers, are the same to the bit whatever the number of legs;
nor do the bytes change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.comm.group import Group, Pending
from mpitp.errors import PlacementError
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.partition import split_by_weight, split_evenly
from mpitp.layers.placement import Cut

MOST_LEGS = 2  # more of them hide little more: of n legs, the last one's way back is behind nothing


@dataclass(frozen=True, slots=True)
class Leg:
    """Rows that travel together. experts: for which of the own ones; counts: how many for each of these, int64 in host
    memory.

    by_expert: the arrived rows' numbers, sorted by expert; by_source: the way back. sent: which of the sorted rows go
    to each rank. arrived: how many come from each.
    """

    experts: slice
    counts: np.ndarray
    by_expert: np.ndarray | None = None
    by_source: np.ndarray | None = None
    sent: tuple[slice, ...] = ()
    arrived: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trip:
    """Where rows have gone: all legs, in the order of the own experts."""

    legs: tuple[Leg, ...]


class Exchange(ABC):
    """Takes sorted rows to their experts."""

    @abstractmethod
    def plan(self, counts: np.ndarray) -> Trip:
        """For rows of which each expert has so many, int64 [e]. A collective."""

    @abstractmethod
    def start_there(self, rows: Array, trip: Trip) -> list[Pending]:
        """Send rows [n, h], sorted by expert: of each leg, those that come for the own experts, sorted by expert."""

    @abstractmethod
    def start_back(self, rows: Array, leg: Leg) -> Pending:
        """Send a leg's rows the other way: what comes from each rank."""

    @abstractmethod
    def home(self, returning: Sequence[Pending], trip: Trip) -> Array:
        """Wait for what `start_back` has begun, of all legs: rows [n, h] as they went there."""

    @abstractmethod
    def ranks_of(self, experts: np.ndarray) -> np.ndarray:
        """Which rank has each of these experts."""

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
        return Trip((Leg(slice(0, len(counts)), counts),))

    def start_there(self, rows: Array, trip: Trip) -> list[Pending]:
        return [Pending.done(rows)]

    def start_back(self, rows: Array, leg: Leg) -> Pending:
        return Pending.done(rows)

    def home(self, returning: Sequence[Pending], trip: Trip) -> Array:
        (rows,) = returning
        return rows.wait()

    def ranks_of(self, experts: np.ndarray) -> np.ndarray:
        return np.zeros_like(experts)

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
    """Rank r of `group` has experts `spans[r]`. `num_legs`: see above."""

    group: Group
    spans: tuple[range, ...]
    num_legs: int = 1
    axis: str = "ep"

    @classmethod
    def over(cls, group: Group, num_experts: int, weights: Sequence[float] = ()) -> ExchangeOverEp:
        """Experts dealt by weight (none: evenly); several legs where they hide something, and a rank has several
        experts.
        """
        spans = split_by_weight(num_experts, group.size, weights)
        return cls(group, spans, min(MOST_LEGS, max(map(len, spans))) if group.in_background else 1)

    def plan(self, counts: np.ndarray) -> Trip:
        of_source = np.stack(self.group.all_to_all([counts[span.start : span.stop] for span in self.spans]))
        ends = np.concatenate([[0], np.cumsum(counts)])
        return Trip(tuple(self._leg(number, of_source, ends) for number in range(self.num_legs)))

    def _leg(self, number: int, of_source: np.ndarray, ends: np.ndarray) -> Leg:
        """of_source [ranks, own experts]: the rows that come; ends [e + 1]: where an expert's own rows begin."""
        parts = [split_evenly(len(span), self.num_legs)[number] for span in self.spans]
        own = slice(parts[self.group.rank].start, parts[self.group.rank].stop)
        of_source = of_source[:, own]
        experts = np.tile(np.arange(of_source.shape[1]), len(of_source))
        by_expert = np.argsort(np.repeat(experts, of_source.reshape(-1)), kind="stable")
        by_source = np.empty_like(by_expert)
        by_source[by_expert] = np.arange(len(by_expert))
        first = [(span.start + part.start, len(part)) for span, part in zip(self.spans, parts, strict=True)]
        sent = tuple(slice(int(ends[start]), int(ends[start + count])) for start, count in first)
        return Leg(own, of_source.sum(axis=0), by_expert, by_source, sent, tuple(of_source.sum(axis=1).tolist()))

    def start_there(self, rows: Array, trip: Trip) -> list[Pending]:
        return [self._start_leg(rows, leg) for leg in trip.legs]

    def _start_leg(self, rows: Array, leg: Leg) -> Pending:
        blocks = self.group.start_all_to_all([rows[part] for part in leg.sent], leg.arrived)

        def arrived() -> Array:
            return array_module(rows).concatenate(blocks.wait())[_index(leg.by_expert, rows)]

        return Pending(arrived, blocks.test)

    def start_back(self, rows: Array, leg: Leg) -> Pending:
        ends = np.cumsum(leg.arrived).tolist()
        by_source = rows[_index(leg.by_source, rows)]
        blocks = [by_source[end - count : end] for end, count in zip(ends, leg.arrived, strict=True)]
        return self.group.start_all_to_all(blocks, [part.stop - part.start for part in leg.sent])

    def home(self, returning: Sequence[Pending], trip: Trip) -> Array:
        pieces = [
            (part.start, block)
            for leg, blocks in zip(trip.legs, returning, strict=True)
            for part, block in zip(leg.sent, blocks.wait(), strict=True)
        ]
        pieces.sort(key=lambda piece: piece[0])
        return array_module(pieces[0][1]).concatenate([block for _, block in pieces])

    def ranks_of(self, experts: np.ndarray) -> np.ndarray:
        return np.searchsorted([span.stop for span in self.spans], experts, side="right")

    def check(self, rows: ArrayType, experts: Cut) -> None:
        rows.expect(self.axis, VARYING, "what is exchanged for experts", "each rank sends its own tokens")

    def sends(self, width: int, top_k: int) -> tuple[Send, ...]:
        """Forward how many rows go where; forward and backward every row there and back. How many a rank hands in on
        their way back, the routing says: all ranks of ep together as many as on the way there. Further legs are calls
        that send nothing more.
        """
        numbers = Send(FORWARD, "all_to_all", 0, "k t h s", self.axis, fixed_bytes=8 * self.spans[-1].stop)
        rows, more = width * top_k, 2 * (self.num_legs - 1)
        both = [Send(phase, "all_to_all", rows, "k t h s", self.axis, calls=2) for phase in (FORWARD, BACKWARD)]
        return (numbers, *both, *(replace(send, width=0, calls=more) for send in both if more))


def _index(numbers: np.ndarray | None, rows: Array) -> Array:
    assert numbers is not None, "a leg of another kind of exchange"
    return from_host(numbers, array_module(rows))
