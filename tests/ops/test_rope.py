from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.errors import ConfigError
from mpitp.ops import row_blocks
from mpitp.ops.rope import rope_backward, rope_forward, rope_inv_freq, rope_reference, rope_table
from tests.ops.checks import assert_like, check_gradients

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def table(t, d, dtype, xp):
    return rope_table(from_host(np.arange(3, 3 + t), xp), rope_inv_freq(d, 10000.0), dtype, xp)


@pytest.mark.parametrize("t", [0, 1, 7, 9])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_gradients(xp, rng, t, heads):
    cos, sin = table(t, 8, np.float64, xp)
    x = rng.standard_normal((t, heads, 8))
    check_gradients(lambda x: rope_forward(x, cos, sin), lambda dy, x: [rope_backward(dy, cos, sin)], [x], xp)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block_bytes", [1, 600, 1 << 20])
def test_equals_the_plain_expression_in_place_and_on_views(xp, rng, monkeypatch, dtype, block_bytes):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
    cos, sin = table(21, 16, dtype, xp)
    host = rng.standard_normal((21, 5 * 16)).astype(dtype)
    fused = from_host(host.copy(), xp)
    x = fused.reshape(21, 5, 16)[:, 1:4]
    expected = to_host(rope_reference(x, cos, sin))
    y = rope_forward(x, cos, sin)
    assert_like(y, dtype, xp)
    np.testing.assert_array_equal(to_host(y), expected)
    np.testing.assert_array_equal(to_host(fused), host)
    assert rope_forward(x, cos, sin, out=x) is x
    np.testing.assert_array_equal(to_host(x), expected)
    rope_backward(x, cos, sin, out=x)
    np.testing.assert_allclose(to_host(fused), host, atol=8 * np.finfo(dtype).eps)


def test_rotates_pairs_of_halves(xp):
    cos, sin = rope_table(from_host(np.array([1]), xp), np.array([0.5, 0.25]), np.float64, xp)
    x = from_host(np.array([[[1.0, 0.0, 0.0, 1.0]]]), xp)
    got = to_host(rope_forward(x, cos, sin))[0, 0]
    np.testing.assert_allclose(got, [math.cos(0.5), -math.sin(0.25), math.sin(0.5), math.cos(0.25)])


def test_table_takes_positions_of_host_or_device(xp):
    host = rope_table(np.array([5, 0, 2]), rope_inv_freq(8, 500000.0), np.float32, xp)
    device = rope_table(from_host(np.array([5, 0, 2]), xp), rope_inv_freq(8, 500000.0), np.float32, xp)
    for a, b in zip(host, device, strict=True):
        assert_like(a, np.float32, xp)
        np.testing.assert_array_equal(to_host(a), to_host(b))


def test_default_frequencies():
    np.testing.assert_allclose(rope_inv_freq(8, 10000.0), [1.0, 0.1, 0.01, 0.001])
    np.testing.assert_array_equal(rope_inv_freq(8, 10000.0, {"rope_type": "default"}), rope_inv_freq(8, 10000.0))
    np.testing.assert_allclose(rope_inv_freq(8, 1e4, {"type": "linear", "factor": 4.0}), rope_inv_freq(8, 1e4) / 4)


def test_llama3_frequencies_follow_its_three_rules():
    """Against the rule spelt out as in the reference implementation, one frequency at a time."""
    plain, scaled = rope_inv_freq(128, 500000.0), rope_inv_freq(128, 500000.0, LLAMA3)
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4.0:
            expected = before
        elif wavelength > 8192 / 1.0:
            expected = before / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8.0 + smooth * before
        assert after == pytest.approx(expected, rel=1e-14)
    assert (scaled == plain).any() and np.isclose(scaled, plain / 8).any()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "yarn"),
        ({"rope_type": "linear"}, "factor"),
        ({"type": "linear", "factor": -1.0}, "factor"),
        ({"type": "linear", "factor": "4"}, "factor"),
        ({**LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
    ],
)
def test_refuses_what_it_does_not_know(scaling, message):
    with pytest.raises(ConfigError, match=message):
        rope_inv_freq(8, 10000.0, scaling)
