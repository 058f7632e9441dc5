"""The tests started in the background (`nohup scripts/test &`): what they start handles signals as anywhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IGNORED_OR_BLOCKED = ("SigBlk:", "SigIgn:")

CHILD = """
import signal, subprocess
for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CHLD", "ALRM"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2, signal.SIGTERM))
subprocess.run(["cat", "/proc/self/status"])
print("then", flush=True)
import tests.conftest
subprocess.run(["cat", "/proc/self/status"])
"""


def test_what_tests_start_ignores_and_blocks_no_signal() -> None:
    told = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    before, after = (
        [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(IGNORED_OR_BLOCKED)]
        for status in told.split("then\n")
    )
    assert all(before) and after == [0, 0]
