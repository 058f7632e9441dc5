"""The mesh: how the ranks of a job are arranged along the axes pp, dp, ep, cp and tp.

Axes run from slowest to fastest, so that the ranks of one tensor-parallel group are neighbours and share a node. Six
ranks as dp 2 x tp 3:

    rank            0  1  2  3  4  5
    dp coordinate   0  0  0  1  1  1       mesh["dp"] of rank 4: ranks 1 and 4
    tp coordinate   0  1  2  0  1  2       mesh["tp"] of rank 4: ranks 3, 4 and 5

The run owns the world (files, stopping, agreement, aborting), a model the groups of its mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from math import prod
from typing import Any

from mpitp.comm.group import Group
from mpitp.comm.observed import Arrays, Call, GroupObserver, ObservedGroup
from mpitp.comm.own_group import Wrap, refuse_bypassed, refuse_unmakeable
from mpitp.comm.serial import SerialGroup
from mpitp.comm.weights import Weights, check_weights
from mpitp.errors import ConfigError, UsageError

AXES = ("pp", "dp", "ep", "cp", "tp")

Axes = tuple[str, ...]


class Mesh:
    """One rank's place, and its groups: `mesh["tp"]`, `mesh.along("dp", "cp")`. `world` holds all ranks.

    `sizes`: ranks along each axis. `coordinates`: this rank's place along each. `split(color, rank, size)` makes the
    group of the ranks of one color; all are made here, in one order on every rank, and `along` is no collective.
    `weights`: of the ranks along an axis, by which all that is dealt along it is dealt (`weights.py`).
    """

    def __init__(
        self,
        world: Group,
        sizes: Mapping[str, int],
        split: Callable[[int, int, int], Group],
        weights: Weights | None = None,
    ) -> None:
        self.world = world
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        self._weights = check_weights(weights or {}, self.sizes)
        self.coordinates = _coordinates(self.sizes, world.rank)
        alone = world if world.size == 1 else SerialGroup()  # a watched group of one rank is watched along every axis
        wide = self._wide(AXES)
        self._groups: dict[Axes, Group] = {(): alone, wide: world}
        for count in range(1, len(wide)):
            for axes in combinations(wide, count):
                others = tuple(axis for axis in wide if axis not in axes)
                size = prod(self.sizes[axis] for axis in axes)
                self._groups[axes] = split(self._place(others), self._place(axes), size)

    def __getitem__(self, axis: str) -> Group:
        return self.along(axis)

    def along(self, *axes: str) -> Group:
        """The ranks that differ from this one along these axes only, in mesh order; equal calls give the same group.

        A `SerialGroup` where each of these axes has one rank, the world itself where all the others have.
        """
        unknown = sorted(set(axes) - set(AXES))
        if unknown:
            raise UsageError(f"a mesh has no axis {unknown[0]!r}; its axes are {', '.join(AXES)}")
        return self._groups[self._wide(axes)]

    def weights(self, *axes: str) -> tuple[float, ...]:
        """Of the ranks of `along(*axes)`: the products of theirs along each axis; () where all are equal."""
        if not any(axis in self._weights for axis in axes):
            return ()
        each = (self._weights.get(axis, (1.0,) * self.sizes[axis]) for axis in AXES if axis in axes)
        return tuple(prod(own) for own in product(*each))

    def groups(self) -> Iterator[tuple[Axes, Group]]:
        """This rank's groups, with the axes along which each lies."""
        yield from self._groups.items()

    def _wide(self, axes: Axes) -> Axes:
        """Those of the axes that have several ranks, in mesh order."""
        return tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)

    def _place(self, axes: Axes) -> int:
        """This rank's number among those that differ from it along these axes only."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self.coordinates[axis]
        return number


def make_mesh(
    world: Group, sizes: Mapping[str, int] | None = None, wrap: Wrap | None = None, weights: Weights | None = None
) -> Mesh:
    """Arrange the ranks of `world`; a collective. `sizes`: ranks along each axis; those left out have one, and `tp`
    (left out or 0) has all that the others leave. `wrap`: what is put around every group (`own_group.py`). `weights`:
    of the ranks along axes where they are unequal, {"tp": [2, 1]}.

    Raises ConfigError when the sizes don't make the number of ranks, for weights that don't fit them, and for a group
    whose sums layers would pass by.
    """
    refuse_unmakeable(wrap)
    around = wrap or (lambda group: group)
    whole = around(world)
    refuse_bypassed(whole)
    whole_sizes = mesh_sizes(sizes or {}, world.size)
    return Mesh(whole, whole_sizes, lambda color, rank, size: around(world.split(color, rank)), weights)


def abstract_mesh(sizes: Mapping[str, int], rank: int = 0, ranks: int = 0, weights: Weights | None = None) -> Mesh:
    """The mesh as `rank` sees it where no rank runs: to look at layouts of thousands of ranks. `ranks`: how many there
    would be, of which tp = 0 takes what the other axes leave (0: the product of the sizes).

    Its groups know their rank and size; a collective over several ranks raises UsageError.
    """
    ranks = ranks or prod(sizes.values())
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} is not in a mesh of {_ranks(ranks)}")
    world = _AbstractGroup(rank, ranks) if ranks > 1 else SerialGroup()
    return Mesh(world, mesh_sizes(sizes, ranks), lambda color, rank, size: _AbstractGroup(rank, size), weights)


class _AbstractGroup(ObservedGroup):
    """Ranks that don't run."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(SerialGroup(), _Refusal())
        self.rank, self.size = rank, size


