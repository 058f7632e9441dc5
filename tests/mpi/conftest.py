"""MPI tests: what fails on one rank ends the whole job at once, with a message.

pytest catches every exception, so a failing rank would go on to the next test while the others wait for it in a
collective of this one. Here any failure, on any rank, is printed in full with its rank and followed by `MPI_Abort`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitp.comm.abort import MESSAGE_TAKES_SECONDS, WAIT_FOR_RANK_0_SECONDS
from mpitp.comm.group import Group
from mpitp.comm.start_world import world_group

try:
    import hypothesis

    # All ranks must draw the same examples.
    hypothesis.settings.register_profile("mpi", derandomize=True, database=None, deadline=None)
except ImportError:
    hypothesis = None


def pytest_configure(config: pytest.Config) -> None:
    if hypothesis is not None:
        hypothesis.settings.load_profile("mpi")


@pytest.fixture
def world() -> Group:
    """The group of all ranks, as programs get it (a one-rank job has a SerialGroup)."""
    return world_group()


@pytest.fixture
def shared_path(world: Group) -> Iterator[Path]:
    """One empty directory that all ranks see."""
    path = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    yield Path(path)
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        _end_job(item.config, f"{report.nodeid} failed ({report.when})", report.longreprtext)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.failed:
        _end_job(collector.config, f"collecting {report.nodeid} failed", report.longreprtext)
    return report


def _end_job(config: pytest.Config, headline: str, details: str) -> None:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or mpi.COMM_WORLD.Get_size() == 1:
        return
    rank = mpi.COMM_WORLD.Get_rank()
    if rank:
        time.sleep(WAIT_FOR_RANK_0_SECONDS)  # a failure of all ranks is told by rank 0
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        size = mpi.COMM_WORLD.Get_size()
        print(f"\n{details}\n\nrank {rank} of {size}: {headline}; ending the job", file=sys.stderr, flush=True)
        time.sleep(MESSAGE_TAKES_SECONDS)  # a launcher forgets what it hasn't read when the job is aborted
        mpi.COMM_WORLD.Abort(1)
        os._exit(1)  # MPICH returns from Abort
