"""Sums that move on while the rank computes, as between nodes: on one machine, through MPI and over simulated nodes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpitp.comm import Group, MpiGroup
from mpitp.comm.checked import checked
from mpitp.comm.node import NodeGroup, place_on_nodes
from tests.comm.group_checks import CHECKS

pytestmark = pytest.mark.mpi

SIZES = [1, 2, 3, 1023, 50_000, 400_001]


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums go the same way as large ones."""
    monkeypatch.setattr("mpitp.comm.mpi.SMALLEST_BACKGROUND_BYTES", 0)


def world() -> MpiGroup:
    return MpiGroup(MPI.COMM_WORLD, in_background=True)


def library() -> MpiGroup:
    return MpiGroup(MPI.COMM_WORLD)


def over_nodes() -> Group:
    """Two nodes; nodes of one rank where the world has fewer than four."""
    plain = world()
    return place_on_nodes(plain, plain.split(plain.rank // max(1, plain.size // 2), plain.rank))


GROUPS = [world, over_nodes]


def wait_until_it_stands_there(out: np.ndarray, value: float) -> None:
    end = time.monotonic() + 20
    while not (out == value).all():
        assert time.monotonic() < end, "nothing moves on before the wait"
        time.sleep(0.002)


@pytest.mark.parametrize("name", CHECKS)
def test_group(name: str, xp: Any) -> None:
    CHECKS[name](world(), xp)


@pytest.mark.parametrize("make", GROUPS)
@pytest.mark.parametrize("name", [name for name in CHECKS if "reduce" in name])
def test_sums_over_nodes(name: str, make: Any) -> None:
    CHECKS[name](make(), np)


@pytest.mark.parametrize("make", GROUPS)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_sums_in_any_order_of_waiting(make: Any, op: str) -> None:
    group, plain = make(), library()
    for size in SIZES:
        x = np.random.default_rng(group.rank).random(size)
        expected = plain.all_reduce(x, op)
        pending = [group.start_all_reduce(k * x, op) for k in range(1, 7)]
        for k in (4, 1, 6, 2, 5, 3):
            np.testing.assert_allclose(pending[k - 1].wait(), k * expected, rtol=1e-12)


@pytest.mark.parametrize("make", GROUPS)
def test_a_sum_ends_without_wait(make: Any) -> None:
    """With the operand in ordinary memory and in the group's, in place and not."""
    group = make()
    total = group.size * (group.size + 1) / 2
    for size in (10_000, 300_000):
        ordinary, out = np.full(size, group.rank + 1.0), np.zeros(size)
        chosen, other = group.empty((size,), np.float64, np), np.zeros(size)
        chosen[...] = group.rank + 1
        pending = [group.start_all_reduce(chosen, out=other), group.start_all_reduce(ordinary, out=out)]
        in_place = np.full(size, group.rank + 1.0)
        pending.append(group.start_all_reduce(in_place, out=in_place))
        if group.size > 1:
            for result in (other, out, in_place):
                wait_until_it_stands_there(result, total)
        assert all((one.wait() == total).all() for one in pending)
        assert (out == total).all() and (other == total).all()


@pytest.mark.parametrize("make", GROUPS)
def test_equal_bits_on_all_ranks_and_from_run_to_run(make: Any) -> None:
    group = make()
    x = np.random.default_rng(group.rank).standard_normal(100_003).astype(np.float32)
    first = group.start_all_reduce(x).wait().tobytes()
    assert set(group.all_gather_objects(first)) == {first}
    for _ in range(5):
        assert group.start_all_reduce(x).wait().tobytes() == first


def test_sums_are_added_in_rank_order() -> None:
    group = world()
    x = np.random.default_rng(group.rank).standard_normal(10_007).astype(np.float32)
    expected = group.all_reduce_in_order([x], like=x) if group.size > 1 else x
    np.testing.assert_array_equal(group.start_all_reduce(x).wait(), expected)


@pytest.mark.parametrize("make", GROUPS)
def test_ranks_that_are_late_and_other_collectives_in_between(make: Any) -> None:
    group = checked(make())
    assert group.in_background
    rng = np.random.default_rng(7)
    for delay in rng.integers(0, 4, 12):
        x = np.full(70_000, group.rank + 1.0)
        first = group.start_all_reduce(x)
        if group.rank == delay:
            time.sleep(0.003)
        second = group.start_all_reduce(2 * x)
        assert group.broadcast_object(int(delay)) == delay
        total = group.size * (group.size + 1) / 2
        assert (group.all_reduce(np.ones(2)) == group.size).all()
        assert (second.wait() == 2 * total).all() and (first.wait() == total).all()


def test_only_groups_over_nodes_do_it() -> None:
    plain = world()
    assert plain.in_background and not library().in_background
    assert not NodeGroup(plain).in_background  # one node
    nodes = over_nodes()
    assert nodes.in_background
    if plain.size == 4:
        assert isinstance(nodes, NodeGroup) and nodes.across is not None and nodes.across.in_background


@pytest.mark.parametrize("size", [2_100, 16_385, 40_001])
def test_small_sums_over_nodes_block_no_thread(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that cross the nodes are smaller than what is worth hiding elsewhere."""
    monkeypatch.setattr("mpitp.comm.mpi.SMALLEST_BACKGROUND_BYTES", 1 << 20)
    group = over_nodes()
    if not isinstance(group, NodeGroup):
        return
    monkeypatch.setattr(group.across, "all_reduce", None)
    x = np.full(size, group.rank + 1.0)
    pending = [group.start_all_reduce(k * x) for k in (1, 2)]
    if group.rank == 0:
        time.sleep(0.02)
    assert all((one.wait() == k * 10).all() for k, one in enumerate(pending, 1))
