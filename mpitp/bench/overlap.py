"""How much of a step's communication is hidden behind work that was done between its start and its end.

Every all-reduce of a step is timed where it stands (the calls that start and end it), and in turn with the step the
same all-reduces run alone, one after the other. The rank that comes last to a sum waits for nobody: its time is what
the sum itself costs, and what that is less than alone was hidden. What the other ranks spend beyond it, they spend
waiting for the last one, which is still at work; that is told apart. A sum counts as overlapped when its rank did
something else between start and wait: in the plain layout those are the dx of the column-parallel layers, and over
nodes the pieces of the row-parallel layers' y.

What moves a sum on behind a product takes the core's time from the product, and that shows in no sum's time. So the
whole step is timed as well, in turn with one in which every sum is waited for where it is started: what hiding is
worth in the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.bench.timing import clocked, say_progress, take_turns
from mpitp.comm.group import Group, Pending

WORK_SECONDS = 1e-4  # less than that between start and wait is no work
OTHER_BYTES = 2**25  # more than the caches of a core
KINDS = ("overlapped", "waited for at once")


@dataclass(slots=True)
class Sum:
    """One all-reduce: elements, dtype, operation, seconds in the calls to start and end it, seconds between the two.

    Seconds in other sums' calls are no seconds between.
    """

    size: int
    dtype: np.dtype
    op: str
    seconds: float = 0.0
    between: float = 0.0


@contextmanager
def record_sums(group: Group) -> Iterator[list[Sum]]:
    """The all-reduces of this group object until the end of the block."""
    sums: list[Sum] = []
    start, reduce, clock = group.start_all_reduce, group.all_reduce, time.perf_counter
    is_inside, in_calls = [False], [0.0]

    def started(x: Any, op: str = "sum", out: Any = None) -> Pending:
        found = Sum(x.size, x.dtype, op)
        sums.append(found)
        begun = clock()
        is_inside[0] = True
        pending = start(x, op, out)
        is_inside[0] = False
        under_way = clock()
        found.seconds = under_way - begun
        in_calls[0] += found.seconds
        others = in_calls[0]

        def wait() -> Any:
            called = clock()
            result = pending.wait()
            waited = clock() - called
            found.between, found.seconds = called - under_way - (in_calls[0] - others), found.seconds + waited
            in_calls[0] += waited
            return result

        return Pending(wait)

    def at_once(x: Any, op: str = "sum", out: Any = None) -> Any:
        if is_inside[0]:  # a kind of group that does at once what it is to start
            return reduce(x, op, out)
        return started(x, op, out).wait()

    group.start_all_reduce, group.all_reduce = started, at_once  # type: ignore[method-assign]
    try:
        yield sums
    finally:
        del group.start_all_reduce, group.all_reduce


@contextmanager
def sums_at_once(group: Group) -> Iterator[None]:
    """No all-reduce of this group object runs behind anything until the end of the block."""
    start, in_background = group.start_all_reduce, group.in_background
    group.start_all_reduce = lambda *args, **named: Pending.done(start(*args, **named).wait())  # type: ignore[method-assign]
    group.in_background = False
    try:
        yield
    finally:
        del group.start_all_reduce
        group.in_background = in_background


def compare_steps(step: Callable[[], Any], group: Group, rounds: int) -> dict[str, Any]:
    """Least seconds of the step, and of one whose sums are waited for at once; median of the rounds' ratios."""
    if group.size == 1:
        return {}

    def at_once() -> None:
        with sums_at_once(group):
            step()

    tasks = {name: clocked(work, time.perf_counter) for name, work in (("as it is", step), ("at once", at_once))}
    samples = take_turns(tasks, rounds, group, "bench train: sums waited for at once")
    least, median = samples.ratio("at once", "as it is")
    return {
        "step_seconds": samples.least("as it is"),
        "step_seconds_at_once": samples.least("at once"),
        "times_as_fast_least": least,
        "times_as_fast_median": median,
    }


