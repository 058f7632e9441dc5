r"""Three ways to cut a convolution over ranks. Images are [b, y, x, c], W [n, c, k, k]; u = unfold(x) as in `ops`.

By output channels (Krizhevsky et al. 2012 cut theirs so over two GPUs): each rank computes some channels of z.

    z_r  = u W_r^T + b_r            x whole on every rank, z_r [b, y', x', n/tp]                       I to V
    dx   = sum_r fold(dz_r W_r)     (CopyToTP's backward; folded first, so that k k times less is summed)
    dW_r = dz_r^T u

By input channels: each rank has some channels of x, and what it makes of them is a summand of z.

    z    = sum_r u_r W_r^T + b      x_r [b, y, x, c/tp], z whole on every rank (ReduceFromTP's forward)  V to I
    dx_r = fold(dz W_r)
    dW_r = dz^T u_r

By rows of the image, with a halo of the neighbours' rows (`halo.py`): every rank has the whole of W.

    z_r  = unfold(near_r) W^T + b   x_r [b, y/tp, x, c], z_r [b, y'/tp, x', n]                           V to V
           windows that see own rows alone are computed while the halo is on its way
    dx_r = what all ranks' fold(dz_r W) say of rank r's rows, added up
    dW   = sum_r dz_r^T unfold(near_r)    a summand a rank, summed before the update

The first two send what their pair sends, whatever the kernel; the third sends k - 1 rows to each side, whatever the
number of channels. u is made again in backward: it has k k times as many numbers as x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitp.backend.arrays import Array, array_module
from mpitp.errors import ConfigError
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import PARTIAL, REPLICATE, VARYING, ArrayType, columns_of
from mpitp.layers.halo import Halo, at
from mpitp.layers.layer import Layer, Send
from mpitp.layers.linear import as_slices
from mpitp.layers.mappings import CopyToTP, ReduceFromTP
from mpitp.layers.param import Param
from mpitp.ops.convolution import Geometry, fold, unfold
from mpitp.ops.linear import linear_bias_grad, linear_forward, linear_input_grad, linear_weight_grad


@dataclass(slots=True)
class ConvolutionContext:
    """What backward needs: the pixels that the windows saw."""

    x: Array  # [b, y, x, c]; by rows: with the halo


class ColumnParallelConvolution(Layer):
    """z_r = unfold(x) W_r^T + b_r: each rank computes its own channels of z.

    Args:
        weight: W_r [n/tp, c, k, k].
        bias: [n/tp], or None.
        copy: the pair that makes dx of the ranks' parts of it.
        blocks: local channels of z that are multiplied by themselves.
        summands: how many of these all ranks have together (0: the ranks' own sums are added).
    """

    algebra = Algebra(
        "convolution, cut by output channels",
        (Segment("y_r = unfold(x) W_r^T{ + b_r}", "x W b", "y", "a rank makes its channels of y"),),
        (
            Segment("dx_partial = fold(dy_r W_r)", "dy W", "dx_partial", "every rank's channels came from the whole x"),
            Sum("dx", "dx = sum_r dx_partial", "x was used on every rank"),
            Segment("dW_r = dy_r^T unfold(x){, db_r = sum dy_r}", "dy x", "", "runs behind the sum", grads=True),
        ),
        "CopyToTP: identity forward, all-reduce of dx backward",
        entry="copy",
    )

    def __init__(
        self,
        weight: Param,
        bias: Param | None,
        copy: CopyToTP,
        geometry: Geometry,
        blocks: Sequence[range],
        summands: int = 0,
    ) -> None:
        self.weight, self.bias, self.copy, self.geometry = weight, bias, copy, geometry
        self.blocks, self.summands = as_slices(blocks), summands

    def forward(self, x: Array, run: object = None) -> tuple[Array, ConvolutionContext]:
        """x [b, y, x, c] -> z [b, y', x', n/tp]."""
        expect_images(x, (self.geometry.height, self.geometry.width, self.weight.data.shape[1]))
        seen, w = unfold(self.copy.forward(x), self.geometry.windows()), matrix_of(self.weight.data)
        z = array_module(x).empty((len(seen), len(w)), x.dtype)
        for rows in self.blocks:
            linear_forward(seen, w[rows], out=z[:, rows])
        if self.bias:
            z += self.bias.data
        return z.reshape(x.shape[0], *self.geometry.outputs, len(w)), ConvolutionContext(x)

    def backward(self, dy: Array, ctx: ConvolutionContext) -> Array:
        """dz [b, y', x', n/tp] -> dx [b, y, x, c]; the sum over ranks runs behind the weight gradient's product."""
        x, w, windows = ctx.x, matrix_of(self.weight.data), self.geometry.windows()
        dz = as_matrix(dy)
        dx_partials = [
            fold(linear_input_grad(dz[:, rows], w[rows]), windows, out=self._room(x, is_first=not i))
            for i, rows in enumerate(self.blocks)
        ]
        pending = self.copy.start_backward(dx_partials, like=x)
        accumulate_weight(self.weight, dz, unfold(x, windows), [(rows, slice(None)) for rows in self.blocks])
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dz))
        return pending.wait()

    def _room(self, x: Array, *, is_first: bool) -> Array:
        return self.copy.operand(x.shape, x) if is_first else array_module(x).empty(x.shape, x.dtype)

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight, **({"bias": self.bias} if self.bias else {})}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """From whole images, copied to every rank, to this rank's channels."""
        x, axis = self.copy.placements(incoming), self.copy.axis
        x.expect_summed("x of a convolution")
        x.expect_columns((), "x of a convolution cut by output channels")
        x.expect(axis, REPLICATE, "x of a convolution cut by output channels", "a copy, which sums dx, is missing")
        for name, param in self.children().items():
            x.expect_gradient_summed(name, param)
        return x.changed(axis, VARYING, columns_of(self.weight.placement.parts, 0))

    def sends(self) -> tuple[Send, ...]:
        return self.copy.sends(self.geometry.height * self.geometry.width * self.weight.data.shape[1], self.summands)


