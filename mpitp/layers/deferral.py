"""Weight gradients that are computed later than the gradients of the inputs: backward in two halves.

    dx = dy W         the layer before waits for it
    dW = dy^T x       nobody waits for it before the update

A product hands the computing of dW to its parameter (`Param.accumulate_made`), which does it at once, or leaves it to
the deferral that a pipeline has given it. What is cheap (of biases, norms, a lookup) is computed at once, and added
with the others. The arrays that a task needs stay alive until it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Task = Callable[[], None]


class Deferral:
    """Takes tasks while it is open, and has them run at once while it isn't."""

    def __init__(self) -> None:
        self._taken: list[Task] | None = None

    def run(self, task: Task) -> None:
        """Run the task, now or later."""
        if self._taken is None:
            task()
        else:
            self._taken.append(task)

    @contextmanager
    def open(self) -> Iterator[list[Task]]:
        """Collects what comes meanwhile in the list that it gives, in the order in which it is to be run."""
        self._taken = []
        try:
            yield self._taken
        finally:
            self._taken = None
