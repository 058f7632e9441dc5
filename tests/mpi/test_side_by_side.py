"""Models side by side in one job of real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.comm import Group, run_threads
from tests.models.side_by_side import assert_equal, run_in_pairs, two_steps

pytestmark = pytest.mark.mpi


def test_each_of_the_models_equals_its_own_run(world: Group, shared_path: Path) -> None:
    pair, place, found = run_in_pairs(world, shared_path)
    own = shared_path / f"alone{world.rank}"
    assert_equal(found, run_threads(2 if world.size % 2 == 0 else 1, two_steps, pair, own)[place])
    world.barrier()
    written = shared_path / f"pair{pair}" / "model.safetensors"
    assert written.read_bytes() == (own / "model.safetensors").read_bytes()
