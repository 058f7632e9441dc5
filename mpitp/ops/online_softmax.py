"""A softmax over keys that come piece by piece (online softmax: Milakov and Gimelshein 2018).

A row keeps the maximum m of its scores so far, the sum l of their exponentials, and o, the sum of the rows of v times
these. With those of the next piece, m2, l2 and o2:

    m' = max(m, m2)    l' = l exp(m - m') + l2 exp(m2 - m')    o' = o exp(m - m') + o2 exp(m2 - m')

and o / l over all pieces is what a softmax over all keys gives. Where each piece is finished by itself (o / l, and
lse = m + log l), `join_finished` puts two of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpitp.backend.arrays import Array, array_module


@dataclass(slots=True)
class RunningSoftmax:
    """Rows under way: maxima and sums of exponentials [s, 1], and o [s, d] before it is divided by them."""

    row_max: Array
    total: Array
    o: Array

    @classmethod
    def of(cls, xp: Any, shape: tuple[int, int], dtype: Any) -> RunningSoftmax:
        """s rows d wide that have seen nothing yet."""
        s, d = shape
        return cls(xp.full((s, 1), -xp.inf, dtype), xp.zeros((s, 1), dtype), xp.zeros((s, d), dtype))

    def at(self, rows: slice) -> RunningSoftmax:
        """Views of some rows."""
        return RunningSoftmax(self.row_max[rows], self.total[rows], self.o[rows])

    def like(self, rows: slice) -> RunningSoftmax:
        """New rows, as many, to be filled."""
        xp = array_module(self.o)
        return RunningSoftmax(*(xp.empty(x[rows].shape, x.dtype) for x in (self.row_max, self.total, self.o)))

    def restart(self) -> None:
        """Forget what the rows have seen."""
        self.row_max[...], self.total[...], self.o[...] = -array_module(self.o).inf, 0.0, 0.0

    def join(self, other: RunningSoftmax) -> None:
        """See what `other` has seen, too; `other` is given away."""
        xp = array_module(self.o)
        largest = xp.maximum(self.row_max, other.row_max)
        for each in (self, other):
            factor = xp.exp(each.row_max - largest)
            each.total[...] *= factor
            each.o[...] *= factor
        self.row_max[...] = largest
        self.total[...] += other.total
        self.o[...] += other.o

    def finish(self, o: Array, lse: Array) -> None:
        """Write the softmax's o [s, d] and lse [s]."""
        xp = array_module(self.o)
        xp.divide(self.o, self.total, out=o)
        lse[...] = (self.row_max + xp.log(self.total))[:, 0]


def join_finished(o: Array, lse: Array, other_o: Array, other_lse: Array) -> None:
    """o [s, a, d] and lse [a, s] of some keys become, in place, those of these and the keys of `other`."""
    xp = array_module(o)
    largest = xp.maximum(lse, other_lse)
    joined = largest + xp.log(xp.exp(lse - largest) + xp.exp(other_lse - largest))
    o *= xp.exp(lse - joined).T[:, :, None]
    o += other_o * xp.exp(other_lse - joined).T[:, :, None]
    lse[...] = joined
