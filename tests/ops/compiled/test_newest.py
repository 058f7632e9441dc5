from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.backend.accelerator import use_accelerator
from mpitp.layers.kv_cache import LayerCache
from mpitp.ops.newest_attention import QueryGroups, attend_newest, attend_newest_of_all

INDEX = [0, 0, 0, 1, 1, 2]


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, index: list[int], *, compiled: bool) -> np.ndarray:
    """o [a, d] of the newest token, the last one of keys and values [u, g, d], over a cache that holds the others."""
    (u, g, d), out = keys.shape, np.full_like(q, np.nan)
    cache = LayerCache((u + 4,), g, d, q.dtype, np)
    cache.extend(0, 0, keys[:-1], values[:-1])
    use_accelerator(compiled)
    try:
        attend_newest((q, keys[-1], values[-1]), cache.stores(0, u), u - 1, QueryGroups.of(index, 0.25), out)
    finally:
        use_accelerator(None)
    stored = cache.stores(0, u)
    assert all(np.array_equal(s[:, u - 1], x[-1], equal_nan=True) for s, x in zip(stored, (keys, values), strict=True))
    return out


def drawn(rng, u: int, d: int, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [a, d], and keys and values [u, g, d]."""
    keys, values = rng.standard_normal((2, u, 3, d)).astype(dtype)
    return rng.standard_normal((len(INDEX), d)).astype(dtype), keys, values


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize("u", [1, 2, 17, 300])
@pytest.mark.parametrize("d", [1, 8, 33, 64])
def test_equals_the_plain_attention(rng, dtype, tolerance, u, d):
    q, keys, values = drawn(rng, u, d, dtype)
    expected = attention(q, keys, values, INDEX, compiled=False)
    np.testing.assert_allclose(attention(q, keys, values, INDEX, compiled=True), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("u", [1, 5, 33, 257])
def test_the_bits_of_a_head_don_t_depend_on_its_neighbours(rng, u):
    q, keys, values = drawn(rng, u, 16, np.float32)
    whole = attention(q, keys, values, INDEX, compiled=True)
    alone = attention(q[3:5], keys[:, 1:2], values[:, 1:2], [0, 0], compiled=True)
    assert alone.tobytes() == whole[3:5].tobytes()


def test_large_scores_and_not_finite_values(rng):
    q, keys, values = drawn(rng, 20, 8, np.float32)
    keys[:, 0] *= 1e4
    values[3, 1, 2], keys[5, 2, 0] = np.nan, np.nan
    o = attention(q, keys, values, INDEX, compiled=True)
    np.testing.assert_allclose(o[:3], attention(q, keys, values, INDEX, compiled=False)[:3], rtol=1e-4)
    assert np.isnan(o[3:5, 2]).all() and np.isfinite(o[3:5, 3:]).all() and np.isnan(o[5]).all()


@pytest.mark.parametrize("window", [0, 5])
def test_several_texts_in_one_pool_attend_as_each_alone(rng, window):
    """To the bit, wherever their places lie; the new keys and values are stored there."""
    groups = replace(QueryGroups.of(INDEX, 0.25), window=window)
    pool, d = rng.standard_normal((2, 3, 64, 32)).astype(np.float32), 32
    q = rng.standard_normal((4, len(INDEX), d)).astype(np.float32)
    k, v = rng.standard_normal((2, 4, 3, d)).astype(np.float32)
    tables, past = [np.r_[0:16, 32:48], np.r_[16:32], np.r_[48:64]], [20, 7, 0]
    texts = list(zip((0, 1, 3), past, (0, 32, 48), strict=True))
    out = np.zeros_like(q)
    expected = out.copy()
    use_accelerator(True)
    try:
        alone = [(pool[0][:, places].copy(), pool[1][:, places].copy()) for places in tables]
        for (row, tokens, _), stores in zip(texts, alone, strict=True):
            attend_newest((q[row], k[row], v[row]), stores, tokens, groups, expected[row])
        kept = (pool[0], pool[1])
        attend_newest_of_all((q, k, v), kept, np.array(texts), np.concatenate(tables), groups, out)
    finally:
        use_accelerator(None)
    assert out.tobytes() == expected.tobytes()
    for places, stores in zip(tables, alone, strict=True):
        np.testing.assert_array_equal(pool[:, :, places], np.array(stores))