def run_alone(sums: list[Sum], group: Group) -> list[float]:
    """Seconds of each of these sums, one after the other, operands made where the group likes them, caches cold."""
    seconds = []
    other_data = np.zeros(OTHER_BYTES, np.uint8)
    for one in sums:
        x = group.empty((one.size,), one.dtype, np)
        x.fill(0)
        other_data += 1  # drives the operands out of the caches, as the products of the step do
        group.barrier()
        started = time.perf_counter()
        group.start_all_reduce(x, one.op, x).wait()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_overlap(step: Callable[[], Any], group: Group, rounds: int) -> dict[str, dict[str, float]]:
    """Of the sums of each kind: their number, seconds of the last rank in the step and alone, and the share hidden.

    The medians of the rounds; equal on all ranks, empty for one.
    """
    if group.size == 1:
        return {}
    table = []
    for index in range(rounds):
        say_progress(group, f"bench train: overlap, round {index + 1} of {rounds}")
        group.barrier()
        with record_sums(group) as sums:
            step()
        alone = run_alone(sums, group)
        table.append(_by_kind(sums, alone, group))
    say_progress(group, "")
    return {kind: _numbers(np.array([row[index] for row in table])) for index, kind in enumerate(KINDS)}


def _by_kind(sums: list[Sum], alone: list[float], group: Group) -> list[np.ndarray]:
    """For each kind: sums over its calls of (last rank's seconds, the same alone, waiting for it, work between, 1)."""
    own = np.array([(one.seconds, other, one.between) for one, other in zip(sums, alone, strict=True)])
    last, mean = group.all_reduce(own, op="min"), group.all_reduce(own) / group.size
    rows = np.stack((last[:, 0], last[:, 1], mean[:, 0] - last[:, 0], mean[:, 2], np.ones(len(sums))), axis=1)
    is_behind_work = mean[:, 2] > WORK_SECONDS
    return [rows[is_behind_work].sum(axis=0), rows[~is_behind_work].sum(axis=0)]


def _numbers(rounds: np.ndarray) -> dict[str, float]:
    """`rounds` [round, 5]: rows as of `_by_kind`."""
    last, alone, waiting, work, calls = (float(statistics.median(column)) for column in rounds.T)
    hidden = [1 - row[0] / row[1] for row in rounds if row[1]]
    return {
        "calls": calls,
        "seconds_in_step": last,
        "seconds_alone": alone,
        "seconds_waiting_for_the_last_rank": waiting,
        "seconds_of_work_between": work,
        "hidden": float(statistics.median(hidden)) if hidden else 0.0,
    }


def overlap_lines(found: dict[str, dict[str, float]], steps: dict[str, float]) -> list[str]:
    """For the report: of `measure_overlap` and `compare_steps`."""
    if not found:
        return []
    lines = ["", "all-reduces in the step (without waiting for the last rank) against the same ones alone, in turn"]
    for kind, row in found.items():
        behind = f", behind {1e3 * row['seconds_of_work_between']:.0f} ms of work" if kind == KINDS[0] else ""
        lines.append(
            f"  {kind:20}{row['calls']:4.0f} x {1e3 * row['seconds_in_step']:8.1f} ms, "
            f"alone {1e3 * row['seconds_alone']:8.1f} ms: {100 * max(row['hidden'], 0):.0f} % hidden{behind}; "
            f"waiting for the last rank {1e3 * row['seconds_waiting_for_the_last_rank']:.1f} ms"
        )
    lines.append(
        f"the step with every sum waited for where it is started: {steps['step_seconds_at_once']:.3f} s, as it is "
        f"{steps['step_seconds']:.3f} s (least, in turn); {steps['times_as_fast_least']:.3f} x as fast, "
        f"{steps['times_as_fast_median']:.3f} x by the median of pairs"
    )
    return lines
