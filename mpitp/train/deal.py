"""Which of a step's microbatches this rank has: they are numbered over the whole step, as one rank would take them.

Five microbatches on two data-parallel ranks: 0 1 2 and 3 4. In turn: 0 2 4 and 1 3, so that after each round of the
ranks the gradients of all earlier microbatches are there, to be added in the order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitp.comm.mesh import Mesh
from mpitp.layers.partition import piece_of


@dataclass(frozen=True, slots=True)
class Deal:
    """This rank's number among `ranks` that have different samples, and whether microbatches go to them in turn.

    `piece`: its number and their number, of the ranks along cp, over which each sample is cut.
    """

    rank: int = 0
    ranks: int = 1
    in_turn: bool = False
    piece: tuple[int, int] = (0, 1)

    @classmethod
    def on(cls, mesh: Mesh, *, in_turn: bool = False) -> Deal:
        """Along the axes that deal samples; the ranks along the others have the same ones."""
        group = mesh.along("dp", "ep")
        return cls(group.rank, group.size, in_turn, (mesh["cp"].rank, mesh["cp"].size))

    def of(self, count: int) -> range:
        """The numbers, out of `count`, of what this rank has; none where there are fewer than ranks."""
        return range(self.rank, count, self.ranks) if self.in_turn else piece_of(count, self.rank, self.ranks)


ALONE = Deal()
