"""A failing MPI test ends its whole job with a message: what tests/mpi/conftest.py promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.test_launch_faults import MOST_SECONDS, MPIEXEC, needs_mpiexec, start, sys

FAILING = """
import pytest

@pytest.fixture
def broken():
    raise OSError("fixture")

@pytest.mark.mpi
def test_fails_on_one_rank(world):
    print("hello", flush=True)
    assert world.rank != 1, "only here"
    world.barrier()

@pytest.mark.mpi
def test_fails_on_all(world):
    assert False, "everywhere"

@pytest.mark.mpi
def test_with_a_broken_fixture(broken):
    pass
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails_on_one_rank", "rank 1 of 2: "),
        ("fails_on_all", "rank 0 of 2: "),
        ("with_a_broken_fixture", "failed (setup); ending the job"),
    ],
)
def test_failure_ends_the_job(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "--with-mpi",
        "-p",
        "tests.mpi.conftest",
        "-p",
        "no:cacheprovider",
    ]
    selection = [f"{tmp_path}/test_failing.py", "-k", name, "--basetemp", f"{tmp_path}/tmp", "--rootdir", str(tmp_path)]
    job = start([str(MPIEXEC), "-n", "2", *pytest_command, "-c", "/dev/null", *selection])
    assert job.code == 1
    assert job.seconds < MOST_SECONDS + 10  # counted from the first output: imports included
    assert message in job.err
    assert "ending the job" in job.err
