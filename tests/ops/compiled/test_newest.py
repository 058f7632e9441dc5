from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.backend.accelerator import use_accelerator
from mpitp.layers.cached_attention import QueryGroups, attend_newest

INDEX = [0, 0, 0, 1, 1, 2]


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, index: list[int], *, compiled: bool) -> np.ndarray:
    out = np.full_like(q, np.nan)
    use_accelerator(compiled)
    try:
        attend_newest(q, keys, values, QueryGroups.of(index), 0.25, out)
    finally:
        use_accelerator(None)
    return out


def cached(rng, u: int, d: int, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [a, d], and keys and values [u, g, d] as views of a larger cache."""
    stores = (rng.standard_normal((3, u + 4, d)).astype(dtype)[:, :u].transpose(1, 0, 2) for _ in range(2))
    return rng.standard_normal((len(INDEX), d)).astype(dtype), *stores


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("u", [1, 2, 17, 300])
@pytest.mark.parametrize("d", [1, 8, 33, 64])
def test_equals_the_plain_attention(rng, dtype, tolerance, u, d):
    q, keys, values = cached(rng, u, d, dtype)
    expected = attention(q, keys, values, INDEX, compiled=False)
    np.testing.assert_allclose(attention(q, keys, values, INDEX, compiled=True), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("u", [1, 5, 33, 257])
def test_the_bits_of_a_head_don_t_depend_on_its_neighbours(rng, u):
    q, keys, values = cached(rng, u, 16, np.float32)
    whole = attention(q, keys, values, INDEX, compiled=True)
    alone = attention(q[3:5], keys[:, 1:2].copy(), values[:, 1:2].copy(), [0, 0], compiled=True)
    assert alone.tobytes() == whole[3:5].tobytes()


def test_large_scores_and_not_finite_values(rng):
    q, keys, values = cached(rng, 20, 8, np.float32)
    keys[:, 0] *= 1e4
    values[3, 1, 2], keys[5, 2, 0] = np.nan, np.nan
    o = attention(q, keys, values, INDEX, compiled=True)
    np.testing.assert_allclose(o[:3], attention(q, keys, values, INDEX, compiled=False)[:3], rtol=1e-4)
    assert np.isnan(o[3:5, 2]).all() and np.isfinite(o[3:5, 3:]).all() and np.isnan(o[5]).all()