class RowParallelConvolution(Layer):
    """z = sum_r unfold(x_r) W_r^T + b: each rank has its own channels of x.

    Args:
        weight: W_r [n, c/tp, k, k].
        bias: [n], the same on every rank, or None.
        reduce: the pair that makes z of the ranks' parts of it.
        blocks: local channels of x that are multiplied by themselves, in global order.
        summands: how many of these all ranks have together (0: the ranks' own sums are added).
    """

    algebra = Algebra(
        "convolution, cut by input channels",
        (
            Segment("y_partial = unfold(x_r) W_r^T", "x W", "y_partial", "a rank's channels make a part of the sum"),
            Sum("y", "y = sum_r y_partial"),
            Segment("y = y + b", "y b", "y", "the bias is added once, after the sum", needs="b"),
        ),
        (Segment("dx_r = fold(dy W_r), dW_r = dy^T unfold(x_r){, db = sum dy}", "dy W x", "dx", "", grads=True),),
        "ReduceFromTP: all-reduce of y forward, identity backward",
        exit="reduce",
    )

    def __init__(
        self,
        weight: Param,
        bias: Param | None,
        reduce: ReduceFromTP,
        geometry: Geometry,
        blocks: Sequence[range],
        summands: int = 0,
    ) -> None:
        self.weight, self.bias, self.reduce, self.geometry = weight, bias, reduce, geometry
        self.summands, area = summands, geometry.kernel**2
        self.blocks = as_slices([range(block.start * area, block.stop * area) for block in blocks])  # columns of u

    def forward(self, x: Array, run: object = None) -> tuple[Array, ConvolutionContext]:
        """x [b, y, x, c/tp] -> z [b, y', x', n]."""
        expect_images(x, (self.geometry.height, self.geometry.width, self.weight.data.shape[1]))
        seen, w = unfold(x, self.geometry.windows()), matrix_of(self.weight.data)
        shape = (len(seen), len(w))
        z_partials = [
            linear_forward(seen[:, cols], w[:, cols], out=None if i else self.reduce.operand(shape, x))
            for i, cols in enumerate(self.blocks)
        ]
        z = self.reduce.forward(z_partials, z_partials[0] if z_partials else array_module(x).zeros(shape, x.dtype))
        if self.bias:
            z += self.bias.data
        return z.reshape(x.shape[0], *self.geometry.outputs, len(w)), ConvolutionContext(x)

    def backward(self, dy: Array, ctx: ConvolutionContext) -> Array:
        """dz [b, y', x', n] -> dx [b, y, x, c/tp]."""
        x, w, windows = ctx.x, matrix_of(self.weight.data), self.geometry.windows()
        if self.bias:
            self.bias.accumulate(linear_bias_grad(as_matrix(dy)))
        dz, xp = self.reduce.backward(as_matrix(dy)), array_module(x)
        dseen = xp.empty((len(dz), w.shape[1]), x.dtype)
        for cols in self.blocks:
            linear_input_grad(dz, w[:, cols], out=dseen[:, cols])
        accumulate_weight(self.weight, dz, unfold(x, windows), [(slice(None), cols) for cols in self.blocks])
        return fold(dseen, windows, out=xp.empty(x.shape, x.dtype))

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight, **({"bias": self.bias} if self.bias else {})}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """From this rank's channels to whole images, summed over the ranks."""
        axis = self.reduce.axis
        incoming.expect(axis, VARYING, "x of a convolution cut by input channels", "each rank needs its own channels")
        incoming.expect_columns(columns_of(self.weight.placement.parts, 1), "x of a convolution cut by input channels")
        incoming.expect_gradient_summed("weight", self.weight)
        z = self.reduce.placements(incoming.changed(axis, PARTIAL).of_layer("its own product"))
        if self.bias:
            z.expect_summed("what a bias is added to")
            z.expect_gradient_summed("bias", self.bias)
        return z

    def sends(self) -> tuple[Send, ...]:
        rows, columns = self.geometry.outputs
        return self.reduce.sends(rows * columns * self.weight.data.shape[0], self.summands)


