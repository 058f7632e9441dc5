from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.ops.compiled.few_rows import few_rows
from mpitp.ops.linear import linear_forward
from tests.ops.checks import assert_rounding_close

DTYPES = [np.float32, np.float64]


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    out = np.full((len(x), len(w)), np.nan, x.dtype)
    few_rows(x, w, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", range(2, 9))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 64), (5, 65), (40, 15), (7, 0), (0, 5)])
def test_equals_the_plain_product(rng, dtype, t, n, k):
    x, w = rng.standard_normal((t, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype)
    assert_rounding_close(product(x, w), x.astype(np.float64) @ w.T.astype(np.float64), max(k, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [2, 4, 7, 8])
def test_the_bits_depend_on_values_and_shapes_alone(rng, dtype, t):
    """Not on gaps between rows, on the place in memory, on the other rows of w, nor on where the result goes."""
    x, w = rng.standard_normal((t, 130)).astype(dtype), rng.standard_normal((40, 130)).astype(dtype)
    for start, k in [(0, 130), (1, 100), (3, 64), (5, 17), (7, 1)]:
        part, weights = x[:, start : start + k], w[:, start : start + k]
        whole = product(part.copy(), weights.copy())
        assert product(part, weights).tobytes() == whole.tobytes()
        assert product(part, weights[11:30]).tobytes() == whole[:, 11:30].tobytes()
        wide = np.zeros((t, 50), dtype)
        few_rows(part, weights, wide[:, 3:43])
        assert wide[:, 3:43].tobytes() == whole.tobytes()


@pytest.mark.parametrize("t", [1, 4, 11, 32])
def test_a_row_has_its_bits_in_any_company(rng, t):
    x, w = rng.standard_normal((t, 77)).astype(np.float32), rng.standard_normal((22, 77)).astype(np.float32)
    whole = product(x, w)
    assert_rounding_close(whole, x.astype(np.float64) @ w.T.astype(np.float64), 77)
    for i in range(t):
        assert product(x[i : i + 1], w).tobytes() == whole[i].tobytes()


def test_not_finite_values_are_seen(rng):
    x, w = rng.standard_normal((3, 50)).astype(np.float32), rng.standard_normal((6, 50)).astype(np.float32)
    w[2, 7], w[4, 8] = np.nan, np.inf
    y = product(x, w)
    assert np.isnan(y[:, 2]).all() and np.isinf(y[:, 4]).all()
    assert np.isfinite(y[:, [0, 1, 3, 5]]).all()


@pytest.mark.parametrize("t", [2, 8, 9])
def test_linear_forward_takes_it(rng, accelerated, t):
    x, w = rng.standard_normal((t, 33)).astype(np.float32), rng.standard_normal((20, 33)).astype(np.float32)
    assert_rounding_close(linear_forward(x, w), x.astype(np.float64) @ w.T.astype(np.float64), 33)
