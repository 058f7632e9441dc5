"""Products whose input is rounded too: what that loses, and compiled ones against the plain expression, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from mpitp.backend.arrays import from_host, to_host
from mpitp.ops import rounded
from mpitp.ops.groupwise import Grouping, quantise, widened
from mpitp.ops.rounded import round_rows, rounded_forward
from tests.ops.test_groupwise import GROUPINGS, matrix

ODD = (0.0, 1e-40, -0.0, np.inf, np.nan, 1e30)  # numbers that groups of their own get
OTHER_PROCESSORS = {"+avx2,+fma,+avxvnni": 0, "+avx2,+fma": 1, "+sse4.2": 2}  # each with one of GROUPINGS


def weights(grouping: Grouping, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = quantise(matrix(n, k), grouping)
    return codes, scales.astype(np.float32)


def plain(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, grouping: Grouping) -> np.ndarray:
    return rounded._terms_added(*round_rows(x, grouping.size), codes, scales, grouping)


def rows_with_odd_groups(t: int, k: int) -> np.ndarray:
    x = matrix(t, k, 1) * np.float32(10) ** (np.arange(k) % 7 - 3).astype(np.float32)
    for i, number in enumerate(ODD[:t]):
        x[i, 32:64] = number
        x[i, 40] = -number
    return x.astype(np.float32)


@pytest.mark.parametrize("size", [32, 8])
def test_rounding_is_off_by_half_a_scale_at_most(size: int) -> None:
    x = matrix(9, 64)
    q, scales = round_rows(x, size)
    assert (q == np.rint(q)).all() and np.abs(q).max() == 127
    off = np.abs(q * np.repeat(scales, size, axis=1) - x)
    assert (off <= np.repeat(scales, size, axis=1) * 0.501).all() and off.max() > 0


def test_groups_that_no_scale_fits() -> None:
    q, scales = round_rows(rows_with_odd_groups(6, 96), 32)
    np.testing.assert_array_equal(scales[:3, 1], 0)
    assert np.isnan(scales[3:5, 1]).all() and scales[5, 1] > 1e27 and (np.abs(q) <= 127).all()


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
def test_products_are_those_of_the_rounded_input(grouping: Grouping, rows: int, xp: Any) -> None:
    (codes, scales), x = weights(grouping, 130, 64), matrix(rows, 64, 1)
    q, s_x = round_rows(x, 32)
    w = widened(codes, scales, grouping)
    y = to_host(rounded_forward(from_host(x, xp), from_host(codes, xp), from_host(scales, xp), grouping))
    np.testing.assert_allclose(y, (q * np.repeat(s_x, 32, axis=1)) @ w.T, rtol=0, atol=3e-5)
    if rows:
        lost = np.sqrt(((y - x @ w.T) ** 2).mean() / ((x @ w.T) ** 2).mean())
        assert 1e-4 < lost < 0.01


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize(("n", "k"), [(50, 96), (64, 288), (5, 32)])
def test_compiled_products_have_the_bits_of_the_plain_ones(grouping: Grouping, n: int, k: int) -> None:
    """In any company, beside numbers that aren't finite, and from and into arrays with gaps."""
    codes, scales = weights(grouping, n, k)
    x = rows_with_odd_groups(11, k) if k > 64 else matrix(11, k, 1)
    expected = plain(x, codes, scales, grouping)
    for rows in (11, 1, 2, 3, 4, 6):
        np.testing.assert_array_equal(rounded_forward(x[:rows], codes, scales, grouping), expected[:rows])
    out = np.zeros((11, n + 8), np.float32)
    rounded_forward(x, codes, scales, grouping, out=out[:, 4 : n + 4])
    np.testing.assert_array_equal(out[:, 4 : n + 4], expected)
    assert (out[:, :4] == 0).all() and (out[:, n + 4 :] == 0).all()
    part = x[:, 32:], codes[:, grouping.group_bytes :], scales[:, grouping.group_floats :]
    np.testing.assert_array_equal(rounded_forward(*part, grouping), plain(*part, grouping) if k > 32 else 0)


@pytest.mark.usefixtures("accelerated")
@pytest.mark.parametrize("features", OTHER_PROCESSORS)
def test_other_processors_have_the_same_bits(features: str) -> None:
    """Those that lack an instruction, as Numba is told to compile for."""
    from mpitp.ops.compiled.dots import processor_has

    if not all(processor_has(feature[1:]) for feature in features.split(",")):
        pytest.skip(f"this processor lacks one of {features}")
    words = ["-m", "tests.ops.other_processor", str(OTHER_PROCESSORS[features])]
    told = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    subprocess.run([sys.executable, *words], check=True, timeout=240, env={**os.environ, **told})
