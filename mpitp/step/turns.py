"""Whose turn it is: the pass, the microbatch and the chunk that a rank is at.

A schedule may take microbatches backwards in another order than forwards. What tells them apart is the context: the
one that a layer's forward has given comes back to its backward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpitp.layers.layer import BACKWARD, FORWARD


class Turn(NamedTuple):
    """What a rank does in one go."""

    phase: str = FORWARD
    microbatch: int = 0
    chunk: int = 0


@dataclass(slots=True)
class Turns:
    """`chunks`: in which chunk of the model each of its layers is."""

    chunks: dict[str, int] = field(default_factory=dict)
    now: Turn = Turn()  # noqa: RUF009 (it is immutable)
    _forwards: Counter[str] = field(default_factory=Counter)
    _given: dict[str, list[tuple[Any, int]]] = field(default_factory=dict)  # contexts that are to come back

    def of(self, layer: str, phase: str, ctx: Any) -> Turn:
        """The turn in which a layer of the model itself is run. `ctx`: what its backward is given."""
        chunk = self.chunks.get(layer, max(self.chunks.values(), default=0))  # the loss stands behind the last
        if phase == FORWARD:
            self._forwards[layer] += 1
            return Turn(phase, self._forwards[layer] - 1, chunk)
        given = self._given[layer]
        place = next((at for at, (own, _) in enumerate(given) if own is ctx), 0)
        return Turn(BACKWARD, given.pop(place)[1], chunk)

    def gave(self, layer: str, ctx: Any) -> None:
        """Forward of a layer of the model itself has ended, and has given this."""
        self._given.setdefault(layer, []).append((ctx, self.now.microbatch))
