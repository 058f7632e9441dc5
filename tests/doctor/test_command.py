from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MPIEXEC = Path(sys.executable).parent / "mpiexec"
SCREEN = (120, 24)  # columns, lines


def doctor(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpitp", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def test_alone() -> None:
    result = doctor("doctor")
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1] == "all is well"
    assert len(lines) <= SCREEN[1]
    assert all(line.startswith("ok ") for line in lines[:-1])


def test_json() -> None:
    told = json.loads(doctor("doctor", "--json").stdout)
    names = [fact["name"] for fact in told["facts"]]
    assert told["ok"] is True
    assert {"python", "numpy", "blas", "accelerator", "cores", "mpi4py", "mpi", "launcher", "ranks"} <= set(names)
    assert {"load", "cuda-aware", "gpu", "/dev/shm", "node sums", "all-reduce"} <= set(names)


def test_mismatch_is_marked_and_ends_with_6() -> None:
    result = doctor("doctor", PMI_SIZE="2", PMI_RANK="0")
    assert result.returncode == 6
    assert "\nWRONG  launcher " in result.stdout
    assert result.stdout.endswith("1 of 16 facts are WRONG\n")
    assert all(len(line) <= SCREEN[0] for line in result.stdout.splitlines() if "->" in line)


@pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")
def test_on_two_ranks() -> None:
    result = doctor("launch", "-n", "2", "--", "doctor", "--json")
    told = json.loads(result.stdout)
    facts = {fact["name"]: fact for fact in told["facts"]}
    enough_cores = len(os.sched_getaffinity(0)) >= 2
    assert facts["load"]["ok"] == enough_cores
    assert all(fact["ok"] for name, fact in facts.items() if name != "load")
    assert facts["ranks"]["value"].startswith("2 on 1 host(s)")
    assert "over 2 rank(s)" in facts["all-reduce"]["value"]
    assert result.returncode == (0 if enough_cores else 6)
