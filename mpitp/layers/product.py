r"""What a linear multiplies by: a matrix W [n, k] on this rank, whatever it is made of.

    y = x W^T          dx = dy W          dW = dy^T x

A linear is a product times a pair: the product knows weights, the pair knows communication (`linear.py`). Every method
takes a *block* of W, `rows` by `cols`, since what is summed in a fixed order is computed block by block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.layers.param import Param
from mpitp.layers.placement import Placement
from mpitp.ops.linear import linear_forward, linear_input_grad, linear_row_by_row, linear_weight_grad

ALL = slice(None)
Block = tuple[slice, slice]  # rows and columns of W


class Product(ABC):
    """A matrix W [n, k] that activations are multiplied by."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """n and k on this rank."""

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """How W as a whole is cut, whatever it is made of."""

    @abstractmethod
    def forward(self, x: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        """x [t, cols] -> y [t, rows]; written to `out` when given."""

    @abstractmethod
    def input_grad(self, dy: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        """dy [t, rows] -> dx [t, cols]; written to `out` when given."""

    @abstractmethod
    def accumulate_grads(self, dy: Array, x: Array, blocks: Sequence[Block]) -> None:
        """Add the gradients of the parameters, for dy [t, n] and x [t, k], block by block."""

    @abstractmethod
    def params(self) -> Mapping[str, Param]:
        """What it is made of, by name."""


@dataclass(frozen=True, slots=True)
class DenseProduct(Product):
    """W is one array of numbers."""

    weight: Param

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.data.shape

    @property
    def placement(self) -> Placement:
        return self.weight.placement

    def forward(self, x: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return linear_forward(x, self.weight.data[rows, cols], out=out)

    def input_grad(self, dy: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return linear_input_grad(dy, self.weight.data[rows, cols], out=out)

    def accumulate_grads(self, dy: Array, x: Array, blocks: Sequence[Block]) -> None:
        self.weight.accumulate_made(lambda: self._weight_grad(dy, x, blocks))

    def _weight_grad(self, dy: Array, x: Array, blocks: Sequence[Block]) -> Array:
        w = self.weight.data
        dw = array_module(x).empty(w.shape, self.weight.grad_dtype)
        for rows, cols in blocks:
            linear_weight_grad(dy[:, rows], x[:, cols], out=dw[rows, cols])
        return dw

    def params(self) -> Mapping[str, Param]:
        return {"weight": self.weight}


@dataclass(frozen=True, slots=True)
class RowByRowProduct(Product):
    """Another product, one row of x at a time: its bits don't depend on how many others come along. Forward only."""

    inner: Product

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    @property
    def placement(self) -> Placement:
        return self.inner.placement

    def forward(self, x: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        if isinstance(self.inner, DenseProduct):
            return linear_row_by_row(x, self.inner.weight.data[rows, cols], out=out)
        y = [self.inner.forward(x[i : i + 1], rows, cols) for i in range(len(x))]
        return array_module(x).concatenate(y, out=out)

    def input_grad(self, dy: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        raise AssertionError("texts are generated row by row, not trained")

    def accumulate_grads(self, dy: Array, x: Array, blocks: Sequence[Block]) -> None:
        raise AssertionError("texts are generated row by row, not trained")

    def params(self) -> Mapping[str, Param]:
        return self.inner.params()
