"""A rank that fails ends the whole job within seconds, with its message and the right exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERB = str(Path(__file__).with_name("faulty_verb.py"))
MPIEXEC = Path(sys.executable).parent / "mpiexec"
MOST_SECONDS = 10  # from the moment all ranks have started

needs_mpiexec = pytest.mark.skipif(not MPIEXEC.exists(), reason="this environment has no mpiexec")


@dataclass
class Job:
    code: int
    out: str
    err: str
    seconds: float


def environment(**more: str) -> dict[str, str]:
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    oversubscribe = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_osc": "^ucx"}
    return {**os.environ, **allow_root, **oversubscribe, "PYTHONPATH": str(ROOT), **more}


def start(command: list[str], **more: str) -> Job:
    """Run to the end, at most a minute; `seconds` count from the first output, when the ranks had started."""
    process = subprocess.Popen(
        command,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what is read ahead behind the first line, `communicate` would not see
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        began = time.monotonic()
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return Job(process.returncode, (first + out).decode(), err.decode(), time.monotonic() - began)


def run_fault(fault: str, ranks: int, failing: int) -> Job:
    return start([str(MPIEXEC), "-n", str(ranks), sys.executable, VERB, fault, str(failing)])


@needs_mpiexec
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("config", 3, "ConfigError: data.seq_len=4096 is too long; lower it"),
        ("bug", 1, "KeyError: 'a bug on purpose'"),
        ("exit", 7, "left with exit code 7"),
        ("thread", 1, "KeyError: 'a bug on purpose'"),
    ],
)
def test_one_rank_fails(fault: str, code: int, message: str, ranks: int) -> None:
    job = run_fault(fault, ranks, failing=ranks - 1)
    assert job.code == code
    assert job.seconds < MOST_SECONDS
    where = f"rank {ranks - 1} of {ranks} on {socket.gethostname()}: "
    assert where in job.err
    assert message in job.err[job.err.index(where) :]
    assert ("Traceback" in job.err) == (fault in ("bug", "thread"))


@needs_mpiexec
@pytest.mark.parametrize("fault", ["config", "before mpi"])
def test_all_ranks_fail_alike_and_the_message_comes_once(fault: str) -> None:
    job = run_fault(fault, 3, failing=-1)
    assert job.code == 3
    assert job.seconds < MOST_SECONDS
    assert job.err.count("ConfigError:") == 1
    assert any(line.startswith("ConfigError:") for line in job.err.splitlines())
    assert "Traceback" not in job.err


@needs_mpiexec
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_fails_before_mpi_starts(failing: int) -> None:
    job = run_fault("before mpi", 2, failing)
    assert job.code == 3
    assert job.seconds < MOST_SECONDS
    assert job.err.count("ConfigError: said before MPI started") == 1


@needs_mpiexec
def test_preempted_job_ends_with_its_code_and_one_message() -> None:
    job = run_fault("preempted", 2, failing=-1)
    assert job.code == 75
    assert job.err.count("state saved at step 5") == 1


@needs_mpiexec
def test_interrupted_in_different_places() -> None:
    job = run_fault("interrupt", 2, failing=-1)
    assert job.code == 130
    assert job.seconds < MOST_SECONDS
    assert "interrupted" in job.err and "Traceback" not in job.err


@needs_mpiexec
def test_killed_rank_ends_the_job() -> None:
    job = run_fault("kill", 2, failing=1)
    assert job.code != 0
    assert job.seconds < MOST_SECONDS


@needs_mpiexec
def test_job_that_does_not_fail() -> None:
    job = run_fault("none", 2, failing=0)
    assert (job.code, job.err) == (0, "")
    assert "rank 0 has started" in job.out and "rank 1 has started" in job.out


@needs_mpiexec
@pytest.mark.parametrize(
    "claim",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=lambda claim: next(iter(claim)),
)
def test_silent_singletons_are_refused(claim: dict[str, str]) -> None:
    job = start([sys.executable, VERB, "none", "0"], **claim)
    assert job.code == 6
    assert "LaunchError: " in job.err and "started 2 ranks" in job.err and "mpitp launch -n 2" in job.err
    assert "Traceback" not in job.err and "RuntimeWarning" not in job.err


def test_alone_a_failure_is_said_plainly() -> None:
    job = start([sys.executable, VERB, "config", "0"])
    assert (job.code, job.err) == (3, "ConfigError: data.seq_len=4096 is too long; lower it\n")


def test_interrupt_is_no_traceback() -> None:
    code = (
        "import sys; from mpitp.launch.guard import guarded\n"
        "def stop(): raise KeyboardInterrupt\nsys.exit(guarded(stop))"
    )
    job = start([sys.executable, "-c", code])
    assert (job.code, job.err) == (130, "interrupted\n")
