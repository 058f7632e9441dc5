"""The tests of ops run on one more kind of array than others: NumPy's, with the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import strict_cupy


@pytest.fixture(params=["numpy", "compiled", "strict_cupy"])
def xp(request: pytest.FixtureRequest) -> Any:
    """Each array module in turn, and NumPy with the accelerator."""
    if request.param == "compiled":
        request.getfixturevalue("accelerated")
    return strict_cupy if request.param == "strict_cupy" else np
