"""Collectives that move on while their rank computes.

A message that was started moves on only inside calls of the MPI library, unless network hardware does it alone: a
rank that multiplies matrices between `start` and `wait` finds at `wait` that hardly anything has happened. So a
collective under way is written as a generator: it yields what it needs next (messages that must have come, ranks that
must be ready) and does what there is to do then (adds, sends on). Whoever resumes it moves it on:

    the rank, in wait()              waits for each need in turn, to the end
    the process's progress thread    looks at the need every now and then, and goes on where it is fulfilled

A matrix product holds no interpreter lock, so the thread gets its turn in the middle of one. On the rank's only core
each turn interrupts the product: the thread naps between turns and looks several times in each. It sleeps when
nothing is under way, and leaves alone what the rank waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpitp.comm.group import Pending

if TYPE_CHECKING:  # the command line imports no NumPy
    from mpitp.backend.arrays import Array

NAP_SECONDS = 400e-6  # a turn costs 20 us of a product; buffers of the network hold most of what comes in a nap
LOOKS = 10  # in one turn: a look takes 1 us, and what is read makes room for more


@dataclass(frozen=True, slots=True)
class Need:
    """What a collective needs to go on: `test` tells whether it is there, `wait` returns when it is."""

    test: Callable[[], bool]
    wait: Callable[[], Any]


Steps = Generator[Need, None, "Array"]  # yields what it needs next, returns the collective's result


def run_to_end(steps: Steps) -> Array:
    """Take all steps, and wait for what they need."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        return end.value


class Stepwise(Pending):
    """A collective as a generator. Only one thread at a time moves it on, and never while the rank waits for it."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(self._finish, self._move)
        self._steps = steps
        self._need: Need | None = None
        self._turn = threading.Lock()
        self._error: BaseException | None = None
        self.is_waited_for = False
        self.has_ended = False

    def _move(self) -> bool:
        """Go on as far as is possible without waiting; whether it has ended. An error is kept for `wait`."""
        if not self.has_ended and self._turn.acquire(blocking=False):
            try:
                while not self.has_ended and (self._need is None or self._need.test()):
                    self._go_on()
            except BaseException as error:
                self._error, self.has_ended = error, True
            finally:
                self._turn.release()
        return self.has_ended

    def _finish(self) -> Array:
        self.is_waited_for = True
        with self._turn:
            while not self.has_ended:
                if self._need is not None:
                    self._need.wait()
                self._go_on()
        if self._error is not None:
            raise self._error
        return self._result

    def _go_on(self) -> None:
        try:
            self._need = next(self._steps)
        except StopIteration as end:
            self._result, self.has_ended = end.value, True


class Progress:
    """The thread that moves collectives on, one for the process; it starts with the first of them."""

    def __init__(self) -> None:
        self._under_way: list[Stepwise] = []
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def watch(self, collective: Stepwise) -> Stepwise:
        """Move `collective` on from time to time until it has ended or is waited for."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpitp progress", daemon=True)
                self._thread.start()
            self._under_way.append(collective)
            self._changed.notify()
        return collective

    def stop(self) -> None:
        """No more turns: MPI is about to end. Returns when the thread is out of the library."""
        self._is_stopped = True
        with self._turn:
            return

    def _run(self) -> None:
        while not self._is_stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way)
            time.sleep(NAP_SECONDS)
            with self._turn:
                for collective in tuple(self._under_way):
                    if self._is_stopped:
                        return
                    if self._give_turn(collective):
                        with self._changed:
                            self._under_way.remove(collective)

    @staticmethod
    def _give_turn(collective: Stepwise) -> bool:
        """Whether it was the last one that the collective needs."""
        return any(collective.is_waited_for or collective.test() for _ in range(LOOKS))


progress = Progress()
