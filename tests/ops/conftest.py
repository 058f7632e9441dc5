"""The tests of ops run on one more kind of array than others: NumPy's, with the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpitp.backend.accelerator import use_accelerator
from tests import strict_cupy


@pytest.fixture
def accelerated() -> Iterator[None]:
    """The test uses compiled kernels; skipped where Numba is missing."""
    pytest.importorskip("numba")
    use_accelerator(True)
    yield
    use_accelerator(None)


@pytest.fixture(params=["numpy", "compiled", "strict_cupy"])
def xp(request: pytest.FixtureRequest) -> Any:
    """Each array module in turn, and NumPy with the accelerator."""
    if request.param == "compiled":
        request.getfixturevalue("accelerated")
    return strict_cupy if request.param == "strict_cupy" else np