class _Refusal(GroupObserver):
    def around_collective(self, call: Call, arrays: Arrays, group: ObservedGroup, run: Callable[[], Any]) -> Any:
        raise UsageError(f"{call}: the {group.size} ranks of this group are of a mesh without processes")


def _coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """The place of a rank along each axis; `sizes` from the slowest axis to the fastest."""
    places = {}
    for axis in reversed(sizes):
        rank, places[axis] = divmod(rank, sizes[axis])
    return {axis: places[axis] for axis in sizes}


def mesh_sizes(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The sizes with tp filled in. Raises ConfigError where they can't be had from so many ranks."""
    for axis, size in sizes.items():
        if axis not in AXES:
            raise ConfigError(f"a mesh has no axis {axis!r}; its axes are {', '.join(AXES)}")
        if size < (0 if axis == "tp" else 1):
            rule = "0 (all ranks that the other axes leave) or a number of ranks" if axis == "tp" else "at least 1"
            raise ConfigError(f"mesh.{axis} = {size} must be {rule}")
    others = prod(size for axis, size in sizes.items() if axis != "tp")
    whole = {**sizes, "tp": sizes.get("tp", 0) or max(1, ranks // others)}
    if prod(whole.values()) != ranks:
        raise ConfigError(_misfit(whole, ranks))
    return whole


def _misfit(sizes: Mapping[str, int], ranks: int) -> str:
    wanted = prod(sizes.values())
    others = wanted // sizes["tp"]
    named = " with ".join(f"mesh.{axis} = {sizes[axis]}" for axis in AXES if axis == "tp" or sizes.get(axis, 1) > 1)
    whole = "all ranks" if others == 1 else "all ranks that the other axes leave"
    cure = f"set mesh.tp = {ranks // others} (or 0, {whole}), or " if ranks % others == 0 else ""
    other = "" if cure else _nearest(sizes, others, ranks)
    return f"{named} needs {_ranks(wanted)}, the job has {ranks}; {cure}start the job with {_ranks(wanted)}{other}"


def _nearest(sizes: Mapping[str, int], others: int, ranks: int) -> str:
    """Sizes of one axis, next to the one wished for, with which tp can have the ranks that are left."""
    for axis in AXES:
        if axis != "tp" and sizes.get(axis, 1) > 1:
            rest = others // sizes[axis]
            fits = [size for size in range(1, ranks + 1) if ranks % (rest * size) == 0]
            near = [
                max((n for n in fits if n < sizes[axis]), default=0),
                min((n for n in fits if n > sizes[axis]), default=0),
            ]
            if any(near):
                return f", or set mesh.{axis} = {' or '.join(str(n) for n in near if n)} with mesh.tp = 0"
    return ""


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
