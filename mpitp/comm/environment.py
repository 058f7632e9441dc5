"""What the environment variables of a launcher claim about this process: pure functions of a mapping, no MPI.

The claim is needed twice: before MPI starts (threads and GPU by node-local rank), and right after, to catch the
launcher of another MPI, under which every process silently becomes a job of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LaunchClaim:
    """What a launcher says. `local_*` count the ranks of this host; None where the launcher doesn't tell."""

    launcher: str
    size: int
    rank: int
    local_rank: int | None
    local_size: int | None
    variable: str  # where `size` stands


_OTHER_LAUNCHERS = (
    ("MVAPICH mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)

MPIEXECS = ("Open MPI mpirun", "PMI (MPICH mpiexec)")  # launchers that can't start another job from within theirs

NO_LAUNCHER = LaunchClaim("none", 1, 0, 0, 1, "")


def launch_claim(environ: Mapping[str, str]) -> LaunchClaim:
    """The claim of the innermost launcher: `mpirun` inside a SLURM step speaks for its ranks, not the step."""
    for read in (_open_mpi, _pals, _hydra, _others, _slurm):
        claim = read(environ)
        if claim is not None:
            return claim
    return NO_LAUNCHER


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Take out what claims several ranks, for a program that goes on as one process."""
    while (claim := launch_claim(environ)).size > 1:
        del environ[claim.variable]


def _open_mpi(environ: Mapping[str, str]) -> LaunchClaim | None:
    return _plain_claim(
        environ,
        "Open MPI mpirun",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _pals(environ: Mapping[str, str]) -> LaunchClaim | None:
    """HPE's PALS (`aprun`, `mpiexec`), which gives the size through PMI."""
    if "PALS_RANKID" not in environ:
        return None
    return _plain_claim(
        environ,
        "PALS mpiexec",
        size="PMI_SIZE",
        rank="PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    )


def _hydra(environ: Mapping[str, str]) -> LaunchClaim | None:
    """MPICH's mpiexec and its relatives; also SLURM's pmi2 plugin, which knows the node-local rank as SLURM_LOCALID."""
    claim = _plain_claim(
        environ,
        "PMI (MPICH mpiexec)",
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    )
    slurm = _slurm(environ)
    if claim is not None and slurm is not None and claim.local_rank is None and claim.size == slurm.size:
        return slurm
    return claim


def _others(environ: Mapping[str, str]) -> LaunchClaim | None:
    """Launchers whose node-local numbers aren't read; PMIx tells no size in the environment."""
    for launcher, size, rank in _OTHER_LAUNCHERS:
        claim = _plain_claim(environ, launcher, size=size, rank=rank, local_rank="", local_size="")
        if claim is not None:
            return claim
    if "PMIX_RANK" in environ and "SLURM_PROCID" not in environ:
        return LaunchClaim("a PMIx launcher", 1, _number(environ, "PMIX_RANK") or 0, None, None, "PMIX_RANK")
    return None


def _slurm(environ: Mapping[str, str]) -> LaunchClaim | None:
    """A task of an `srun` step. A batch script has SLURM_PROCID too, but no step."""
    if "SLURM_PROCID" not in environ or not ({"SLURM_STEP_ID", "SLURM_STEPID"} & set(environ)):
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    claim = _plain_claim(
        environ, "srun", size=size, rank="SLURM_PROCID", local_rank="SLURM_LOCALID", local_size="SLURM_NTASKS_PER_NODE"
    )
    if claim is None:
        return None
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    local_size = slurm_tasks_of_node(layout, _number(environ, "SLURM_NODEID") or 0)
    return claim if local_size is None else replace(claim, local_size=local_size)


def slurm_tasks_of_node(layout: str, node: int) -> int | None:
    """Tasks on the node-th node, from SLURM's short form: "4(x2),3" means 4, 4, 3. None where it doesn't tell."""
    counts: list[int] = []
    for count, _, repeats in re.findall(r"(\d+)(\(x(\d+)\))?", layout):
        counts += [int(count)] * int(repeats or 1)
    return counts[node] if node < len(counts) else None


def _plain_claim(
    environ: Mapping[str, str], launcher: str, *, size: str, rank: str, local_rank: str, local_size: str
) -> LaunchClaim | None:
    ranks = _number(environ, size)
    if ranks is None:
        return None
    return LaunchClaim(
        launcher=launcher,
        size=ranks,
        rank=_number(environ, rank) or 0,
        local_rank=_number(environ, local_rank),
        local_size=_number(environ, local_size),
        variable=size,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None
