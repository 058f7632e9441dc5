from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import rms_norm_parts as parts
from mpitp.ops import row_blocks
from mpitp.ops.layer_norm import layer_norm_backward, layer_norm_forward, layer_norm_reference
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_reference
from tests.ops.checks import assert_like, assert_rounding_close, check_gradients, strided

EPS = 1e-5
ROWS = [0, 1, 7, 8, 9]


def data(rng, t, h=13, dtype=np.float64):
    x = rng.standard_normal((t, h)) * 2 + 0.5
    return [v.astype(dtype) for v in (x, rng.standard_normal(h), rng.standard_normal(h))]


@pytest.mark.parametrize("t", ROWS)
def test_layer_norm_gradients(xp, rng, t):
    def backward(dy, x, weight, bias):
        _, mean, rstd = layer_norm_forward(x, weight, bias, EPS)
        return layer_norm_backward(dy, x, weight, mean, rstd)

    check_gradients(lambda *args: layer_norm_forward(*args, EPS)[0], backward, data(rng, t), xp)


@pytest.mark.parametrize("t", ROWS)
def test_rms_norm_gradients(xp, rng, t):
    def backward(dy, x, weight):
        return rms_norm_backward(dy, x, weight, rms_norm_forward(x, weight, EPS)[1])

    check_gradients(lambda *args: rms_norm_forward(*args, EPS)[0], backward, data(rng, t)[:2], xp)


@pytest.mark.parametrize("owned", [[13], [5, 8], [6, 0, 7]])
@pytest.mark.parametrize("t", ROWS)
def test_parts_of_an_rms_norm_make_the_whole(xp, rng, t, owned):
    """Columns dealt to owners, some with none: their sums added, and each owner's rows beside the others'."""
    x, weight, dy = (from_host(each, xp) for each in (*data(rng, t)[:2], rng.standard_normal((t, 13))))
    ends = np.cumsum(owned).tolist()
    pieces = [slice(end - size, end) for end, size in zip(ends, owned, strict=True)]
    squares = sum(parts.sum_of_squares(x[:, piece]) for piece in pieces)
    products = sum(parts.gradient_products(dy[:, piece], x[:, piece], weight[piece]) for piece in pieces)
    y, dx, dweight = xp.empty_like(x), xp.empty_like(x), xp.empty_like(weight)
    rstd = parts.reciprocal_root(squares, 13, EPS)
    for piece in pieces:
        parts.scaled_rows(x[:, piece], rstd, weight[piece], out=y[:, piece])
        arrays = dy[:, piece], x[:, piece], weight[piece], rstd, products / 13
        dweight[piece] = parts.scaled_rows_backward(*arrays, out=dx[:, piece])
    expected, root = rms_norm_forward(x, weight, EPS)
    for found, want in zip((y, dx, dweight), (expected, *rms_norm_backward(dy, x, weight, root)), strict=True):
        np.testing.assert_allclose(to_host(found), to_host(want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("view", [from_host, strided])
@pytest.mark.parametrize("block_bytes", [1, 600, 1 << 20])
def test_equal_the_plain_expression_and_keep_the_dtype(xp, rng, monkeypatch, dtype, view, block_bytes):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
    x, weight, bias = data(rng, 21, 64, dtype)
    dy = rng.standard_normal(x.shape).astype(dtype)
    device = [view(x, xp), from_host(weight, xp), from_host(bias, xp)]
    wide = [v.astype(np.float64) for v in (x, weight, bias)]
    statistics = np.float64 if dtype == np.float64 else np.float32
    y, mean, rstd = layer_norm_forward(*device, EPS)
    assert_like(y, dtype, xp)
    assert_like(mean, statistics, xp)
    assert_like(rstd, statistics, xp)
    assert_rounding_close(y, layer_norm_reference(*wide, EPS))
    dx, *weight_grads = layer_norm_backward(view(dy, xp), device[0], device[1], mean, rstd)
    assert_like(dx, dtype, xp)
    for grad in weight_grads:  # added up over steps: never in 16 bits
        assert_like(grad, statistics, xp)
    y, rstd = rms_norm_forward(*device[:2], EPS)
    assert_like(y, dtype, xp)
    assert_like(rstd, statistics, xp)
    assert_rounding_close(y, rms_norm_reference(*wide[:2], EPS))
    dx, weight_grad = rms_norm_backward(view(dy, xp), device[0], device[1], rstd)
    assert_like(dx, dtype, xp)
    assert_like(weight_grad, statistics, xp)


@pytest.mark.parametrize("t", [1, 2, 37])
@pytest.mark.parametrize("h", [1, 7, 48, 515])
def test_bits_do_not_depend_on_the_block_size(rng, monkeypatch, t, h):
    x, weight, bias = data(rng, t, h, np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    results = []
    for block_bytes in (1, 4000, 1 << 22):
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
        y, mean, rstd = layer_norm_forward(x, weight, bias, EPS)
        dx, _, _ = layer_norm_backward(dy, x, weight, mean, rstd)
        z, rms = rms_norm_forward(x, weight, EPS)
        dz, _ = rms_norm_backward(dy, x, weight, rms)
        results.append([y, mean, rstd, dx, z, rms, dz])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_large_mean_keeps_its_variance(xp):
    """The variance is of centred values: a mean of squares less the square of the mean would cancel here."""
    x = np.array([[10000.0, 10001.0, 10002.0, 10003.0]], np.float32)
    one = from_host(np.ones(4, np.float32), xp)
    y, _, _ = layer_norm_forward(from_host(x, xp), one, one * 0, EPS)
    np.testing.assert_allclose(to_host(y)[0], np.array([-3, -1, 1, 3]) / np.sqrt(5), rtol=1e-4)
