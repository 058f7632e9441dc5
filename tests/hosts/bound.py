"""The mpitp command on a core of its own: that of the rank's number, cyclic. Two ranks would else meet on one core."""

from __future__ import annotations

import os
import sys

from mpitp.cli import main
from mpitp.comm.environment import launch_claim

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[launch_claim(os.environ).rank % len(cores)]})
sys.exit(main())
