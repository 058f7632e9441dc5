"""Activations alone and as gates: slopes against differences, values against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import row_blocks
from mpitp.ops.elementwise import (
    FUNCTIONS,
    activation_backward,
    activation_forward,
    gated_backward,
    gated_forward,
)
from mpitp.ops.erf import erf
from tests.ops.checks import assert_like, check_gradients

DEFINITIONS = {
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
}


def test_every_function_has_its_definition() -> None:
    assert set(DEFINITIONS) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(xp, rng, name):
    f, x = FUNCTIONS[name], rng.standard_normal((7, 6)) * 2
    check_gradients(lambda x: activation_forward(f, x), lambda dy, x: [activation_backward(f, dy, x)], [x], xp)
    check_gradients(lambda x: gated_forward(f, x), lambda dy, x: [gated_backward(f, dy, x)], [x], xp)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_definition(xp, monkeypatch, name, block_bytes, dtype):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", block_bytes)
    x = np.linspace(-9, 9, 301 * 4).astype(dtype).reshape(-1, 4)
    expected = np.vectorize(DEFINITIONS[name])(x.astype(np.float64))
    y = activation_forward(FUNCTIONS[name], from_host(x, xp))
    assert_like(y, dtype, xp)
    np.testing.assert_allclose(to_host(y), expected, rtol=0, atol=20 * np.finfo(dtype).eps)
    gated = gated_forward(FUNCTIONS[name], from_host(np.concatenate([x, 2 * x], axis=1), xp))
    assert_like(gated, dtype, xp)
    np.testing.assert_allclose(to_host(gated), 2 * x * to_host(y), rtol=4 * np.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf_of_everything(xp, dtype):
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, -0.0, 1e-30, 1e30, -1e30, np.inf, -np.inf]]).astype(dtype)
    y = erf(from_host(x, xp))
    assert_like(y, dtype, xp)
    expected = np.array([math.erf(value) for value in x.tolist()])
    np.testing.assert_allclose(to_host(y), expected, rtol=0, atol=12 * np.finfo(dtype).eps)
    assert np.isnan(to_host(erf(from_host(np.array([np.nan], dtype), xp)))).all()
