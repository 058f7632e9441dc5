"""Variables of a batch system that speak of another moment, or of commands that aren't here: ignored, and said so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitp.errors import LaunchError, UsageError
from mpitp.launch import allocation
from mpitp.launch.allocation import believed, number_of_hosts, srun_failure
from mpitp.launch.command import number_of_ranks
from tests.launch.test_launch_faults import environment, needs_mpiexec
from tests.launch.without_srun import path_without_srun

ONE_HOST = {
    **{"SLURM_JOB_ID": "77", "SLURM_JOBID": "77", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1"},
    **{"SLURM_NODELIST": "n1", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "2"},
}
TWO_HOSTS = {**ONE_HOST, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
NO_SRUN = "there is no srun on the PATH"
ENDED = str(int(time.time()) - 3600)
LATER = str(int(time.time()) + 3600)


def test_what_srun_confirms_is_believed() -> None:
    for environ in (ONE_HOST, TWO_HOSTS, {**ONE_HOST, "SLURM_JOB_END_TIME": ENDED}):
        belief = believed(environ, "vm", lambda: "")
        assert belief.decide == belief.job == environ and belief.notes == ()


def test_outside_an_allocation_srun_is_not_asked() -> None:
    def asked() -> str:
        raise AssertionError

    assert believed({"HOME": "/"}, "vm", asked) == allocation.Belief({"HOME": "/"}, {"HOME": "/"})


@pytest.mark.parametrize("end", [None, LATER, "Unknown"], ids=["unsaid", "later", "unknown"])
def test_one_host_without_srun(end: str | None) -> None:
    environ = {**ONE_HOST, "HOME": "/", **({} if end is None else {"SLURM_JOB_END_TIME": end})}
    belief = believed(environ, "vm", lambda: NO_SRUN)
    assert belief.decide == {"HOME": "/", "SLURM_NTASKS": "2"}
    assert not {"SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST"} & set(belief.job)  # mpiexecs go by these
    assert belief.job["SLURM_JOB_ID"] == "77" and belief.job.get("SLURM_JOB_END_TIME") == end
    assert belief.notes == (f"SLURM_JOB_ID=77, but {NO_SRUN}: the ranks are started on this host (vm), without SLURM",)


def test_several_hosts_without_srun_are_refused_unless_the_user_names_a_launcher() -> None:
    with pytest.raises(LaunchError, match=f"SLURM_JOB_ID=77 is an allocation of 2 hosts, but {NO_SRUN}: load"):
        believed(TWO_HOSTS, "vm", lambda: NO_SRUN)
    assert believed(TWO_HOSTS, "vm", lambda: NO_SRUN, is_named=True).job == TWO_HOSTS


@pytest.mark.parametrize("environ", [ONE_HOST, TWO_HOSTS])
def test_a_job_that_is_over_is_ignored_whole(environ: dict[str, str]) -> None:
    belief = believed({**environ, "HOME": "/", "SLURM_JOB_END_TIME": ENDED}, "vm", lambda: NO_SRUN)
    assert belief.decide == belief.job == {"HOME": "/"}
    assert "ignored: SLURM_JOB_ID=77 and the other SLURM variables" in belief.notes[0]


@pytest.mark.parametrize("name", allocation.HOST_FILES)
def test_a_file_of_hosts_that_is_gone(name: str, tmp_path: Path) -> None:
    belief = believed({name: f"{tmp_path}/gone"}, "vm", lambda: NO_SRUN)
    assert belief.job == {} and belief.notes == (f"ignored: {name}={tmp_path}/gone, there is no such file",)
    (tmp_path / "hosts").write_text("n1\n")
    assert believed({name: f"{tmp_path}/hosts"}, "vm", lambda: NO_SRUN).job == {name: f"{tmp_path}/hosts"}


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, 2),
        ({"SLURM_NODELIST": "n1,m4"}, 2),
        ({"SLURM_NODELIST": "n1"}, 1),
        ({"SLURM_NNODES": "3", "SLURM_NODELIST": "n1"}, 3),
        ({}, 1),
    ],
)
def test_number_of_hosts(environ: dict[str, str], hosts: int) -> None:
    assert number_of_hosts(environ) == hosts


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, NO_SRUN),
        ("echo MPI plugin types are...", ""),
        ("echo srun: error: Unable to contact slurm controller >&2; exit 1", "srun doesn't work here (srun: error: Un"),
        ("exit 3", "srun doesn't work here (exit code 3)"),
        ("sleep 60", "srun doesn't answer in 1 s"),
    ],
)
def test_whether_srun_works(script: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "SRUN_SECONDS", 1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path_without_srun(tmp_path, os.environ['PATH'])}")
    if script is not None:
        (tmp_path / "srun").write_text(f"#!/bin/sh\n{script}\n".replace("sleep", "exec sleep"))
        (tmp_path / "srun").chmod(0o755)
    assert srun_failure().startswith(said) and bool(srun_failure()) == bool(said)


@pytest.mark.parametrize("told", ["many", "-1", "2.5", "9" * 5000])
def test_an_odd_number_of_tasks_is_told(told: str) -> None:
    with pytest.raises(UsageError, match="is no number of ranks. how many ranks"):
        number_of_ranks(None, {"SLURM_NTASKS": told})


@needs_mpiexec
@pytest.mark.parametrize("named", [[], ["--launcher", "mpiexec"]], ids=["found", "named"])
def test_ranks_start_in_an_allocation_of_this_host_without_srun(named: list[str], tmp_path: Path) -> None:
    """MPICH's mpiexec waits for ever for an srun that it can't start."""
    script = tmp_path / "say.py"
    script.write_text(
        "import os\nfrom mpi4py import MPI\n"
        "told = MPI.COMM_WORLD.allgather(os.environ['SLURM_JOB_ID'])\nif MPI.COMM_WORLD.rank == 0: print(told)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mpitp", "launch", *named, "--", str(script)],
        env=environment(**ONE_HOST, PATH=path_without_srun(tmp_path, os.environ["PATH"])),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "['77', '77']\n"), result.stderr
    assert f"SLURM_JOB_ID=77, but {NO_SRUN}: the ranks are started on this host" in result.stderr
