from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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


KERNEL = """
import sys, time
import numpy as np
from mpitp.backend.accelerator import compiled

@compiled()
def total(x):
    result = 0.0
    for value in x.flat:
        result += value
    return result

x = np.arange(12.0).reshape(3, 4)
x = {"float64": x, "float32": x.astype(np.float32), "columns": x[:, 1:3], "cube": x.reshape(3, 2, 2)}[sys.argv[2]]
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))  # all at once
assert total(x) == x.sum()
print(sum(total.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_processes_that_compile_at_once_keep_all_their_code(tmp_path: Path) -> None:
    """Each its own kind of array; none of their entries is lost or names another one's code."""
    pytest.importorskip("numba")
    (tmp_path / "kernel.py").write_text(KERNEL)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    hits = []
    for _ in range(2):
        commands = [
            [sys.executable, str(tmp_path / "kernel.py"), str(time.time() + 2), kind]
            for kind in ("float64", "float32", "columns", "cube")
        ]
        running = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands
        ]
        said = [process.communicate(timeout=60)[0] for process in running]
        assert [process.returncode for process in running] == [0] * 4
        hits.append([int(text) for text in said])
    assert hits == [[0] * 4, [1] * 4]


@pytest.mark.parametrize("chosen", ["/proc/nowhere", ""])
def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """A read-only installation and no home: compiled anew in each process, without a word."""
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    accelerator._writable_cache.cache_clear()
    assert accelerator._writable_cache(Path("/proc"), chosen) is None


def test_read_only_installation_uses_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    accelerator._writable_cache.cache_clear()
    folder = accelerator._writable_cache(Path("/proc"), "")
    assert folder is not None and folder.parent == tmp_path / "mpitp"


@pytest.mark.parametrize("damage", [b"", b"\x00other bytes"])
def test_damaged_code_on_the_disk_is_compiled_again(tmp_path: Path, damage: bytes) -> None:
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "MPITP_ACCELERATOR": "auto"}
    code = (
        "import numpy as np; from mpitp.ops.gelu import gelu_forward; print(gelu_forward(np.ones((2, 3), 'f4'))[1, 2])"
    )
    words = [sys.executable, "-c", code]
    first = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=100)
    kept = [file for file in tmp_path.rglob("*") if file.suffix in (".nbi", ".nbc")]
    assert {file.suffix for file in kept} == {".nbi", ".nbc"}
    for suffix in (".nbc", ".nbi"):
        for file in kept:
            if file.suffix == suffix:
                file.write_bytes(damage)
        again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=100)
        assert (again.stdout, again.stderr) == (first.stdout, "")
