"""Compiled attention through windows and through several tiles: what NumPy's passes make of them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from mpitp.backend.accelerator import use_accelerator
from mpitp.ops import sight
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.sight import CAUSAL, EVERYTHING, Band


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    use_accelerator(None)


@pytest.mark.parametrize("band", [CAUSAL, EVERYTHING, Band(behind=7), Band(behind=2, ahead=5)])
@pytest.mark.parametrize("longer", [16, 512])
def test_equals_numpy(rng, monkeypatch, band, longer):
    monkeypatch.setattr(sight, "TILE", 12)
    monkeypatch.setattr(sight, "LONG_TILE", longer)
    q, k, v, do = rng.standard_normal((4, 50, 1, 8))
    results = []
    for accelerated in (False, True):
        use_accelerator(accelerated)
        o, lse = attention_forward(q, k, v, HeadMap([0], 0.3), sight=band)
        grads = attention_backward(do, Kept(q, k, v, o, lse), HeadMap([0], 0.3), sight=band)
        results.append((o, lse, *grads))
    for plain, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-11, atol=1e-12)
