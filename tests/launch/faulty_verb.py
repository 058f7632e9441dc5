"""A verb that fails as it is told to, run by test_launch_faults.py: `python faulty_verb.py FAULT RANK`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time

from mpitp import cli
from mpitp.comm.environment import launch_claim
from mpitp.errors import ConfigError, Preempted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fault")
    parser.add_argument("rank", type=int)


def run(args: argparse.Namespace) -> int:
    """Fail on the given rank (-1: on all), while the others wait for it in a collective."""
    if args.fault == "before mpi" and args.rank in (launch_claim(os.environ).rank, -1):
        raise ConfigError("said before MPI started")
    from mpitp.comm import world_group

    group = world_group()
    print(f"rank {group.rank} has started", flush=True)
    if args.rank in (group.rank, -1):
        fail(args.fault)
    group.barrier()
    return 0


def fail(fault: str) -> None:
    if fault == "config":
        raise ConfigError("data.seq_len=4096 is too long; lower it")
    if fault == "bug":
        raise KeyError("a bug on purpose")
    if fault == "exit":
        sys.exit(7)
    if fault == "thread":
        threading.Thread(target=fail, args=("bug",)).start()
        time.sleep(60)
    if fault == "preempted":
        raise Preempted("state saved at step 5")
    if fault == "interrupt":  # Ctrl-C reaches the ranks in different places: here one has begun a collective
        import numpy as np
        from mpi4py import MPI

        begun = MPI.COMM_WORLD.Iallreduce(np.ones(4), np.empty(4)) if MPI.COMM_WORLD.rank == 0 else None
        raise KeyboardInterrupt(begun)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    cli.VERBS["fault"] = ("__main__", "fail")
    sys.exit(cli.main(["fault", *sys.argv[1:]]))
