"""Sums through shared memory: the checks of every group, many sums under way, growing windows, simulated nodes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpitp.comm import MpiGroup, SerialGroup, shared_memory, world_group
from mpitp.comm.node import NodeGroup, place_on_nodes
from mpitp.comm.shared_memory import map_shared
from tests.comm.group_checks import CHECKS

pytestmark = pytest.mark.mpi


def library() -> MpiGroup:
    return MpiGroup(MPI.COMM_WORLD)


def group_of_node() -> NodeGroup:
    """Everything goes through the window, however small."""
    return NodeGroup(library(), smallest_bytes=0)


@pytest.mark.parametrize("name", CHECKS)
def test_group(name: str) -> None:
    CHECKS[name](group_of_node(), np)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [1, 7, 1000, 40_000, 700_001])
def test_sums_in_any_order_of_waiting(size: int, dtype: str) -> None:
    group = group_of_node()
    x = np.random.default_rng(group.rank).random(size).astype(dtype)
    expected = library().all_reduce(x)
    pending = [group.start_all_reduce(k * x) for k in range(1, 7)]  # more than there are slots
    for k in (4, 1, 6, 2, 5, 3):
        np.testing.assert_allclose(pending[k - 1].wait(), k * expected, rtol=1e-6)


def test_operands_produced_in_the_window_are_not_copied() -> None:
    group = group_of_node()
    for size in (10, 300_000, 1000):  # the window grows once
        operand = group.empty((size,), np.float32, np)
        second = group.empty((size,), np.float32, np)  # one operand at a time: this one is ordinary memory
        operand[...], second[...] = group.rank + 1, 100 * (group.rank + 1)
        first = group.start_all_reduce(operand, out=operand)
        ranks = group.size * (group.size + 1) / 2
        assert (group.all_reduce(second, out=second) == 100 * ranks).all()
        assert (first.wait() == ranks).all()


def test_equal_bits_on_all_ranks_and_from_run_to_run() -> None:
    group = group_of_node()
    x = np.random.default_rng(group.rank).standard_normal(100_003).astype(np.float32)
    first = group.all_reduce(x).tobytes()
    assert set(group.all_gather_objects(first)) == {first}
    assert all(group.all_reduce(x).tobytes() == first for _ in range(5))


@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_simulated_nodes(ranks_per_node: int) -> None:
    """The world cut into nodes of a given size; nodes that differ in size use the library."""
    world = library()
    node = world.split(world.rank // ranks_per_node, world.rank)
    placed = place_on_nodes(world, node)
    sizes = set(world.all_gather_objects(node.size))
    assert isinstance(placed, NodeGroup) == (len(sizes) == 1 and sizes != {1})
    for size in (1, 1023, 50_000, 400_001):
        x = np.random.default_rng(world.rank).random(size)
        np.testing.assert_allclose(placed.all_reduce(x), world.all_reduce(x), rtol=1e-12)
        for op in ("max", "min"):
            assert np.array_equal(placed.all_reduce(x, op), world.all_reduce(x, op))
        started = [placed.start_all_reduce(k * x) for k in range(5)]
        for k in (3, 4, 0, 1, 2):
            np.testing.assert_allclose(started[k].wait(), k * world.all_reduce(x), rtol=1e-12)


def test_large_operands_and_other_dtypes_use_the_library() -> None:
    group = NodeGroup(library(), smallest_bytes=0, largest_bytes=4096)
    assert (group.all_reduce(np.ones(5000, np.float32)) == group.size).all()
    assert (group.all_reduce(np.ones(10, np.int64)) == group.size).all()
    assert group._memory is None


def test_no_room_in_shared_memory_falls_back_to_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mpitp.comm.shared_memory.DIRECTORY", str(tmp_path / "missing"))
    monkeypatch.delattr(os, "memfd_create")
    group = group_of_node()
    assert map_shared(library(), 3, 4096, spin=False) is None
    assert (group.all_reduce(np.ones(5000, np.float32)) == group.size).all()


@pytest.mark.parametrize("is_named", [False, True])
def test_memory_without_and_with_a_name(monkeypatch: pytest.MonkeyPatch, is_named: bool) -> None:
    if is_named:
        monkeypatch.delattr(os, "memfd_create")
    group = group_of_node()
    assert (group.all_reduce(np.ones(5000, np.float32)) == group.size).all()
    assert group._memory is not None
    creator = group.broadcast_object(os.getpid())
    group.barrier()
    assert not list(Path("/dev/shm").glob(f"mpitp-{creator}-*"))


def test_memory_never_has_a_name_where_that_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mpitp.comm.shared_memory.DIRECTORY", str(tmp_path / "missing"))
    group = group_of_node()
    group.all_reduce(np.ones(5000, np.float32))
    assert group._memory is not None


def test_another_file_at_the_same_place_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in containers of their own, where a process number means another process."""
    monkeypatch.setattr("mpitp.comm.shared_memory.DIRECTORY", str(tmp_path / "missing"))
    group, real = library(), shared_memory._map
    if group.rank == group.size - 1:
        monkeypatch.setattr(shared_memory, "_map", lambda place, size: real((place[0], (0, 0)), size))
    assert map_shared(group, 3, 4096, spin=False) is None


