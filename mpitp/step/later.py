"""Weight gradients that a schedule puts off: `dx` at once, `dW` when the stage would otherwise stand still.

backward         dx = dy W          told where it is computed
weight grads     dW = dy^T x        told where it is computed, by the part of the equation that says so
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from mpitp.layers.algebra import Segment
from mpitp.layers.deferral import Deferral, Task

PUT_OFF = "weight gradients are put off: nobody waits for them"
DONE_LATER = "was put off: done where this stage would stand still"


class WatchedDeferral(Deferral):
    """Tells of every task that is put off. `put_off(task)` returns what is to be done in its place."""

    def __init__(self, put_off: Callable[[Task], Task]) -> None:
        super().__init__()
        self.put_off = put_off

    def run(self, task: Task) -> None:
        super().run(task if self._taken is None else self.put_off(task))


def halves(segment: Segment, weights: list[str], *, has_bias: bool) -> tuple[Segment, Segment]:
    """A segment of backward without the gradients of `weights` (letters), and these alone; where the equation can't be
    parted, both have all of it.
    """
    whole = segment.equation_of(has_bias)
    parts = whole.split(", ")
    grads = [part for part in parts if part.startswith(tuple(f"d{name}" for name in weights))]
    others = [part for part in parts if part not in grads]
    if not all("=" in part for part in parts):
        grads = others = parts
    second = ", ".join(grads)
    used = " ".join(name for name in segment.inputs.split() if re.search(rf"\b{name}(?![A-Za-z])", second))
    return (
        replace(segment, equation=", ".join(others), grads=False, note=PUT_OFF),
        replace(segment, equation=second, inputs=used, output="", note=DONE_LATER),
    )
