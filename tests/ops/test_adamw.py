from __future__ import annotations

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import row_blocks
from mpitp.ops.adamw import AdamWRule, adamw_reference, adamw_update, sum_of_squares

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def state(rng, shape, dtype):
    return [rng.standard_normal(shape).astype(dtype), np.zeros(shape, dtype), np.zeros(shape, dtype)]


@pytest.mark.parametrize("shape", [(), (1,), (7, 9), (0, 4), (3, 5, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_equals_the_plain_expression(xp, rng, monkeypatch, shape, dtype, block_bytes):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
    host = state(rng, shape, dtype)
    param, m, v = (from_host(x.copy(), xp) for x in host)
    wide = [x.astype(np.float64) for x in host]
    for step in range(1, 6):
        grad = rng.standard_normal(shape).astype(dtype)
        device_grad = from_host(np.asarray(grad).copy(), xp)
        rule = AdamWRule(**SETTINGS, step=step)
        adamw_update(param, device_grad, m, v, rule, grad_scale=0.5)
        np.testing.assert_array_equal(to_host(device_grad), grad)
        wide = list(adamw_reference(wide[0], grad.astype(np.float64) * 0.5, *wide[1:], rule))
    for got, expected in zip((param, m, v), wide, strict=True):
        assert got.dtype == dtype and got.shape == shape
        np.testing.assert_allclose(to_host(got), expected, rtol=64 * np.finfo(dtype).eps, atol=16 * np.finfo(dtype).eps)


def test_first_step_moves_by_the_learning_rate(xp):
    """Bias correction makes the first step lr * sign(grad), whatever the size of the gradient."""
    param, m, v = (from_host(np.zeros(3), xp) for _ in range(3))
    rule = AdamWRule(lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.0, step=1)
    adamw_update(param, from_host(np.array([1e-3, -5.0, 2.0]), xp), m, v, rule)
    np.testing.assert_allclose(to_host(param), [-0.1, 0.1, -0.1], rtol=1e-12)


def test_refuses_what_it_could_only_update_in_a_copy(xp):
    wide = from_host(np.ones((4, 6), np.float32), xp)
    x = from_host(np.ones((4, 3), np.float32), xp)
    with pytest.raises(AssertionError):
        adamw_update(wide[:, :3], x, x * 0, x * 0, AdamWRule(**SETTINGS, step=1))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (333, 1001)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_squares(xp, rng, shape, dtype):
    x = np.asarray(rng.standard_normal(shape)).astype(dtype)
    total = sum_of_squares(from_host(x, xp))
    assert total.shape == () and total.dtype == np.float64
    assert float(to_host(total)) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-13)
    assert to_host(sum_of_squares(from_host(x.reshape(-1), xp))) == to_host(total)


def test_sum_of_squares_of_a_view(xp, rng):
    x = rng.standard_normal((9, 12)).astype(np.float32)
    got = sum_of_squares(from_host(x, xp)[:, 3:7])
    assert to_host(got) == to_host(sum_of_squares(from_host(x[:, 3:7].copy(), xp)))


def test_sum_of_squares_does_not_overflow_float32(xp):
    assert float(to_host(sum_of_squares(from_host(np.full(4, 1e30, np.float32), xp)))) == pytest.approx(4e60, rel=1e-6)
