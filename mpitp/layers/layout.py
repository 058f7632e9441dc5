"""How a model is laid over the ranks of one tensor-parallel group, and how partial sums of those ranks are added.

Two layouts exist. The plain one gives each rank one block of every cut dimension and lets the library add the ranks'
partial sums in whatever order it likes. The invariant one cuts every dimension into `num_blocks` blocks at any rank
count, deals whole blocks, and adds the blocks' partial sums strictly from left to right: the same bits on 1, 2, 3, ...
ranks. Layers don't know which one they have: they loop over their blocks and hand the list of partial sums on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import array_module
from mpitp.comm.group import Group, Pending
from mpitp.errors import ConfigError
from mpitp.layers.partition import HeadShare, Share, share_heads, share_of

Array = Any

MOST_PIECES = 4  # into which a sum is cut that runs behind its own product: all but the last piece can be hidden
SMALLEST_PIECE_BYTES, SMALLEST_PIECE_ROWS = 1 << 18, 128  # a product of few rows is slow


class Summation(ABC):
    """Adds the partial sums that the ranks of a group hold; every rank gets the whole."""

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

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Memory of the group's choice."""
        return self.group.empty(shape, like.dtype, array_module(like))

    def start(self, partials: Sequence[Array], like: Array, out: Array | None = None) -> Pending:
        """Start the all-reduce of the local sum."""
        total = partials[0] if partials else array_module(like).zeros_like(like)
        for partial in partials[1:]:
            total += partial
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

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Ordinary memory."""
        return array_module(like).empty(shape, like.dtype)

    def start(self, partials: Sequence[Array], like: Array, out: Array | None = None) -> Pending:
        """Add at once: a strict order leaves nothing to overlap."""
        total = self.group.all_reduce_in_order(partials, like)
        if out is not None:
            out[...] = total
        return Pending.done(total if out is None else out)


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor-parallel group and the number of blocks each cut dimension has (0: one a rank, the plain layout)."""

    group: Group
    num_blocks: int = 0

    @property
    def summation(self) -> Summation:
        """How partial sums of this layout are added."""
        return OrderedSum(self.group) if self.num_blocks else LibrarySum(self.group)

    def share(self, units: int) -> Share:
        """This rank's share of `units`."""
        return share_of(units, self.group.rank, self.group.size, self.num_blocks)

    def heads(self, heads: int, kv_heads: int) -> HeadShare:
        """This rank's attention heads."""
        return share_heads(heads, kv_heads, self.group.rank, self.group.size, self.num_blocks)

    def check(self, sizes: dict[str, int]) -> None:
        """Refuse an invariant layout that `sizes` (name of a cut dimension: its units) can't give."""
        if not self.num_blocks:
            return
        limit = min(sizes.values())
        scarce = min(sizes, key=sizes.__getitem__)
        if self.num_blocks > limit:
            raise ConfigError(
                f"invariant_blocks={self.num_blocks} exceeds {scarce}={limit}: a block needs at least one unit of "
                f"every cut dimension; use a number from {self.group.size} to {limit}"
                if self.group.size <= limit
                else f"invariant mode can cut this model into at most {limit} blocks ({scarce}={limit}), "
                f"fewer than the {self.group.size} ranks; use at most {limit} ranks"
            )
        if self.group.size > self.num_blocks:
            raise ConfigError(
                f"invariant mode deals whole blocks: {self.num_blocks} blocks can't go to {self.group.size} ranks; "
                f"use at most {self.num_blocks} ranks or set invariant_blocks to a number up to {limit}"
            )


def choose_blocks(invariant: bool, blocks: int, heads: int) -> int:
    """The number of blocks for a user's wish: 0 unless `invariant`; `blocks` 0 takes one a head, at most 12.

    The choice must not depend on the rank count, or results would. Raises ConfigError for blocks without the mode.
    """
    if blocks and not invariant:
        raise ConfigError(
            f"{blocks} blocks are asked for, but not the invariant mode; add --invariant, or drop the blocks"
        )
    if not invariant:
        return 0
    return blocks or min(heads, 12)
