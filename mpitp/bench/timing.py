"""Timings that can be compared on a busy machine: the tasks take turns, and ratios are taken within a turn.

A machine's speed drifts (other work, clock rate). Two things measured one after the other may then differ by the drift
alone; measured in turns, A B A B ..., both see the same machine. The least time of each tells what the machine can do,
the median of the paired ratios tells what it usually does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.error_stream import ErrorStream

Task = Callable[[], float]  # runs something once and returns its seconds
Clock = Callable[[], float]


@dataclass(slots=True)
class Samples:
    """Seconds of every task in every round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def least(self, *names: str) -> float:
        """The least time of a task; of several, the sum of their least times."""
        return sum(min(self.seconds[name]) for name in names)

    def median(self, *names: str) -> float:
        """The median time of a task; of several, the median of the rounds' sums."""
        return statistics.median(self._sums(names))

    def ratio(self, name: str, *to: str) -> tuple[float, float]:
        """Task `name` against the tasks `to` taken together: (least by least, median of the rounds' ratios)."""
        pairs = zip(self.seconds[name], self._sums(to), strict=True)
        return self.least(name) / self.least(*to), statistics.median(one / other for one, other in pairs)

    def _sums(self, names: tuple[str, ...]) -> list[float]:
        return [sum(round_) for round_ in zip(*(self.seconds[name] for name in names), strict=True)]


# "wall" tells what a user waits. "cpu" counts this process's own seconds on a core: on a machine that other programs
# keep busy it leaves out their turns, but it is right for one rank with one BLAS thread only.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def clocked(work: Callable[[], Any], clock: Clock) -> Task:
    """A task that runs `work` and times it."""

    def task() -> float:
        started = clock()
        work()
        return clock() - started

    return task


def take_turns(tasks: Mapping[str, Task], rounds: int, group: Group, label: str = "") -> Samples:
    """Run all tasks once unrecorded, then `rounds` times in turn. A time is that of the group's slowest rank."""
    samples = Samples({name: [] for name in tasks})
    for index in range(-1, rounds):
        for name, task in tasks.items():
            say_progress(group, f"{label}: warming up" if index < 0 else f"{label}: round {index + 1} of {rounds}")
            group.barrier()
            seconds = group.all_reduce(np.array([task()]), op="max")
            if index >= 0:
                samples.seconds[name].append(float(seconds[0]))
    say_progress(group, "")
    return samples


def say_progress(group: Group, text: str) -> None:
    """Show a line on rank 0's terminal in place of the one before; nothing where stderr is no terminal."""
    if group.rank == 0 and (stream := ErrorStream()).isatty():
        print(f"\r\x1b[K{text}", end="", file=stream, flush=True)
