"""One job a run directory: the second is refused before it touches anything, and a killed one leaves no lock."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mpitp.errors import FileError
from mpitp.train import lock as lock_module
from mpitp.train.lock import RunLock
from tests.train.run_case import config, files, make_data, run


@pytest.fixture(autouse=True)
def without_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 0.0)


HOLD = """
import sys, time
from pathlib import Path
from mpitp.train.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "1\n"
    return process


def test_second_is_refused_and_named_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        words = rf"in use by another job \(process {process.pid} on .*\); wait for it, or choose another train.run_dir"
        with pytest.raises(FileError, match=words), RunLock(tmp_path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    with RunLock(tmp_path), pytest.raises(FileError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{}, {"train_overwrite": True}])
def test_second_job_touches_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = make_data(tmp_path)
    settings = {"train_steps": 2, "checkpoint_every": 1}
    run(1, config(data, tmp_path / "run", **settings))
    before = files(tmp_path / "run")
    with RunLock(tmp_path / "run"):
        for resume in (None, "auto"):
            with pytest.raises(FileError, match="in use by another job"):
                run(2, config(data, tmp_path / "run", **settings, **changes), resume=resume)
    assert files(tmp_path / "run", [".lock"]) == {name: text for name, text in before.items() if name != ".lock"}


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        assert "can't be locked here" in capsys.readouterr().err


def test_a_job_that_is_just_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 30.0)
    process = holder(tmp_path)
    timer = threading.Timer(0.2, process.kill)
    timer.start()
    with RunLock(tmp_path):
        timer.join()
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="can't lock .*nothing/.lock: No such file"), RunLock(tmp_path / "nothing"):
        pass
