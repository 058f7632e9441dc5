r"""Images to tokens (Dosovitskiy et al. 2021): patches, a class token before them, learned positions.

    patches   y = [0; x W_0^T + b_0, x W_1^T + b_1, ...] the convolution of stride = kernel = p, as the product it is:
                                                         x [b n, c p p] unfolded pixels, W [h, c, p, p] cut along h;
                                                         before each image's patches a row of noughts   [b (n + 1), h]
    tokens    z = [class + P_class, y_1 + P_1, ..., y_n + P_n]  for each image                      [b (n + 1), h]

P is interpolated where the image has another grid than the table: P' = (R kron C) P with the bicubic matrices R and C
of rows and columns (a = -0.75, corners not aligned, as PyTorch's), so that its gradient is (R kron C)^T dP'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpitp.backend.arrays import Array, array_module, from_host
from mpitp.backend.precision import wide_dtype
from mpitp.comm.group import Group
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, PARTIAL, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.gathered_dense import Gather
from mpitp.layers.layer import BACKWARD, FORWARD, Layer, Send
from mpitp.layers.mappings import ReduceFromTP
from mpitp.layers.norm import row_by_row
from mpitp.layers.param import Param
from mpitp.layers.passes import Pass
from mpitp.layers.rows import Rows, Run
from mpitp.ops.linear import linear_bias_grad


@dataclass(slots=True)
class PatchContext:
    """The pixels, and which of the `count` rows are patches."""

    x: Array  # [b n, c p p]
    rows: Array  # [b n]
    count: int


class PatchEmbedding(Layer):
    """y = x W^T + b in the rows of patches, 0 in those of class tokens; W is cut along its outputs. Pixels have no
    gradient. `gather`: how the ranks' columns come together.
    """

    algebra = Algebra(
        "patch embedding",
        (
            Segment("y_partial = x W_r^T + b_r", "x W b", "y_partial", "a rank makes its columns"),
            Sum("y", "y = [y_0, y_1, ...]", "an all-gather"),
        ),
        (Segment("dW_r = dy_r^T x, db_r = sum_t dy_r", "dy x", "", "dy is on every rank", grads=True),),
        "all-gather forward, identity backward",
    )

    def __init__(self, weight: Param, bias: Param, gather: Gather) -> None:
        self.weight, self.bias, self.gather = weight, bias, gather
        self.blocks = [slice(block.start, block.stop) for block in gather.columns.local_blocks if len(block)]

    def forward(self, x: Array, run: Pass) -> tuple[Array, PatchContext]:
        """pixels x [b n, c p p] -> y [b (n + 1), h]."""
        weight, xp = self._matrix(self.weight.data), array_module(x)
        made = xp.empty((x.shape[0], weight.shape[0]), x.dtype)  # [b n, h/tp]
        for columns in self.blocks:  # each by itself: its bits don't depend on its neighbours
            made[:, columns] = x @ weight[columns].T
        made += self.bias.data
        rows = from_host(np.flatnonzero(run.rows.positions()), xp)
        y = xp.zeros((run.rows.num_tokens, weight.shape[0]), x.dtype)
        y[rows] = made
        return self.gather.forward(y)[0], PatchContext(x, rows, run.rows.num_tokens)

    def backward(self, dy: Array, ctx: PatchContext) -> None:
        """dy [b (n + 1), h]: add to the gradients."""
        own = self.gather.backward(dy, None)[ctx.rows]  # [b n, h/tp]
        self.weight.accumulate_made(lambda: self._weight_grad(own, ctx.x))
        self.bias.accumulate(linear_bias_grad(own))

    def _weight_grad(self, dy: Array, x: Array) -> Array:
        """dy_r^T x, block by block."""
        grad = array_module(dy).empty((dy.shape[1], x.shape[1]), dy.dtype)
        for columns in self.blocks:
            grad[columns] = dy[:, columns].T @ x
        return grad.reshape((-1, *self.weight.placement.parts[0].shape[1:]))

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

    def rows_sent(self, x: Array, ctx: PatchContext) -> int:
        """The class tokens' too."""
        return ctx.count

    def sends(self) -> tuple[Send, ...]:
        return self.gather.sends()


