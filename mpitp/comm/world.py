"""The group of all ranks of this job."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from mpitp.comm.environment import LaunchClaim, launch_claim
from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.errors import LaunchError


def world_group() -> Group:
    """The group of all ranks; starts MPI when called for the first time under a launcher.

    Without a launcher it is a `SerialGroup` and MPI is not touched. Every rank of the job must call it.
    Raises LaunchError when a launcher claims more ranks than MPI sees: otherwise many one-rank jobs would
    write the same files.
    """
    claim = launch_claim(os.environ)
    if not claim.variable and not mpi_is_started():
        return SerialGroup()
    if find_spec("mpi4py") is None:
        refuse_singletons(claim, 1, "mpi4py is not installed")
        return SerialGroup()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py can't load an MPI library ({error}); install one into this environment with "
            'pip install "mpitp[mpich]", or load the MPI module of this site'
        ) from None

    from mpitp.comm.mpi import MpiGroup

    size = MPI.COMM_WORLD.Get_size()
    refuse_singletons(claim, size, MPI.Get_library_version().splitlines()[0].strip("\x00 "))
    return MpiGroup(MPI.COMM_WORLD) if size > 1 else SerialGroup()


def mpi_is_started() -> bool:
    """Whether this process has already started MPI (through mpi4py)."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def refuse_singletons(claim: LaunchClaim, size: int, library: str) -> None:
    """Raise LaunchError when the launcher claims several ranks and MPI sees one."""
    if claim.size > 1 and size == 1:
        raise LaunchError(
            f"{claim.launcher} started {claim.size} ranks ({claim.variable}={claim.size}), but MPI sees one rank alone "
            f"({library}): launcher and MPI library don't belong together. Start the job with `mpitp launch "
            f"-n {claim.size} -- ...`, which takes the mpiexec of this Python; under SLURM use `srun --mpi=pmi2` with "
            "MPICH, `srun --mpi=pmix` with an Open MPI built for it, or the MPI that this site provides. For a run of "
            "one rank inside an srun shell: `mpitp launch -n 1 -- ...`"
        )
