"""Whether the MPI library can be handed device memory. A wrong yes is a segmentation fault, so every doubt is a no."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceAwareness:
    """The answer and how it was found, in words."""

    aware: bool
    how: str


def query_device_awareness() -> DeviceAwareness:
    """Ask the MPI library of this process. The answer is no as long as MPI is not started."""
    from mpi4py import MPI

    if not MPI.Is_initialized():  # MPICH ends the process when asked too early
        return DeviceAwareness(False, "not asked, as MPI is not started")
    cray = _cray_mpich(os.environ, _loaded_libraries())
    if cray is not None:
        return cray
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return DeviceAwareness(False, "the library has no MPIX_Query_cuda_support")
    answer = bool(query())
    return DeviceAwareness(answer, f"MPIX_Query_cuda_support() = {int(answer)}")


def _cray_mpich(environ: Mapping[str, str], libraries: str) -> DeviceAwareness | None:
    """Cray MPICH has no query: it is aware when switched on and its GPU transport library is in the process."""
    switch = environ.get("MPICH_GPU_SUPPORT_ENABLED")
    if switch is None:
        return None
    has_transport = "libmpi_gtl" in libraries
    how = f"MPICH_GPU_SUPPORT_ENABLED={switch}, libmpi_gtl {'loaded' if has_transport else 'not loaded'}"
    return DeviceAwareness(switch == "1" and has_transport, how)


def _loaded_libraries() -> str:
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""
