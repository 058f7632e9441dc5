"""Where shared memory may be used: what its counters promise, a processor must keep."""

from __future__ import annotations

import platform
import threading

import numpy as np
import pytest

from mpitp.comm import Group, run_threads
from mpitp.comm import node as node_module
from mpitp.comm.node import NodeGroup, place_on_nodes
from mpitp.comm.shared_memory import map_shared, orders_stores

MACHINES = {"x86_64": True, "AMD64": True, "i686": True, "aarch64": False, "arm64": False, "ppc64le": False, "": False}


@pytest.mark.parametrize("machine", MACHINES)
def test_only_processors_that_keep_the_order_of_stores_share_memory(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)

    def program(group: Group) -> None:
        placed = place_on_nodes(group, group)
        assert orders_stores() == isinstance(placed, NodeGroup) == MACHINES[machine]
        assert (map_shared(group, 3, 4096, spin=False) is not None) == MACHINES[machine]
        direct = NodeGroup(group, smallest_bytes=0)
        assert (direct.all_reduce(np.ones(3000)) == 2).all()
        assert (direct._memory is not None) == MACHINES[machine]

    run_threads(2, program)


def test_all_ranks_use_the_library_when_one_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "orders_stores", lambda: threading.current_thread().name != "rank 1")

    def program(group: Group) -> None:
        assert place_on_nodes(group, group) is group

    run_threads(3, program)
