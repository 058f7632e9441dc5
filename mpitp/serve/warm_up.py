"""A server's first texts, before anybody waits for one: what is compiled, loaded or touched once is so by then."""

from __future__ import annotations

from collections.abc import Callable

from mpitp.infer.engine import Engine
from mpitp.infer.requests import SILENT, Request, room_behind
from mpitp.infer.sampling import Sampling
from mpitp.serve.step_watch import StepWatch

LENGTHS = (3, 2)  # of the prompts


def warm_up(engine: Engine, watch: StepWatch, is_over: Callable[[], bool]) -> None:
    """Two short texts, in steps under the `watch`; given up before the next step once `is_over()`."""
    positions = engine.executor.model.config.cached_positions
    prompts = [[0] * length for length in LENGTHS if length <= positions]
    requests = [Request(prompt, room_behind(prompt, 3, positions), SILENT, Sampling()) for prompt in prompts]
    numbers = [engine.submit(request) for request in requests]
    is_busy = True
    while is_busy and not is_over():
        watch.begin()
        is_busy = engine.step()
    watch.rest()
    for number in numbers:
        engine.cancel(number)
