"""A parameter, its gradient, and what part of the global tensor this rank holds.

The spec names the *parts* of a parameter, never raw rows of a fused matrix: the attention's fused input projection has
the parts q, k and v, each cut by heads on its own. Slices to load and save, initial values, the gradient norm and the
checks for drift all follow from the spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Array = Any


@dataclass(frozen=True, slots=True)
class Part:
    """One named part of a parameter: rows `held` of a global tensor with `size` rows along the cut dim.

    Rows in `owned` (within `held`) are this rank's to save and to count; the others are replicas owned elsewhere.
    `blocks` cut `held` into the pieces whose products are computed by themselves (one piece, unless in invariant mode).
    """

    name: str
    size: int
    held: range
    owned: range
    blocks: tuple[range, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks and len(self.held):
            object.__setattr__(self, "blocks", (self.held,))


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """How a parameter is cut: along `dim`, into `parts` that lie one after the other in the local array.

    `shape` is the shape of the local array. A replicated parameter has one part that holds everything; `owned` is then
    empty on all ranks but the first, so that each global element is owned exactly once in either case.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Part, ...]

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(len(part.held) == part.size for part in self.parts)

    def global_shape(self, part: Part) -> tuple[int, ...]:
        """Shape of the global tensor that `part` is a piece of."""
        return self.shape[: self.dim] + (part.size,) + self.shape[self.dim + 1 :]

    def local_parts(self) -> Iterator[tuple[Part, slice]]:
        """Each part with the slice of the local array, along `dim`, where its held rows lie."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + len(part.held))
            start += len(part.held)

    def view(self, array: Array, rows: slice) -> Array:
        """Rows of the local array along the cut dim."""
        return array[(slice(None),) * self.dim + (rows,)]

    def owned_rows(self) -> Iterator[tuple[Part, slice]]:
        """Each part with the slice of the local array that this rank owns."""
        for part, rows in self.local_parts():
            start = rows.start + part.owned.start - part.held.start
            yield part, slice(start, start + len(part.owned)) if len(part.owned) else slice(rows.start, rows.start)


@dataclass(slots=True, eq=False)
class Param:
    """An array with its gradient. Gradients are accumulated: backward adds, the optimizer's `zero_grad` clears.

    `grad` is None until the first `accumulate`, so that the first product can be written straight into place.
    """

    data: Array
    spec: ShardSpec
    init_std: float = 0.0  # standard deviation of the initial values; 0: constant `init_value`
    init_value: float = 0.0
    decay: bool = True  # whether weight decay applies (matrices yes; biases and norm weights no)
    grad: Array | None = field(default=None)

    def accumulate(self, grad: Array) -> None:
        """Add to the gradient. The array is taken over when it is the first one: don't write to it afterwards."""
        if self.grad is None:
            self.grad = grad
        else:
            self.grad += grad


def replicated(name: str, shape: tuple[int, ...], rank: int) -> ShardSpec:
    """The spec of a parameter that every rank of the group holds whole; rank 0 owns it."""
    rows = range(shape[0])
    return ShardSpec(shape, 0, (Part(name, shape[0], rows, rows if rank == 0 else range(0)),))


def prefixed(prefix: str, params: dict[str, Param]) -> dict[str, Param]:
    """The same parameters, their names preceded by `prefix.`."""
    return {f"{prefix}.{name}": param for name, param in params.items()}
