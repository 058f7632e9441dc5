"""The mesh: how the ranks of a job are arranged along the axes pp, dp, cp and tp.

Axes run from slowest to fastest, so that the ranks of one tensor-parallel group are neighbours and share a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.errors import ConfigError

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """One group for each axis (the ranks that differ from this one along that axis only), and all ranks: `world`."""

    world: Group
    pp: Group
    dp: Group
    cp: Group
    tp: Group

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: getattr(self, axis).size for axis in AXES}


def make_mesh(world: Group, tp: int = 0, pp: int = 1, dp: int = 1, cp: int = 1) -> Mesh:
    """Arrange the ranks of `world`. `tp=0` takes all ranks that the other axes leave.

    Raises ConfigError when the sizes don't multiply to the number of ranks, and for axes that nothing uses yet.
    """
    for axis, size in (("pp", pp), ("dp", dp), ("cp", cp)):
        if size != 1:
            raise ConfigError(f"mesh.{axis} = {size} is not supported yet; set it to 1 and give the ranks to mesh.tp")
    if tp < 0:
        raise ConfigError(f"mesh.tp = {tp} must be 0 (all ranks) or a number of ranks")
    if tp not in (0, world.size):
        raise ConfigError(
            f"mesh.tp = {tp} needs {_ranks(tp)}, the job has {world.size}; "
            f"set mesh.tp = {world.size} (or 0, all ranks), or start the job with {_ranks(tp)}"
        )
    return Mesh(world=world, pp=SerialGroup(), dp=SerialGroup(), cp=SerialGroup(), tp=world)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
