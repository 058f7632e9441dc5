from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpitp.backend import accelerator
from mpitp.backend.accelerator import describe_accelerator, is_accelerated, offer, use_accelerator
from mpitp.comm import run_threads
from mpitp.comm.group import Group
from mpitp.comm.start import agree_on_accelerator
from mpitp.errors import ConfigError
from tests import strict_cupy


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    """Every test decides anew, and so does what comes after."""
    use_accelerator(None)
    yield
    use_accelerator(None)


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITP_ACCELERATOR", "off")
    assert not is_accelerated(np, np.float32)
    assert offer() == ""
    assert describe_accelerator() == "off (MPITP_ACCELERATOR=off)"


@pytest.mark.parametrize("value", ["on", "OFF", "1"])
def test_unknown_value(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MPITP_ACCELERATOR", value)
    with pytest.raises(ConfigError, match="expected auto or off"):
        is_accelerated(np, np.float32)


def test_only_host_arrays_of_two_dtypes() -> None:
    use_accelerator(True)
    assert is_accelerated(np, np.float32) and is_accelerated(np, np.dtype(np.float64))
    assert not is_accelerated(np, np.float16) and not is_accelerated(np, np.dtype(np.int32))
    assert not is_accelerated(strict_cupy, np.float32)


@pytest.mark.parametrize(
    ("offers", "used"),
    [
        (["Numba 1.0"] * 3, True),
        (["Numba 1.0", "", "Numba 1.0"], False),
        (["Numba 1.0", "Numba 1.0", "Numba 1.1"], False),
        ([""] * 3, False),
    ],
)
def test_ranks_decide_alike(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], offers: list[str], used: bool
) -> None:
    class Place:
        """A rank that hears what all of them offer."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather_objects(self, value: Any) -> list[Any]:
            return offers

    for rank in range(3):
        agree_on_accelerator(Place(rank))  # type: ignore[arg-type]
        assert is_accelerated(np, np.float32) == used
    told = capfd.readouterr().err
    assert told.count("warning") == (len(set(offers)) > 1)
    if told:
        assert "the ranks differ in their accelerator (" in told


def test_agreement_between_rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITP_ACCELERATOR", "auto")

    def rank(group: Group) -> bool:
        agree_on_accelerator(group)
        return is_accelerated(np, np.float32)

    assert set(run_threads(3, rank)) == {bool(offer())}


@pytest.mark.parametrize("version", ["0.61.2", None])
def test_old_or_missing_numba(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setenv("MPITP_ACCELERATOR", "auto")
    module = None
    if version:
        module = type(sys)("numba")
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numba", module)  # None: its import fails
    accelerator._numba_found.cache_clear()
    try:
        assert offer() == "" and not is_accelerated(np, np.float32)
        assert "older than" in describe_accelerator() if version else "Numba" in describe_accelerator()
    finally:
        accelerator._numba_found.cache_clear()


def test_numba_is_loaded_only_when_asked() -> None:
    code = (
        "import sys, mpitp.cli, mpitp.ops.attention, mpitp.train.run, mpitp.backend.accelerator;"
        "assert 'numba' not in sys.modules;"
        "sys.exit(mpitp.cli.main(['train', '--help']) if 'numba' not in sys.modules else 1)"
    )
    environment = {**os.environ, "MPITP_ACCELERATOR": "auto"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
