"""Weights in 8 and 4 bits: what rounding loses, products against the plain expression, and GGUF's own roundings."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.errors import ConfigError
from mpitp.ops.groupwise import BITS, Grouping, groupwise_forward, groupwise_input_grad, quantise, widened

GGUF_KINDS = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_0}
GROUPINGS = [Grouping(8), Grouping(4), Grouping(4, has_least=True)]


def matrix(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [32, 8])
def test_rounding_is_off_by_half_a_scale_at_most(bits: int, size: int) -> None:
    w, grouping = matrix(7, 64), Grouping(bits, size)
    codes, scales = quantise(w, grouping)
    assert (codes.dtype, codes.shape) == (grouping.dtype, (7, 64 * bits // 8)) and scales.dtype == np.float16
    step = np.repeat(np.abs(scales.astype(np.float32)), size, axis=1)
    off = np.abs(widened(codes, scales, grouping) - w)
    most = 0.5 if bits == 8 else 1.0  # of 16 values, 7 lies beyond the last one where the largest is -8
    assert (off <= step * (most + 1e-2)).all() and off.max() > 0
    assert (off <= step * 0.51).mean() > (0.999 if bits == 8 else 0.9)


@pytest.mark.parametrize("bits", BITS)
def test_what_gguf_has_rounded_is_kept_bit_for_bit(bits: int) -> None:
    kind = GGUF_KINDS[bits]
    w = gguf.quants.dequantize(gguf.quants.quantize(matrix(9, 96), kind), kind).astype(np.float32)
    grouping = Grouping(bits)
    np.testing.assert_array_equal(widened(*quantise(w, grouping), grouping), w)


def test_groups_of_zeros_and_what_no_scale_can_hold() -> None:
    for bits in BITS:
        codes, scales = quantise(np.zeros((2, 32), np.float32), Grouping(bits))
        assert (widened(codes, scales, Grouping(bits)) == 0).all()
        for wrong in (np.inf, np.nan, 1e9):
            with pytest.raises(ConfigError, match="beyond what a scale in float16 can hold"):
                quantise(np.full((1, 32), wrong, np.float32), Grouping(bits))
    with pytest.raises(ConfigError, match="rows of 33 weights can't be cut into groups of 32"):
        quantise(np.zeros((1, 33), np.float32), Grouping(8))
    with pytest.raises(ConfigError, match="weights of 3 bits are not supported"):
        Grouping(3)


def test_least_values() -> None:
    """Off by half a scale at most but for what float16 loses; a group of one number is that number."""
    w, grouping = matrix(7, 64) + 2, Grouping(4, has_least=True)
    codes, scales = quantise(w, grouping)
    assert (codes.shape, scales.shape, scales.dtype) == ((7, 32), (7, 4), np.float32)
    off = np.abs(widened(codes, scales, grouping) - w)
    assert (off <= np.repeat(scales[:, ::2], 32, axis=1) * 0.51 + 2e-3).all() and off.max() > 0.05
    same = np.full((2, 32), -1.5, np.float32)
    np.testing.assert_array_equal(widened(*quantise(same, grouping), grouping), same)
    for wrong in (np.inf, np.nan, 1e9):
        with pytest.raises(ConfigError, match="beyond what a scale in float16 can hold"):
            quantise(np.full((1, 32), wrong, np.float32), grouping)
    with pytest.raises(ConfigError, match="8 bits with a least value are not supported"):
        Grouping(8, has_least=True)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 70])
def test_products_are_those_of_the_widened_matrix(grouping: Grouping, rows: int, xp: Any) -> None:
    codes, scales = quantise(matrix(130, 64), grouping)
    w, x, dy = widened(codes, scales, grouping), matrix(rows, 64, 1), matrix(rows, 130, 2)
    codes, scales = from_host(codes, xp), from_host(scales.astype(np.float32), xp)
    y = to_host(groupwise_forward(from_host(x, xp), codes, scales, grouping))
    np.testing.assert_allclose(y, x @ w.T, rtol=0, atol=2e-5)
    dx = to_host(groupwise_input_grad(from_host(dy, xp), codes, scales, grouping))
    np.testing.assert_allclose(dx, dy @ w, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_compiled_products_of_many_rows(grouping: Grouping) -> None:
    """They go through the widened matrix, which is that of the plain expression to the bit."""
    from mpitp.ops.compiled.groupwise import widen

    codes, scales = quantise(matrix(50, 96), grouping)
    scales = scales.astype(np.float32)
    x, w, made = matrix(40, 96, 1), widened(codes, scales, grouping), np.empty((50, 96), np.float32)
    widen(codes, scales, grouping, made)
    np.testing.assert_array_equal(made, w)
    np.testing.assert_allclose(groupwise_forward(x, codes, scales, grouping), x @ w.T, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("rows", [1, 3, 5, 7, 16])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_compiled_products(grouping: Grouping, rows: int) -> None:
    """As the plain ones to rounding, into gaps too, and a row's bits don't depend on the others beside it."""
    from mpitp.ops.compiled.few_rows import few_rows

    codes, scales = quantise(matrix(50, 96), grouping)
    scales = scales.astype(np.float32)
    x, w = matrix(rows, 96, 1), widened(codes, scales, grouping)
    out = np.zeros((rows, 60), np.float32)
    groupwise_forward(x, codes, scales, grouping, out=out[:, 4:54])
    alone = [groupwise_forward(x[i : i + 1], codes, scales, grouping)[0] for i in range(rows)]
    inner = groupwise_forward(x[:, 32:], codes[:, grouping.group_bytes :], scales[:, grouping.group_floats :], grouping)
    np.testing.assert_allclose(out[:, 4:54], x @ w.T, rtol=0, atol=1e-5)
    assert (out[:, :4] == 0).all() and (out[:, 54:] == 0).all()
    np.testing.assert_array_equal(np.array(alone), out[:, 4:54])
    dense = np.empty((rows, 50), np.float32)
    few_rows(x, w, dense)
    np.testing.assert_array_equal(dense, out[:, 4:54])  # widening rounds nothing
    np.testing.assert_allclose(inner, x[:, 32:] @ w[:, 32:].T, rtol=0, atol=1e-5)
