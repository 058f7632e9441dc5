"""The group of all ranks of this job."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any

from mpitp.comm.environment import LaunchClaim, launch_claim
from mpitp.comm.fresh_memory import fresh_memory
from mpitp.comm.group import Group
from mpitp.comm.library import chosen_library, library_name, load_mpi
from mpitp.comm.serial import SerialGroup
from mpitp.comm.shm_room import shm_failure, shm_room
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
    mpi = _start_mpi(claim)
    size = mpi.COMM_WORLD.Get_size()
    refuse_singletons(claim, size, library_name(mpi))
    if size == 1:
        return SerialGroup()
    return _placed_world(mpi.COMM_WORLD)


def _placed_world(comm: Any) -> Group:
    """The group of `comm`, on its nodes; so is every group that is ever split off. A collective."""
    from mpitp.comm.mpi import MpiGroup
    from mpitp.comm.node import has_core_for_each, place_on_nodes

    node = MpiGroup(comm).split_by_node()
    spin = has_core_for_each(node)

    def place(group: MpiGroup) -> Group:
        return place_on_nodes(group, group.split_by_node(), spin=spin)

    world = MpiGroup(comm, in_background=node.size < comm.Get_size(), place=place)
    return place_on_nodes(world, node, spin=spin)


def _start_mpi(claim: LaunchClaim) -> Any:
    """`mpi4py.MPI`, started, after a look at whether library and launcher are of one make."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    mpi = load_mpi()
    if not mpi.Is_initialized():
        refuse_strangers(claim, library_name(mpi))
        refuse_small_shm(claim, library_name(mpi))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a suspicious launcher: `refuse_singletons` knows more
            with fresh_memory(library_name(mpi)):
                mpi.Init_thread()
    return mpi


def mpi_is_started() -> bool:
    """Whether this process has already started MPI (through mpi4py)."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def refuse_strangers(claim: LaunchClaim, library: str) -> None:
    """Raise LaunchError when Open MPI's mpirun started a program of another library: MPICH would crash."""
    if claim.launcher == "Open MPI mpirun" and "Open MPI" not in library:
        raise LaunchError(_mismatch(claim, f"this Python's MPI library is {library}"))


def refuse_small_shm(claim: LaunchClaim, library: str) -> None:
    """Raise LaunchError where the library would die of a bus error, because /dev/shm is too small or read-only."""
    failure = shm_failure(library, claim.local_size or 1, shm_room(), has_begun=True)
    if failure:
        raise LaunchError(failure)


def refuse_singletons(claim: LaunchClaim, size: int, library: str) -> None:
    """Raise LaunchError when the launcher claims several ranks and MPI sees one."""
    if claim.size > 1 and size == 1:
        raise LaunchError(_mismatch(claim, f"MPI sees one rank alone ({library})"))


def _mismatch(claim: LaunchClaim, found: str) -> str:
    if chosen := chosen_library(os.environ):
        found += f", chosen by {chosen}"
    return (
        f"{claim.launcher} started {claim.size} ranks ({claim.variable}={claim.size}), but {found}: launcher and MPI "
        f"library don't belong together. Start the job with `mpitp launch -n {claim.size} -- ...`, which takes this "
        "Python's mpiexec; under SLURM use `srun --mpi=pmi2` with MPICH, `srun --mpi=pmix` with an Open MPI built for "
        "it, or this site's own MPI. For a run of one rank inside an srun shell: `mpitp launch -n 1 -- ...`"
    )
