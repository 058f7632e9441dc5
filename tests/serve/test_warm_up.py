"""The texts before the first client: steps under the watch, given up when the server is told to end."""

from __future__ import annotations

import pytest

from mpitp.infer.engine import Engine
from mpitp.infer.schedule import Limits
from mpitp.serve.step_watch import StepWatch
from mpitp.serve.warm_up import warm_up
from tests.infer.imagined import ImaginedExecutor


class Counted(StepWatch):
    """Counts what it is told."""

    def __init__(self) -> None:
        super().__init__(0, lambda: None)
        self.steps = 0
        self.rests = False

    def begin(self) -> None:
        self.steps, self.rests = self.steps + 1, False

    def rest(self) -> None:
        self.rests = True


@pytest.mark.parametrize(("told_after", "most_steps"), [(None, 99), (0, 0), (1, 1), (2, 2)])
def test_the_first_texts_end_with_the_server(told_after: int | None, most_steps: int) -> None:
    engine, watch = Engine(ImaginedExecutor(4), Limits(4, 40)), Counted()  # type: ignore[arg-type]
    warm_up(engine, watch, lambda: told_after is not None and watch.steps >= told_after)
    assert watch.rests and not engine.running and not engine.waiting
    assert engine.pool.free == 4, "nothing is held"
    assert watch.steps <= most_steps and (told_after is not None or watch.steps > 2)
