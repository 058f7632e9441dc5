"""Stays beside a launcher that ends a job without a word on which rank died, and says it afterwards.

MPICH's mpiexec kills all ranks the moment that one is killed, and names a process and a host. The status files that the
ranks' watchdogs have left in the run directory know which rank that process was, and in which collective the job stood.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from mpitp.comm.peers import Process
from mpitp.comm.watchdog import FOLDER, death_report, read_statuses
from mpitp.config import load_run_config
from mpitp.errors import MpitpError

TAIL_BYTES = 1 << 14
_DEATH = re.compile(r"PID (\d+) RUNNING AT (\S+)")
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT)
_PR_SET_PDEATHSIG = 1


def run_and_explain(command: Sequence[str], environ: Mapping[str, str], run_dir: Path) -> int:
    """Run the launcher, its output and signals passed on; its exit code, after a word on a rank that has died."""
    started = time.time()
    on_linux = _end_with_parent if sys.platform == "linux" else None
    process = subprocess.Popen(command, env=dict(environ), stdout=subprocess.PIPE, preexec_fn=on_linux)
    _pass_signals_on(process)
    tail = _pass_output_on(process)
    code = process.wait()
    death = _DEATH.search(tail) if code else None
    text = explain(run_dir, int(death[1]), death[2], started) if death else None
    if text:
        print(f"mpitp launch: {text}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def run_directory(words: Sequence[str]) -> Path | None:
    """The run directory of `train RUN.TOML ...`; None for other verbs and for what the verb itself will refuse."""
    if not words or words[0] != "train":
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run_file")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    parser.add_argument("--trace", action="store_true")
    try:
        known, _ = parser.parse_known_args(list(words[1:]))
        return Path(load_run_config(known.run_file, known.set).train.run_dir)
    except (MpitpError, argparse.ArgumentError, SystemExit):
        return None


def explain(run_dir: Path, pid: int, host: str, started: float) -> str | None:
    """Which rank the process was, and where it and the job stood; None when no status file of this job knows it."""
    for folder in sorted(run_dir.glob(f"{FOLDER}*")):
        statuses = read_statuses(folder)
        dead = next((status for status in statuses.values() if status.pid == pid), None)
        if dead is None or dead.written < started - 60:  # an earlier job's; clocks of hosts may differ a little
            continue
        others = [status for status in statuses.values() if status is not dead and status.last is not None]
        furthest = max(others, key=lambda status: status.last.started if status.last else 0.0, default=dead)
        return death_report(Process(dead.rank, host, pid, ""), dead, furthest, time.time())
    return None


def _pass_signals_on(process: subprocess.Popen[bytes]) -> None:
    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    # Ctrl-C reaches the launcher by itself: the terminal sends it to the whole group
    signal.signal(signal.SIGINT, signal.SIG_IGN if sys.stdin is not None and sys.stdin.isatty() else pass_on)


def _pass_output_on(process: subprocess.Popen[bytes]) -> str:
    """Copy the launcher's output to ours as it comes; its end."""
    assert process.stdout is not None
    tail = b""
    write: Callable[[int, bytes], int] | None = os.write
    while data := os.read(process.stdout.fileno(), 1 << 16):
        tail = (tail + data)[-TAIL_BYTES:]
        while data and write is not None:
            try:
                data = data[write(1, data) :]
            except OSError:  # nobody reads it any more; the job goes on
                write = None
    return tail.decode(errors="replace")


def _end_with_parent() -> None:
    """In the child: be told to stop when this process is killed, so that the job doesn't go on without its head."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
