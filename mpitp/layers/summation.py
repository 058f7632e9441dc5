"""How the partial sums of the ranks along an axis are added.

In the plain layout each rank has one block of every cut dim, and the library adds the ranks' sums in whatever order it
likes. In the invariant one every dim is cut into the same blocks at any rank count, whole blocks are dealt, and their
partial sums are added strictly from left to right: the same bits on 1, 2, 3, ... ranks. Layers don't know which one
they have: they loop over their blocks and hand the list of partial sums on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group, Pending

MOST_PIECES = 4  # into which a sum is cut that runs behind its own product: all but the last piece can be hidden
SMALLEST_PIECE_BYTES, SMALLEST_PIECE_ROWS = 1 << 18, 128  # a product of few rows is slow


class Summation(ABC):
    """Adds the partial sums that the ranks of a group hold; every rank gets the whole. `op`: its name in a ledger."""

    group: Group
    op: str

    @abstractmethod
    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """An array to produce the first partial in: where the ranks add from, it need not be copied there."""

    @abstractmethod
    def start(self, partials: Sequence[Array], like: Array, out: Array | None = None) -> Pending:
        """Start adding. Partials are given away: the sum may be written over the first. `like`: one partial's shape.

        `out`: where to write the sum instead.
        """

    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        """Rows of a partial that are best summed by themselves, so that one piece's sum runs behind the next's product.

        All of them at once, unless the layout's sums run behind other work.
        """
        return [slice(0, shape[0])]

    def __call__(self, partials: Sequence[Array], like: Array) -> Array:
        """The sum of all ranks' partials."""
        return self.start(partials, like).wait()


@dataclass(frozen=True, slots=True)
class LibrarySum(Summation):
    """Adds this rank's partials, then all ranks' sums by the library's all-reduce (its order, its speed)."""

    group: Group
    op = "all_reduce sum"

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Memory of the group's choice."""
        return self.group.empty(shape, like.dtype, array_module(like))

    def start(self, partials: Sequence[Array], like: Array, out: Array | None = None) -> Pending:
        """Start the all-reduce of the local sum."""
        total = local_sum(partials, like)
        return self.group.start_all_reduce(total, out=total if out is None else out)

    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        """Equal pieces, not too small, of what sums move on behind other work."""
        rows, width = shape
        most = min(MOST_PIECES, rows // SMALLEST_PIECE_ROWS, rows * width * itemsize // SMALLEST_PIECE_BYTES)
        count = max(1, most) if self.group.in_background else 1
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True, slots=True)
class OrderedSum(Summation):
    """Adds block by block in global order, whatever rank holds the block."""

    group: Group
    op = "all_reduce_in_order"

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Ordinary memory."""
        return array_module(like).empty(shape, like.dtype)

    def start(self, partials: Sequence[Array], like: Array, out: Array | None = None) -> Pending:
        """Add at once: a strict order leaves nothing to overlap."""
        total = self.group.all_reduce_in_order(partials, like)
        if out is not None:
            out[...] = total
        return Pending.done(total if out is None else out)


def local_sum(partials: Sequence[Array], like: Array) -> Array:
    """This rank's partials added up, over the first of them; zeros of the shape of `like` where it has none."""
    total = partials[0] if partials else array_module(like).zeros_like(like)
    for partial in partials[1:]:
        total += partial
    return total
