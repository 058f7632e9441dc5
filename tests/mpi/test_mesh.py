"""Groups of a mesh over real ranks: each on its node, several of them used at once."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpitp.comm import Group, MpiGroup, SerialGroup, make_mesh
from mpitp.comm.node import NodeGroup, place_on_nodes
from tests.comm.group_checks import CHECKS

pytestmark = pytest.mark.mpi


def halves(world: Group) -> dict[str, int]:
    """Two rows of ranks where that can be, else one."""
    return {"dp": 2, "tp": 0} if world.size % 2 == 0 else {"tp": 0}


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")], ids="-".join)
@pytest.mark.parametrize("name", CHECKS)
def test_group_of_a_mesh(name: str, axes: tuple[str, ...], world: Group) -> None:
    CHECKS[name](make_mesh(world, halves(world)).along(*axes), np)


def test_each_group_has_its_window(world: Group) -> None:
    mesh = make_mesh(world, halves(world))
    for axis in ("dp", "tp"):
        group = mesh[axis]
        assert isinstance(group, NodeGroup if group.size > 1 else SerialGroup)
        operand = group.empty((5000,), np.float32, np)
        operand[...] = world.rank
        assert (group.all_reduce(operand, out=operand) == sum(group.all_gather_objects(world.rank))).all()
        if isinstance(group, NodeGroup):
            assert group._memory is not None


def test_groups_of_both_axes_at_once(world: Group) -> None:
    """Sums under way in every group of the mesh, with data of their own, ended in another order than begun."""
    mesh = make_mesh(world, halves(world))
    groups = [mesh["tp"], mesh["dp"], mesh.world]
    expected = [sum(group.all_gather_objects(world.rank + 1)) for group in groups]
    for size in (3, 5000, 300_000):
        x = np.full(size, world.rank + 1.0)
        for _ in range(5):
            pending = [(group.start_all_reduce(x), total) for group, total in zip(groups, expected, strict=True)]
            for each, total in reversed(pending):
                assert (each.wait() == total).all()


def test_parts_of_a_group_wait_as_the_whole_does(world: Group) -> None:
    """Whether a core is free for each rank is asked of all ranks of the node, not of the few that sum together."""
    mesh = make_mesh(world, halves(world))
    if isinstance(mesh["tp"], NodeGroup) and isinstance(world, NodeGroup):
        assert mesh["tp"]._spin == world._spin


def test_part_over_several_nodes_sums_within_each_first() -> None:
    """Nodes of two ranks, simulated; the part is all ranks in reverse order."""

    def node_of(group: MpiGroup) -> Group:
        return MpiGroup(group.comm.Split(MPI.COMM_WORLD.rank // 2, group.rank))

    whole = MpiGroup(MPI.COMM_WORLD, place=lambda group: place_on_nodes(group, node_of(group)))
    part = whole.split(0, -whole.rank)
    if whole.size == 4:
        assert isinstance(part, NodeGroup) and (part.node.size, part.across.size) == (2, 2)
    x = np.random.default_rng(whole.rank).random(50_000)
    np.testing.assert_allclose(part.all_reduce(x), whole.all_reduce(x), rtol=1e-12)
