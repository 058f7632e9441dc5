r"""Where a model communicates: pairs of conjugate functions (f and g of Megatron-LM, Shoeybi et al. 2019).

| pair           | stands                           | forward          | backward           | type   |
|----------------|----------------------------------|------------------|--------------------|--------|
| `CopyToTP`     | before a column-parallel product | identity         | sum of partial dx  | I to R |
| `ReduceFromTP` | after a row-parallel product     | sum of partial y | identity           | P to I |
| `MaxFromTP`    | over the columns of logits       | maximum          | none (cancels out) | P to I |
| `GatherFromTP` | behind the head, when generating | all-gather       | none (generation)  | V to I |

With sequence parallelism (Korthikanti et al. 2022) the rows of tokens are cut over the ranks between these products,
and other pairs stand in the places of the first two:

| pair                | stands                           | forward             | backward             | type   |
|---------------------|----------------------------------|---------------------|----------------------|--------|
| `GatherFromSP`      | before a column-parallel product | all-gather of x     | reduce-scatter of dx | V to R |
| `ReduceScatterToSP` | after a row-parallel product     | reduce-scatter of y | all-gather of dy     | P to V |

`GatherFromTP` changes the shape from [t, v/tp] to [t, v], `GatherFromSP` from [t/tp, h] to [t, h], `ReduceScatterToSP`
from [t, h] to [t/tp, h]; their backwards the other way. Rows are dealt raggedly (`Site.token_share`).

Why they are conjugate: y = x copied to p ranks means every copy adds to the loss, so dL/dx is the sum over the ranks.
y = sum over ranks of x_r means each x_r adds with factor one, so dL/dx_r is dL/dy, the same on every rank. A
reduce-scatter is that sum of which a rank keeps its own rows, so that dy is gathered from whoever has its rows.

A partial is an array of the right shape whose values are wrong until it has been summed over the ranks. Letters: see
`array_type.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group, Pending
from mpitp.layers.array_type import INVARIANT, PARTIAL, REPLICATE, VARYING, ArrayType
from mpitp.layers.layer import BACKWARD, FORWARD, Send
from mpitp.layers.partition import split_by_weight
from mpitp.layers.summation import Summation, local_sum


class EntryPair(ABC):
    """Stands before a column-parallel product: what it does to x, and how the ranks' parts of dx become dx."""

    @abstractmethod
    def forward(self, x: Array) -> Array:
        """x as the product takes it."""

    @abstractmethod
    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Where to produce the first partial dx, so that it need not be copied to be summed."""

    @abstractmethod
    def start_backward(self, dx_partials: Sequence[Array], like: Array) -> Pending:
        """Start making dx of the partial dx of this rank's blocks; independent work may run before `wait()`."""

    @abstractmethod
    def placements(self, incoming: ArrayType) -> ArrayType:
        """The type of x as the product takes it."""

    @abstractmethod
    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        """What it sends for an x of `width`, of which all ranks together make `summands` partial dx (0: one each)."""


class ExitPair(ABC):
    """Stands after a row-parallel product: how the ranks' parts of y become y, and what it does to dy."""

    @abstractmethod
    def forward(self, y_partials: Sequence[Array], like: Array) -> Array:
        """y of the partial y of this rank's blocks."""

    @abstractmethod
    def start_forward(self, y_partials: Sequence[Array], out: Array) -> Pending:
        """Start making a piece of y in `out`."""

    @abstractmethod
    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        """Rows of y that are made by themselves: one piece's sum runs behind the next one's product."""

    @abstractmethod
    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Where to produce the first partial y, so that it need not be copied to be summed."""

    @abstractmethod
    def backward(self, dy: Array) -> Array:
        """dy as the product takes it."""

    @abstractmethod
    def placements(self, incoming: ArrayType) -> ArrayType:
        """The type of y."""

    @abstractmethod
    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        """What it sends for a y of `width`, of which all ranks together make `summands` partials (0: one each)."""


@dataclass(frozen=True, slots=True)
class CopyToTP(EntryPair):
    """Forward: every rank uses the same x. Backward: the ranks' dx are summed."""

    summation: Summation
    axis: str = "tp"

    def forward(self, x: Array) -> Array:
        return x  # it is already on every rank

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.summation.operand(shape, like)

    def start_backward(self, dx_partials: Sequence[Array], like: Array) -> Pending:
        return self.summation.start(dx_partials, like)

    def placements(self, incoming: ArrayType) -> ArrayType:
        incoming.expect(self.axis, INVARIANT, "what is copied to all ranks")
        return incoming.changed(self.axis, REPLICATE)

    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        return (Send(BACKWARD, self.summation.op, width, "t h s", self.axis, summands),)


