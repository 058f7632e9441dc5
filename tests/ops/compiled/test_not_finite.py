"""NaN, infinities and numbers near the ends come out of compiled kernels as of the plain expressions."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.backend.accelerator import use_accelerator
from mpitp.ops.adamw import AdamWRule, adamw_update, sum_of_squares
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward, attention_reference
from mpitp.ops.cross_entropy import exp_sums
from mpitp.ops.gelu import gelu_backward, gelu_forward
from mpitp.ops.layer_norm import layer_norm_backward, layer_norm_forward
from mpitp.ops.rms_norm import rms_norm_backward, rms_norm_forward
from mpitp.ops.rope import rope_forward
from mpitp.ops.swiglu import swiglu_backward, swiglu_forward

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 100.0, -100.0, 1e12, -1e12, 1e38, -1e38]


@pytest.fixture(autouse=True)
def quietly():
    with np.errstate(all="ignore"):
        yield
    use_accelerator(None)


def assert_alike(compute, rtol=2e-6, atol=1e-30):
    """The plain and the compiled results are equal but for rounding, and not finite in the same places."""
    use_accelerator(False)
    plain = compute()
    use_accelerator(True)
    for expected, got in zip(plain, compute(), strict=True):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(got), test(expected))
        finite = np.isfinite(expected)
        np.testing.assert_allclose(np.asarray(got)[finite], np.asarray(expected)[finite], rtol=rtol, atol=atol)


def matrix(rng, rows, cols):
    """Ordinary numbers with one special one in each of the first rows, in any column."""
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x[np.arange(len(SPECIAL)), rng.integers(0, cols, len(SPECIAL))] = SPECIAL
    return x


@pytest.mark.parametrize("cols", [1, 5, 70])
def test_activations(rng, cols):
    x, dy = matrix(rng, 20, cols), rng.standard_normal((20, cols)).astype(np.float32)
    assert_alike(lambda: [gelu_forward(x), gelu_backward(dy, x)], rtol=1e-5, atol=1e-6)
    assert_alike(lambda: [gelu_backward(x, dy)], rtol=1e-5, atol=1e-6)
    for pair in ([x, dy], [dy, x], [x, x]):
        both = np.concatenate(pair, axis=1)
        assert_alike(lambda both=both: [swiglu_forward(both), swiglu_backward(dy, both)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cols", [3, 70])
def test_norms(rng, cols):
    x, dy = matrix(rng, 20, cols), rng.standard_normal((20, cols)).astype(np.float32)
    weight, bias = rng.standard_normal((2, cols)).astype(np.float32)
    x[np.abs(x) > 1e30] = np.inf  # sums of finite numbers this large overflow in one order and not in another

    def layer():
        y, mean, rstd = layer_norm_forward(x, weight, bias, 1e-5)
        return y, rstd, layer_norm_backward(dy, x, weight, mean, rstd)[0]

    def root():
        y, rstd = rms_norm_forward(x, weight, 1e-5)
        return y, rstd, rms_norm_backward(dy, x, weight, rstd)[0]

    assert_alike(layer, rtol=1e-4, atol=1e-4)
    assert_alike(root, rtol=1e-4, atol=1e-4)


def test_loss_rotation_and_optimizer(rng):
    x = matrix(rng, 20, 32)
    assert_alike(lambda: exp_sums(x, x.max(axis=1), [range(5), range(5, 32)]), rtol=1e-5)
    cos, sin = rng.standard_normal((2, 20, 8)).astype(np.float32)
    assert_alike(lambda: [rope_forward(x.reshape(20, 2, 16), cos, sin)], atol=1e-6)
    assert_alike(lambda: [np.float64(sum_of_squares(row)) for row in x], rtol=1e-14)

    def update():
        arrays = [x.copy(), x[::-1].copy(), x.copy(), np.abs(x)]
        adamw_update(*arrays, AdamWRule(0.1, 0.9, 0.95, 1e-8, 0.1, step=3))
        return arrays

    assert_alike(update, rtol=0, atol=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_is_seen_in_its_row_alone(rng, value):
    q, k, v = rng.standard_normal((3, 40, 1, 8)).astype(np.float32)
    q[17, 0, 3] = value
    use_accelerator(True)
    o, lse = attention_forward(q, k, v, HeadMap([0], 0.3))
    seen = np.isfinite(attention_reference(q, k, v, [0], 0.3))
    np.testing.assert_array_equal(np.isfinite(o), seen)
    assert not seen[17].any() and seen[:17].all() and not np.isfinite(lse[0, 17])
    for grad in attention_backward(np.ones_like(q), Kept(q, k, v, o, lse), HeadMap([0], 0.3, [0], 1)):
        assert not np.isfinite(grad).all()


@pytest.mark.parametrize("which", [1, 2])
def test_a_key_or_value_that_is_not_finite_is_seen_by_all_later_queries(rng, which):
    arrays = list(rng.standard_normal((3, 200, 1, 8)).astype(np.float32))
    arrays[which][150, 0] = np.nan
    use_accelerator(True)
    o, _ = attention_forward(*arrays, HeadMap([0], 0.3))
    assert np.isnan(o[150:]).all() and np.isfinite(o[:96]).all()


def test_scores_far_apart(rng):
    q, k, v = rng.standard_normal((3, 100, 1, 8)).astype(np.float32)

    def compute():
        o, lse = attention_forward(q * 100, k * 100, v, HeadMap([0], 0.3))
        return o, lse, *attention_backward(v, Kept(q * 100, k * 100, v, o, lse), HeadMap([0], 0.3, [0], 1))

    assert_alike(compute, rtol=1e-3, atol=2e-2)
