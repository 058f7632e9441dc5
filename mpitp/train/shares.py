"""`[mesh] shares = "measured"`: the weights that a run's ranks are found to have when it starts."""

from __future__ import annotations

import dataclasses

from mpitp.backend.device import Device
from mpitp.comm.group import Group
from mpitp.comm.mesh import abstract_mesh, mesh_sizes
from mpitp.config import RunConfig
from mpitp.error_stream import tell
from mpitp.layers.speeds import DEALT_FIRST, measure_speeds, told, weights_of_speeds
from mpitp.train import setup
from mpitp.train.stages import refusal_of_unequal


def with_shares(config: RunConfig, hidden: int, world: Group, device: Device) -> RunConfig:
    """The run with weights in the place of "measured"; any other run as it is. A collective: the first rank decides,
    and says what. `hidden`: the model's width.
    """
    if config.mesh.shares != "measured":
        return config
    speeds = measure_speeds(world, device, config.model.dtype, hidden)
    weights = world.broadcast_object(_weights(config, speeds))
    if world.rank == 0:
        tell([f"mesh.shares measured: {told(speeds, weights)}"])
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, shares=weights or "equal"))


def _weights(config: RunConfig, speeds: list[float]) -> dict[str, tuple[float, ...]]:
    """What the run can deal by weight: not the blocks of `stages`, nor microbatches that its pipeline needs evenly."""
    sizes = mesh_sizes(setup.mesh_sizes(config), len(speeds))
    axes = [axis for axis in DEALT_FIRST if axis != "pp" or not config.mesh.stages]
    weights = weights_of_speeds(speeds, sizes, axes)
    if sizes["pp"] > 1 and refusal_of_unequal(config, abstract_mesh(sizes, weights=weights)):
        return weights_of_speeds(speeds, sizes, [axis for axis in axes if axis not in ("dp", "ep")])
    return weights
