"""Small sums through the memory of a node: any shape, operation and place of the result, ranks at their own pace."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpitp.comm import Group, run_threads
from mpitp.comm.node import NodeGroup
from mpitp.comm.small_sums import MOST_RANKS


def drawn(rank: int, number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng([rank, number]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_of_ranks_that_go_at_their_own_pace(ranks: int, op: str) -> None:
    """Added in the order of the ranks: every rank has the same bits, those of one rank that adds them so."""
    cases = [((1, 576), "f4"), ((7,), "f8"), ((), "f4"), ((2, 3, 4), "f4"), ((0, 5), "f8"), ((1, 576), "f4")]
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]

    def program(group: Group) -> None:
        node, pauses = NodeGroup(group), np.random.default_rng(group.rank)
        for number in range(60):
            shape, dtype = cases[number % len(cases)]
            parts = [drawn(rank, number, shape, dtype) for rank in range(ranks)]
            expected = parts[0]
            for part in parts[1:]:
                expected = combine(expected, part)
            mine = parts[group.rank].copy()
            if pauses.random() < 0.2:
                time.sleep(1e-3)
            y = node.start_all_reduce(mine, op, out=mine).wait() if number % 2 else node.all_reduce(mine, op)
            assert y.tobytes() == np.asarray(expected).tobytes() and y.shape == shape
            assert (y is mine) == bool(number % 2) and (number % 2 or np.array_equal(mine, parts[group.rank]))

    run_threads(ranks, program)


def test_beside_large_sums_under_way() -> None:
    def program(group: Group) -> None:
        node = NodeGroup(group)
        large = [node.start_all_reduce(np.full(5000, float(number + group.rank))) for number in range(3)]
        small = [float(node.all_reduce(np.array([number + group.rank], np.float32))[0]) for number in range(5)]
        assert small == [2.0 * number + 1 for number in range(5)]
        assert [float(pending.wait()[0]) for pending in large] == [1.0, 3.0, 5.0]

    run_threads(2, program)


@pytest.mark.parametrize("ranks", [2, MOST_RANKS + 1])
def test_what_others_sum(ranks: int) -> None:
    """Whole numbers, 16 bits, and more ranks than read one another's operands: the group inside does it."""

    def program(group: Group) -> None:
        node = NodeGroup(group, spin=False)
        assert node.all_reduce(np.array([group.rank])).tolist() == [sum(range(ranks))]
        assert node.all_reduce(np.ones(3, np.float16)).tolist() == [ranks] * 3
        assert node.all_reduce(np.ones(3)).tolist() == [ranks] * 3

    run_threads(ranks, program)
