"""Collectives in steps: who moves them on, where errors come up, and that nobody moves what a rank waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from mpitp.comm.progress import Need, Progress, Steps, Stepwise, run_to_end


class Gate:
    """A need that a test fulfils. `threads`: who looked at it or waited for it."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.threads: set[str] = set()

    def need(self) -> Need:
        return Need(self._test, self._wait)

    def _test(self) -> bool:
        self.threads.add(threading.current_thread().name)
        return self.is_open.is_set()

    def _wait(self) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.is_open.wait(5)


def through(gates: list[Gate], passed: list[int]) -> Steps:
    """Passes the gates one by one; 'end' is the result."""
    for index, gate in enumerate(gates):
        yield gate.need()
        passed.append(index)
    return "end"


def has_passed(passed: list[int], count: int) -> bool:
    return len(passed) == count


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_test_goes_as_far_as_needs_are_fulfilled() -> None:
    gates, passed = [Gate(), Gate(), Gate()], []
    collective = Stepwise(through(gates, passed))
    assert not collective.test() and passed == []
    gates[0].is_open.set()
    gates[1].is_open.set()
    assert not collective.test() and passed == [0, 1]
    gates[2].is_open.set()
    assert collective.test() and passed == [0, 1, 2]
    assert collective.wait() == collective.wait() == "end"


def test_wait_takes_all_steps() -> None:
    gates, passed = [Gate(), Gate()], []
    for gate in gates:
        gate.is_open.set()
    assert Stepwise(through(gates, passed)).wait() == "end" and passed == [0, 1]
    assert run_to_end(through(gates, passed)) == "end" and passed == [0, 1, 0, 1]


def test_the_thread_moves_collectives_on_and_sleeps_when_there_are_none() -> None:
    progress = Progress()
    gates, passed = [Gate(), Gate()], []
    collective = progress.watch(Stepwise(through(gates, passed)))
    for count, gate in enumerate(gates, 1):
        gate.is_open.set()
        eventually(partial(has_passed, passed, count))
    eventually(lambda: not progress._under_way)
    assert all(gate.threads == {"mpitp progress"} for gate in gates)
    assert collective.has_ended and collective.wait() == "end"
    second = Gate()
    second.is_open.set()
    progress.watch(Stepwise(through([second], passed)))
    eventually(lambda: passed == [0, 1, 0])
    progress.stop()


def test_what_is_waited_for_is_left_to_the_rank() -> None:
    progress, gate = Progress(), Gate()
    collective = Stepwise(through([gate], []))
    collective.test()
    waiting = threading.Thread(target=collective.wait, name="rank")
    waiting.start()
    eventually(lambda: "rank" in gate.threads)
    progress.watch(collective)
    eventually(lambda: not progress._under_way)
    gate.is_open.set()
    waiting.join()
    assert "mpitp progress" not in gate.threads and collective.wait() == "end"


def test_an_error_of_the_thread_is_raised_by_wait() -> None:
    def fails() -> Steps:
        yield Need(lambda: True, lambda: None)
        raise OSError("cable pulled")

    progress = Progress()
    collective = progress.watch(Stepwise(fails()))
    eventually(lambda: collective.has_ended)
    for _ in range(2):
        with pytest.raises(OSError, match="cable pulled"):
            collective.wait()
    progress.stop()


def test_stop_ends_the_turns() -> None:
    progress, gate = Progress(), Gate()
    progress.watch(Stepwise(through([gate], [])))
    eventually(lambda: bool(gate.threads))
    progress.stop()
    gate.threads.clear()
    time.sleep(0.01)
    assert not gate.threads


def test_the_thread_takes_turns_while_the_rank_computes() -> None:
    """A product holds no interpreter lock, so turns come in its midst."""
    import numpy as np

    turns: list[float] = []

    def look() -> bool:
        turns.append(time.perf_counter())
        return False

    def steps() -> Steps:
        yield Need(look, lambda: None)

    progress = Progress()
    progress.watch(Stepwise(steps()))
    a = np.ones((1500, 1500), np.float32)
    began = time.perf_counter()
    a @ a
    ended = time.perf_counter()
    progress.stop()
    inside = [began, *(turn for turn in turns if began < turn < ended), ended]
    assert max(later - earlier for earlier, later in pairwise(inside)) < 0.5 * (ended - began)
