"""Convolutions that are cut over real MPI ranks against one rank."""

from __future__ import annotations

import pytest

from mpitp.comm import Group
from tests.layers.test_convolution import WAYS, one_rank, run
from tests.sharded import assert_close

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("name", ["same", "strided", "wide"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_one_rank(way: str, name: str, world: Group) -> None:
    assert_close(run(world, way, name), one_rank(way, name), 1e-12)
