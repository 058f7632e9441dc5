"""MPI groups, with the checks that serial and thread groups pass too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpitp.comm import MpiGroup, SerialGroup, make_mesh, world_group
from mpitp.comm.node import NodeGroup
from mpitp.errors import UsageError
from tests import strict_cupy
from tests.comm.group_checks import CHECKS

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", CHECKS)
def test_group(name: str, xp: Any) -> None:
    CHECKS[name](MpiGroup(MPI.COMM_WORLD), xp)


@pytest.mark.parametrize("name", CHECKS)
def test_group_in_chunks(name: str) -> None:
    """Arrays in calls of at most 5 elements, as those beyond 2^31 elements go in calls of 2^28."""
    CHECKS[name](MpiGroup(MPI.COMM_WORLD, chunk_elements=5, pipeline_elements=4), np)


def test_world_and_mesh() -> None:
    world = world_group()
    size = MPI.COMM_WORLD.Get_size()
    assert (world.rank, world.size) == (MPI.COMM_WORLD.Get_rank(), size)
    assert isinstance(world, NodeGroup if size > 1 else SerialGroup)  # all ranks are on this host
    assert make_mesh(world)["tp"] is world


def test_what_mpi_cannot_reduce_is_refused() -> None:
    for dtype in ("c8", "?", ">f4"):
        with pytest.raises(UsageError, match="can't be reduced"):
            MpiGroup(MPI.COMM_WORLD).all_reduce(np.zeros(3, dtype))


def test_read_only_arrays_can_be_sent() -> None:
    group = MpiGroup(MPI.COMM_WORLD)
    x = np.ones(7, "f4")
    x.flags.writeable = False
    assert (group.all_reduce(x) == group.size).all()
    assert group.all_gather(x).shape == (7 * group.size,)
    assert (group.broadcast(x, group.size - 1) == 1).all()


def test_out_that_overlaps_the_argument() -> None:
    group = MpiGroup(MPI.COMM_WORLD)
    buffer = np.arange(8.0)
    group.all_reduce(buffer[:6], out=buffer[2:])
    assert buffer.tolist() == [0, 1, *(np.arange(6.0) * group.size).tolist()]


def test_device_arrays_are_staged_after_the_stream_is_synchronized() -> None:
    group = MpiGroup(MPI.COMM_WORLD, device_aware=False)
    x = strict_cupy.asarray(np.ones((3, 4), "f4"))
    strict_cupy.transfers.reset()
    group.all_reduce(x)
    moved = strict_cupy.transfers
    assert (moved.synchronized, moved.to_host, moved.to_device) == (1, 1, 1)


def test_larger_arrays_in_order() -> None:
    """Enough stretches that every link carries several at once."""
    group = MpiGroup(MPI.COMM_WORLD, pipeline_elements=1000)
    partials = [np.random.default_rng(rank).standard_normal(100_001).astype("f4") for rank in range(group.size)]
    expected = np.zeros(100_001, "f4")
    for partial in partials:
        expected += partial
    assert (group.all_reduce_in_order([partials[group.rank]], partials[0]) == expected).all()
