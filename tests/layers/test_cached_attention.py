"""Attention of the newest token against the tiled attention, and its bits whichever heads a rank holds."""

from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import array_module, from_host, to_host
from mpitp.layers.kv_cache import LayerCache
from mpitp.ops.attention import HeadMap, attention_forward
from mpitp.ops.newest_attention import QueryGroups, attend_newest
from tests import strict_cupy

CASES = [([0], 1), ([0, 1, 2], 3), ([0, 0, 0, 1, 1], 2), ([0, 1, 1, 1, 2], 3), ([], 0)]


def drawn(u: int, g: int, d: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [u, g, d]."""
    keys, values = np.random.default_rng(0).standard_normal((2, u, g, d)).astype(dtype)
    return keys, values


def newest(q: np.ndarray, keys: np.ndarray, values: np.ndarray, kv_index: list[int]) -> np.ndarray:
    """o [a, d] of the newest token, the last one of keys and values [u, g, d], over a cache that holds the others."""
    xp, (u, g, d), out = array_module(q), keys.shape, from_host(np.empty(q.shape, q.dtype), array_module(q))
    cache = LayerCache((3, u + 3), g, d, q.dtype, xp)
    cache.extend(1, 0, keys[:-1], values[:-1])
    attend_newest((q, keys[-1], values[-1]), cache.stores(1, u), u - 1, QueryGroups.of(kv_index, 0.25), out)
    stored = cache.stores(1, u)
    assert all(
        to_host(s[:, u - 1]).tobytes() == to_host(x[-1]).tobytes() for s, x in zip(stored, (keys, values), strict=True)
    )
    return out


def test_groups_cover_the_query_heads_in_order() -> None:
    assert QueryGroups.of([0, 0, 1, 2, 2], 0.25).neighbours == ((0, slice(0, 2)), (1, slice(2, 3)), (2, slice(3, 5)))
    assert QueryGroups.of([], 0.25).neighbours == ()


@pytest.mark.parametrize("kv_index, g", CASES)
@pytest.mark.parametrize("u", [1, 2, 17, 300])
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-13), ("float32", 2e-6)])
def test_equals_the_tiled_attention(kv_index: list[int], g: int, u: int, dtype: str, tolerance: float) -> None:
    keys, values = drawn(u, g, 8, dtype)
    q = np.random.default_rng(1).standard_normal((len(kv_index), 8)).astype(dtype)
    given = q.copy(), keys.copy(), values.copy()
    o = newest(q, keys, values, kv_index)
    expected = attention_forward(q[None], keys, values, HeadMap(kv_index, 0.25))[0][0]
    assert o.dtype == np.dtype(dtype)
    np.testing.assert_allclose(o, expected, rtol=0, atol=tolerance)
    assert all(np.array_equal(now, then) for now, then in zip((q, keys, values), given, strict=True))


@pytest.mark.parametrize("u", [1, 5, 33, 257])
def test_bits_of_a_head_do_not_depend_on_its_neighbours(u: int) -> None:
    kv_index = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    keys, values = drawn(u, 3, 16, "float32")
    q = np.random.default_rng(2).standard_normal((9, 16)).astype(np.float32)
    whole = newest(q, keys, values, kv_index)
    for start, stop in [(0, 5), (5, 9), (2, 3), (3, 8)]:
        first, last = kv_index[start], kv_index[stop - 1]
        held = slice(first, last + 1)
        part = newest(q[start:stop], keys[:, held], values[:, held], [i - first for i in kv_index[start:stop]])
        assert np.array_equal(part, whole[start:stop])


def test_runs_on_device_arrays() -> None:
    keys, values = drawn(7, 2, 8, "float32")
    q = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    out = newest(*(from_host(x, strict_cupy) for x in (q, keys, values)), [0, 0, 1])
    np.testing.assert_allclose(to_host(out), newest(q, keys, values, [0, 0, 1]), atol=1e-6)
