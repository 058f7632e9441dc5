"""`mpitp bench shares`, and the helper that slows a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitp.bench import shares
from mpitp.comm import SerialGroup, run_threads
from mpitp.errors import UsageError
from tests.bench.test_command import parsed

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["shares", "--layers", "1", "--hidden", "16", "--heads", "3", "--head-dim", "4", "--vocab", "32", "--seq", "4"]


def test_both_dealings_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "measure_speeds", lambda group, device, dtype, width: [1.0, 0.5])
    args = parsed(*WORDS, "--batch", "1", "--rounds", "1", "--slow", "1")
    first, second = run_threads(2, lambda group: shares.measure(args, group))
    assert first["shares"] == second["shares"] == [1.0, 0.5]
    assert first["losses"]["measured"] == pytest.approx(first["losses"]["equal"], rel=1e-5)
    assert first["times_as_fast"]["at_most"] == 1.5 and first["times_as_fast"]["least"] > 0
    assert shares.report(first)[-1].startswith("measured shares are ")


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="this is a job of 1"):
        shares.measure(parsed(*WORDS), SerialGroup())
    with pytest.raises(UsageError, match=r"--slow 0.0: expected the part of the time"):
        run_threads(2, lambda group: shares.measure(parsed(*WORDS, "--slow", "0"), group))


SLOWED = """
import time
from mpitp.bench.slowed import slowed

def part_of_a_second() -> float:
    wall, own = time.perf_counter(), time.process_time()
    while time.perf_counter() < wall + 1:
        pass
    return (time.process_time() - own) / (time.perf_counter() - wall)

with slowed(0.2):
    for _ in range(30):  # until the helper has begun
        if (part := part_of_a_second()) < 0.6:  # a busy machine gives it less than its part
            break
    print(part)
"""


def test_a_slowed_process_runs_part_of_the_time_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOWED], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 < float(done.stdout) < 0.6
