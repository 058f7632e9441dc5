"""Every rank agrees on the outcome of every test, so that one rank's failure neither hangs nor hides.

pytest catches exceptions: a rank whose assertion fails before a collective goes on to its next test, and the others
wait in that collective for ever. Here the ranks meet after each phase of each test. A rank that failed and whose peers
don't come says what happened and aborts the job; when they do come, all ranks report the failure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from typing import Any

import pytest

PATIENCE_SECONDS = 20.0

_meeting_point: list[Any] = []


def meeting_point() -> Any:
    """A communicator of this file's own, made at the first call (all ranks make it together)."""
    if not _meeting_point:
        from mpi4py import MPI

        _meeting_point.append(MPI.COMM_WORLD.Dup())
    return _meeting_point[0]


def peers_come(comm: Any, patience: float) -> bool:
    """Whether every rank arrives here; after `patience` seconds the answer is no."""
    request = comm.Ibarrier()
    deadline = time.monotonic() + patience
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make the outcome of each phase the same on all ranks."""
    report = yield
    if not item.config.getoption("--with-mpi"):
        return report
    comm = meeting_point()
    if not peers_come(comm, PATIENCE_SECONDS if report.failed else float("inf")):
        print(
            f"\nrank {comm.rank}: {item.nodeid} failed, other ranks hang:\n{report.longreprtext}", file=sys.__stderr__
        )
        sys.__stderr__.flush()
        comm.Abort(1)
    outcomes = comm.allgather((report.outcome, report.longreprtext if report.failed else ""))
    if len({outcome for outcome, _ in outcomes}) > 1 and not report.failed:
        texts = [f"rank {rank}: {outcome}\n{text}" for rank, (outcome, text) in enumerate(outcomes)]
        report.outcome, report.longrepr = "failed", "ranks disagree on the outcome\n" + "\n".join(texts)
    return report
