"""The way of a few newest tokens through the layers: each layer as one function, with its kernels and nothing else.

    call = decode_call(layer)           call(x, run) -> y, the bits of layer.forward(x, run)[0]

A decode step is bound by reading the weights once. What a layer's forward does beside (contexts for a backward, blocks
of the invariant layout, pieces of long sums, and the question which kernel suits these arrays) costs a small step a
sixth of its time, so here it is answered once for all steps. A layer of a kind that isn't listed below, and one that is
being observed, is asked as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpitp.backend.accelerator import is_accelerated
from mpitp.backend.arrays import Array
from mpitp.backend.threads import blas_threads
from mpitp.comm.serial import SerialGroup
from mpitp.layers.attention import AttentionHeads, SelfAttention
from mpitp.layers.block import TransformerBlock
from mpitp.layers.cached_attention import Caches
from mpitp.layers.groupwise import GroupwiseProduct
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.mappings import CopyToTP, ReduceFromTP
from mpitp.layers.mlp import MLP, SwiGlu
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.paged_cache import PagedCaches
from mpitp.layers.passes import Pass
from mpitp.layers.product import DenseProduct, Product
from mpitp.layers.rows import Rows
from mpitp.layers.summation import LibrarySum
from mpitp.ops.groupwise import GROUP_SIZE
from mpitp.ops.linear import COMPILED_ROWS
from mpitp.ops.rounded import rounded_forward

DecodeCall = Callable[[Array, Pass], Array]
Multiply = Callable[[Array, Array], Any]  # x [t, k] and where to write y [t, n]


class DecodeCalls:
    """Layers one after the other, for the passes that `takes` says yes to."""

    def __init__(self, layers: Sequence[Layer], xp: Any, dtype: np.dtype) -> None:
        self._layers, self._kind = layers, (xp, dtype)

    def takes(self, rows: Rows, caches: Caches) -> bool:
        """Whether rows are a few newest tokens, one a text, that compiled kernels take on one core."""
        is_kind = isinstance(caches, PagedCaches) and not caches.one_by_one
        is_short = 0 < len(rows.runs) <= COMPILED_ROWS and all(run.length == 1 for run in rows.runs)
        return is_kind and is_short and is_accelerated(*self._kind) and blas_threads() == 1

    def forward(self, x: Array, run: Pass) -> Array:
        """What comes out of the last layer."""
        for call in self._calls:
            x = call(x, run)
        return x

    @cached_property
    def _calls(self) -> list[DecodeCall]:
        return [decode_call(layer) for layer in self._layers]


def decode_call(layer: Layer) -> DecodeCall:
    """(x, run) -> y of a layer."""
    make = _MAKERS.get(type(layer))
    call = None if make is None or "forward" in vars(layer) else make(layer)
    return call or _as_ever(layer)


def _as_ever(layer: Layer) -> DecodeCall:
    return lambda x, run: layer.forward(x, run)[0]


def _of_block(layer: TransformerBlock) -> DecodeCall:
    """Dropout stands still in a pass with caches."""
    parts = layer.norm1, layer.attention, layer.norm2, layer.mlp
    norm1, attention, norm2, mlp = (decode_call(part) for part in parts)

    def call(x: Array, run: Pass) -> Array:
        x1 = attention(norm1(x, run), run)
        x1 += x
        y = mlp(norm2(x1, run), run)
        y += x1
        return y

    return call


def _of_attention(layer: SelfAttention) -> DecodeCall:
    parts = layer.qkv, layer.norms, layer.heads, layer.out
    return _one_by_one([decode_call(part) for part in parts if part is not None])


def _of_mlp(layer: MLP) -> DecodeCall:
    return _one_by_one([decode_call(part) for part in (layer.up, layer.activation, layer.down)])


def _one_by_one(calls: Sequence[DecodeCall]) -> DecodeCall:
    def call(x: Array, run: Pass) -> Array:
        for each in calls:
            x = each(x, run)
        return x

    return call


def _of_heads(layer: AttentionHeads) -> DecodeCall | None:
    from mpitp.ops.compiled.rope import turn

    a, g, d, rotary = layer.heads.query.size, len(layer.heads.kv), layer.head_dim, layer.rotary
    is_whole = rotary is None or rotary.width == d
    if layer.query_groups.change is not None or not a or not is_whole:
        return None

    def call(x: Array, run: Pass) -> Array:
        t = len(x)
        if rotary is not None:
            turn(x[:, : (a + g) * d], *run.rotation(rotary, x))
        by_head = x.reshape(t, a + 2 * g, d)
        o = np.empty((t, a, d), x.dtype)
        assert isinstance(run.caches, PagedCaches)
        run.caches.attend_newest(layer, run, (by_head[:, :a], by_head[:, a : a + g], by_head[:, a + g :]), o)
        return o.reshape(t, a * d)

    return call


def _of_columns(layer: ColumnParallelLinear) -> DecodeCall | None:
    (n, _), bias = layer.product.shape, layer.bias
    if not isinstance(layer.copy, CopyToTP) or layer.blocks != (slice(0, n),):
        return None
    multiply = _multiply_by(layer.product)

    def call(x: Array, run: Pass) -> Array:
        y = np.empty((len(x), n), x.dtype)
        multiply(x, y)
        if bias is not None:
            y += bias.data
        return y

    return call


def _of_rows(layer: RowParallelLinear) -> DecodeCall | None:
    (n, k), bias, reduce = layer.product.shape, layer.bias, layer.reduce
    if not isinstance(reduce, ReduceFromTP) or layer.blocks != (slice(0, k),):
        return None
    multiply = _multiply_by(layer.product)
    is_alone = isinstance(reduce.summation, LibrarySum) and isinstance(reduce.summation.group, SerialGroup)

    def call(x: Array, run: Pass) -> Array:
        y = np.empty((len(x), n), x.dtype) if is_alone else reduce.operand((len(x), n), x)
        multiply(x, y)
        if not is_alone:
            y = reduce.forward([y], y)
        if bias is not None:
            y += bias.data
        return y

    return call


def _multiply_by(product: Product) -> Multiply:
    """Writes y [t, n] of x [t, k]."""
    from mpitp.ops.compiled import few_rows, groupwise, rounded

    if type(product) is DenseProduct:
        weight = product.weight
        return lambda x, y: few_rows.few_rows(x, weight.data, y)
    if type(product) is not GroupwiseProduct or product.grouping.size != GROUP_SIZE or 0 in product.shape:
        return lambda x, y: product.forward(x, out=y)
    multiply = rounded.rounded_products if product.multiply is rounded_forward else groupwise.few_rows
    codes, scales, grouping = product.codes, product.scales, product.grouping
    return lambda x, y: multiply(x, codes.data, scales.data, grouping, y)


def _of_rms_norm(layer: RMSNorm) -> DecodeCall:
    from mpitp.ops.compiled.rms_norm import rms_norm_forward

    def call(x: Array, run: Pass) -> Array:
        y = np.empty(x.shape, x.dtype)
        rms_norm_forward(x, layer.factors(), layer.eps, y, np.empty(len(x), x.dtype))
        return y

    return call


def _of_layer_norm(layer: LayerNorm) -> DecodeCall:
    from mpitp.ops.compiled.layer_norm import layer_norm_forward

    def call(x: Array, run: Pass) -> Array:
        y, (mean, rstd) = np.empty(x.shape, x.dtype), np.empty((2, len(x)), x.dtype)
        layer_norm_forward(x, layer.weight.data, layer.bias.data, layer.eps, y, mean, rstd)
        return y

    return call


def _of_swiglu(layer: SwiGlu) -> DecodeCall:
    from mpitp.ops.compiled.swiglu import swiglu_forward

    def call(x: Array, run: Pass) -> Array:
        y = np.empty((len(x), x.shape[1] // 2), x.dtype)
        swiglu_forward(x, y)
        return y

    return call


_MAKERS: dict[type[Layer], Callable[[Any], DecodeCall | None]] = {
    TransformerBlock: _of_block,
    SelfAttention: _of_attention,
    MLP: _of_mlp,
    AttentionHeads: _of_heads,
    ColumnParallelLinear: _of_columns,
    RowParallelLinear: _of_rows,
    RMSNorm: _of_rms_norm,
    LayerNorm: _of_layer_norm,
    SwiGlu: _of_swiglu,
}
