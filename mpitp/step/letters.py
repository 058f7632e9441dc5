"""The letters that are shown beside an array, one for each axis of the mesh along which there are several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpitp.layers.algebra import UNITS
from mpitp.layers.array_type import INVARIANT, PARTIAL, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.param import Param
from mpitp.step.film import Shown
from mpitp.step.picture import Picture

TP = "tp"
# What a collective takes and gives; others, from each rank its own to each its own.
COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "all_reduce_in_order"), (PARTIAL, INVARIANT)),
    **{"reduce_scatter": (PARTIAL, VARYING), "all_gather": (VARYING, INVARIANT), "broadcast": (VARYING, INVARIANT)},
}


@dataclass(frozen=True, slots=True)
class Letters:
    """Along `axes`, the fastest last. Stages (pp) hold other layers, and so have no letter."""

    axes: tuple[str, ...] = (TP,)

    def shown(self, name: str, kind: ArrayType, picture: Picture, role: str = "out") -> Shown:
        """An array of this type."""
        letters = tuple((axis, kind.along(axis)) for axis in self.axes)
        part = kind.columns[0][0] or "columns" if kind.columns else "rows"
        along = UNITS.get(part, part) if letters[-1][1] == VARYING else ""
        return Shown(name, role, letters[-1][1], along, picture, letters if self.axes != (TP,) else ())

    def changed(self, kind: ArrayType, axis: str, letter: str) -> ArrayType:
        """The same with another letter along `axis` (several as "dp+cp"): what a collective is given or gives there."""
        along = axis.split("+")
        return ArrayType(tuple((each, letter if each in along else kind.along(each)) for each in self.axes))

    def of_param(self, param: Param) -> ArrayType:
        """With one rank all is whole, but stays cut in the reader's mind."""
        placement = param.placement
        letters = {axis: REPLICATE if axis in placement.partial else INVARIANT for axis in self.axes}
        letters |= {axis: VARYING for axis in self.axes if axis in placement.axes}
        kind = ArrayType(tuple(letters.items()))
        return replace(kind, columns=columns_of(placement.parts, placement.fused)) if TP in placement.axes else kind
