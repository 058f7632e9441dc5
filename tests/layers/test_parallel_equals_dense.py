"""Every layer cut over 2 to 7 ranks gives what it gives on one: y, dx and the gradient of every parameter."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mpitp.backend.device import Device
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.build import Builder
from mpitp.layers.site import make_site
from mpitp.optim.grad_sync import sync_gradients
from tests.layers.layer_cases import CASES, gathered, global_gradient, global_input, local, make_rig
from tests.sharded import assert_close, gradients

RANKS = [2, 3, 4, 5, 7]
TOLERANCE = 1e-10  # float64; what is seen is 1e-14


def run_layer(
    group: Group, name: str, dtype: str = "float64", num_blocks: int = 0, device: Device | None = None
) -> dict[str, np.ndarray]:
    """One forward and backward pass: global y, dx and parameter gradients, the same on every rank."""
    case = CASES[name]
    builder = Builder(make_site(group, device=device, dtype=dtype, invariant_blocks=num_blocks), 0.02)
    rig = make_rig(case, builder)
    y, ctx = rig.forward(local(global_input(case), rig.columns_in, builder))
    dx = rig.backward(local(global_gradient(case), rig.columns_out, builder), ctx)
    sync_gradients(rig.params.values(), builder.site.mesh)
    result = {"y": gathered(group, y, rig.columns_out, case.columns_out)}
    if not rig.reads_ids:
        result["dx"] = gathered(group, dx, rig.columns_in, case.columns_in)
    return result | gradients(group, rig.params.items())


@cache
def one_rank(name: str, dtype: str = "float64") -> dict[str, np.ndarray]:
    return run_layer(SerialGroup(), name, dtype)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(name: str, ranks: int) -> None:
    for result in run_threads(ranks, run_layer, name):
        assert_close(result, one_rank(name), TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_float32_differs_by_rounding(name: str) -> None:
    for result in run_threads(3, run_layer, name, "float32"):
        assert_close(result, one_rank(name), 2e-6)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("name", ["column gate up 9", "row 9", "qkv 9/3", "attention 6/2 dropout", "gelu 9", "loss 4"])
def test_block_by_block_gives_the_same(name: str, num_blocks: int) -> None:
    for ranks in range(1, num_blocks + 1):
        for result in run_threads(ranks, run_layer, name, "float64", num_blocks):
            assert_close(result, one_rank(name), TOLERANCE)
