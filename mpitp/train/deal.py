"""Which of a step's microbatches this rank has: they are numbered over the whole step, as one rank would take them.

Five microbatches on two data-parallel ranks: 0 1 2 and 3 4. In turn: 0 2 4 and 1 3, so that after each round of the
ranks the gradients of all earlier microbatches are there, to be added in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.comm.mesh import Mesh
from mpitp.layers.partition import counts_by_weight, piece_of


@dataclass(frozen=True, slots=True)
class Deal:
    """This rank's number among `ranks` that have different samples, and whether microbatches go to them in turn.

    `piece`: its number and their number, of the ranks along cp, over which each sample is cut. `weights`: of the ranks;
    by 2 and 1, six microbatches are 0 1 2 3 and 4 5, in turn 0 2 4 5 and 1 3.
    """

    rank: int = 0
    ranks: int = 1
    in_turn: bool = False
    piece: tuple[int, int] = (0, 1)
    weights: tuple[float, ...] = ()

    @classmethod
    def on(cls, mesh: Mesh, *, in_turn: bool = False) -> Deal:
        """Along the axes that deal samples; the ranks along the others have the same ones."""
        group = mesh.along("dp", "ep")
        return cls(group.rank, group.size, in_turn, (mesh["cp"].rank, mesh["cp"].size), mesh.weights("dp", "ep"))

    def of(self, count: int) -> Sequence[int]:
        """The numbers, out of `count`, of what this rank has; none where there are fewer than ranks."""
        if not self.in_turn:
            return piece_of(count, self.rank, self.ranks, self.weights)
        if not self.weights:
            return range(self.rank, count, self.ranks)
        return _in_turn(counts_by_weight(count, self.weights), self.rank)

    def counts(self, count: int) -> tuple[int, ...]:
        """How many of `count` each rank has."""
        return tuple(len(piece_of(count, rank, self.ranks, self.weights)) for rank in range(self.ranks))


def _in_turn(counts: Sequence[int], rank: int) -> list[int]:
    """A rank's numbers where each round goes to those that haven't all of theirs."""
    before = [sum(min(n, done) for n in counts) for done in range(counts[rank])]
    return [start + sum(n > done for n in counts[:rank]) for done, start in enumerate(before)]


ALONE = Deal()