def test_world_of_processors_that_may_reorder_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    world = world_group()
    assert not isinstance(world, NodeGroup)
    assert (world.all_reduce(np.ones(5000, np.float32)) == world.size).all()


def test_a_rank_alone_needs_no_window() -> None:
    serial = SerialGroup()
    assert place_on_nodes(serial, serial) is serial


@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_and_scatters_in_any_order_of_waiting(dim: int) -> None:
    """More than there are slots, among sums, with ragged sizes."""
    group, plain = group_of_node(), library()
    sizes = [(3 * rank + 1) % 5 for rank in range(group.size)]
    shape, whole = [90, 70], [90, 70]
    shape[dim], whole[dim] = sizes[group.rank], sum(sizes)
    piece, x = (np.random.default_rng(group.rank).random(lengths).astype("f4") for lengths in (shape, whole))
    gathered, scattered, summed = plain.all_gather(piece, dim), plain.reduce_scatter(x, sizes, dim), plain.all_reduce(x)
    gathers = [group.start_all_gather(k * piece, dim) for k in range(1, 6)]
    scatters = [group.start_reduce_scatter(k * x, sizes, dim) for k in range(1, 6)]
    sums = [group.start_all_reduce(k * x) for k in range(1, 6)]
    for k in (4, 1, 5, 2, 3):
        np.testing.assert_allclose(sums[k - 1].wait(), k * summed, rtol=1e-6)
        np.testing.assert_array_equal(gathers[k - 1].wait(), (k * gathered).astype("f4"))
        np.testing.assert_allclose(scatters[k - 1].wait(), k * scattered, rtol=1e-6)


def test_gathers_grow_their_window_while_others_are_under_way() -> None:
    """Only the last rank knows that its piece is too large for the slots."""
    group = group_of_node()
    small = np.full(3, group.rank, np.float32)
    large = np.full(400_000 if group.rank == group.size - 1 else 2, group.rank, np.float32)
    pending = [group.start_all_gather(x) for x in (small, large, small, large)]
    for index, x in ((1, large), (2, small), (0, small), (3, large)):
        np.testing.assert_array_equal(pending[index].wait(), library().all_gather(x))


@pytest.mark.parametrize("sizes", [(300_000,) * 6, (10, 300_000, 500_000, 700_000, 20, 600_000), (900_000, 1, 2, 3, 4)])
def test_gathers_that_are_all_too_large_for_their_window(sizes: tuple[int, ...]) -> None:
    """More of them under way than there are slots; one that grows the window ends the others."""
    group = group_of_node()
    pieces = [np.full(size, group.rank + number, np.float64) for number, size in enumerate(sizes)]
    pending = [group.start_all_gather(piece) for piece in pieces]
    for number, (size, gathered) in enumerate(zip(sizes, pending, strict=True)):
        expected = np.repeat(np.arange(group.size) + number, size)
        np.testing.assert_array_equal(gathered.wait(), expected)


def test_a_gather_leaves_the_operand_of_the_next_sum_alone() -> None:
    group = group_of_node()
    operand = group.empty((5000,), np.float32, np)
    operand[...] = group.rank
    group.all_gather(np.full(5000, -1, np.float32))
    assert (group.all_reduce(operand, out=operand) == sum(range(group.size))).all()


def test_large_gathers_use_the_library() -> None:
    group = NodeGroup(library(), smallest_bytes=0, largest_bytes=4096)
    x = np.full((300_000, 1), group.rank, np.float64)
    np.testing.assert_array_equal(group.all_gather(x, 1), library().all_gather(x, 1))
    np.testing.assert_array_equal(
        group.reduce_scatter(x, [300_000] + [0] * (group.size - 1)),
        library().reduce_scatter(x, [300_000] + [0] * (group.size - 1)),
    )
