"""Blocks dealt to the parts of a pipeline, so that the dearest is as cheap as can be and the others as even as can be.

The objective is that of `models/stages.py`: of all ways with the cheapest dearest part, the one with the smallest sum
of squares. Two ways to it, with the same costs (a test holds both to all ways tried one by one):

    blocks alike     one after the other to the part that is cheapest with it: exact for sums of convex functions of the
                     counts (Fox 1966, "Discrete optimization via marginal analysis"), O(blocks log parts)
    blocks that      dynamic programming over (parts dealt, blocks dealt), all starts of a part at once:
    differ           O(parts blocks^2)
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from mpitp.models.stages import Costs

SLACK = 1 + 1e-9  # costs are sums of rounded numbers


@lru_cache(maxsize=1 << 14)
def balanced(costs: Costs, parts: int) -> tuple[int, ...]:
    """How many blocks each part gets: at least one each, except that the last may have the head alone."""
    if parts == 1:
        return (len(costs.blocks),)
    alike = len(set(costs.blocks)) == 1
    return _of_alike(costs, parts) if alike else _by_programming(costs, parts)


def _of_alike(costs: Costs, parts: int) -> tuple[int, ...]:
    each, count = costs.blocks[0], len(costs.blocks)
    beside = [costs.first, *[0.0] * (parts - 2), costs.last]
    counts = [1] * (parts - 1) + [0]
    heap = [((beside[part] + each * (counts[part] + 1)), part) for part in range(parts)]
    heapq.heapify(heap)
    for _ in range(count - parts + 1):
        cost, part = heap[0]
        counts[part] += 1
        heapq.heapreplace(heap, (cost + each, part))
    return tuple(counts)


def _by_programming(costs: Costs, parts: int) -> tuple[int, ...]:
    count = len(costs.blocks)
    sums = np.concatenate([[0.0], np.cumsum(costs.blocks)])
    middle = sums[None, :] - sums[:, None]  # [start, stop]
    places = np.arange(count + 1)
    middle = np.where(places[:, None] < places[None, :], middle, np.inf)
    last = np.where(places[:, None] <= places[None, :], sums[None, :] - sums[:, None], np.inf) + costs.last
    best = sums + costs.first
    best[0] = np.inf
    for part in range(1, parts):
        best = np.maximum(best[:, None], last if part == parts - 1 else middle).min(axis=0)
    limit = best[count] * SLACK
    return _most_even(limit, (sums + costs.first, middle, last), parts)


def _most_even(limit: float, tables: tuple[np.ndarray, np.ndarray, np.ndarray], parts: int) -> tuple[int, ...]:
    """The smallest sum of squares among ways without a part above the limit."""
    first, *others = (np.where(table <= limit, table, np.inf) ** 2 for table in tables)
    first[0] = np.inf
    best, starts = first, []
    for part in range(1, parts):
        with_part = best[:, None] + others[part == parts - 1]
        starts.append(with_part.argmin(axis=0))
        best = with_part.min(axis=0)
    stop, counts = len(first) - 1, []
    for chosen in reversed(starts):
        counts.append(stop - int(chosen[stop]))
        stop = int(chosen[stop])
    return (stop, *reversed(counts))
