"""The MPI library: loading it without starting it, and what to say where it can't be loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitp.errors import LaunchError

CHOOSERS = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")  # by which mpi4py is told what library to load


def load_mpi() -> Any:
    """`mpi4py.MPI`, which isn't started by this. Raises LaunchError, the cure first, where no library can be loaded."""
    try:
        import mpi4py

        before, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = before
    except (ImportError, RuntimeError) as error:
        raise LaunchError(load_failure(str(error), os.environ, Path(sys.executable).parent)) from None
    return MPI


def load_failure(reason: str, environ: Mapping[str, str], beside: Path) -> str:
    """What to do, and that mpi4py can't load a library. `beside`: the folder of this Python."""
    reason = " ".join(reason.split())
    chosen = chosen_library(environ)
    if chosen:
        return f"unset {chosen.partition('=')[0]}: with {chosen} mpi4py can't load an MPI library ({reason})"
    if has_own_mpi(beside):
        return (
            f"install the MPI beside this Python again, it is broken: {beside} has its mpiexec, but mpi4py can't load "
            f"its library ({reason})"
        )
    return (
        'install an MPI into this environment with pip install "mpitp[mpich]", or load the MPI module of this site: '
        f"mpi4py can't load an MPI library ({reason})"
    )


def chosen_library(environ: Mapping[str, str]) -> str:
    """The variable, with its value, that chooses mpi4py's library; "" where none does."""
    return next((f"{name}={environ[name]}" for name in CHOOSERS if environ.get(name)), "")


def has_own_mpi(beside: Path) -> bool:
    """Whether an MPI is installed in the environment of the Python in this folder."""
    return os.access(beside / "mpiexec", os.X_OK)


def library_name(mpi: Any) -> str:
    """Make and version of the MPI library, such as "MPICH 5.0.2"."""
    first = mpi.Get_library_version().replace("\x00", "").replace(" Version:", "").splitlines()[0]
    return " ".join(first.split(",")[0].split())
