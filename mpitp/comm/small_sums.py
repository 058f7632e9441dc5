"""Sums of a few kilobytes within a node: what a token's step has sixty of, each of them waited for at once.

    rank r     copy x_r into slot n mod 2 of r's part of the memory;  tell ready = n
               wait until every rank is ready;  y = x_0 + x_1 + ...     in rank order: the same bits on every rank

Nobody has to tell that a slot may be written again: whoever begins sum n + 2 has seen that all ranks are ready for
n + 1, so they have read all of n. The library does the same in fewer microseconds, but the way there through Python's
and its own layers takes several times as long as the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.comm.reductions import reduction
from mpitp.comm.shared_memory import SharedMemory

READY = 0  # the counter
SLOTS = 2
MOST_RANKS = 16  # with more of them, reading every operand takes longer than the library's tree
KEPT_VIEWS = 64


class SmallSums:
    """The small sums of one rank. `map_memory(slots)` makes the memory: a collective that gives None on all ranks where
    it can't be had; then all sums are the library's.
    """

    def __init__(self, map_memory: Callable[[int], SharedMemory | None], ranks: int) -> None:
        self._map = map_memory
        self._memory: SharedMemory | None = None
        self._is_possible = ranks <= MOST_RANKS
        self._count = 0
        self._views: dict[tuple[int, tuple[int, ...], Any], list[np.ndarray]] = {}

    def add(self, x: np.ndarray, op: str, out: Array | None) -> Array | None:
        """The sum, in `out` where one is given; None: it can't be made here, on any rank alike."""
        memory = self._memory or self._mapped()
        if memory is None:
            return None
        combine = reduction(op, np)
        self._count += 1
        operands = self._operands(memory, self._count % SLOTS, x)
        operands[memory.rank][...] = x
        memory.tell(READY, self._count)
        memory.wait(READY, self._count)
        y = combine(operands[0], operands[1], out=np.empty(x.shape, x.dtype) if out is None else out)
        for operand in operands[2:]:
            combine(y, operand, out=y)
        return y

    def _mapped(self) -> SharedMemory | None:
        if self._is_possible:
            self._memory = self._map(SLOTS)
            self._is_possible = self._memory is not None
        return self._memory

    def _operands(self, memory: SharedMemory, slot: int, x: np.ndarray) -> list[np.ndarray]:
        """All ranks' operands in the shape of x, the same objects for the same slot."""
        key = slot, x.shape, x.dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            flat = [memory.operand(rank, slot, x.size, x.dtype) for rank in range(memory.ranks)]
            views = self._views[key] = [each.reshape(x.shape) for each in flat]
        return views
