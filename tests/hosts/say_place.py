"""What a rank knows of its place: one JSON list on stdout, in rank order."""

from __future__ import annotations

import json
import os
import socket

import numpy as np

from mpitp.comm import Group, make_mesh, world_group
from mpitp.comm.environment import launch_claim
from mpitp.comm.node import NodeGroup

world = world_group()

from mpi4py import MPI  # noqa: E402 (started by the line above)

node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
claim = launch_claim(os.environ)
mesh = make_mesh(world, {"dp": world.size // 2, "tp": 2} if world.size % 2 == 0 else {})


def kind(group: Group) -> list[object]:
    """Its class, and how many of its ranks sum through one window; a sum over it is right."""
    x = np.full(100_000, 1.0 + world.rank)
    assert group.all_reduce(x)[0] == sum(1.0 + rank for rank in group.all_gather_objects(world.rank))
    return [type(group).__name__, group.node.size if isinstance(group, NodeGroup) else 1, group.in_background]


place = {
    "rank": world.rank,
    "host": socket.gethostname(),
    "claimed": [claim.local_rank, claim.local_size],
    "found": [node.rank, node.size],
    "groups": [kind(group) for group in (world, mesh["dp"], mesh["tp"])],
}
places = world.all_gather_objects(place)
if world.rank == 0:
    print(json.dumps(places))
