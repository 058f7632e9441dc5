from __future__ import annotations

import pytest

from mpitp.comm.environment import NO_LAUNCHER, forget_launcher, launch_claim, slurm_tasks_of_node

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PMI_SIZE": "4", "PMI_RANK": "3"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPEN_MPI, "Open MPI mpirun"),
        (HYDRA, "PMI (MPICH mpiexec)"),
        (PALS, "PALS mpiexec"),
        (SLURM, "srun"),
        ({**SLURM, "PMI_SIZE": "4", "PMI_RANK": "3"}, "srun"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **OPEN_MPI}, "Open MPI mpirun"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", **HYDRA}, "PMI (MPICH mpiexec)"),
    ],
)
def test_every_launcher_tells_the_same(environ: dict[str, str], launcher: str) -> None:
    claim = launch_claim(environ)
    assert (claim.launcher, claim.size, claim.rank) == (launcher, 4, 3)
    assert (claim.local_rank, claim.local_size) == (1, 2)
    assert environ[claim.variable] == "4"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/root", "PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "x"},
        # a batch script is no task of a step
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert launch_claim(environ) == NO_LAUNCHER


def test_launchers_that_tell_less() -> None:
    claim = launch_claim({"FLUX_JOB_SIZE": "3", "FLUX_TASK_RANK": "2"})
    assert (claim.size, claim.rank, claim.local_rank, claim.local_size) == (3, 2, None, None)
    claim = launch_claim({"PMIX_RANK": "2"})
    assert (claim.launcher, claim.size, claim.variable) == ("a PMIx launcher", 1, "PMIX_RANK")


def test_slurm_short_form() -> None:
    assert [slurm_tasks_of_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert slurm_tasks_of_node("", 0) is None


def test_a_program_of_one_process_forgets_its_launcher() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "3"}
    environ = {"PMI_SIZE": "3", "PMI_RANK": "0", "A": "b", **step}
    forget_launcher(environ)
    assert launch_claim(environ).size == 1
    assert environ["A"] == "b"
