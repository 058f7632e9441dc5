"""Layouts of `test_composition.py` on the real ranks of a job: `mpiexec -n 8 python -m tests.train.on_ranks`.

Those that need as many ranks as the job has; the first rank compares each with one rank, and says so in a line.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from math import prod
from pathlib import Path

from mpitp.comm.mesh import AXES
from mpitp.comm.start_world import world_group
from tests.train.layouts import check_layout_on
from tests.train.test_composition import COMMON, LAYOUTS, name_of


def main() -> int:
    world = world_group()
    chosen = [each for each in LAYOUTS if prod(s for axis, s in each[0].items() if axis in AXES) == world.size]
    for layout in chosen:
        mesh, others, same = layout
        folder = Path(world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None))
        started = time.perf_counter()
        check_layout_on(world, folder, mesh, others, **{**COMMON, **same})
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
            print(f"equal to one rank: {name_of(layout)} ({time.perf_counter() - started:.1f} s)", flush=True)
    if world.rank == 0:
        print(f"{len(chosen)} layouts on {world.size} ranks are equal to one rank", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
