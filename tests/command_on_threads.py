"""A verb of the command line run on thread ranks, so that several ranks need no launcher."""

from __future__ import annotations

import threading

import pytest

import mpitp.comm.start
from mpitp.backend.device import CpuDevice
from mpitp.cli import main
from mpitp.comm import Group, run_threads


def command_on_threads(ranks: int, *words: str) -> list[int]:
    """Every rank's exit code of `mpitp WORDS`. Each rank takes its thread's group for the group of all ranks."""
    own = threading.local()

    def start_job(device: str, *, invariant: bool = False, accelerate: bool = True) -> tuple[Group, CpuDevice]:
        return own.group, CpuDevice()

    def rank(group: Group) -> int:
        own.group = group
        return main(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpitp.comm.start, "start_job", start_job)
        return run_threads(ranks, rank)
