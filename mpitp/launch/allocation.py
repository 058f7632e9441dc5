"""What a batch system's variables say, believed only where it agrees with this moment, this host and its commands.

They outlive what they speak of: a shell of a job that is over, a container inside a job without the batch system's
commands, a file of hosts that is gone. An mpiexec that goes by them waits for ever, or fails in its own words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpitp.errors import LaunchError

HOST_FILES = ("PBS_NODEFILE", "PE_HOSTFILE", "COBALT_NODEFILE", "LSB_DJOB_HOSTFILE", "HYDRA_HOST_FILE")
_READ_BY_MPIEXEC = ("SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
SRUN_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Belief:
    """The variables to decide by, those that the job gets, and what to tell about those that were ignored."""

    decide: dict[str, str]
    job: dict[str, str]
    notes: tuple[str, ...] = ()


def believed(
    environ: Mapping[str, str], host: str, srun_failure: Callable[[], str], *, is_named: bool = False
) -> Belief:
    """What is believed of `environ` on `host`.

    `srun_failure`: why srun doesn't work ("": it does), asked for in an allocation only. `is_named`: the user has named
    a launcher. Raises LaunchError for an allocation of several hosts that nothing here can reach.
    """
    gone = [name for name in HOST_FILES if name in environ and not os.path.isfile(environ[name])]
    notes = [f"ignored: {name}={environ[name]}, there is no such file" for name in gone]
    decide = {name: value for name, value in environ.items() if name not in gone}
    if "SLURM_JOB_ID" not in environ and "SLURM_JOBID" not in environ:
        return Belief(decide, decide, tuple(notes))
    failure = srun_failure()
    if not failure:
        return Belief(decide, decide, tuple(notes))
    return _without_srun(decide, notes, host, failure, is_named)


def _without_srun(decide: dict[str, str], notes: list[str], host: str, failure: str, is_named: bool) -> Belief:
    job_id = decide.get("SLURM_JOB_ID") or decide.get("SLURM_JOBID", "")
    ended = time_of_end(decide)
    is_over = ended is not None and ended < time.time()
    others = {name: value for name, value in decide.items() if not name.startswith("SLURM_")}
    if is_over:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended))
        notes.append(f"ignored: SLURM_JOB_ID={job_id} and the other SLURM variables, that job was over at {when}")
        return Belief(others, others, tuple(notes))
    hosts = number_of_hosts(decide)
    if hosts > 1 and is_named:
        return Belief(decide, decide, tuple(notes))
    if hosts > 1:
        raise LaunchError(
            f"SLURM_JOB_ID={job_id} is an allocation of {hosts} hosts, but {failure}: load SLURM's commands (or leave "
            "the container), or unset SLURM_JOB_ID to start all ranks on this host"
        )
    notes.append(f"SLURM_JOB_ID={job_id}, but {failure}: the ranks are started on this host ({host}), without SLURM")
    job = {name: value for name, value in decide.items() if name not in _READ_BY_MPIEXEC}
    return Belief({**others, **_sizes(decide)}, job, tuple(notes))


def _sizes(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("SLURM_NTASKS",) if name in environ}


def time_of_end(environ: Mapping[str, str]) -> float | None:
    """When the job ends by SLURM's word, in seconds since the epoch; None where it says nothing or nonsense."""
    value = environ.get("SLURM_JOB_END_TIME", "")
    return float(value) if value.isdecimal() and len(value) < 16 else None


def number_of_hosts(environ: Mapping[str, str]) -> int:
    """Of the allocation: as counted by SLURM, else by the look of the list of names."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environ.get(name, "").isdecimal():
            return int(environ[name][:9])
    names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    return 2 if "," in names or "[" in names else 1


def srun_failure() -> str:
    """Why srun can't be used here; "" where it can."""
    if shutil.which("srun") is None:
        return "there is no srun on the PATH"
    try:
        told = subprocess.run(
            ["srun", "--mpi=list"], capture_output=True, text=True, check=False, timeout=SRUN_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"srun doesn't answer in {SRUN_SECONDS} s"
    except OSError as error:
        return f"srun can't be started ({error.strerror or error})"
    if told.returncode:
        said = next(iter(told.stderr.strip().splitlines()), f"exit code {told.returncode}")
        return f"srun doesn't work here ({said})"
    return ""
