"""Norms of queries and keys, head by head and over all heads: without rows, on ranks without heads, and row by row."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.layers.build import Builder
from mpitp.layers.head_norm import HeadNorms
from mpitp.layers.joint_norm import JointNorms
from mpitp.layers.site import make_site
from tests.sharded import fill, random_array

KINDS = ["head by head", "over all heads"]
HEADS, KV_HEADS, DIM = 3, 1, 4


def make_norms(group: Group, kind: str, dtype: str, blocks: int = 0) -> HeadNorms | JointNorms:
    """Filled with global random tensors."""
    builder = Builder(make_site(group, dtype=dtype, invariant_blocks=blocks), 0.02)
    own = builder.site.heads(HEADS, KV_HEADS)
    norms = builder.head_norms if kind == KINDS[0] else builder.joint_norms
    layer: HeadNorms | JointNorms = norms(own, DIM, 1e-6)
    fill(layer.params().items())
    return layer


@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_without_rows_gradients_are_noughts(kind: str, ranks: int, blocks: int) -> None:
    def run(group: Group) -> list[np.ndarray]:
        layer = make_norms(group, kind, "float32", blocks)
        x = np.empty((0, layer.values.stop), np.float32)
        y, ctx = layer.forward(x)
        dx = layer.backward(np.empty_like(x), ctx)
        assert y.shape == dx.shape == x.shape
        return [param.grad for param in layer.params().values()]

    for grads in run_threads(ranks, run):
        assert len(grads) == 2 and all(grad is not None and not grad.any() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_heads(kind: str) -> None:
    """A rank without heads joins the sums, and its gradients count for nothing."""

    def run(group: Group) -> tuple[np.ndarray, int]:
        layer = make_norms(group, kind, "float64")
        x = random_array("x", (5, layer.values.stop))
        y, ctx = layer.forward(x)
        layer.backward(random_array("dy", x.shape), ctx)
        assert np.isfinite(y).all()
        return y, x.shape[1]

    widths = [width for _, width in run_threads(5, run)]
    assert widths == [12, 12, 12, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    layer = make_norms(SerialGroup(), kind, "float32", 3)
    x = random_array("x", (70, layer.values.stop)).astype(np.float32)
    together = layer.forward(x)[0]
    for row in (0, 33, 69):
        np.testing.assert_array_equal(layer.forward(x[row : row + 1])[0][0], together[row])
