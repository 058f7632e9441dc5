"""What an activation is along each axis of the mesh, checked when a model is put together, before anything is computed.

| letter | type      | the ranks along the axis hold                  | their gradients       |
|--------|-----------|------------------------------------------------|-----------------------|
| I      | invariant | equal values                                   | I: equal              |
| R      | replicate | equal values, each for its own part of the work| P: to be summed       |
| V      | varying   | each its own piece                             | V: each its own piece |
| P      | partial   | summands                                       | R: equal              |

The terms are those of JAX's shard_map. A pair (`mappings.py`) is a change of type: CopyToTP from I to R, ReduceFromTP
from P to I. A layer says what it gives for what it is given (`Layer.placements`), so that a forgotten sum, a sum too
many or along another axis, or a weight whose gradient nobody sums is an error that names the place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from mpitp.errors import PlacementError
from mpitp.layers.param import Param
from mpitp.layers.placement import Cut, Part

INVARIANT, REPLICATE, VARYING, PARTIAL = "I", "R", "V", "P"
WORDS = {INVARIANT: "invariant", REPLICATE: "replicate", VARYING: "varying", PARTIAL: "partial"}
_GRADIENT = {INVARIANT: INVARIANT, REPLICATE: PARTIAL, VARYING: VARYING, PARTIAL: REPLICATE}

Columns = tuple[tuple[str, Cut], ...]  # named parts of the last dim, neighbours in the local array


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A letter for each axis. `columns`: how the last dim is cut where it is; (): it isn't.

    `made_by`: the layer whose output it is, for messages.
    """

    letters: tuple[tuple[str, str], ...]
    columns: Columns = ()
    made_by: str = "the input"

    @classmethod
    def of(cls, axes: Iterable[str], **letters: str) -> ArrayType:
        """Invariant along all `axes` but those that are named: `ArrayType.of(("dp", "tp"), dp="V")`."""
        return cls(tuple((axis, letters.get(axis, INVARIANT)) for axis in axes))

    def along(self, axis: str) -> str:
        """The letter along `axis`; along one that the mesh doesn't have nothing can differ."""
        return dict(self.letters).get(axis, INVARIANT)

    def changed(self, axis: str, letter: str, columns: Columns = ()) -> ArrayType:
        """The same with another letter along `axis`, the last dim now cut as `columns` say."""
        letters = tuple((each, letter if each == axis else old) for each, old in self.letters)
        return replace(self, letters=letters, columns=columns)

    def of_layer(self, name: str) -> ArrayType:
        """The same as the output of the layer `name`."""
        return replace(self, made_by=name)

    @property
    def gradient(self) -> ArrayType:
        """What the gradient of such an array is."""
        return replace(self, letters=tuple((axis, _GRADIENT[letter]) for axis, letter in self.letters))

    def expect(self, axis: str, allowed: str, what: str, cure: str = "") -> None:
        """Raise PlacementError unless the letter along `axis` is one of `allowed`."""
        found = self.along(axis)
        if found not in allowed:
            wanted = " or ".join(f"{letter} ({WORDS[letter]})" for letter in allowed)
            self._refuse(f"{what} must be {wanted} along {axis}, found {found} ({WORDS[found]})", cure)

    def expect_summed(self, what: str) -> None:
        """Refuse summands: only sums are linear."""
        for axis, _ in self.letters:
            self.expect(axis, INVARIANT + REPLICATE + VARYING, what, f"a sum over {axis} is missing before it")

    def expect_columns(self, columns: Columns, what: str) -> None:
        """Refuse an array whose last dim is cut in another way than `columns`."""
        if [cut for _, cut in self.columns] != [cut for _, cut in columns]:
            self._refuse(f"{what} must be cut as {_told(columns)}, found {_told(self.columns)}")

    def expect_like(self, other: ArrayType, what: str) -> None:
        """Refuse to add arrays of different types."""
        for axis, letter in self.letters:
            other.expect(axis, letter, what, f"what it is added to is {letter} (made by {self.made_by})")
        other.expect_columns(self.columns, what)

    def expect_gradient_summed(self, name: str, param: Param) -> None:
        """Refuse a parameter whose gradient, where x of this type meets it, isn't what its placement says."""
        placement = param.placement
        for axis, letter in self.letters:
            if axis in placement.axes:
                continue
            is_partial, is_declared = letter in (REPLICATE, VARYING), axis in placement.partial
            if is_partial and not is_declared:
                raise PlacementError(
                    f"the gradient of {name} is a summand along {axis}, since what meets it is {letter} there "
                    f"(made by {self.made_by}), but nobody sums it",
                    cure=f"declare the parameter partial along {axis}",
                )
            if is_declared and not is_partial:
                raise PlacementError(
                    f"the gradient of {name} is whole along {axis}, since what meets it is {letter} there "
                    f"(made by {self.made_by}), but its placement says partial: it would be summed once more",
                    cure=f"take {axis} out of the parameter's partial axes",
                )

    def joined(self, parts: int, what: str) -> ArrayType:
        """The type of what is made, column by column, of the last dim's `parts` (gate times up): that of one of them.

        Raises PlacementError unless there are as many, cut alike, and no summands.
        """
        self.expect_summed(what)
        if not self.columns:
            return self
        first = self.columns[0][1]
        self.expect_columns(tuple((name, first) for name, _ in (self.columns * parts)[:parts]), what)
        return replace(self, columns=self.columns[:1])

    def _refuse(self, problem: str, cure: str = "") -> NoReturn:
        raise PlacementError(problem, self.made_by, cure)

    def __str__(self) -> str:
        return ", ".join(f"{letter} along {axis}" for axis, letter in self.letters)


def columns_of(parts: tuple[Part, ...], dim: int) -> Columns:
    """The cut of a weight's dim as that of the activation's columns which it makes or meets."""
    return tuple((part.name, part.dims[dim]) for part in parts)


def _told(columns: Columns) -> str:
    if not columns:
        return "nothing (whole rows)"
    return ", ".join(
        f"{name or 'columns'} {c.held.start}:{c.held.stop} of {c.size} along {c.axis}" for name, c in columns
    )
