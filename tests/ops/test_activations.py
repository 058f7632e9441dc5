from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import row_blocks
from mpitp.ops.dropout import dropout_forward
from mpitp.ops.gelu import gelu_backward, gelu_forward, gelu_reference
from mpitp.ops.swiglu import swiglu_backward, swiglu_forward, swiglu_reference
from tests.ops.checks import assert_like, assert_rounding_close, check_gradients, strided

ROWS = [0, 1, 7, 8, 9]


@pytest.mark.parametrize("t", ROWS)
def test_gradients(xp, rng, t):
    check_gradients(gelu_forward, lambda dy, x: [gelu_backward(dy, x)], [rng.standard_normal((t, 6)) * 2], xp)
    check_gradients(swiglu_forward, lambda dy, x: [swiglu_backward(dy, x)], [rng.standard_normal((t, 6)) * 2], xp)
    mask = from_host((rng.random((t, 6)) < 0.5) * 2.0, xp)
    check_gradients(
        lambda x: dropout_forward(x, mask),
        lambda dy, x: [dropout_forward(dy, mask)],
        [rng.standard_normal((t, 6))],
        xp,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("view", [from_host, strided])
@pytest.mark.parametrize("block_bytes", [1, 600, 1 << 20])
def test_equal_the_plain_expression_and_keep_the_dtype(xp, rng, monkeypatch, dtype, view, block_bytes):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
    x = (rng.standard_normal((21, 46)) * 3).astype(dtype)
    y = gelu_forward(view(x, xp))
    assert_like(y, dtype, xp)
    assert_rounding_close(y, gelu_reference(x.astype(np.float64)))
    assert_like(gelu_backward(y, view(x, xp)), dtype, xp)
    y = swiglu_forward(view(x, xp))
    assert_like(y, dtype, xp)
    assert_rounding_close(y, swiglu_reference(x.astype(np.float64)))
    assert_like(swiglu_backward(view(to_host(y), xp), view(x, xp)), dtype, xp)


@pytest.mark.parametrize("t", [1, 2, 37])
@pytest.mark.parametrize("width", [2, 14, 94, 1030])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bits_do_not_depend_on_the_block_size_or_the_slice(rng, monkeypatch, t, width, dtype):
    x = (rng.standard_normal((t, width)) * 2).astype(dtype)
    dy = rng.standard_normal((t, width)).astype(dtype)
    results = []
    for block_bytes in (1, 4000, 1 << 22):
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
        results.append(
            [gelu_forward(x), gelu_backward(dy, x), swiglu_forward(x), swiglu_backward(dy[:, : width // 2], x)]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(gelu_forward(x[:, 1:]), results[0][0][:, 1:])
    np.testing.assert_array_equal(gelu_backward(dy[:, 1:], x[:, 1:].copy()), results[0][1][:, 1:])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_from_end_to_end(xp, dtype):
    """Against the definition, one value at a time; the error is of the rounding of x."""
    x = np.concatenate([np.linspace(-12, 12, 2001), [-1e4, -1e-6, 0.0, 1e-6, 1e4]]).astype(dtype).reshape(-1, 2006)
    u = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in x[0].tolist()]
    expected = np.array([[v / 2 * (1 + math.tanh(w)) for v, w in zip(x[0].tolist(), u, strict=True)]])
    y = to_host(gelu_forward(from_host(x, xp)))
    assert (np.abs(y - expected) <= 3 * np.finfo(dtype).eps * np.abs(x)).all()
    grad = to_host(gelu_backward(from_host(np.ones_like(x), xp), from_host(x, xp)))
    np.testing.assert_allclose(grad[0, [0, -5, -3, -1]], [0, 0, 0.5, 1], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_swiglu_of_extreme_gates_is_silent_and_right(xp, dtype):
    gates = np.array([[-1e30, -1e4, -200.0, -80.0, 0.0, 80.0, 1e4, 1e30]], dtype)
    x = from_host(np.concatenate([gates, np.ones_like(gates)], axis=1), xp)
    expected = np.array([[0, 0, 0, -80 * math.exp(-80), 0, 80, 1e4, 1e30]])
    np.testing.assert_allclose(to_host(swiglu_forward(x)), expected, rtol=1e-5, atol=1e-30)
    grad = to_host(swiglu_backward(from_host(np.ones_like(gates), xp), x))
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(grad[0, :8], [0, 0, 0, 0, 0.5, 1, 1, 1], atol=1e-30)
