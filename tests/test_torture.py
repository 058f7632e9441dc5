"""A short form of scripts/torture: three rounds of kill -9 and every single trial."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.test_launch_faults import environment, needs_mpiexec

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "torture.py"


@pytest.mark.slow
@needs_mpiexec
@pytest.mark.timeout(300)
def test_nothing_is_lost() -> None:
    command = [sys.executable, str(SCRIPT), "3", "--seed", "7"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("rounds 9, survived 9, lost 0\n")
    assert ("SKIPPED" in done.stdout) <= (os.geteuid() != 0 or "can't be mounted" in done.stdout)
