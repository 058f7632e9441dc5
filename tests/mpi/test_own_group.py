"""An all-reduce of one's own on real MPI ranks: as the library's, and under a model."""

from __future__ import annotations

import pytest

from examples.your_own_all_reduce import Ring, passes
from mpitp.comm import Group, SerialGroup
from mpitp.comm.own_group import check_group

pytestmark = pytest.mark.mpi


def test_it_gives_what_the_library_gives(world: Group) -> None:
    check_group(Ring, world, "Ring")
    assert passes(world, Ring) == pytest.approx(passes(SerialGroup()), rel=1e-12)
