"""`python faulty_run.py FAULT RANK STEP WORDS...`: mpitp WORDS, in which one rank goes wrong before a step."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from mpitp import cli
from mpitp.train.loop import TrainLoop
from mpitp.train.step import StepResult


def go_wrong(fault: str, loop: TrainLoop) -> None:
    """Kill or stop this rank, raise, or call a collective that the others don't."""
    if fault in ("KILL", "STOP"):
        os.kill(os.getpid(), signal.Signals[f"SIG{fault}"])
    if fault == "bug":
        raise KeyError("a bug on purpose")
    if fault == "extra":
        loop.world.barrier()
    if fault == "shape":
        loop.world.all_reduce(np.ones(3, np.float32))
    if fault == "loop":
        time.sleep(3600)


def main(fault: str, rank: str, at_step: str, *words: str) -> int:
    """Patch the training loop, then run the command line."""
    real = TrainLoop.step

    def step(self: TrainLoop, number: int) -> StepResult:
        if number == int(at_step):
            if self.world.rank == 0:
                print("now", flush=True)
            if self.world.rank == int(rank):
                go_wrong(fault, self)
        return real(self, number)

    TrainLoop.step = step  # type: ignore[method-assign]
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
