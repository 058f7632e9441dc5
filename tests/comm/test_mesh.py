from __future__ import annotations

import pytest

from mpitp.comm import Mesh, make_mesh, run_threads
from mpitp.errors import ConfigError


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_go_to_tensor_parallelism(size: int) -> None:
    def program(group) -> Mesh:
        return make_mesh(group)

    for mesh in run_threads(size, program) + run_threads(size, make_mesh, size):
        assert mesh.sizes == {"pp": 1, "dp": 1, "cp": 1, "tp": size}
        assert mesh.tp is mesh.world


def test_wrong_product_names_what_works() -> None:
    with pytest.raises(
        ConfigError, match=r"mesh.tp = 3 needs 3 ranks, the job has 4; set mesh.tp = 4 \(or 0, all ranks\)"
    ):
        run_threads(4, make_mesh, 3)


@pytest.mark.parametrize("axis", ["pp", "dp", "cp"])
def test_other_axes_are_not_there_yet(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"mesh.{axis} = 2 is not supported yet"):
        run_threads(2, lambda group: make_mesh(group, **{axis: 2}))


def test_negative_size() -> None:
    with pytest.raises(ConfigError, match="mesh.tp = -1"):
        run_threads(1, make_mesh, -1)
