"""Mixtures of experts on real ranks: whole runs equal one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitp.comm import Group
from tests.train.layouts import check_layout_on

pytestmark = pytest.mark.mpi


def test_experts_over_ranks(world: Group, shared_path: Path) -> None:
    """Two replicas that deal experts, of two ranks each, on four ranks."""
    ep = 2 if world.size == 4 else world.size
    mesh = {"ep": ep, "tp": world.size // ep, "sequence_parallel": True}
    check_layout_on(world, shared_path, mesh, model="mixtral", train_steps=2, train_global_batch_size=3)


def test_experts_columns_and_stages(world: Group, shared_path: Path) -> None:
    mesh = {"pp": 2, "tp": 2} if world.size == 4 else {"tp": world.size}
    check_layout_on(world, shared_path, mesh, model="qwen2_moe", train_steps=1)
