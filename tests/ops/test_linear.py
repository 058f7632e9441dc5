from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import linear
from mpitp.ops.linear import linear_bias_grad, linear_forward, linear_input_grad, linear_weight_grad
from tests.ops.checks import assert_like, assert_rounding_close, check_gradients, strided

SIZES = [0, 1, 2, 5, 8, 9, 33]


@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize("view", [from_host, strided])
@pytest.mark.parametrize("with_out", [False, True])
def test_forward(xp, rng, t, view, with_out):
    x, w, bias = rng.standard_normal((t, 7)), rng.standard_normal((11, 7)), rng.standard_normal(11)
    x, w, bias = (v.astype(np.float32) for v in (x, w, bias))
    out = strided(np.zeros((t, 11), np.float32), xp) if with_out else None
    y = linear_forward(view(x, xp), view(w, xp), from_host(bias, xp), out=out)
    assert_like(y, np.float32, xp)
    assert_rounding_close(y, x.astype(np.float64) @ w.T.astype(np.float64) + bias, 16)
    if with_out:
        assert y is out
    no_bias = linear_forward(view(x, xp), view(w, xp))
    assert_rounding_close(no_bias, x.astype(np.float64) @ w.T.astype(np.float64), 16)
    if xp is np:
        assert no_bias.flags.c_contiguous


@pytest.mark.parametrize(("threads", "kernels"), [(1, "SkylakeX"), (1, "Haswell"), (2, "SkylakeX")])
@pytest.mark.parametrize("t", [1, 2, 3, 8, 9, 64, 65])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_few_rows_on_one_core_and_on_several(monkeypatch, rng, threads, kernels, t, dtype):
    """One core takes dot products and pieces of w where that pays, several share BLAS's products."""
    monkeypatch.setattr(linear, "blas_threads", lambda: threads)
    monkeypatch.setattr(linear, "blas_kernels", lambda: kernels)
    monkeypatch.setattr(linear, "CACHED_BYTES", 7 * 70 * 4)
    monkeypatch.setattr(linear, "SMALL_PRODUCT", 70 * 100)
    x, w = rng.standard_normal((t, 70)).astype(dtype), rng.standard_normal((50, 70)).astype(dtype)
    assert_rounding_close(linear_forward(x, w), x.astype(np.float64) @ w.T.astype(np.float64), 70)


def test_one_row_s_bits_don_t_depend_on_what_lies_around_it(rng):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in [(3, 200), (150, 200)])
    for k in range(1, 100):
        part = linear_forward(x[1:2, 7 : 7 + k], w[:, 7 : 7 + k])
        assert part.tobytes() == linear_forward(x[1:2, 7 : 7 + k].copy(), w[:, 7 : 7 + k].copy()).tobytes()
        assert part[:, 20:50].tobytes() == linear_forward(x[1:2, 7 : 7 + k], w[20:50, 7 : 7 + k]).tobytes()


@pytest.mark.parametrize("t", SIZES)
def test_gradients(xp, rng, t):
    inputs = [rng.standard_normal((t, 7)), rng.standard_normal((11, 7)), rng.standard_normal(11)]

    def backward(dy, x, w, bias):
        return linear_input_grad(dy, w), linear_weight_grad(dy, x), linear_bias_grad(dy)

    check_gradients(linear_forward, backward, inputs, xp)


@pytest.mark.parametrize("t", SIZES)
def test_gradients_into_strided_views(xp, rng, t):
    dy, x, w = (rng.standard_normal(shape).astype(np.float32) for shape in [(t, 11), (t, 7), (11, 7)])
    dx, dw = strided(np.zeros((t, 7), np.float32), xp), strided(np.zeros((11, 7), np.float32), xp)
    assert linear_input_grad(strided(dy, xp), strided(w, xp), out=dx) is dx
    assert linear_weight_grad(strided(dy, xp), strided(x, xp), out=dw) is dw
    assert_rounding_close(dx, dy.astype(np.float64) @ w, 16)
    assert_rounding_close(dw, dy.T.astype(np.float64) @ x, 16)
    assert_like(linear_bias_grad(strided(dy, xp)), np.float32, xp)


@pytest.mark.parametrize(("n", "k"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("t", [0, 1, 3])
def test_empty_shards(xp, t, n, k):
    x, w, dy = (from_host(np.ones(shape, np.float32), xp) for shape in [(t, k), (n, k), (t, n)])
    np.testing.assert_array_equal(to_host(linear_forward(x, w)), np.zeros((t, n)))
    np.testing.assert_array_equal(to_host(linear_input_grad(dy, w)), np.zeros((t, k)))
    assert linear_weight_grad(dy, x).shape == (n, k)
    assert linear_bias_grad(dy).shape == (n,)


@pytest.mark.parametrize("t", [1, 2, 7, 16, 40])
def test_a_block_has_the_same_bits_wherever_it_lies(rng, t):
    w, x = rng.standard_normal((96, 64)).astype(np.float32), rng.standard_normal((t, 64)).astype(np.float32)
    alone = linear_forward(x, w[32:64].copy())
    out = np.zeros((t, 96), np.float32)
    for start in (0, 32, 64):
        linear_forward(x, w[start : start + 32], out=out[:, start : start + 32])
    np.testing.assert_array_equal(out[:, 32:64], alone)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_by_row_a_row_has_its_bits_in_any_company(xp, rng, dtype):
    x, w = rng.standard_normal((21, 70)).astype(dtype), rng.standard_normal((50, 70)).astype(dtype)
    whole = to_host(linear.linear_row_by_row(from_host(x, xp), from_host(w, xp)))
    assert_rounding_close(whole, x.astype(np.float64) @ w.T.astype(np.float64), 70)
    for start, stop in ((0, 1), (3, 5), (7, 21)):
        part = linear.linear_row_by_row(from_host(x[start:stop].copy(), xp), from_host(w, xp))
        assert to_host(part).tobytes() == whole[start:stop].tobytes()
