"""Groups of ranks and what they do together. Importing this package starts nothing; names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpitp.comm.group import ForwardingGroup, Group, Pending
    from mpitp.comm.mesh import Mesh, abstract_mesh, make_mesh
    from mpitp.comm.mpi import MpiGroup
    from mpitp.comm.serial import SerialGroup
    from mpitp.comm.start_world import world_group
    from mpitp.comm.threads import ThreadGroup, run_threads

_HOMES = {
    "ForwardingGroup": "group",
    "Group": "group",
    "Mesh": "mesh",
    "MpiGroup": "mpi",
    "Pending": "group",
    "SerialGroup": "serial",
    "ThreadGroup": "threads",
    "abstract_mesh": "mesh",
    "make_mesh": "mesh",
    "run_threads": "threads",
    "world_group": "start_world",
}

__all__ = [
    "ForwardingGroup",
    "Group",
    "Mesh",
    "MpiGroup",
    "Pending",
    "SerialGroup",
    "ThreadGroup",
    "abstract_mesh",
    "make_mesh",
    "run_threads",
    "world_group",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
