from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, Mesh, SerialGroup, abstract_mesh, make_mesh, run_threads
from mpitp.comm.mesh import AXES
from mpitp.errors import ConfigError, UsageError
from mpitp.train.setup import run_mesh
from tests.train.run_case import config


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_go_to_tensor_parallelism(size: int) -> None:
    for sizes in ({}, {"tp": 0}, {"tp": size}):
        for mesh in run_threads(size, make_mesh, sizes):
            assert mesh.sizes == {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": size}
            assert mesh["tp"].size == size
            assert mesh["tp"] is mesh.world or size == 1
            assert isinstance(mesh["dp"], SerialGroup)


def test_wrong_product_names_what_works() -> None:
    with pytest.raises(
        ConfigError, match=r"mesh.tp = 3 needs 3 ranks, the job has 4; set mesh.tp = 4 \(or 0, all ranks\)"
    ):
        run_threads(4, make_mesh, {"tp": 3})
    with pytest.raises(
        ConfigError,
        match=r"mesh.dp = 2 with mesh.tp = 3 needs 6 ranks, the job has 4; set mesh.tp = 2 \(or 0, all ranks ",
    ):
        run_threads(4, make_mesh, {"dp": 2, "tp": 3})
    with pytest.raises(ConfigError, match=r"mesh.dp = 3 with mesh.tp = 1 needs 3 ranks, the job has 4; start the job "):
        run_threads(4, make_mesh, {"dp": 3})
    with pytest.raises(ConfigError, match=r"with 3 ranks, or set mesh.dp = 2 or 4 with mesh.tp = 0"):
        run_threads(4, make_mesh, {"dp": 3})
    with pytest.raises(ConfigError, match=r"needs 10 ranks, the job has 6; .* or set mesh.pp = 3 with mesh.tp = 0"):
        run_threads(6, make_mesh, {"pp": 5, "dp": 2})


@pytest.mark.parametrize("axis", ["pp", "dp", "cp", "tp"])
def test_a_run_file_names_the_axes(axis: str, tmp_path: Any) -> None:
    settings = config(tmp_path, tmp_path, **{f"mesh_{axis}": 2})
    for mesh in run_threads(2, lambda group: run_mesh(settings, group)):
        assert mesh[axis].size == 2


def test_negative_size() -> None:
    for axis in ("tp", "dp"):
        with pytest.raises(ConfigError, match=f"mesh.{axis} = -1"):
            run_threads(1, make_mesh, {axis: -1})


def test_axes_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="no axis 'rows'; its axes are pp, dp, ep, cp, tp"):
        make_mesh(SerialGroup(), {"rows": 1})
    with pytest.raises(UsageError, match="no axis 'rows'"):
        make_mesh(SerialGroup()).along("tp", "rows")


SIZES = [{"dp": 2, "tp": 2}, {"pp": 2, "cp": 3}, {"ep": 2, "tp": 0}, {"pp": 2, "dp": 2, "tp": 2}, {"tp": 1, "dp": 5}]


def members(sizes: dict[str, int], rank: int, axes: tuple[str, ...]) -> list[int]:
    """The ranks that differ from this one along these axes only, from the definition of the order of axes."""
    table = np.arange(np.prod([*sizes.values()])).reshape([sizes[axis] for axis in AXES])
    place = [int(index[0]) for index in np.nonzero(table == rank)]
    return table[tuple(slice(None) if axis in axes else place[i] for i, axis in enumerate(AXES))].reshape(-1).tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_hold_the_ranks_that_differ_along_their_axes_only(sizes: dict[str, int]) -> None:
    def program(world: Group) -> None:
        mesh = make_mesh(world, sizes)
        for count in range(6):
            for axes in combinations(AXES, count):
                group = mesh.along(*axes)
                expected = members(mesh.sizes, world.rank, axes)
                assert group.all_gather_objects(world.rank) == expected
                assert (group.rank, group.size) == (expected.index(world.rank), len(expected))
                assert mesh.along(*reversed(axes)) is group
                assert isinstance(group, SerialGroup) == (len(expected) == 1)
                assert (group is world) == (len(expected) == world.size)
        for axis in AXES:
            assert (mesh[axis].rank, mesh[axis].size) == (mesh.coordinates[axis], mesh.sizes[axis])

    run_threads(max(4, int(np.prod([*sizes.values()]))), program)


def test_along_is_no_collective() -> None:
    """A rank may ask for a joint group that no other rank asks for."""

    def program(world: Group) -> Mesh:
        mesh = make_mesh(world, {"pp": 2, "dp": 2, "tp": 2})
        if mesh.coordinates["pp"] == 0:
            joint = mesh.along("dp", "tp")
            assert joint.all_gather_objects(world.rank) == [0, 1, 2, 3]
        return mesh

    run_threads(8, program)


def test_both_groups_of_threads_at_once() -> None:
    def program(world: Group) -> None:
        mesh = make_mesh(world, {"dp": 2, "tp": 2})
        for _ in range(20):
            assert mesh["tp"].all_reduce(np.full(5, 10.0**world.rank))[0] == (11 if world.rank < 2 else 1100)
            assert mesh["dp"].all_reduce(np.full(5, 10.0**world.rank))[0] == (101 if world.rank % 2 == 0 else 1010)

    run_threads(4, program)


@pytest.mark.parametrize("sizes", SIZES[:2] + SIZES[3:], ids=str)
def test_mesh_without_processes_is_the_mesh(sizes: dict[str, int]) -> None:
    for rank in range(int(np.prod([*sizes.values()]))):
        mesh = abstract_mesh(sizes, rank)
        for count in range(6):
            for axes in combinations(AXES, count):
                expected = members(mesh.sizes, rank, axes)
                assert (mesh.along(*axes).rank, mesh.along(*axes).size) == (expected.index(rank), len(expected))


def test_mesh_without_processes_of_thousands_of_ranks() -> None:
    mesh = abstract_mesh({"pp": 8, "dp": 64, "ep": 8, "cp": 2, "tp": 8}, rank=65_535)
    assert (mesh.world.size, mesh.along("dp", "cp").size, mesh["tp"].rank) == (65_536, 128, 7)
    with pytest.raises(UsageError, match=r"all_reduce\(sum\) \[3\] float32: the 8 ranks .* without processes"):
        mesh["tp"].all_reduce(np.ones(3, "f4"))
    with pytest.raises(UsageError, match="without processes"):
        mesh.world.barrier()
    with pytest.raises(UsageError, match="rank 8 is not in a mesh of 8 ranks"):
        abstract_mesh({"tp": 8}, rank=8)
