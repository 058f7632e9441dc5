"""Serial and thread groups; tests/mpi/test_groups.py runs the same checks on MPI groups."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpitp.comm import ForwardingGroup, SerialGroup, run_threads, threads
from mpitp.comm.group import Group
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.comm.threads import BrokenGroup
from tests.comm.group_checks import CHECKS

SIZES = [1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_group(name: str, size: int, xp: Any) -> None:
    run_threads(size, CHECKS[name], xp)


def test_one_rank_costs_nothing() -> None:
    group, x = SerialGroup(), np.ones((3, 4))
    assert group.all_reduce(x) is x
    assert group.all_gather(x, 1) is x
    assert group.reduce_scatter(x, [3]) is x
    assert group.broadcast(x) is x


def test_one_rank_sends_to_itself() -> None:
    group, x = SerialGroup(), np.ones(3)
    group.send(x, 0, tag=1)
    x[:] = 2
    assert group.recv(x, 0, tag=1).tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="wait for ever"):
        group.recv(x, 0, tag=1)


def test_results_come_in_rank_order() -> None:
    assert run_threads(5, lambda group: group.rank * 10) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_failing_rank_is_named_and_frees_the_others(size: int) -> None:
    def program(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("broken on purpose")
        if group.rank == 0:
            group.recv(np.zeros(3), 1)
        group.split(0, 0).barrier()

    start = time.perf_counter()
    with pytest.raises(KeyError, match="broken on purpose") as raised:
        run_threads(size, program)
    assert raised.value.__notes__ == [f"raised on rank 1 of {size}"]
    assert time.perf_counter() - start < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_failure_breaks_split_groups_too() -> None:
    def program(group: Group) -> None:
        half = group.split(group.rank // 2, group.rank)
        if group.rank == 3:
            raise ValueError("no")
        half.barrier()
        half.barrier()
        group.barrier()

    with pytest.raises(ValueError, match="no"):
        run_threads(4, program)


def test_timeout_says_where_ranks_stand() -> None:
    def program(group: Group) -> None:
        if group.rank:
            group.barrier()

    with pytest.raises(TimeoutError, match=r"1 of 2 ranks had not ended after 0\.3 s(.|\n)*group\.barrier\(\)"):
        run_threads(2, program, timeout=0.3)


def test_a_rank_that_works_may_take_its_time() -> None:
    """Only ranks that all wait for one another are stuck: not while one computes, or stands at a debugger's prompt."""

    def program(group: Group) -> float:
        if group.rank == 1:
            time.sleep(0.8)
        group.barrier()
        return float(group.recv(np.zeros(1), 0)[0]) if group.rank else group.send(np.ones(1), 1) or 1.0

    assert run_threads(2, program, timeout=0.1) == [1.0, 1.0]


def test_there_is_no_limit_under_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "gettrace", lambda: lambda *event: None)
    ready = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 0:
            group.barrier()  # waits for a rank that stands in no collective
        else:
            with threads._waiting():
                ready.wait(0.6)
            group.barrier()

    run_threads(2, program, timeout=0.1)
    monkeypatch.undo()
    with pytest.raises(TimeoutError, match="waiting for one another"):
        run_threads(2, program, timeout=0.1)


def test_different_collectives_are_an_error_that_says_who_called_what() -> None:
    def program(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(np.zeros(3))
        else:
            group.all_gather(np.zeros(3))

    with pytest.raises(RuntimeError, match=r"rank 0: all_reduce sum \(3,\) float64; rank 1: all_gather"):
        run_threads(2, program)


def test_different_shapes_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="different collectives"):
        run_threads(3, lambda group: group.all_reduce(np.zeros(3 + group.rank)))


def test_threads_inherit_error_state() -> None:
    with np.errstate(over="raise"):
        states = run_threads(2, lambda group: np.geterr()["over"])
    assert states == ["raise", "raise"]


def test_broken_group_without_another_cause_is_reported() -> None:
    def program(group: Group) -> None:
        raise BrokenGroup("alone")

    with pytest.raises(BrokenGroup):
        run_threads(2, program)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_group_that_hands_on(name: str, size: int) -> None:
    run_threads(size, lambda group: CHECKS[name](ForwardingGroup(group), np))


class Doubling(ForwardingGroup):
    """An all-reduce of its own."""

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        return 2 * self.inner.all_reduce(x, op)


def test_all_reduce_of_ones_own_is_what_is_started() -> None:
    def program(group: Group) -> None:
        for each in (Doubling(group), ObservedGroup(Doubling(group), Silent())):
            assert each.start_all_reduce(np.ones(3)).wait().tolist() == [4, 4, 4]

    run_threads(2, program)


class Silent(GroupObserver):
    def around_collective(self, call: Any, arrays: Any, group: Any, run: Any) -> Any:
        return run()
