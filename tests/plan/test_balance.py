"""Stages dealt by dynamic programming and by the greedy rule are as good as the best of all ways."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from mpitp.models.stages import Costs
from mpitp.plan.balance import _by_programming, balanced


def all_ways(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """At least one block each, but for the last part."""
    for counts in itertools.product(range(1, count + 1), repeat=parts - 1):
        if sum(counts) <= count:
            yield (*counts, count - sum(counts))


def quality(costs: Costs, counts: tuple[int, ...]) -> tuple[float, float]:
    """The dearest part and the sum of squares."""
    sums, first = [], 0
    for part, count in enumerate(counts):
        ends = costs.first * (part == 0) + costs.last * (part == len(counts) - 1)
        sums.append(sum(costs.blocks[first : first + count]) + ends)
        first += count
    return round(max(sums), 6), round(sum(x * x for x in sums), 6)


@pytest.mark.parametrize("seed", range(40))
def test_dealt_as_well_as_the_best_of_all_ways(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    parts = draw.randint(2, min(count, 4))
    alike = (float(draw.randint(1, 5)),) * count
    mixed = tuple(float(draw.randint(1, 5)) for _ in range(count))
    for blocks in (alike, mixed):
        costs = Costs(draw.choice([0.0, 1.5, 7.0]), blocks, draw.choice([0.0, 2.5, 9.0]))
        best = min(quality(costs, ways) for ways in all_ways(count, parts))
        assert quality(costs, balanced(costs, parts)) == best
        assert quality(costs, _by_programming(costs, parts)) == best


def test_one_part_has_all() -> None:
    assert balanced(Costs(1.0, (1.0,) * 5, 2.0), 1) == (5,)