class RowsConvolution(Layer):
    """z_r = unfold(near_r) W^T + b: each rank has its own rows of the images, and its neighbours' beside them.

    Args:
        weight: W [n, c, k, k], the same on every rank; its gradient is a summand along the axis, as that of the bias.
        bias: [n], or None.
        halo: the pair that gets the rows beside one's own.
    """

    algebra = Algebra(
        "convolution, cut by rows of the image",
        (Segment("y_r = unfold(near_r) W^T{ + b}", "x W b", "y", "near_r: own rows and the neighbours' beside them"),),
        (Segment("dx_r = fold(dy_r W) here, and on the neighbours", "dy W x", "dx", "added up at home", grads=True),),
        "Halo: rows to the neighbours forward, their gradients back and added backward",
        entry="halo",
    )

    def __init__(self, weight: Param, bias: Param | None, halo: Halo) -> None:
        self.weight, self.bias, self.halo = weight, bias, halo

    def forward(self, x: Array, run: object = None) -> tuple[Array, ConvolutionContext]:
        """x [b, own rows, x, c] -> z [b, own rows of windows, x', n]; the halo comes behind the windows inside."""
        geometry, rank = self.halo.geometry, self.halo.group.rank
        expect_images(x, (len(self.halo.own(rank)), geometry.width, self.weight.data.shape[1]))
        outputs, inner = self.halo.outputs(rank), self.halo.inner(rank)
        z = array_module(x).empty((x.shape[0], len(outputs), geometry.outputs[1], len(self.weight.data)), x.dtype)
        near, coming = self.halo.start_forward(x)
        self._compute(inner, near, z)
        coming.wait()
        for edge in (range(outputs.start, inner.start), range(inner.stop, outputs.stop)):
            self._compute(edge, near, z)
        if self.bias:
            z += self.bias.data
        return z, ConvolutionContext(near)

    def _compute(self, rows: range, near: Array, z: Array) -> None:
        """Write some rows of windows to z: unfold(near) W^T."""
        if rows:
            geometry, rank = self.halo.geometry, self.halo.group.rank
            seen = near[:, at(geometry.seen(rows), self.halo.near(rank))]
            made = linear_forward(unfold(seen, geometry.windows(rows)), matrix_of(self.weight.data))
            z[:, at(rows, self.halo.outputs(rank))] = made.reshape(z.shape[0], len(rows), *z.shape[2:])

    def backward(self, dy: Array, ctx: ConvolutionContext) -> Array:
        """dz [b, own rows of windows, x', n] -> dx [b, own rows, x, c]; gradients go home behind the products of dW."""
        near, w = ctx.x, matrix_of(self.weight.data)
        windows = self.halo.geometry.windows(self.halo.outputs(self.halo.group.rank))
        dz = as_matrix(dy)
        dnear = fold(linear_input_grad(dz, w), windows, out=array_module(near).empty(near.shape, near.dtype))
        pending = self.halo.start_backward(dnear)
        accumulate_weight(self.weight, dz, unfold(near, windows), [(slice(None), slice(None))])
        if self.bias:
            self.bias.accumulate(linear_bias_grad(dz))
        return pending.wait()

    def children(self) -> Mapping[str, Param]:
        return {"weight": self.weight, **({"bias": self.bias} if self.bias else {})}

    def placements(self, incoming: ArrayType) -> ArrayType:
        """From this rank's rows to this rank's rows."""
        near = self.halo.placements(incoming)
        near.expect_summed("x of a convolution")
        for name, param in self.children().items():
            near.expect_gradient_summed(name, param)
        return near

    def sends(self) -> tuple[Send, ...]:
        return self.halo.sends(self.weight.data.shape[1])


def matrix_of(weight: Array) -> Array:
    """W [n, c, k, k] as [n, c k k]."""
    outputs, channels, kernel, _ = weight.shape
    return weight.reshape(outputs, channels * kernel * kernel)


def as_matrix(images: Array) -> Array:
    """[b, y, x, n] as [b y x, n]."""
    b, y, x, n = images.shape
    return images.reshape(b * y * x, n)


def accumulate_weight(weight: Param, dz: Array, seen: Array, blocks: Sequence[tuple[slice, slice]]) -> None:
    """Add dW = dz^T u to the gradient, block by block of W's rows and columns."""
    shape = weight.data.shape
    dw = array_module(dz).empty((shape[0], seen.shape[1]), weight.grad_dtype)
    for rows, cols in blocks:
        linear_weight_grad(dz[:, rows], seen[:, cols], out=dw[rows, cols])
    weight.accumulate(dw.reshape(shape))


def expect_images(x: Array, shape: tuple[int, int, int]) -> None:
    """Raise ConfigError unless x is [b, *shape]."""
    if x.ndim != 4 or x.shape[1:] != shape:
        raise ConfigError(
            f"a convolution of images of {shape[0]} rows, {shape[1]} columns and {shape[2]} channels on this rank got "
            f"an array of shape {list(x.shape)}; expected [images, {shape[0]}, {shape[1]}, {shape[2]}]"
        )
