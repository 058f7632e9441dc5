"""Row-parallel layers that sum y piece by piece: the same y, in the plain layout only, and only where it pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import to_host
from mpitp.backend.device import CpuDevice, Device
from mpitp.comm import Group, run_threads
from mpitp.layers.build import Builder
from mpitp.layers.site import make_site
from mpitp.layers.summation import MOST_PIECES
from tests.sharded import StrictDevice

TOKENS, UNITS, WIDTH = 700, 6, 512  # y: 1.4 MB


def layer_and_input(group: Group, device: Device, num_blocks: int = 0) -> tuple[Any, Any]:
    builder = Builder(make_site(group, device=device, invariant_blocks=num_blocks), 0.02)
    share = builder.site.share(UNITS)
    layer = builder.row("down", share, WIDTH, bias=True)
    rng = np.random.default_rng(1)
    w, b, x = (rng.standard_normal(shape).astype("f4") for shape in ((WIDTH, UNITS), WIDTH, (TOKENS, UNITS)))
    columns = [unit for block in share.blocks for unit in block]
    layer.product.weight.data[...] = device.xp.asarray(w[:, columns])
    layer.bias.data[...] = device.xp.asarray(b)
    return layer, device.xp.asarray(np.ascontiguousarray(x[:, columns]))


@pytest.mark.parametrize("device", [CpuDevice(), StrictDevice()], ids=["numpy", "strict"])
def test_y_is_the_same_as_in_one_piece(device: Device) -> None:
    def check(group: Group) -> None:
        layer, x = layer_and_input(group, device)
        whole, _ = layer.forward(x)
        group.in_background = True
        assert len(layer.reduce.pieces((TOKENS, WIDTH), 4)) == MOST_PIECES
        y, ctx = layer.forward(x)
        np.testing.assert_allclose(to_host(y), to_host(whole), rtol=1e-5, atol=1e-5)
        assert ctx.x is x

    run_threads(2, check)


def test_pieces_cover_the_rows_and_are_not_too_small() -> None:
    def check(group: Group) -> None:
        group.in_background = True
        summation = make_site(group).summation()
        for rows, width in ((700, 512), (301, 512), (100, 4096), (1, 576), (0, 512), (5000, 8)):
            pieces = summation.pieces((rows, width), 4)
            assert [row for piece in pieces for row in range(rows)[piece]] == list(range(rows))
            assert len(pieces) == 1 or all(piece.stop - piece.start >= 128 for piece in pieces)
        assert len(summation.pieces((301, 512), 4)) == 2
        assert len(summation.pieces((100, 4096), 4)) == 1

    run_threads(2, check)


def test_the_invariant_layout_and_one_node_have_one_piece() -> None:
    def check(group: Group) -> None:
        assert len(make_site(group).summation().pieces((TOKENS, WIDTH), 4)) == 1
        layer, x = layer_and_input(group, CpuDevice(), num_blocks=3)
        before, _ = layer.forward(x)
        group.in_background = True
        assert len(layer.reduce.pieces((TOKENS, WIDTH), 4)) == 1
        after, _ = layer.forward(x)
        assert before.tobytes() == after.tobytes()

    run_threads(2, check)


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_sum_goes_where_it_is_to_go(num_blocks: int) -> None:
    def check(group: Group) -> None:
        summation, out = make_site(group, invariant_blocks=num_blocks).summation(), np.zeros((4, 3), np.float32)
        partial = np.full((2, 3), group.rank + 1, np.float32)
        summation.start([partial], like=out[1:3], out=out[1:3]).wait()
        assert out.tolist() == [[0] * 3, [3] * 3, [3] * 3, [0] * 3]

    run_threads(2, check)
