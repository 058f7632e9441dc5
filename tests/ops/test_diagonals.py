from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops.diagonals import add_to_diagonals, diagonal_sums
from tests.ops.checks import assert_like, assert_rounding_close, strided


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (7, 1), (5, 9), (9, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_the_plain_loops_on_views(xp, rng, shape, dtype):
    rows, cols = shape
    host, numbers = rng.standard_normal(shape).astype(dtype), rng.standard_normal(rows + cols - 1).astype(dtype)
    x = strided(host, xp)
    add_to_diagonals(x, from_host(numbers, xp))
    plain = np.array([[host[i, j] + numbers[j - i + rows - 1] for j in range(cols)] for i in range(rows)])
    np.testing.assert_array_equal(to_host(x), plain)
    sums = diagonal_sums(strided(host, xp))
    assert_like(sums, dtype, xp)
    expected = [np.trace(host.astype(np.float64), offset) for offset in range(1 - rows, cols)]
    assert_rounding_close(sums, np.array(expected))
