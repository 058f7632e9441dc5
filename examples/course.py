"""What the numbered examples share: ranks as threads or processes, printing once, counting traffic, proofs."""

import math
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from mpitp.backend.threads import limit_blas_threads
from mpitp.comm import Group, run_threads, world_group
from mpitp.comm.abort import READER_LEFT
from mpitp.comm.environment import launch_claim
from mpitp.comm.observed import Call, GroupObserver, ObservedGroup


def on_ranks(program: Callable[[Group], Any], ranks: int = 3) -> None:
    """Run `program(group)` on every rank: MPI's ranks under a launcher, else `ranks` threads of this process."""
    limit_blas_threads(1)
    tidy_ctrl_c()
    if launch_claim(os.environ).variable:
        program(world_group())
    else:
        try:
            run_threads(ranks, program)
        except BrokenPipeError:  # who read has left, as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(READER_LEFT)


def tidy_ctrl_c() -> None:
    """From here on Ctrl-C ends a script at once and without a traceback: the launcher tells it, or a line."""
    if launch_claim(os.environ).variable:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends also a rank that waits inside of MPI
    else:
        sys.excepthook = told


def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """How an example that ends says why: of Ctrl-C a line, of anything else Python's traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("\nstopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def say(group: Group, text: str = "") -> None:
    """Print once, whatever the number of ranks."""
    if group.rank == 0:
        print(text, flush=True)


def say_each(group: Group, text: str) -> None:
    """Print every rank's line, in the order of the ranks."""
    for rank, line in enumerate(group.all_gather_objects(text)):
        say(group, f"  rank {rank:<2}  {line}")


def difference(group: Group, *pairs: tuple[Any, Any]) -> float:
    """The largest difference between the two of each pair, on any rank."""
    own = max((float(np.abs(np.asarray(a) - b).max(initial=0.0)) for a, b in pairs), default=0.0)
    return float(group.all_reduce(np.array([own]), op="max")[0])


def prove(group: Group, claim: str, *pairs: tuple[Any, Any], limit: float = 1e-12) -> None:
    """Print how far apart the two of each pair are; stop when it's more than rounding."""
    worst = difference(group, *pairs)
    say(group, f"{'PROOF ' if worst <= limit else 'WRONG '} {claim}: largest difference {worst:.1e}")
    if worst > limit:
        group.barrier()  # the line above is printed before any rank ends the job
        raise AssertionError(f"{claim}: {worst} exceeds {limit}")


def exercise(group: Group, text: str) -> None:
    """What to think about next."""
    say(group, "\n" + textwrap.fill(f"EXERCISE  {text}", 80, subsequent_indent=" " * 10, break_on_hyphens=False))


class Watched(ObservedGroup):
    """A group that writes down every collective in `calls` and hands it on."""

    def __init__(self, inner: Group) -> None:
        self.calls: list[Call] = []
        super().__init__(inner, Notebook(self.calls))


class Notebook(GroupObserver):
    """Writes down every collective."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def around_collective(self, call: Call, arrays: Any, group: Group, run: Callable[[], Any]) -> Any:
        if not call.op.startswith("wait"):  # one that overlaps with work is a call to start it and one to wait for it
            self.calls.append(replace(call, op=call.op.removeprefix("start ")))
        return run()


def nbytes(call: Call) -> int:
    """Bytes of the array that a rank hands to a collective."""
    return math.prod(call.shape) * np.dtype(call.dtype or "u1").itemsize
