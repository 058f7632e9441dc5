r"""Where tensor parallelism communicates: pairs of conjugate functions (f and g of Megatron-LM, Shoeybi et al. 2019).

| pair           | stands                            | forward             | backward              | shape            |
|----------------|-----------------------------------|---------------------|-----------------------|------------------|
| `CopyToTP`     | before a column-parallel linear   | identity            | sum of partial dx     | [t, h] -> [t, h] |
| `ReduceFromTP` | after a row-parallel linear       | sum of partial y    | identity              | [t, h] -> [t, h] |

Why they are conjugate: y = x copied to p ranks means every copy adds to the loss, so dL/dx is the sum over the ranks.
y = sum over ranks of x_r means each x_r adds with factor one, so dL/dx_r is dL/dy, the same on every rank.

A partial is an array of the right shape whose values are wrong until it has been summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitp.comm.group import Pending
from mpitp.layers.layout import Summation

Array = Any


@dataclass(frozen=True, slots=True)
class CopyToTP:
    """Forward: every rank uses the same x. Backward: the ranks' dx are summed."""

    summation: Summation

    def forward(self, x: Array) -> Array:
        """Identity: x is already on every rank."""
        return x

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Where to produce the first partial dx, so that it need not be copied to be summed."""
        return self.summation.operand(shape, like)

    def start_backward(self, dx_partials: Sequence[Array], like: Array) -> Pending:
        """Start summing the partial dx of every rank's blocks; independent work may run before `wait()`."""
        return self.summation.start(dx_partials, like)


@dataclass(frozen=True, slots=True)
class ReduceFromTP:
    """Forward: the ranks' partial y are summed. Backward: every rank gets the same dy."""

    summation: Summation

    def forward(self, y_partials: Sequence[Array], like: Array) -> Array:
        """The sum of the partial y of every rank's blocks."""
        return self.summation(y_partials, like)

    def pieces(self, shape: tuple[int, int], itemsize: int) -> list[slice]:
        """Rows of y that are summed by themselves: one piece's sum runs behind the next one's product."""
        return self.summation.pieces(shape, itemsize)

    def start_forward(self, y_partials: Sequence[Array], out: Array) -> Pending:
        """Start summing a piece of y into `out`."""
        return self.summation.start(y_partials, like=out, out=out)

    def operand(self, shape: tuple[int, ...], like: Array) -> Array:
        """Where to produce the first partial y, so that it need not be copied to be summed."""
        return self.summation.operand(shape, like)

    def backward(self, dy: Array) -> Array:
        """Identity: dy is already on every rank."""
        return dy
