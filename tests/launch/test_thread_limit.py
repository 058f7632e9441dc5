"""Limits of processes and threads: one message that names the limit, whichever library meets it first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.backend import thread_room
from mpitp.backend.thread_room import can_start, require_threads, threads_of_libraries
from mpitp.errors import LaunchError
from mpitp.launch import command
from mpitp.launch.command import make_of
from tests.launch.test_launch_faults import environment, needs_mpiexec

MODEL = str(Path(__file__).resolve().parents[1] / "parity" / "golden" / "llama-gqa")
IS_MPICH = (Path(sys.executable).parent / "hydra_pmi_proxy").exists()
# The limit doesn't hold for root; as somebody else the files of this checkout must still be readable.
CAPABILITIES = "+dac_read_search,+dac_override"
AS_SOMEBODY = ["setpriv", "--reuid=64999", "--clear-groups", "--inh-caps", CAPABILITIES, "--ambient-caps", CAPABILITIES]


def _can_limit() -> bool:
    if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        return False
    return subprocess.run([*AS_SOMEBODY, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0


needs_limit = pytest.mark.skipif(not _can_limit(), reason="NO LIMIT OF THREADS CAN BE SET HERE: needs root, setpriv")


def test_threads_are_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_start(20)
    left = [3]

    def start(thread: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread_room.threading.Thread, "start", start)
    monkeypatch.setattr(thread_room.threading.Thread, "join", lambda thread: None)
    require_threads(3, "a rank")
    with pytest.raises(LaunchError, match="a rank needs about 4 more threads .* the limit of processes and threads"):
        require_threads(4, "a rank")


def test_threads_of_libraries() -> None:
    assert threads_of_libraries({}) == 1
    assert threads_of_libraries({"OPENBLAS_NUM_THREADS": "4", "RAYON_NUM_THREADS": "8"}) == 11
    assert threads_of_libraries({"OMP_NUM_THREADS": "2,1", "RAYON_NUM_THREADS": "9" * 400}) == 1


def limited(limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of a user who may have so many processes and threads."""
    limits = ["timeout", "-s", "KILL", "50", *AS_SOMEBODY, "prlimit", f"--nproc={limit}"]
    return subprocess.run(
        [*limits, sys.executable, "-m", "mpitp", *words],
        env=environment(OPENBLAS_NUM_THREADS="2", RAYON_NUM_THREADS="2"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_limit
@pytest.mark.parametrize("limit", [3, 6])
def test_one_process(limit: int, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some text " * 100)
    prepare = ["data", "prepare", str(tmp_path / "t.txt"), "--tokenizer", "bytes", "--out", str(tmp_path / "d")]
    for words in (["verify", "--model", MODEL], prepare):
        result = limited(limit, *words)
        assert result.returncode == 6, result.stderr
        assert result.stderr.startswith("LaunchError: a rank needs about") and f"{limit} (ulimit -u" in result.stderr
        assert result.stderr.count("\n") == 1, result.stderr


@needs_limit
@needs_mpiexec
@pytest.mark.parametrize("limit", [3, 10, 18])
def test_a_job(limit: int) -> None:
    result = limited(limit, "launch", "-n", "2", "--", "verify", "--model", MODEL)
    assert result.returncode == 6, (result.returncode, result.stderr)
    assert result.stderr.count("the limit of processes and threads is") == 1, result.stderr


@needs_limit
@needs_mpiexec
@pytest.mark.skipif(not IS_MPICH, reason="OPEN MPI REFUSES A PYTHON THAT LIES IN ANOTHER USER'S HOME, limit or not")
def test_enough_is_enough() -> None:
    assert limited(200, "launch", "-n", "2", "--", "verify", "--model", MODEL, "--failures-only").returncode == 0


@needs_mpiexec
@needs_limit
def test_one_process_is_too_few_for_launch() -> None:
    """The first process beside mpitp itself can't be started: the launcher that is asked what it is."""
    ended = limited(1, "launch", "-n", "2", "--", "doctor")
    assert ended.returncode == 6, ended.stderr
    assert "the limit of processes and threads is 1 (ulimit -u, of this user)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_launcher_that_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_ANSWER_SECONDS", 0.2)
    mute = tmp_path / "mpiexec"
    mute.write_text("#!/bin/sh\nexec sleep 5\n")
    mute.chmod(0o755)
    with pytest.raises(LaunchError, match="gave no answer within 0.2 s"):
        make_of(str(mute))
    mute.write_text("no script")
    with pytest.raises(LaunchError, match="can't start .*mpiexec: Exec format error"):
        make_of(str(mute))
