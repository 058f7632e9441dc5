"""A short form of scripts/torture: a round of kill -9 and every single trial."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_launch_faults import environment, needs_mpiexec

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "torture.py"


def test_job_that_does_not_end_is_lost_with_its_last_words(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("torture", SCRIPT)
    assert spec is not None and spec.loader is not None
    torture = importlib.util.module_from_spec(spec)
    sys.modules["torture"] = torture  # where dataclasses look for it
    spec.loader.exec_module(torture)
    (tmp_path / "run.out").write_text("first words " + "." * 5000)
    (tmp_path / "run.err").write_text("still loading\n")
    job = torture.Job(subprocess.Popen(["sleep", "60"]), tmp_path, "run")
    with pytest.raises(torture.Lost) as caught:
        job.wait(0.1)
    said = str(caught.value)
    assert said.startswith("the job did not end in 0 s; it said last:\n") and said.endswith("still loading\n")
    assert "first words" not in said and job.process.returncode is not None


@pytest.mark.slow
@needs_mpiexec
@pytest.mark.timeout(300)
def test_nothing_is_lost() -> None:
    command = [sys.executable, str(SCRIPT), "1", "--seed", "7"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("rounds 7, survived 7, lost 0\n")
    assert ("SKIPPED" in done.stdout) <= (os.geteuid() != 0 or "can't be mounted" in done.stdout)