@dataclass(frozen=True, slots=True)
class ReduceFromTP(ExitPair):
    """Forward: the ranks' partial y are summed. Backward: every rank gets the same dy."""

    summation: Summation
    axis: str = "tp"

    def forward(self, y_partials: Sequence[Array], like: Array) -> Array:
        return self.summation(y_partials, like)

    def start_forward(self, y_partials: Sequence[Array], out: Array) -> Pending:
        return self.summation.start(y_partials, like=out, out=out)

    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        return self.summation.pieces(shape, itemsize)

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.summation.operand(shape, like)

    def backward(self, dy: Array) -> Array:
        return dy  # it is already on every rank

    def placements(self, incoming: ArrayType) -> ArrayType:
        incoming.expect(self.axis, PARTIAL, "what is summed over the ranks", "only summands are to be added")
        return incoming.changed(self.axis, INVARIANT)

    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        return (Send(FORWARD, self.summation.op, width, "t h s", self.axis, summands),)


@dataclass(frozen=True, slots=True)
class GatherFromSP(EntryPair):
    """Forward: every rank uses the rows of all. Backward: the ranks' dx are summed, each rank keeps its own rows.

    `weights`: by which rows are dealt (none: evenly).
    """

    group: Group
    axis: str = "tp"
    weights: tuple[float, ...] = ()

    def forward(self, x: Array) -> Array:
        return self.group.all_gather(x)  # [t/tp, h] -> [t, h]

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.group.empty(shape, like.dtype, array_module(like))

    def start_backward(self, dx_partials: Sequence[Array], like: Array) -> Pending:
        return _start_scatter(self.group, self.weights, dx_partials, like)

    def placements(self, incoming: ArrayType) -> ArrayType:
        incoming.expect(self.axis, VARYING, "what is gathered from all ranks", "each rank needs its own rows of tokens")
        incoming.expect_columns((), "what is gathered by rows")
        return incoming.changed(self.axis, REPLICATE)

    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        forward = Send(FORWARD, "all_gather", width, "t/p h s", self.axis)
        return forward, Send(BACKWARD, "reduce_scatter", width, "t h s", self.axis)


@dataclass(frozen=True, slots=True)
class ReduceScatterToSP(ExitPair):
    """Forward: the ranks' partial y are summed, each rank keeps its own rows. Backward: dy of all rows.

    `weights`: by which rows are dealt (none: evenly).
    """

    group: Group
    axis: str = "tp"
    weights: tuple[float, ...] = ()

    def forward(self, y_partials: Sequence[Array], like: Array) -> Array:
        return _start_scatter(self.group, self.weights, y_partials, like).wait()  # [t, h] -> [t/tp, h]

    def start_forward(self, y_partials: Sequence[Array], out: Array) -> Pending:
        raise AssertionError("a piece of the rows can't be made by itself: it isn't a share of every rank")

    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        return [slice(0, shape[0])]

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.group.empty(shape, like.dtype, array_module(like))

    def backward(self, dy: Array) -> Array:
        return self.group.all_gather(dy)  # [t/tp, h] -> [t, h]

    def placements(self, incoming: ArrayType) -> ArrayType:
        incoming.expect(self.axis, PARTIAL, "what is summed over the ranks", "only summands are to be added")
        return incoming.changed(self.axis, VARYING)

    def sends(self, width: int, summands: int) -> tuple[Send, ...]:
        forward = Send(FORWARD, "reduce_scatter", width, "t h s", self.axis)
        return forward, Send(BACKWARD, "all_gather", width, "t/p h s", self.axis)


def _start_scatter(group: Group, weights: Sequence[float], partials: Sequence[Array], like: Array) -> Pending:
    """Start summing all ranks' partials [t, h], of which this rank gets its rows. Partials are given away."""
    total = local_sum(partials, like)
    rows = split_by_weight(len(total), group.size, weights)
    return group.start_reduce_scatter(total, [len(own) for own in rows])


@dataclass(frozen=True, slots=True)
class MaxFromTP:
    """Forward: the largest of the ranks' values. It has no gradient: a softmax's maximum cancels out."""

    group: Group
    axis: str = "tp"

    def forward(self, x: Array) -> Array:
        """x [t] of every rank -> the largest [t]; x is given away."""
        return self.group.all_reduce(x, op="max", out=x)

    def sends(self, width: int) -> tuple[Send, ...]:
        """What it sends for `width` values a token."""
        return (Send(FORWARD, "all_reduce max", width, "t s", self.axis),)


@dataclass(frozen=True, slots=True)
class GatherFromTP:
    """Forward: every rank's columns side by side. Generation only, so it has no backward."""

    group: Group
    axis: str = "tp"

    def forward(self, x: Array) -> Array:
        """x [t, v/tp] -> [t, v] on every rank."""
        return self.group.all_gather(x, dim=1)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Pieces become one whole."""
        incoming.expect(self.axis, VARYING, "what is gathered from all ranks")
        return incoming.changed(self.axis, INVARIANT)
