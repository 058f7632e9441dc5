"""What a rank knows of its place: one JSON list on stdout, in rank order."""

from __future__ import annotations

import json
import os
import socket

from mpitp.comm import world_group
from mpitp.comm.environment import launch_claim

world = world_group()

from mpi4py import MPI  # noqa: E402 (started by the line above)

node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
claim = launch_claim(os.environ)
place = {
    "rank": world.rank,
    "host": socket.gethostname(),
    "claimed": [claim.local_rank, claim.local_size],
    "found": [node.rank, node.size],
}
places = world.all_gather_objects(place)
if world.rank == 0:
    print(json.dumps(places))
