"""What all ranks do in a step: rank 0 decides it and sends one work order, which the others check and carry out.

An order is a row of whole numbers, so that one broadcast of `HEAD` numbers carries it (a longer one needs a second).
When there is nothing to do, rank 0 says so; the others then sleep until it wakes them, and burn no core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from mpitp.comm.group import Group

HEAD = 1024  # numbers in the first broadcast
WAKE_TAG = 30001


class Next(IntEnum):
    """What comes after an order."""

    WORK = 0
    SLEEP = 1
    END = 2


class Reason(IntEnum):
    """How a text goes on behind a chosen token: it does, or why it ends. Of EOS, the token is not part of the text."""

    GOES_ON = 0
    EOS = 1
    LENGTH = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class TextRun:
    """`tokens` of a text from position `first` on; `table`: extents of its places; `wanted`: behind how many of these
    tokens, the last ones, the logits are wanted.
    """

    text: int
    first: int
    tokens: tuple[int, ...]
    table: tuple[tuple[int, int], ...]
    wanted: int


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """Copies (source, target, places) come first, then `model` computes the runs: 0, or 1 for the one that drafts.
    `told`: (text, token, reason) chosen in the step before. Orders are numbered, so a rank that missed one is found
    out.
    """

    number: int
    runs: tuple[TextRun, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    told: tuple[tuple[int, int, Reason], ...] = ()
    next: Next = Next.WORK
    model: int = 0


def encoded(order: WorkOrder) -> np.ndarray:
    """The order as int64 numbers."""
    numbers = [0, order.number, order.next, order.model, len(order.runs), len(order.copies), len(order.told)]
    for run in order.runs:
        numbers += (run.text, run.first, len(run.tokens), len(run.table), run.wanted, *run.tokens)
        numbers += (place for extent in run.table for place in extent)
    numbers += (value for copy in order.copies for value in copy)
    numbers += (value for told in order.told for value in told)
    numbers[0] = len(numbers)
    return np.array(numbers, np.int64)


def decoded(numbers: np.ndarray, num_places: int) -> WorkOrder:
    """The order in int64 numbers, checked. Raises ValueError for one that can't be carried out in `num_places`."""
    values = iter(numbers.tolist())
    try:
        length, number, then, model, num_runs, num_copies, num_told = _next(values, 7)
        runs = tuple(_run(values) for _ in range(num_runs))
        copies = tuple((a, b, count) for a, b, count in (_next(values, 3) for _ in range(num_copies)))
        told = tuple(
            (text, token, Reason(reason)) for text, token, reason in (_next(values, 3) for _ in range(num_told))
        )
        order = WorkOrder(number, runs, copies, told, Next(then), model)
    except (StopIteration, RuntimeError) as error:
        raise ValueError("a work order that ends too early") from error
    if length != len(numbers) or next(values, None) is not None:
        raise ValueError(f"a work order of {len(numbers)} numbers that says it has {length}")
    _check(order, num_places)
    return order


def _next(values: Iterator[int], count: int) -> list[int]:
    return [next(values) for _ in range(count)]


def _run(values: Iterator[int]) -> TextRun:
    text, first, length, extents, wanted = _next(values, 5)
    tokens, places = _next(values, length), _next(values, 2 * extents)
    return TextRun(text, first, tuple(tokens), tuple(zip(places[::2], places[1::2], strict=True)), wanted)


def _check(order: WorkOrder, num_places: int) -> None:
    if order.model not in (0, 1):
        raise ValueError(f"work order {order.number}: model {order.model} of 0 and 1")
    for run in order.runs:
        room = sum(stop - start for start, stop in run.table)
        inside = all(0 <= start < stop <= num_places for start, stop in run.table)
        if not inside or run.first < 0 or not run.tokens or run.first + len(run.tokens) > room:
            raise ValueError(f"work order {order.number}: text {run.text} doesn't lie in its {room} places")
        if not 0 <= run.wanted <= len(run.tokens):
            raise ValueError(f"work order {order.number}: {run.wanted} logits of {len(run.tokens)} tokens")
    for source, target, count in order.copies:
        if min(source, target, count) < 0 or max(source, target) + count > num_places:
            raise ValueError(f"work order {order.number}: a copy outside the cache")


class OrderChannel:
    """Brings orders from the first rank of `world` to the others."""

    def __init__(self, world: Group, num_places: int) -> None:
        self.world, self.num_places = world, num_places
        self._received = 0
        self._asleep = False

    def send(self, order: WorkOrder) -> None:
        """On the first rank: hand an order to all; to SLEEP it must carry nothing else."""
        if self.world.size == 1:
            return
        self._wake()
        numbers = encoded(order)
        head = np.zeros(HEAD, np.int64)
        head[: min(HEAD, len(numbers))] = numbers[:HEAD]
        self.world.broadcast(head)
        if len(numbers) > HEAD:
            self.world.broadcast(numbers[HEAD:])
        self._asleep = order.next is Next.SLEEP

    def receive(self) -> WorkOrder:
        """On the other ranks: the next order. Raises ValueError for one that isn't right."""
        if self._asleep:
            self.world.wait_for(0, WAKE_TAG)
            self.world.recv(np.zeros(1, np.int64), 0, WAKE_TAG)
        numbers = self.world.broadcast(np.zeros(HEAD, np.int64))
        length = int(numbers[0])
        if length > HEAD:
            rest = self.world.broadcast(np.zeros(length - HEAD, np.int64))
            numbers = np.concatenate((numbers, rest))
        order = decoded(numbers[:length], self.num_places)
        self._received += 1
        if order.number != self._received:
            raise ValueError(f"work order {order.number} came where number {self._received} was due")
        self._asleep = order.next is Next.SLEEP
        return order

    def _wake(self) -> None:
        if self._asleep:
            for rank in range(1, self.world.size):
                self.world.send(np.zeros(1, np.int64), rank, WAKE_TAG)


def merged(extents: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring extents as one.

    >>> merged([(16, 32), (32, 48), (0, 16)])
    ((16, 48), (0, 16))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in extents:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)
