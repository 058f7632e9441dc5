"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: bit-exact tests need one thread count
os.environ.setdefault("MPITP_ACCELERATOR", "off")  # the plain expressions are what most tests are about

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpitp.backend.accelerator import use_accelerator
from tests import strict_cupy


def handle_signals_as_in_the_foreground() -> None:
    """What is ignored or blocked here would be so in all that tests start: HUP under nohup, INT in `scripts/test &`."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


handle_signals_as_in_the_foreground()


@pytest.fixture
def accelerated() -> Iterator[None]:
    """The test uses compiled kernels; skipped where Numba is missing."""
    pytest.importorskip("numba")
    use_accelerator(True)
    yield
    use_accelerator(None)


@pytest.fixture(params=["numpy", "strict_cupy"])
def xp(request: pytest.FixtureRequest) -> Any:
    """Each array module in turn: NumPy, and the stand-in for CuPy that refuses implicit host conversion."""
    return np if request.param == "numpy" else strict_cupy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12345)
