"""Every layer behind one interface, with global inputs: what the contract and the comparison with one rank run over.

A case knows which columns of the global input and output a rank has, so that one body feeds and gathers
column-parallel, row-parallel and replicated layers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import from_host, to_host
from mpitp.comm import Group
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.block import TransformerBlock
from mpitp.layers.branch_norm_block import BranchNormBlock
from mpitp.layers.build import AttentionSizes, Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding
from mpitp.layers.mlp import MLP, SwiGlu
from mpitp.layers.parallel_block import ParallelBlock
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare
from mpitp.layers.passes import DropoutState, Pass
from mpitp.layers.rotary import Rotary
from mpitp.layers.rows import Rows
from mpitp.layers.sandwich_block import SandwichBlock
from mpitp.layers.scale import Scale, SoftCap
from tests.sharded import fill, random_array

HIDDEN = 8
LENGTHS = (5, 1, 3)  # of the sequences in a batch
TOKENS = sum(LENGTHS)
Array = Any


@dataclass
class Rig:
    """A layer of one rank, ready to be run on global inputs."""

    params: dict[str, Param]
    forward: Callable[[Array], tuple[Array, Any]]
    backward: Callable[[Array, Any], Array | None]
    columns_in: Sequence[int] | None = None  # the global columns of x that this rank has; None: all
    columns_out: Sequence[int] | None = None  # the same of y
    reads_ids: bool = False  # x is ids or targets: not differentiated
    looks_up: bool = False  # rows of a table


@dataclass(frozen=True)
class LayerCase:
    """How a layer is made, and the shapes of its global input and output."""

    make: Callable[[Builder, Pass], Rig]
    columns_in: int | None = HIDDEN  # None: [t]
    columns_out: int | None = HIDDEN
    ids_below: int = 0  # > 0: the input is ids below this
    dropout: bool = False


def column(builder: Builder, run: Pass, names: Sequence[str], units: int) -> Rig:
    share = builder.site.share(units)
    layer = builder.column(names, HIDDEN, share, bias=True)
    out = [i * units + j for i in range(len(names)) for j in share.span]
    return Rig(layer.params(), layer.forward, layer.backward, columns_out=out)


def row(builder: Builder, run: Pass, units: int) -> Rig:
    share = builder.site.share(units)
    layer = builder.row("in", share, HIDDEN, bias=True)
    return Rig(layer.params(), layer.forward, layer.backward, columns_in=share.span)


def qkv(builder: Builder, run: Pass, heads: int, kv_heads: int, d: int) -> Rig:
    own = builder.site.heads(heads, kv_heads)
    layer = attention_layer(builder, own, d).qkv
    return Rig(layer.params(), layer.forward, layer.backward, columns_out=qkv_columns(own, heads, kv_heads, d))


def qkv_columns(own: HeadShare, heads: int, kv_heads: int, d: int) -> list[int]:
    """Columns [q | k | v] of the global projection that a rank with these heads has."""
    q = range(own.query.span.start * d, own.query.span.stop * d)
    kv = range(own.kv.start * d, own.kv.stop * d)
    return [*q, *(heads * d + j for j in kv), *((heads + kv_heads) * d + j for j in kv)]


def attention_layer(
    builder: Builder, own: HeadShare, d: int, rate: float = 0.0, rope: int = 0, norms: Any = None
) -> Any:
    sizes = AttentionSizes(own, d, HIDDEN, qkv_bias=True, out_bias=True)
    return builder.attention(sizes, AttentionDropout(rate, "attention"), Rotary(rope, 100.0) if rope else None, norms)


def attention(builder: Builder, run: Pass, heads: int, kv_heads: int, d: int, rate: float = 0.0, rope: int = 0) -> Rig:
    layer = attention_layer(builder, builder.site.heads(heads, kv_heads), d, rate, rope)
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def normed_attention(builder: Builder, run: Pass, heads: int, kv_heads: int, d: int, rope: int) -> Rig:
    own = builder.site.heads(heads, kv_heads)
    layer = attention_layer(builder, own, d, 0.0, rope, builder.head_norms(own, d, 1e-6, 1.0))
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def jointly_normed_attention(builder: Builder, run: Pass, heads: int, kv_heads: int, d: int, rope: int) -> Rig:
    own = builder.site.heads(heads, kv_heads)
    layer = attention_layer(builder, own, d, 0.0, rope, builder.joint_norms(own, d, 1e-6))
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def mlp(builder: Builder, run: Pass, ffn: int, activation: str, gated: bool) -> Rig:
    layer = builder.mlp(HIDDEN, builder.site.share(ffn), gated=gated, bias=True, activation=activation)
    return Rig(layer.params(), layer.forward, layer.backward)


def gelu_mlp(builder: Builder, run: Pass, ffn: int) -> Rig:
    layer = gelu_layer(builder, ffn)
    return Rig(layer.params(), layer.forward, layer.backward)


def gelu_layer(builder: Builder, ffn: int) -> MLP:
    return builder.mlp(HIDDEN, builder.site.share(ffn), gated=False, bias=True)


def swiglu_mlp(builder: Builder, run: Pass, ffn: int) -> Rig:
    layer = swiglu_layer(builder, ffn)
    return Rig(layer.params(), layer.forward, layer.backward)


def swiglu_layer(builder: Builder, ffn: int) -> MLP:
    share = builder.site.share(ffn)
    gate_up = builder.column(("gate", "up"), HIDDEN, share, bias=True)
    return MLP(gate_up, SwiGlu(), builder.row("down", share, HIDDEN, bias=False))


def layer_norm(builder: Builder, run: Pass) -> Rig:
    layer = builder.layer_norm(HIDDEN, 1e-5)
    return Rig(layer.params(), layer.forward, layer.backward)


def rms_norm(builder: Builder, run: Pass) -> Rig:
    layer = builder.rms_norm(HIDDEN, 1e-6)
    return Rig(layer.params(), layer.forward, layer.backward)


def offset_rms_norm(builder: Builder, run: Pass) -> Rig:
    layer = builder.offset_rms_norm(HIDDEN, 1e-6)
    return Rig(layer.params(), layer.forward, layer.backward)


def soft_cap(builder: Builder, run: Pass, columns: int) -> Rig:
    layer, share = SoftCap(1.5), builder.site.share(columns)
    return Rig({}, layer.forward, layer.backward, columns_in=share.span, columns_out=share.span)


def scale(builder: Builder, run: Pass) -> Rig:
    layer = Scale(2.5)
    return Rig({}, layer.forward, layer.backward)


def embedding(builder: Builder, run: Pass, vocab: int) -> Rig:
    share = builder.site.share(vocab)
    layer = builder.embedding(builder.vocab_table(share, HIDDEN), share)
    return Rig(layer.params(), layer.forward, layer.backward, reads_ids=True, looks_up=True)


def positions(builder: Builder, run: Pass, rows: int, offset: int = 0) -> Rig:
    layer = PositionEmbedding(builder.site.whole(rows, HIDDEN, std=0.02), offset)
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward, looks_up=True)


def loss(builder: Builder, run: Pass, vocab: int) -> Rig:
    share = builder.site.share(vocab)
    layer = builder.loss(share)
    targets = from_host(random_ids("targets", vocab, lowest=-1), builder.site.device.xp)  # some are to be ignored
    forward = lambda logits: layer.forward(logits, targets)  # noqa: E731
    return Rig({}, forward, layer.backward, columns_in=share.span)


def dropout(builder: Builder, run: Pass, rate: float) -> Rig:
    layer = Dropout(rate, "residual")
    return Rig({}, lambda x: layer.forward(x, run), layer.backward)


def block(builder: Builder, run: Pass, kind: str, heads: int, kv_heads: int, d: int, ffn: int, rope: int = 0) -> Rig:
    own, is_gpt = builder.site.heads(heads, kv_heads), kind == "gpt2"
    make_norm = builder.layer_norm if is_gpt else builder.rms_norm
    mlp = gelu_layer(builder, ffn) if is_gpt else swiglu_layer(builder, ffn)
    dropouts = (Dropout(0.2, "residual1"), Dropout(0.2, "residual2"))
    attention = attention_layer(builder, own, d, rate=0.3, rope=rope)
    layer = TransformerBlock(make_norm(HIDDEN, 1e-5), attention, make_norm(HIDDEN, 1e-5), mlp, dropouts)
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def parallel_block(builder: Builder, run: Pass, one_norm: bool) -> Rig:
    norms = [builder.layer_norm(HIDDEN, 1e-5), None if one_norm else builder.layer_norm(HIDDEN, 1e-5)]
    attention = attention_layer(builder, builder.site.heads(4, 2), 4, rope=2)
    dropouts = (Dropout(0.2, "residual1"), Dropout(0.2, "residual2"))
    layer = ParallelBlock(norms[0], attention, norms[1], gelu_layer(builder, 9), dropouts)
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def sandwich_block(builder: Builder, run: Pass) -> Rig:
    norms = tuple(builder.offset_rms_norm(HIDDEN, 1e-5) for _ in range(4))
    layer = SandwichBlock(norms, attention_layer(builder, builder.site.heads(3, 1), 2), swiglu_layer(builder, 7))
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def branch_norm_block(builder: Builder, run: Pass) -> Rig:
    own = builder.site.heads(4, 2)
    attention = attention_layer(builder, own, 2, norms=builder.joint_norms(own, 2, 1e-5))
    layer = BranchNormBlock(
        attention, builder.rms_norm(HIDDEN, 1e-5), swiglu_layer(builder, 7), builder.rms_norm(HIDDEN, 1e-5)
    )
    return Rig(layer.params(), lambda x: layer.forward(x, run), layer.backward)


def _case(make: Callable[..., Rig], *args: Any, **options: Any) -> LayerCase:
    return LayerCase(lambda builder, run: make(builder, run, *args), **options)


CASES: dict[str, LayerCase] = {
    "column 7": _case(column, ("out",), 7, columns_out=7),
    "column 8": _case(column, ("out",), 8, columns_out=8),
    "column gate up 9": _case(column, ("gate", "up"), 9, columns_out=18),
    "row 7": _case(row, 7, columns_in=7),
    "row 9": _case(row, 9, columns_in=9),
    "qkv 9/3": _case(qkv, 9, 3, 2, columns_out=30),
    "qkv 8/2": _case(qkv, 8, 2, 3, columns_out=36),
    "attention 7/7": _case(attention, 7, 7, 3),
    "attention 9/3": _case(attention, 9, 3, 2, 0.0, 2),
    "attention 6/2": _case(attention, 6, 2, 4, 0.0, 4),
    "attention 5/1": _case(attention, 5, 1, 2, 0.0, 2),
    "attention 8/2": _case(attention, 8, 2, 3),
    "attention 2/1": _case(attention, 2, 1, 4, 0.0, 4),
    "attention 6/2 dropout": _case(attention, 6, 2, 2, 0.4, 2, dropout=True),
    "gelu 9": _case(gelu_mlp, 9),
    "gelu 3": _case(gelu_mlp, 3),
    "swiglu 7": _case(swiglu_mlp, 7),
    "swiglu 8": _case(swiglu_mlp, 8),
    "gelu by erf 7": _case(mlp, 7, "gelu", False),
    "relu 7": _case(mlp, 7, "relu", False),
    "quick gelu 7": _case(mlp, 7, "quick_gelu", False),
    "gated tanh gelu 7": _case(mlp, 7, "gelu_tanh", True),
    "gated gelu 7": _case(mlp, 7, "gelu", True),
    "attention 6/2 partly rotated": _case(attention, 6, 2, 6, 0.0, 4),
    "attention 6/2 with norms": _case(normed_attention, 6, 2, 4, 4),
    "attention 6/2 with joint norms": _case(jointly_normed_attention, 6, 2, 4, 4),
    "attention 5/1 with joint norms": _case(jointly_normed_attention, 5, 1, 2, 0),
    "branch norm block": _case(branch_norm_block),
    "attention 5/1 with norms": _case(normed_attention, 5, 1, 4, 0),
    "offset rms norm": _case(offset_rms_norm),
    "soft cap 9": _case(soft_cap, 9, columns_in=9, columns_out=9),
    "scale": _case(scale),
    "positions 5 behind 2": _case(positions, 7, 2),
    "parallel block": _case(parallel_block, False, dropout=True),
    "parallel block, one norm": _case(parallel_block, True),
    "sandwich block": _case(sandwich_block),
    "layer norm": _case(layer_norm),
    "rms norm": _case(rms_norm),
    "embedding 9": _case(embedding, 9, columns_in=None, ids_below=9),
    "embedding 3": _case(embedding, 3, columns_in=None, ids_below=3),
    "positions 5": _case(positions, 5),
    "loss 9": _case(loss, 9, columns_in=9, columns_out=None),
    "loss 4": _case(loss, 4, columns_in=4, columns_out=None),
    "dropout": _case(dropout, 0.3, dropout=True),
    "block gpt2": _case(block, "gpt2", 4, 4, 2, 9),
    "block gpt2 dropout": _case(block, "gpt2", 4, 4, 2, 9, dropout=True),
    "block llama": _case(block, "llama", 9, 3, 2, 7, 2, dropout=True),
}


def make_rig(case: LayerCase, builder: Builder) -> Rig:
    """The layer on this rank, its parameters filled from global random tensors."""
    rig = case.make(builder, Pass(Rows.of(LENGTHS, samples=(4, 0, 9)), DropoutState(7, 3) if case.dropout else None))
    fill(rig.params.items())
    return rig


def random_ids(name: str, below: int, lowest: int = 0) -> np.ndarray:
    """Ids with repeats, [TOKENS]."""
    return np.floor(lowest + np.abs(np.sin(random_array(name, (TOKENS,)))) * (below - lowest)).astype(np.int64)


def global_input(case: LayerCase, name: str = "x") -> np.ndarray:
    """The whole input: float64 [t, columns_in], or ids [t]."""
    if case.ids_below:
        return random_ids(name, case.ids_below)
    assert case.columns_in is not None
    return random_array(name, (TOKENS, case.columns_in))


def global_gradient(case: LayerCase, name: str = "dy") -> np.ndarray:
    """The gradient of the whole output, float64."""
    return random_array(name, (TOKENS,) if case.columns_out is None else (TOKENS, case.columns_out))


def local(whole: np.ndarray, columns: Sequence[int] | None, builder: Builder) -> Array:
    """This rank's columns of a global array, on the builder's device in its dtype (ids stay integers)."""
    mine = whole if columns is None else whole[:, list(columns)]
    dtype = mine.dtype if mine.dtype == np.int64 else builder.site.dtype
    return from_host(np.ascontiguousarray(mine, dtype=dtype), builder.site.device.xp)


def gathered(group: Group, mine: Array, columns: Sequence[int] | None, total: int | None) -> np.ndarray:
    """The global array. What several ranks hold must be equal on them, to rounding where they computed it apart."""
    pieces = group.all_gather_objects((None if columns is None else list(columns), to_host(mine)))
    if columns is None:
        for _, values in pieces:
            np.testing.assert_array_equal(values, pieces[0][1], "a replicated array differs between ranks")
        return pieces[0][1].copy()
    assert total is not None
    whole = np.full((to_host(mine).shape[0], total), np.nan)
    for cols, values in pieces:
        known = ~np.isnan(whole[:, cols])
        np.testing.assert_allclose(whole[:, cols][known], values[known], rtol=0, atol=1e-5)
        whole[:, cols] = values
    assert not np.isnan(whole).any(), "a column is on no rank"
    return whole
