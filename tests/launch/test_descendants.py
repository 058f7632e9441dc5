"""The ranks below a launcher, as this machine sees them."""

from __future__ import annotations

import os
import subprocess
import time

from mpitp.launch.descendants import descendants

TREE = """\
PMI_RANK=0 PMI_SIZE=2 sleep 60 &
sh -c 'OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 sh -c "sleep 61 & wait" & wait' &
sleep 62 &
wait
"""


def test_ranks_and_the_helpers_between() -> None:
    """A rank's own children are none, nor is a helper without children."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    launcher = subprocess.Popen(["sh", "-c", TREE], env=clean, start_new_session=True)
    try:
        end = time.monotonic() + 20
        while (len((found := descendants(launcher.pid)).ranks) < 2 or not found.helpers) and time.monotonic() < end:
            time.sleep(0.05)
        assert sorted(found.ranks) == [0, 1] and len(found.helpers) == 1
        assert len({launcher.pid, *found.ranks.values(), *found.helpers}) == 4
    finally:
        os.killpg(launcher.pid, 9)
        launcher.wait()
    assert descendants(launcher.pid).ranks == {}
