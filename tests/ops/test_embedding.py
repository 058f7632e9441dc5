from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops.embedding import embedding_backward, embedding_forward
from tests.ops.checks import assert_like, check_gradients


@pytest.mark.parametrize("t", [0, 1, 7, 40])
@pytest.mark.parametrize(("start", "rows"), [(0, 10), (3, 4), (0, 0), (9, 1)])
def test_gradients(xp, rng, t, start, rows):
    ids = from_host(rng.integers(0, 10, t), xp)
    check_gradients(
        lambda table: embedding_forward(ids, table, start),
        lambda dy, table: [embedding_backward(dy, ids, rows, start)],
        [rng.standard_normal((rows, 5))],
        xp,
    )


@pytest.mark.parametrize("integers", [np.int32, np.int64, np.uint16])
def test_shards_add_up_to_the_whole(xp, rng, integers):
    table, ids = rng.standard_normal((10, 5)).astype(np.float32), rng.integers(0, 10, 30).astype(integers)
    device = from_host(ids, xp)
    whole = embedding_forward(device, from_host(table, xp))
    assert_like(whole, np.float32, xp)
    np.testing.assert_array_equal(to_host(whole), table[ids])
    parts = [embedding_forward(device, from_host(table[a:b].copy(), xp), a) for a, b in ((0, 4), (4, 7), (7, 10))]
    np.testing.assert_array_equal(sum(to_host(p) for p in parts), table[ids])


@pytest.mark.parametrize("ids", [[0] * 50, list(range(10)) * 3, [9, 0, 9, 9, 0, 3], []])
def test_gradient_is_summed_in_token_order_whatever_the_shard(xp, rng, ids):
    ids = np.array(ids, np.int64)
    dy = (rng.standard_normal((len(ids), 5)) * 10 ** rng.uniform(-3, 3, (len(ids), 1))).astype(np.float32)
    expected = np.zeros((10, 5), np.float32)
    for token, row in enumerate(ids):
        expected[row] += dy[token]
    for start, stop in ((0, 10), (0, 4), (4, 10), (9, 10)):
        got = embedding_backward(from_host(dy, xp), from_host(ids, xp), stop - start, start)
        assert_like(got, np.float32, xp)
        np.testing.assert_array_equal(to_host(got), expected[start:stop])
