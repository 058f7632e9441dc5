"""Model directories written by processes: the same bytes as by one rank, and one error for all when a rank fails."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint import Documents, load_model, raise_together, save_model
from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.errors import FileError
from mpitp.layers.site import make_site

pytestmark = pytest.mark.mpi

GOLDEN = Path(__file__).resolve().parent.parent / "parity" / "golden"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("name", ["gpt2", "llama-mqa-bias"])
def test_the_same_bytes_as_from_one_rank(name: str, world: Group, shared_path: Path) -> None:
    model = load_model(GOLDEN / name, make_site(world))
    save_model(model, shared_path / "together", world, Documents(model.config.hf), save_dtype="bfloat16")
    if world.rank == 0:
        alone = load_model(GOLDEN / name, make_site(SerialGroup()))
        save_model(alone, shared_path / "alone", SerialGroup(), Documents(model.config.hf), save_dtype="bfloat16")
        assert contents(shared_path / "together") == contents(shared_path / "alone")
        assert sorted(os.listdir(shared_path)) == ["alone", "together"]
    world.barrier()


def test_one_rank_that_cannot_write(world: Group, shared_path: Path) -> None:
    model = load_model(GOLDEN / "gpt2", make_site(world))
    if world.rank == world.size - 1:  # beyond what float16 holds
        _, param = next(iter(model.named_params()))
        param.data[-1, -1] = np.float32(1e9)
    with pytest.raises(FileError, match=r"transformer.wte.weight is beyond what float16 holds"):
        save_model(model, shared_path / "m", world, Documents(model.config.hf), save_dtype="float16")
    world.barrier()
    assert os.listdir(shared_path) == []


def test_all_raise_the_error_of_one(world: Group) -> None:
    raise_together(world, None)
    last = world.size - 1
    with pytest.raises(FileError, match=f"from rank {last}"):
        raise_together(world, FileError(f"from rank {last}") if world.rank == last else None)
