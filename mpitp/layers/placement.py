"""Where a parameter lies: which piece of which global tensors this rank holds, dim by dim, and what is still to be
summed.

    local array = its parts one after the other along dim `fused`; a part is a box of its global tensor,
    part.index = (held rows of dim 0, held rows of dim 1, ...), each dim cut along one axis of the mesh or not at all

The parts of a fused parameter (q, k and v; gate and up) are named and cut each by itself, never by raw rows of the
fused matrix. What a rank loads, saves, initialises and counts in the gradient norm, and which gradients are summed
before the update, all follow from the placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mpitp.layers.partition import Share

Index = tuple[slice, ...]
Box = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One dim of a global tensor: `held` of its `size` rows are on this rank, cut along `axis` ("": not cut).

    Rows in `owned` (within `held`) are this rank's to save and to count; the others are replicas owned by its
    neighbours on the axis. `blocks` cut `held` into the pieces whose products are computed by themselves.
    """

    size: int
    held: range
    owned: range
    blocks: tuple[range, ...]
    axis: str = ""

    @classmethod
    def whole(cls, size: int) -> Cut:
        """A dim that every rank holds whole."""
        rows = range(size)
        return cls(size, rows, rows, (rows,) if size else ())

    @classmethod
    def of(cls, share: Share, axis: str = "tp") -> Cut:
        """A dim that is dealt like `share` along `axis`."""
        return cls(share.units, share.span, share.span, share.blocks, axis)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it."""
        return len(self.held) == self.size


@dataclass(frozen=True, slots=True)
class Part:
    """One named part of a parameter: a box of a global tensor, one cut for each dim."""

    name: str
    dims: tuple[Cut, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global tensor."""
        return tuple(cut.size for cut in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what this rank holds."""
        return tuple(len(cut.held) for cut in self.dims)

    @property
    def held(self) -> Box:
        """The rows of each dim that this rank holds."""
        return tuple(cut.held for cut in self.dims)

    @property
    def owned(self) -> Box:
        """Those of them that no other rank along the cutting axes owns."""
        return tuple(cut.owned for cut in self.dims)

    @property
    def index(self) -> Index:
        """Where this rank's piece lies in the global tensor."""
        return index_of(self.held)

    def within(self, box: Box) -> Index:
        """Where a box of the global tensor lies in this rank's piece."""
        firsts = [cut.held.start for cut in self.dims]
        return tuple(slice(r.start - first, r.stop - first) for r, first in zip(box, firsts, strict=True))

    def blocks(self) -> Iterator[Box]:
        """What this rank holds block by block: boxes of the global tensor."""
        yield from product(*(cut.blocks for cut in self.dims))

    def owned_blocks(self) -> Iterator[Box]:
        """The owned rows block by block."""
        yield from product(*(_overlaps(cut.blocks, cut.owned) for cut in self.dims))


@dataclass(frozen=True, slots=True)
class Placement:
    """The parts of a parameter, neighbours along dim `fused` of the local array.

    `partial`: the axes along which the gradient that backward leaves is a summand, to be summed before the update;
    along the others it is whole. `is_owner`: this rank has coordinate 0 on every axis that doesn't cut the parameter.
    """

    parts: tuple[Part, ...]
    fused: int = 0
    partial: frozenset[str] = frozenset()
    is_owner: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local array."""
        first = self.parts[0].local_shape
        length = sum(part.local_shape[self.fused] for part in self.parts)
        return first[: self.fused] + (length,) + first[self.fused + 1 :]

    @property
    def axes(self) -> frozenset[str]:
        """The axes that cut the parameter."""
        return frozenset(cut.axis for part in self.parts for cut in part.dims if cut.axis)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensors."""
        return all(cut.is_whole for part in self.parts for cut in part.dims)

    def places(self) -> Iterator[tuple[Part, Index]]:
        """Each part, and where it lies in the local array."""
        start = 0
        for part in self.parts:
            stop = start + part.local_shape[self.fused]
            yield part, (slice(None),) * self.fused + (slice(start, stop),)
            start = stop

    def owned(self) -> Iterator[tuple[Part, Index]]:
        """Each part of which this rank owns something, and where that lies in the local array."""
        for part, place in self.places():
            if self.is_owner and all(len(rows) for rows in part.owned):
                yield part, self._inside(place, part.within(part.owned))

    def owned_blocks(self) -> Iterator[tuple[Part, Box, Index]]:
        """The blocks that this rank owns: part, box of its global tensor, and place in the local array."""
        for part, place in self.places() if self.is_owner else ():
            for box in part.owned_blocks():
                yield part, box, self._inside(place, part.within(box))

    def num_owned(self) -> int:
        """Elements that this rank owns."""
        return sum(math.prod(map(len, part.owned)) for part, _ in self.owned())

    def _inside(self, place: Index, inner: Index) -> Index:
        """An index into a part as one into the local array."""
        start = place[self.fused].start
        fused = slice(start + inner[self.fused].start, start + inner[self.fused].stop)
        return inner[: self.fused] + (fused,) + inner[self.fused + 1 :]


def index_of(box: Box) -> Index:
    """Ranges as slices."""
    return tuple(slice(rows.start, rows.stop) for rows in box)


def _overlaps(blocks: tuple[range, ...], owned: range) -> Iterator[range]:
    for block in blocks:
        cut = range(max(block.start, owned.start), min(block.stop, owned.stop))
        if len(cut):
            yield cut
