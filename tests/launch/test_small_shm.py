"""/dev/shm that is too small for MPICH, or read-only: one message and code 6 instead of a bus error; doctor says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.comm.shm_room import ShmRoom, shm_failure, shm_room
from tests.launch.test_launch_faults import MPIEXEC, environment, needs_mpiexec

MIB = 1 << 20
MODEL = str(Path(__file__).resolve().parents[1] / "parity" / "golden" / "llama-gqa")
IS_MPICH = (Path(sys.executable).parent / "hydra_pmi_proxy").exists()
CAN_MOUNT = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="NO MOUNT NAMESPACE HERE (needs root): /dev/shm stays as it is")


@pytest.mark.parametrize(
    ("library", "ranks", "room", "has_begun", "fails"),
    [
        ("MPICH 5.0.2", 2, ShmRoom(1 * MIB, 1 * MIB, True), True, True),
        ("MPICH 5.0.2", 2, ShmRoom(3 * MIB, 3 * MIB, True), True, False),
        ("MPICH 5.0.2", 2, ShmRoom(3 * MIB, 0, True), True, False),  # this job's own ranks may have it
        ("MPICH 5.0.2", 2, ShmRoom(3 * MIB, 0, True), False, True),
        ("MPICH 5.0.2", 2, ShmRoom(64 * MIB, 0, True), True, True),  # others have filled it
        ("MPICH 5.0.2", 2, ShmRoom(64 * MIB, 64 * MIB, False), True, True),
        ("MPICH 5.0.2", 100, ShmRoom(64 * MIB, 64 * MIB, True), True, True),
        ("MPICH 5.0.2", 2, None, True, False),
        ("Open MPI v5.0.11", 2, ShmRoom(1 * MIB, 0, False), True, False),  # it looks itself
    ],
)
def test_when_it_is_too_small(library: str, ranks: int, room: ShmRoom | None, has_begun: bool, fails: bool) -> None:
    assert bool(shm_failure(library, ranks, room, has_begun=has_begun)) == fails


def test_the_room_of_this_machine(tmp_path: Path) -> None:
    assert shm_room(str(tmp_path / "none")) is None
    room = shm_room(str(tmp_path))
    assert room is not None and room.is_writable and 0 < room.free_bytes <= room.total_bytes


def run_with(options: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command where /dev/shm is a file system of its own, mounted with these options."""
    shell = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, "sh", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


LAUNCH = [sys.executable, "-m", "mpitp", "launch", "-n", "2", "--"]
PLAIN = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "mpitp"]
VERIFY = ["verify", "--model", MODEL, "--failures-only"]


@needs_mount
@needs_mpiexec
@pytest.mark.parametrize("start", [LAUNCH, PLAIN], ids=["launch", "mpiexec"])
@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_ranks_say_so_or_work(options: str, start: list[str]) -> None:
    result = run_with(options, *start, *VERIFY)
    if not IS_MPICH:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 6 and result.stderr.count("Error: /dev/shm ") == 1, result.stderr
    assert "--shm-size=1g" in result.stderr and "Bus error" not in result.stdout + result.stderr


@needs_mount
@needs_mpiexec
def test_what_is_enough_is_enough() -> None:
    result = run_with("size=3m", *LAUNCH, *VERIFY)
    assert result.returncode == 0, result.stderr


@needs_mount
@needs_mpiexec
@pytest.mark.parametrize("start", [LAUNCH, PLAIN], ids=["launch", "mpiexec"])
@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_doctor_survives_and_says_so(options: str, start: list[str]) -> None:
    result = run_with(options, *start, "doctor")
    assert result.returncode == 6, result.stderr
    assert "WRONG  /dev/shm " in result.stdout and "--shm-size=1g" in result.stdout
