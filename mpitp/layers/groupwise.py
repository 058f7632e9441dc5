r"""Products and tables whose weights are whole numbers of 8 or 4 bits with a scale a group (`ops/groupwise.py`).

    W[i, j] = codes[i, j] * scales[i, j // g]        codes [n, k * bits / 8] int8 or uint8, scales [n, k/g] float32

or codes * scales + least, then [n, 2 k/g], each group's scale and least value side by side.
Codes and scales are two parameters, cut as W is; a cut along k lies between groups. They are loaded, never trained:
backward gives dx, and no gradients of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.errors import ConfigError
from mpitp.layers.algebra import Algebra, Segment, Sum
from mpitp.layers.array_type import INVARIANT, PARTIAL, ArrayType
from mpitp.layers.layer import Layer, Send
from mpitp.layers.mappings import ExitPair
from mpitp.layers.param import Param
from mpitp.layers.partition import Share
from mpitp.layers.placement import Cut, Part, Placement
from mpitp.layers.product import ALL, Block, Product
from mpitp.layers.site import Site
from mpitp.ops.groupwise import Grouping, Multiply, groupwise_forward, groupwise_input_grad, widened

SCALE = "weight_scale"  # the second parameter's name, beside "weight"


@dataclass(frozen=True, slots=True)
class GroupwiseProduct(Product):
    """W is made of codes and scales. `whole`: how W would be cut; `multiply`: what makes y of x, codes and scales."""

    codes: Param
    scales: Param
    grouping: Grouping
    whole: Placement
    multiply: Multiply = groupwise_forward

    @property
    def shape(self) -> tuple[int, int]:
        scales = self.scales.data
        return len(scales), self.grouping.groups_in(scales) * self.grouping.size

    @property
    def placement(self) -> Placement:
        return self.whole

    def forward(self, x: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return self.multiply(x, *self._block(rows, cols), self.grouping, out=out)

    def input_grad(self, dy: Array, rows: slice = ALL, cols: slice = ALL, out: Array | None = None) -> Array:
        return groupwise_input_grad(dy, *self._block(rows, cols), self.grouping, out=out)

    def accumulate_grads(self, dy: Array, x: Array, blocks: Sequence[Block]) -> None:
        """Nothing: whole numbers have no gradient."""

    def params(self) -> Mapping[str, Param]:
        return {"weight": self.codes, SCALE: self.scales}

    def _block(self, rows: slice, cols: slice) -> tuple[Array, Array]:
        """Codes and scales of a block of W."""
        groups = cols
        if cols != ALL:
            groups = slice(cols.start // self.grouping.size, cols.stop // self.grouping.size)
            cols = slice(groups.start * self.grouping.group_bytes, groups.stop * self.grouping.group_bytes)
            groups = slice(groups.start * self.grouping.group_floats, groups.stop * self.grouping.group_floats)
        return self.codes.data[rows, cols], self.scales.data[rows, groups]


class GroupwiseEmbedding(Layer):
    """Rows of a table in 8 or 4 bits, cut along the vocabulary as in `VocabParallelEmbedding`; it isn't trained."""

    algebra = Algebra(
        "vocabulary-parallel embedding",
        (
            Segment("y_partial[i] = E_r[ids_i] if rank r holds that row, else 0", "ids E", "y_partial", "widened"),
            Sum("y", "y = sum_r y_partial", "all terms but one are 0"),
        ),
        (),
        exit="reduce",
        names={"x": "ids", "weight": "E"},
    )

    def __init__(self, product: GroupwiseProduct, vocab: Share, reduce: ExitPair) -> None:
        self.product, self.vocab, self.reduce = product, vocab, reduce

    def forward(self, x: Array, run: Any = None) -> tuple[Array, None]:
        """ids x [t] -> y [t, h]."""
        xp, (n, hidden) = array_module(x), self.product.shape
        y_partial = xp.zeros((len(x), hidden), np.float32)
        local = x.astype(np.int64) - self.vocab.span.start
        held = (local >= 0) & (local < n)
        codes, scales = (param.data[local[held]] for param in (self.product.codes, self.product.scales))
        y_partial[held] = widened(codes, scales, self.product.grouping)
        return self.reduce.forward([y_partial], like=y_partial), None

    def backward(self, dy: Array, ctx: None) -> None:
        """Nothing: neither ids nor whole numbers have a gradient."""

    def children(self) -> Mapping[str, Param]:
        return self.product.params()

    def placements(self, incoming: ArrayType) -> ArrayType:
        """Ids, the same on every rank that has rows of the table, to whole rows."""
        axis = self.product.placement.parts[0].dims[0].axis
        incoming.expect(axis, INVARIANT, "ids")
        return self.reduce.placements(incoming.changed(axis, PARTIAL))

    def sends(self) -> tuple[Send, ...]:
        return self.reduce.sends(self.product.shape[1], summands=0)


def groupwise_product(site: Site, placement: Placement, grouping: Grouping) -> GroupwiseProduct:
    """The product of a W that is cut like `placement`, all zero. Raises ConfigError where a cut parts a group."""
    return GroupwiseProduct(*codes_and_scales(site, placement, grouping), grouping, placement)


def codes_and_scales(site: Site, placement: Placement, grouping: Grouping) -> tuple[Param, Param]:
    """The two parameters of matrices that are cut like `placement`, all zero. Raises ConfigError where a cut parts a
    group.
    """
    codes = _regrouped(placement, grouping, grouping.group_bytes)
    scales = _regrouped(placement, grouping, grouping.group_floats)
    zeros = site.device.zeros
    return (
        Param(zeros(codes.shape, grouping.dtype), codes, decay=False),
        Param(zeros(scales.shape, np.dtype(np.float32)), scales, decay=False),
    )


def _regrouped(placement: Placement, grouping: Grouping, unit: int) -> Placement:
    """The placement of matrices that have `unit` columns for each group of W's, which lie along its last dim."""
    parts = [
        Part(part.name, (*part.dims[:-1], _scaled(part.dims[-1], grouping.size, unit))) for part in placement.parts
    ]
    return replace(placement, parts=tuple(parts))


def _scaled(cut: Cut, size: int, unit: int) -> Cut:
    def scaled(columns: range) -> range:
        if columns.start % size or columns.stop % size:
            raise ConfigError(
                f"weights in groups of {size} along their inputs can't be cut at columns {columns.start} to "
                f"{columns.stop} of {cut.size}: the width, each head and each rank's share must be multiples of {size}"
            )
        return range(columns.start // size * unit, columns.stop // size * unit)

    whole = scaled(range(cut.size))
    return Cut(len(whole), scaled(cut.held), scaled(cut.owned), tuple(map(scaled, cut.blocks)), cut.axis)
