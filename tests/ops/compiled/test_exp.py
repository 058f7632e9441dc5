from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from mpitp.ops.compiled.exp import exp, exp_flushed
from mpitp.ops.compiled.rows import row_maximum


@numba.njit
def exp_of_each(x, y):
    for i in range(x.shape[0]):
        y[i] = exp(x[i])


@numba.njit
def flushed_of_each(x, y):
    for i in range(x.shape[0]):
        y[i] = exp_flushed(x[i])


@numba.njit
def largest(x):
    return row_maximum(x)


def of_each(kernel, x):
    y = np.empty_like(x)
    kernel(x, y)
    return y


def points(rng, dtype):
    """All sizes of arguments, and the neighbourhoods of the ends and of halves of ln 2, where the rounding turns."""
    end = 110.0 if dtype == np.float32 else 760.0
    small = np.exp(rng.uniform(-60, 4, 100_000)) * rng.choice([-1.0, 1.0], 100_000)
    turns = (np.arange(-2 * int(end), 2 * int(end)) + 0.5) * np.log(2.0)
    near = (turns[:, None] * (1 + np.finfo(dtype).eps * np.arange(-4, 5))).ravel()
    return np.concatenate([rng.uniform(-end, end, 400_000), small, near]).astype(dtype)


def ulps(got, x):
    """Distance from exp(x), in units in the last place of the right result; and that result in x's dtype."""
    with np.errstate(all="ignore"):
        right = np.exp(x.astype(np.longdouble))
        finite = (right < np.finfo(x.dtype).max) & (right > 0)
        unit = np.spacing(right[finite].astype(x.dtype)).astype(np.longdouble)
        return np.abs(got[finite].astype(np.longdouble) - right[finite]) / unit, right.astype(x.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_two_units_in_the_last_place(rng, dtype):
    x = points(rng, dtype)
    y = of_each(exp_of_each, x)
    error, right = ulps(y, x)
    assert error.max() <= 2
    assert (np.isinf(y) == np.isinf(right)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_flushed_is_the_same_above_the_smallest_normal_number(rng, dtype):
    x = points(rng, dtype)
    x = x[x < 88]
    y = of_each(flushed_of_each, x)
    normal = x > np.log(np.finfo(dtype).tiny) + 1
    assert ulps(y[normal], x[normal])[0].max() <= 2
    assert (y[x < np.log(np.finfo(dtype).tiny)] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kernel", [exp_of_each, flushed_of_each])
def test_ends(dtype, kernel):
    x = np.array([0, -0.0, -np.inf, np.nan, -np.nan, -1e30, np.finfo(dtype).min], dtype)
    np.testing.assert_array_equal(of_each(kernel, x), np.array([1, 1, 0, np.nan, np.nan, 0, 0], dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_too_large_is_inf(dtype):
    x = np.array([np.inf, np.finfo(dtype).max, 1000], dtype)
    np.testing.assert_array_equal(of_each(exp_of_each, x), np.full(3, np.inf, dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bits_do_not_depend_on_the_neighbours(rng, dtype):
    x = points(rng, dtype)[:200]
    for kernel in (exp_of_each, flushed_of_each):
        whole = of_each(kernel, x)
        for n in range(1, 71):
            for start in (0, 1, 3, 16, 200 - n):
                assert of_each(kernel, x[start : start + n]).tobytes() == whole[start : start + n].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_maximum(rng, dtype):
    for n in [*range(1, 70), 1000]:
        x = (rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30, n)).astype(dtype)
        assert largest(x) == x.max() and largest(-np.abs(x)) == -np.abs(x).min()
    assert largest(np.empty(0, dtype)) == -np.inf
    assert largest(np.array([-np.inf, -np.inf], dtype)) == -np.inf
    assert largest(np.array([1, np.inf, -np.inf], dtype)) == np.inf
    assert np.isnan(largest(np.array([1, np.nan, np.inf], dtype)))
    assert largest(np.array([1, -np.nan, 0], dtype)) == 1  # found by the exponential of it, see softmax_numerators
