"""What one rank can tell about itself, its host and its libraries. No rank talks to another here."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mpitp import __version__
from mpitp.backend.accelerator import describe_accelerator
from mpitp.backend.threads import affinity_cores
from mpitp.comm.device_aware import DeviceAwareness, query_device_awareness
from mpitp.comm.library import chosen_library, has_own_mpi, library_name, load_mpi
from mpitp.comm.shared_memory import orders_stores
from mpitp.comm.shm_room import shm_room
from mpitp.errors import LaunchError


@dataclass(frozen=True, slots=True)
class RankProbe:
    """One rank's facts; equal types on every rank, so that they can be gathered and compared."""

    host: str
    cores: frozenset[int]
    versions: tuple[tuple[str, str], ...]  # what must be equal on all ranks
    executable: str
    blas: tuple[str, ...]
    blas_threads: int
    accelerator: str
    mpi: tuple[str, str, str]  # library, standard version; what to do where the library there is can't be loaded
    device_aware: DeviceAwareness
    gpu: str
    num_gpus: int
    shm_free_bytes: int | None  # None where there is no /dev/shm, 0 where it can't be written
    machine: str  # kind of processor
    orders_stores: bool


def probe_rank() -> RankProbe:
    """Look at this process. Loads NumPy and, where there is one, the MPI library (without starting it)."""
    import numpy
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    gpu, num_gpus = _probe_gpu()
    return RankProbe(
        host=socket.gethostname(),
        cores=affinity_cores(),
        versions=(
            ("mpitp", __version__),
            ("python", platform.python_version()),
            ("numpy", numpy.__version__),
            ("mpi4py", _installed("mpi4py")),
        ),
        executable=sys.executable,
        blas=tuple(
            f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}".strip() for pool in pools
        ),
        blas_threads=max((pool["num_threads"] for pool in pools), default=1),
        accelerator=describe_accelerator(),
        mpi=_probe_mpi(),
        device_aware=_probe_device_awareness(),
        gpu=gpu,
        num_gpus=num_gpus,
        shm_free_bytes=_shm_free_bytes(),
        machine=platform.machine(),
        orders_stores=orders_stores(),
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _probe_mpi() -> tuple[str, str, str]:
    try:
        mpi = load_mpi()
    except LaunchError as error:
        is_wanted = chosen_library(os.environ) or has_own_mpi(Path(sys.executable).parent)
        return "none", "", str(error) if is_wanted else ""
    version, subversion = mpi.Get_version()
    return library_name(mpi), f"{version}.{subversion}", ""


def _shm_free_bytes() -> int | None:
    room = shm_room()
    return room.free_bytes * room.is_writable if room is not None else None


def _probe_gpu() -> tuple[str, int]:
    """CuPy and its devices in words, and how many."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed", 0
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy {cupy.__version__}, no usable GPU ({error})", 0
    names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    return f"CuPy {cupy.__version__}, {count} GPU(s): {', '.join(dict.fromkeys(names))}", count


def _probe_device_awareness() -> DeviceAwareness:
    return query_device_awareness() if "mpi4py.MPI" in sys.modules else DeviceAwareness(False, "no MPI library")
