"""What a rank keeps for backward, in bytes: what forward has left, and what weight gradients that are put off need."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.step.contents import arrays_in


@dataclass(slots=True)
class Held:
    """Bytes of arrays by their identity, for each owner who keeps them alive; what two keep counts once."""

    _owned: dict[Hashable, dict[int, int]] = field(default_factory=dict)

    def keep(self, owner: Hashable, value: Any) -> None:
        """The owner keeps every array in `value`, a context; of a view, the whole."""
        own = self._owned.setdefault(owner, {})
        for array in arrays_in(value):
            while isinstance(array.base, np.ndarray):
                array = array.base
            own[id(array)] = array.nbytes

    def drop(self, owner: Hashable) -> None:
        """The owner lets go of all."""
        self._owned.pop(owner, None)

    def clear(self) -> None:
        """All do."""
        self._owned.clear()

    @property
    def nbytes(self) -> int:
        """Of all that is kept."""
        return sum({key: size for own in self._owned.values() for key, size in own.items()}.values())


def captured(task: Callable[[], Any]) -> list[Any]:
    """What the variables of a function keep alive: arrays, and what functions among them keep."""
    found: list[Any] = []
    for cell in getattr(task, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, np.ndarray):
            found.append(value)
        elif callable(value):
            found += captured(value)
    return found
