"""The mpitp command, or the script that its first word names, on a core of its own: that of the rank's number, cyclic.

Two ranks would else meet on one core.
"""

from __future__ import annotations

import os
import runpy
import sys

from mpitp.cli import main
from mpitp.comm.environment import launch_claim

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[launch_claim(os.environ).rank % len(cores)]})
if sys.argv[1:2] and sys.argv[1].endswith(".py"):
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    sys.exit(main())
