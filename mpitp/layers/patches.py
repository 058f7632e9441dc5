r"""Images to tokens (Dosovitskiy et al. 2021): patches, a class token before them, learned positions.

    patches   y = [x W_0^T + b_0, x W_1^T + b_1, ...]    the convolution of stride = kernel = p, as the product it is:
                                                         x [b n, c p p] unfolded pixels, W [h, c, p, p] cut along h
    tokens    z = [class + P_class, y_1 + P_1, ..., y_n + P_n]  for each image                      [b (n + 1), h]

P is interpolated where the image has another grid than the table: P' = (R kron C) P with the bicubic matrices R and C
of rows and columns (a = -0.75, corners not aligned, as PyTorch's), so that its gradient is (R kron C)^T dP'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.gathered_dense import GatherColumns
from mpitp.layers.layer import Layer, Send
from mpitp.layers.norm import row_by_row
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.ops.linear import linear_bias_grad


@dataclass(slots=True)
class PatchContext:
    """The pixels."""

    x: Array  # [b n, c p p]


class PatchEmbedding(Layer):
    """y = x W^T + b, whole on every rank; W is cut along its outputs. Pixels have no gradient."""

    algebra = Algebra(
        "patch embedding",
        (
            Segment("y_partial = x W_r^T + b_r", "x W b", "y_partial", "a rank makes its columns"),
            Sum("y", "y = [y_0, y_1, ...]", "an all-gather"),
        ),
        (Segment("dW_r = dy_r^T x, db_r = sum_t dy_r", "dy x", "", "dy is on every rank", grads=True),),
        "all-gather forward, identity backward",
    )

    def __init__(self, weight: Param, bias: Param, gather: GatherColumns) -> None:
        self.weight, self.bias, self.gather = weight, bias, gather
        self.blocks = [slice(block.start, block.stop) for block in gather.columns.local_blocks if len(block)]

    def forward(self, x: Array, run: Any = None) -> tuple[Array, PatchContext]:
        """pixels x [b n, c p p] -> y [b n, h]."""
        weight, xp = self._matrix(self.weight.data), array_module(x)
        y = xp.empty((x.shape[0], weight.shape[0]), x.dtype)
        for rows in self.blocks:  # each by itself: its bits don't depend on its neighbours
            y[:, rows] = x @ weight[rows].T
        y += self.bias.data
        return self.gather.forward(y)[0], PatchContext(x)

    def backward(self, dy: Array, ctx: PatchContext) -> None:
        """dy [b n, h]: add to the gradients."""
        own = self.gather.backward(dy, None)
        grad = array_module(dy).empty(self._matrix(self.weight.data).shape, dy.dtype)
        for rows in self.blocks:
            grad[rows] = own[:, rows].T @ ctx.x
        self.weight.accumulate(grad.reshape(self.weight.data.shape))
        self.bias.accumulate(linear_bias_grad(own))

    def _matrix(self, weight: Array) -> Array:
        return weight.reshape(weight.shape[0], int(np.prod(weight.shape[1:])))

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight, "bias": self.bias}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Pixels, the same on every rank, to whole rows."""
        incoming.expect("tp", INVARIANT, "pixels")
        used = incoming.changed("tp", REPLICATE)
        for name, param in self.children().items():
            used.expect_gradient_summed(name, param)
        return self.gather.placements(used.changed("tp", VARYING, columns_of(self.weight.placement.parts, 0)))

    def sends(self) -> tuple[Send, ...]:
        return self.gather.sends()


class ImageTokens(Layer):
    """A class token before each image's patches, and positions to all.

    Args:
        token: [1, 1, h].
        positions: [1, 1 + rows * columns of the table's grid, h].
        table_grid, grid: rows and columns of the table, and of the images.
    """

    algebra = Algebra(
        "class token and positions",
        (Segment("z = [class + P_0, x_i + P_i]", "x", "y", "the same on every rank"),),
        (Segment("dx_i = dz_i, dP = sum over images of dz", "dy", "dx", "the same on every rank", grads=True),),
    )

    def __init__(self, token: Param, positions: Param, table_grid: tuple[int, int], grid: tuple[int, int]) -> None:
        self.token, self.positions, self.table_grid, self.grid = token, positions, table_grid, grid

    @cached_property
    def resampling(self) -> np.ndarray | None:
        """R kron C, float64; None where the grids are the same."""
        if self.table_grid == self.grid:
            return None
        rows, columns = (bicubic_matrix(new, old) for new, old in zip(self.grid, self.table_grid, strict=True))
        return np.kron(rows, columns)

    def forward(self, x: Array, run: Pass) -> tuple[Array, None]:
        """x [b n, h] -> z [b (n + 1), h]."""
        xp, hidden = array_module(x), x.shape[1]
        table = self.positions.data[0]  # [1 + table grid, h]
        patches = table[1:]
        if self.resampling is not None:
            patches = from_host(self.resampling.astype(x.dtype), xp) @ patches
        images = x.reshape(-1, patches.shape[0], hidden)
        z = xp.empty((images.shape[0], 1 + images.shape[1], hidden), x.dtype)
        z[:, 0] = self.token.data[0, 0] + table[0]
        xp.add(images, patches, out=z[:, 1:])
        return z.reshape(-1, hidden), None

    def backward(self, dy: Array, ctx: None) -> Array:
        """dz [b (n + 1), h] -> dx [b n, h]."""
        xp, hidden = array_module(dy), dy.shape[1]
        images = dy.reshape(-1, 1 + self.grid[0] * self.grid[1], hidden)
        summed = images.sum(axis=0)
        patches = summed[1:]
        if self.resampling is not None:
            patches = from_host(self.resampling.T.astype(dy.dtype), xp) @ patches
        self.token.accumulate(summed[0].reshape(1, 1, hidden).copy())
        self.positions.accumulate(xp.concatenate((summed[:1], patches))[None])
        return images[:, 1:].reshape(-1, hidden)

    def children(self) -> Mapping[str, Param]:
        return {"token": self.token, "positions": self.positions}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, self.children())


def bicubic_matrix(new: int, old: int, a: float = -0.75) -> np.ndarray:
    """The linear map from `old` samples to `new` ones, [new, old]: Keys' cubic kernel, edges repeated."""
    places = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(places).astype(int)
    matrix = np.zeros((new, old))
    for step in range(-1, 3):
        distance = np.abs(places - (first + step))
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
        np.add.at(matrix, (np.arange(new), np.clip(first + step, 0, old - 1)), weights)
    return matrix


class ClassAndMean(Layer):
    """The class token's row beside the mean of the patches' rows, of each image: [t, h] -> [b, 2h] (DINOv2)."""

    def forward(self, x: Array, run: Pass) -> tuple[Array, tuple[int, int]]:
        """x [b (n + 1), h] -> y [b, 2h]; images are alike."""
        length = run.rows.runs[0].length
        images = x.reshape(-1, length, x.shape[1])
        y = array_module(x).concatenate((images[:, 0], images[:, 1:].mean(axis=1)), axis=1)
        return y, (length, x.shape[1])

    def backward(self, dy: Array, ctx: tuple[int, int]) -> Array:
        """dy [b, 2h] -> dx [b (n + 1), h]."""
        length, hidden = ctx
        dx = array_module(dy).empty((dy.shape[0], length, hidden), dy.dtype)
        dx[:, 0], dx[:, 1:] = dy[:, :hidden], dy[:, None, hidden:] / dy.dtype.type(length - 1)
        return dx.reshape(-1, hidden)

    def children(self) -> Mapping[str, Layer]:
        return {}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Whole rows to whole rows."""
        return row_by_row(incoming, {})
