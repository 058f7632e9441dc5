"""A traced step on real MPI ranks: the ledger equals the closed form, and every rank has its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpitp.comm import world_group
from mpitp.trace.clock import clock_offset
from tests.trace.test_ledger import train_traced, wrong_rows

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("blocks", [0, 4], ids=["plain", "invariant"])
def test_ledger_of_real_ranks(mpi_tmp_path: Path, blocks: int) -> None:
    group = world_group()
    path = mpi_tmp_path / f"trace-{blocks}.json"
    trace = train_traced(group, "llama 9/3", blocks, path)
    ok = trace is None or wrong_rows(trace) == []
    if trace is not None:
        events = json.loads(path.read_text())["traceEvents"]
        ok = ok and {event["tid"] for event in events if event["ph"] == "X"} == set(range(group.size))
    assert all(group.all_gather_objects(ok)), trace


def test_clocks_of_one_node_agree() -> None:
    assert abs(clock_offset(world_group())) < 0.05  # ranks may have to wait for a core