class ImageTokens(Layer):
    """The class token in its row before each image's patches, and positions to all.

    Args:
        token: [1, 1, h].
        positions: [1, 1 + rows * columns of the table's grid, h].
        table_grid, grid: rows and columns of the table, and of the images.
    """

    algebra = Algebra(
        "class token and positions",
        (Segment("z = [class + P_0, x_i + P_i]", "x", "y", "row by row: no communication"),),
        (Segment("dx = dz, dP = sum over images of dz", "dy", "dx", "row by row: no communication", grads=True),),
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

    def forward(self, x: Array, run: Pass) -> tuple[Array, Rows]:
        """x [b (n + 1), h] -> z [b (n + 1), h]."""
        xp, table = array_module(x), self.positions.data[0]  # [1 + table grid, h]
        if self.resampling is not None:
            table = xp.concatenate((table[:1], from_host(self.resampling.astype(x.dtype), xp) @ table[1:]))
        z = xp.empty_like(x)
        for each, rows in run.shard_rows.places():
            xp.add(x[rows], table[each.first : each.first + each.length], out=z[rows])
            if each.begins:
                z[rows.start] += self.token.data[0, 0]
        return z, run.shard_rows

    def backward(self, dy: Array, ctx: Rows) -> Array:
        """dz [b (n + 1), h] -> dx [b (n + 1), h]."""
        xp, hidden, wide = array_module(dy), dy.shape[1], wide_dtype(dy.dtype)
        summed, token = xp.zeros((1 + self.grid[0] * self.grid[1], hidden), wide), xp.zeros(hidden, wide)
        for each, rows in ctx.places():
            summed[each.first : each.first + each.length] += dy[rows]
            if each.begins:
                token += dy[rows.start]
        if self.resampling is not None:
            patches = from_host(self.resampling.T.astype(wide), xp) @ summed[1:]
            summed = xp.concatenate((summed[:1], patches))
        self.token.accumulate(token.reshape(1, 1, hidden))
        self.positions.accumulate(summed[None])
        return dy

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
    """The class token's row beside the mean of the patches' rows, of each image: [t, h] -> [b, 2h] (DINOv2).

    `reduce`: with sequence parallelism, adds what the ranks' own rows come to. `images`: the ranks over which images
    are cut; the sum of their rows goes to the one where the image begins, which has its target. `hidden`: h; `patches`:
    n.
    """

    gives_a_row_a_sequence = True
    algebra = Algebra(
        "class token and mean",
        (
            Segment("y_partial = [z_0, sum_i z_i / n]", "x", "y_partial", "of each image's rows here"),
            Sum("y", "y = sum of y_partial over the ranks that have rows of the image"),
        ),
        (Segment("dz_0 = dy's first half, dz_i = its second / n", "dy", "dx", "row by row"),),
    )

    def __init__(
        self, hidden: int, patches: int, reduce: ReduceFromTP | None = None, images: Group | None = None
    ) -> None:
        self.hidden, self.patches, self.reduce, self.images = hidden, patches, reduce, images

    def forward(self, x: Array, run: Pass) -> tuple[Array, Pass]:
        """x [b (n + 1), h] -> y [b, 2h], of the images that begin here."""
        h, y = self.hidden, array_module(x).zeros((len(_whole(run).runs), 2 * self.hidden), x.dtype)
        for image, each, rows in _images(run):
            if each.begins:
                y[image, :h] = x[rows.start]
            y[image, h:] += x[rows.start + each.begins : rows.stop].sum(axis=0) / x.dtype.type(self.patches)
        y = y if self.reduce is None else self.reduce.forward([y], like=y)
        return y if self.images is None else self.images.reduce_scatter(y, _counts(run)), run

    def backward(self, dy: Array, ctx: Pass) -> Array:
        """dy [b, 2h] -> dx [b (n + 1), h]."""
        h, dy = self.hidden, dy if self.images is None else self.images.all_gather(dy)
        dy = dy if self.reduce is None else self.reduce.backward(dy)
        dx = array_module(dy).empty((ctx.shard_rows.num_tokens, h), dy.dtype)
        for image, each, rows in _images(ctx):
            dx[rows] = dy[image, h:] / dy.dtype.type(self.patches)
            if each.begins:
                dx[rows.start] = dy[image, :h]
        return dx

    def children(self) -> Mapping[str, Layer]:
        return {}

    def rows_sent(self, x: Array, ctx: Pass) -> int:
        """A row an image."""
        return len(_whole(ctx).runs)

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Some rows of whole ones; of a rank's own rows, a sum of summands."""
        if self.images is not None:
            incoming.expect("cp", VARYING, "rows of images", "each rank has its own rows of tokens")
        elif incoming.along("cp") == VARYING:
            incoming.expect("cp", "IR", "rows of images", "the patches on other ranks along cp aren't in the mean")
        if self.reduce is None:
            return row_by_row(incoming, {})
        incoming.expect("tp", VARYING, "rows of images", "each rank has its own rows of tokens")
        return self.reduce.placements(incoming.changed("tp", PARTIAL))

    def sends(self) -> tuple[Send, ...]:
        over_tp = () if self.reduce is None else self.reduce.sends(2 * self.hidden, 0)
        if self.images is None:
            return over_tp
        forward = Send(FORWARD, "reduce_scatter", 2 * self.hidden, "2 b h s", "cp")
        return *over_tp, forward, Send(BACKWARD, "all_gather", 2 * self.hidden, "2 b h s", "cp", summands=1)


def _whole(run: Pass) -> Rows:
    """Whole images of which some rows are here."""
    return run.rows.uncut() if run.rows.everyone else run.rows


def _counts(run: Pass) -> list[int]:
    """Images that begin on each of the ranks over which they are cut: all on the first."""
    return [sum(each.begins for each in own) for own in run.rows.everyone]


def _images(run: Pass) -> Iterator[tuple[int, Run, slice]]:
    """Each run of the rows that are here, with the number of its image among the pass's."""
    numbers = {each.sample: number for number, each in enumerate(_whole(run).runs)}
    for each, rows in run.shard_rows.places():
        yield numbers[each.sample], each, rows
