"""Whole runs on real ranks equal one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpitp.comm import Group
from tests.train.layouts import check_layout_on

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_data_parallelism(zero: int, world: Group, shared_path: Path) -> None:
    dp = 2 if world.size % 2 == 0 else world.size  # two replicas of two ranks on four
    check_layout_on(world, shared_path, {"dp": dp}, {"optim_zero": zero if dp > 1 else 0})


@pytest.mark.parametrize("form", ["ring", "heads"])
def test_context_parallelism(form: str, world: Group, shared_path: Path) -> None:
    mesh = {"cp": 2, "tp": 2} if world.size == 4 else {"cp": world.size}
    same = {"model": "llama biases, tied, 5/1, llama3", "train_steps": 2, "checkpoint_every": 2}
    check_layout_on(world, shared_path, {**mesh, "cp_form": form}, **same)


def test_pipeline(world: Group, shared_path: Path) -> None:
    """Two stages, of two ranks each on four; three on three ranks."""
    pp = 2 if world.size % 2 == 0 else world.size
    mesh = {"pp": pp, "tp": world.size // pp, "schedule": "zb"}
    check_layout_on(world, shared_path, mesh, model_n_layer=3)


def test_axes_together(world: Group, shared_path: Path) -> None:
    """Token shards beside another axis on four ranks, alone on two and three."""
    mesh = {"pp": 2, "tp": 2, "schedule": "1f1b"} if world.size == 4 else {"tp": world.size}
    layout = {"train_recompute": "full"}
    check_layout_on(world, shared_path, {**mesh, "sequence_parallel": True}, layout, model="llama 9/3")


def test_dealt_weights_in_a_pipeline(world: Group, shared_path: Path) -> None:
    """Two stages of two replicas on four ranks; replicas alone on two and three."""
    mesh = {"pp": 2, "dp": 2} if world.size == 4 else {"dp": world.size}
    zero = {"optim_zero": 3 if world.size > 1 else 0}
    check_layout_on(world, shared_path, mesh, zero, train_global_batch_size=4, train_eval_every=3)


def test_unequal_shares(world: Group, shared_path: Path) -> None:
    """Along dp and tp on four ranks; along tp on two and three, where the last has most."""
    if world.size == 4:
        mesh: dict[str, Any] = {"dp": 2, "tp": 2, "shares": {"dp": [1, 2], "tp": [2, 1]}}
    else:
        mesh = {"tp": world.size, "shares": list(range(1, world.size + 1))}
    same = {"model": "llama 9/3", "train_steps": 2, "checkpoint_every": 2}
    check_layout_on(world, shared_path, {**mesh, "sequence_parallel": world.size > 1}, **same)
