r"""Ranks that can't be told apart: simulated thousands become a few, exactly.

Ranks lie on a mesh and on nodes. Two of them are alike where they have the same work (stage, microbatches, speed) and
stand in the same place among ranks that are alike: in their groups, on their nodes, before and behind in the pipeline.
The coarsest such partition is found by refinement (Weisfeiler and Leman 1968; an equitable partition of a graph): start
from the ranks' own work, and tell apart what has different neighbours until nothing changes.

By induction over time, ranks that are alike do the same at the same moments: what each waits for depends on which
classes it meets, and how fast a transfer is on how many of each class share its links. So one rank of each class is
enough, without an error. With `fold` off every rank is a class of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mpitp.comm.mesh import AXES


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ranks of a job stand: sizes of the mesh's axes, slowest to fastest, and ranks a node."""

    sizes: Mapping[str, int]
    per_node: int

    @property
    def ranks(self) -> int:
        """Of the job."""
        return prod(self.sizes.get(axis, 1) for axis in AXES)

    def stride(self, axis: str) -> int:
        """Between neighbours along an axis."""
        return prod(self.sizes.get(each, 1) for each in AXES[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Of a rank along an axis."""
        return rank // self.stride(axis) % self.sizes.get(axis, 1)

    def node(self, rank: int) -> int:
        """The node of a rank: nodes are filled one after the other."""
        return rank // self.per_node

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes only, in order."""
        members = [rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)]
        for axis in (each for each in AXES if each in axes):
            members = [member + i * self.stride(axis) for member in members for i in range(self.sizes.get(axis, 1))]
        return tuple(sorted(members))

    def neighbour(self, rank: int, step: int) -> int:
        """The rank of the stage before or behind, round and round."""
        stage, stages = self.coordinate(rank, "pp"), self.sizes.get("pp", 1)
        return rank + ((stage + step) % stages - stage) * self.stride("pp")


@dataclass(frozen=True, slots=True)
class Classes:
    """`of`: the class of each rank; `first`: of each class its first rank; `count`: how many ranks it has."""

    of: tuple[int, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]


def classes_of(
    places: Places, work: Sequence[Hashable], groups: Sequence[Sequence[str]], *, fold: bool = True
) -> Classes:
    """The classes of all ranks; `work`: of each rank, `groups`: the axes of each kind of group that they meet in."""
    colours = _numbered(list(work) if fold else list(range(places.ranks)))
    instances = [members for axes in groups for members in _instances(places, axes)]
    instances = [members for members in instances if 1 < len(members) < places.ranks]
    neighbours = [[places.neighbour(rank, step) for rank in range(places.ranks)] for step in (-1, 1)]
    while True:
        refined = _refined(places, colours, instances, neighbours)
        if len(set(refined)) == len(set(colours)):
            return _classes(refined)
        colours = refined


def _refined(
    places: Places,
    colours: Sequence[int],
    instances: Sequence[Sequence[int]],
    neighbours: Sequence[Sequence[int]],
) -> list[int]:
    """The classes, told apart by what stands around a rank; groups and nodes by numbers, which are quick to compare."""
    shapes: dict[Hashable, int] = {}
    nodes = [shapes.setdefault(key, len(shapes)) for key in _by_node(places, colours)]
    keys: list[list[Hashable]] = [[colour, nodes[places.node(rank)]] for rank, colour in enumerate(colours)]
    for members in instances:
        on_node = _by_own_node(places, members, colours)
        shape = tuple(sorted(on_node.values()))
        number = shapes.setdefault(shape, len(shapes))
        for rank in members:
            own = on_node[places.node(rank)]
            keys[rank].append((number, shapes.setdefault(own, len(shapes))))
    for others in neighbours:
        for rank, other in enumerate(others):
            keys[rank].append((colours[other], places.node(other) == places.node(rank)))
    return _numbered([tuple(key) for key in keys])


def _instances(places: Places, axes: Sequence[str]) -> list[tuple[int, ...]]:
    seen: set[int] = set()
    found = []
    for rank in range(places.ranks):
        if rank not in seen:
            members = places.group(rank, axes)
            seen.update(members)
            found.append(members)
    return found


def _by_own_node(places: Places, members: Sequence[int], colours: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """A group's members on each of its nodes, by their classes."""
    on_node: dict[int, list[int]] = {}
    for rank in members:
        on_node.setdefault(places.node(rank), []).append(colours[rank])
    return {node: tuple(sorted(own)) for node, own in on_node.items()}


def _by_node(places: Places, colours: Sequence[int]) -> list[Hashable]:
    starts = range(0, len(colours), places.per_node)
    return [tuple(sorted(colours[start : start + places.per_node])) for start in starts]


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """Equal keys get equal numbers, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _classes(colours: Sequence[int]) -> Classes:
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for rank, colour in enumerate(colours):
        first.setdefault(colour, rank)
        count[colour] = count.get(colour, 0) + 1
    return Classes(tuple(colours), tuple(first.values()), tuple(count[colour] for colour in first))
