r"""Rows of images that are cut over ranks: a pair that gets the rows beside one's own, and brings their gradients home.

    forward     near_r = the rows that rank r's windows see: its own, and a halo of its neighbours'       V to V
    backward    dx_r   = sum over ranks of what their dnear says of rank r's rows

A copy to several ranks forward is a sum backward: the adjoint of handing rows out is adding up what comes back. Rows
are dealt raggedly; a rank may have none, and a halo may come from several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group, Pending
from mpitp.layers.array_type import VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.partition import piece_of
from mpitp.ops.convolution import Geometry

_TAG_ROWS, _TAG_GRADIENTS = 21, 22


@dataclass(frozen=True, slots=True)
class Halo:
    """The exchange of a convolution whose images are cut by rows over `group`."""

    group: Group
    geometry: Geometry
    axis: str = "tp"

    def own(self, rank: int) -> range:
        """The rows of the image that a rank holds."""
        return piece_of(self.geometry.height, rank, self.group.size)

    def outputs(self, rank: int) -> range:
        """The rows of windows that a rank computes."""
        return piece_of(self.geometry.outputs[0], rank, self.group.size)

    def near(self, rank: int) -> range:
        """The rows that its windows see."""
        return self.geometry.seen(self.outputs(rank))

    def shared(self, owner: int, user: int) -> range:
        """Those of the owner's rows that the user's windows see."""
        own, near = self.own(owner), self.near(user)
        start = max(own.start, near.start)
        return range(start, max(start, min(own.stop, near.stop)))

    def inner(self, rank: int) -> range:
        """The rows of windows that see own rows alone: they can be computed while the halo is on its way."""
        own, outputs = self.own(rank), self.outputs(rank)
        seen = [(row, self.geometry.seen(range(row, row + 1))) for row in outputs]
        inside = [row for row, rows in seen if rows and own.start <= rows.start and rows.stop <= own.stop]
        return range(inside[0], inside[-1] + 1) if inside else range(outputs.start, outputs.start)

    def start_forward(self, x: Array) -> tuple[Array, Pending]:
        """Own rows [b, own, w, c] -> the rows that own windows see [b, near, w, c], the own ones there already, the
        neighbours' after `wait()`.
        """
        xp, me = array_module(x), self.group.rank
        near = xp.empty((x.shape[0], len(self.near(me)), *x.shape[2:]), x.dtype)
        coming = [
            (rows, self.group.start_recv(self._room(x, rows), owner, _TAG_ROWS)) for owner, rows in self._from(me)
        ]
        going = [
            self.group.start_send(xp.ascontiguousarray(x[:, at(rows, self.own(me))]), user, _TAG_ROWS)
            for user, rows in self._to(me)
        ]
        inside = self.shared(me, me)
        near[:, at(inside, self.near(me))] = x[:, at(inside, self.own(me))]

        def wait() -> Array:
            for rows, message in coming:
                near[:, at(rows, self.near(me))] = message.wait()
            for message in going:
                message.wait()
            return near

        return near, Pending(wait)

    def start_backward(self, dnear: Array) -> Pending:
        """Start making dx [b, own, w, c] of every rank's dnear; independent work may run before `wait()`."""
        xp, me = array_module(dnear), self.group.rank
        coming = [
            (rows, self.group.start_recv(self._room(dnear, rows), user, _TAG_GRADIENTS)) for user, rows in self._to(me)
        ]
        going = [
            self.group.start_send(xp.ascontiguousarray(dnear[:, at(rows, self.near(me))]), owner, _TAG_GRADIENTS)
            for owner, rows in self._from(me)
        ]

        def wait() -> Array:
            dx = xp.zeros((dnear.shape[0], len(self.own(me)), *dnear.shape[2:]), dnear.dtype)
            inside = self.shared(me, me)
            dx[:, at(inside, self.own(me))] = dnear[:, at(inside, self.near(me))]
            for rows, message in coming:
                dx[:, at(rows, self.own(me))] += message.wait()
            for message in going:
                message.wait()
            return dx

        return Pending(wait)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Rows to rows."""
        incoming.expect(self.axis, VARYING, "images cut by rows", "each rank needs its own rows")
        incoming.expect_columns((), "images cut by rows")
        return incoming

    def sends(self, channels: int) -> tuple[Send, ...]:
        """A message to and from each neighbour, in both passes; elements an image."""
        me, element = self.group.rank, self.geometry.width * channels
        out, back = [len(rows) for _, rows in self._to(me)], [len(rows) for _, rows in self._from(me)]
        moves = [(FORWARD, "send", out), (FORWARD, "recv", back), (BACKWARD, "send", back), (BACKWARD, "recv", out)]
        return tuple(
            Send(phase, op, rows * element, "b r w c s", self.axis) for phase, op, each in moves for rows in each
        )

    def _to(self, rank: int) -> list[tuple[int, range]]:
        """Who sees some of a rank's rows, and which."""
        pairs = [(user, self.shared(rank, user)) for user in range(self.group.size) if user != rank]
        return [(user, rows) for user, rows in pairs if rows]

    def _from(self, rank: int) -> list[tuple[int, range]]:
        """Who has some of the rows that a rank sees, and which."""
        pairs = [(owner, self.shared(owner, rank)) for owner in range(self.group.size) if owner != rank]
        return [(owner, rows) for owner, rows in pairs if rows]

    def _room(self, like: Array, rows: range) -> Array:
        return array_module(like).empty((like.shape[0], len(rows), *like.shape[2:]), like.dtype)


def at(rows: range, within: range) -> slice:
    """Where some rows are in an array of the rows `within`."""
    return slice(rows.start - within.start, rows.stop - within.start)
