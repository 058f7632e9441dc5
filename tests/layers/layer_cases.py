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
from mpitp.layers.build import Builder, sharded
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mlp import GeluMLP, SwiGluMLP
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare
from mpitp.layers.sequences import DropoutState, Sequences
from mpitp.ops.rope import rope_inv_freq, rope_table
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


@dataclass(frozen=True)
class LayerCase:
    """How a layer is made, and the shapes of its global input and output."""

    make: Callable[[Builder, Sequences], Rig]
    columns_in: int | None = HIDDEN  # None: [t]
    columns_out: int | None = HIDDEN
    ids_below: int = 0  # > 0: the input is ids below this
    rope: int = 0  # the head_dim, where q and k are rotated
    dropout: bool = False


def column(builder: Builder, seqs: Sequences, names: Sequence[str], units: int) -> Rig:
    share = builder.layout.share(units)
    layer = builder.column(names, HIDDEN, share, bias=True)
    out = [i * units + j for i in range(len(names)) for j in share.span]
    return Rig(layer.params(), layer.forward, layer.backward, columns_out=out)


def row(builder: Builder, seqs: Sequences, units: int) -> Rig:
    share = builder.layout.share(units)
    layer = builder.row("in", share, HIDDEN, bias=True)
    return Rig(layer.params(), layer.forward, layer.backward, columns_in=share.span)


def qkv(builder: Builder, seqs: Sequences, heads: int, kv_heads: int, d: int) -> Rig:
    own = builder.layout.heads(heads, kv_heads)
    layer = attention_layer(builder, own, d).qkv
    return Rig(layer.params(), layer.forward, layer.backward, columns_out=qkv_columns(own, heads, kv_heads, d))


def qkv_columns(own: HeadShare, heads: int, kv_heads: int, d: int) -> list[int]:
    """Columns [q | k | v] of the global projection that a rank with these heads has."""
    q = range(own.query.span.start * d, own.query.span.stop * d)
    kv = range(own.kv.start * d, own.kv.stop * d)
    return [*q, *(heads * d + j for j in kv), *((heads + kv_heads) * d + j for j in kv)]


def attention_layer(builder: Builder, own: HeadShare, d: int, rate: float = 0.0) -> Any:
    return builder.attention(own, d, HIDDEN, AttentionDropout(rate, "attention"), qkv_bias=True, out_bias=True)


def attention(builder: Builder, seqs: Sequences, heads: int, kv_heads: int, d: int, rate: float = 0.0) -> Rig:
    layer = attention_layer(builder, builder.layout.heads(heads, kv_heads), d, rate)
    return Rig(layer.params(), lambda x: layer.forward(x, seqs), layer.backward)


def gelu_mlp(builder: Builder, seqs: Sequences, ffn: int) -> Rig:
    layer = gelu_layer(builder, ffn)
    return Rig(layer.params(), layer.forward, layer.backward)


def gelu_layer(builder: Builder, ffn: int) -> GeluMLP:
    share = builder.layout.share(ffn)
    return GeluMLP(builder.column(("up",), HIDDEN, share, bias=True), builder.row("down", share, HIDDEN, bias=True))


def swiglu_mlp(builder: Builder, seqs: Sequences, ffn: int) -> Rig:
    layer = swiglu_layer(builder, ffn)
    return Rig(layer.params(), layer.forward, layer.backward)


def swiglu_layer(builder: Builder, ffn: int) -> SwiGluMLP:
    share = builder.layout.share(ffn)
    gate_up = builder.column(("gate", "up"), HIDDEN, share, bias=True)
    return SwiGluMLP(gate_up, builder.row("down", share, HIDDEN, bias=False))


def layer_norm(builder: Builder, seqs: Sequences) -> Rig:
    layer = builder.layer_norm(HIDDEN, 1e-5)
    return Rig(layer.params(), layer.forward, layer.backward)


def rms_norm(builder: Builder, seqs: Sequences) -> Rig:
    layer = builder.rms_norm(HIDDEN, 1e-6)
    return Rig(layer.params(), layer.forward, layer.backward)


def embedding(builder: Builder, seqs: Sequences, vocab: int) -> Rig:
    share = builder.layout.share(vocab)
    weight = builder.matrix([sharded("vocab", share)], HIDDEN, dim=0)
    layer = VocabParallelEmbedding(weight, share, builder.layout.group)
    return Rig(layer.params(), layer.forward, layer.backward, reads_ids=True)


def positions(builder: Builder, seqs: Sequences, rows: int) -> Rig:
    layer = PositionEmbedding(builder.replicated_matrix(rows, HIDDEN))
    return Rig(layer.params(), layer.forward, layer.backward, reads_ids=True)


def loss(builder: Builder, seqs: Sequences, vocab: int) -> Rig:
    share = builder.layout.share(vocab)
    layer = VocabParallelCrossEntropy(share, builder.layout.group, builder.layout.summation)
    targets = from_host(random_ids("targets", vocab, lowest=-1), builder.device.xp)  # some are to be ignored
    forward = lambda logits: layer.forward(logits, targets)  # noqa: E731
    return Rig({}, forward, layer.backward, columns_in=share.span)


def dropout(builder: Builder, seqs: Sequences, rate: float) -> Rig:
    layer = Dropout(rate, "residual")
    return Rig({}, lambda x: (layer.forward(x, seqs), None), lambda dy, ctx: layer.backward(dy, seqs))


def block(builder: Builder, seqs: Sequences, kind: str, heads: int, kv_heads: int, d: int, ffn: int) -> Rig:
    own, is_gpt = builder.layout.heads(heads, kv_heads), kind == "gpt2"
    make_norm = builder.layer_norm if is_gpt else builder.rms_norm
    mlp = gelu_layer(builder, ffn) if is_gpt else swiglu_layer(builder, ffn)
    dropouts = (Dropout(0.2, "residual1"), Dropout(0.2, "residual2"))
    attention = attention_layer(builder, own, d, rate=0.3)
    layer = TransformerBlock(make_norm(HIDDEN, 1e-5), attention, make_norm(HIDDEN, 1e-5), mlp, dropouts)
    return Rig(layer.params(), lambda x: layer.forward(x, seqs), layer.backward)


def _case(make: Callable[..., Rig], *args: Any, **options: Any) -> LayerCase:
    return LayerCase(lambda builder, seqs: make(builder, seqs, *args), **options)


CASES: dict[str, LayerCase] = {
    "column 7": _case(column, ("out",), 7, columns_out=7),
    "column 8": _case(column, ("out",), 8, columns_out=8),
    "column gate up 9": _case(column, ("gate", "up"), 9, columns_out=18),
    "row 7": _case(row, 7, columns_in=7),
    "row 9": _case(row, 9, columns_in=9),
    "qkv 9/3": _case(qkv, 9, 3, 2, columns_out=30),
    "qkv 8/2": _case(qkv, 8, 2, 3, columns_out=36),
    "attention 7/7": _case(attention, 7, 7, 3),
    "attention 9/3": _case(attention, 9, 3, 2, rope=2),
    "attention 6/2": _case(attention, 6, 2, 4, rope=4),
    "attention 5/1": _case(attention, 5, 1, 2, rope=2),
    "attention 8/2": _case(attention, 8, 2, 3),
    "attention 2/1": _case(attention, 2, 1, 4, rope=4),
    "attention 6/2 dropout": _case(attention, 6, 2, 2, 0.4, rope=2, dropout=True),
    "gelu 9": _case(gelu_mlp, 9),
    "gelu 3": _case(gelu_mlp, 3),
    "swiglu 7": _case(swiglu_mlp, 7),
    "swiglu 8": _case(swiglu_mlp, 8),
    "layer norm": _case(layer_norm),
    "rms norm": _case(rms_norm),
    "embedding 9": _case(embedding, 9, columns_in=None, ids_below=9),
    "embedding 3": _case(embedding, 3, columns_in=None, ids_below=3),
    "positions 5": _case(positions, 5, columns_in=None, ids_below=5),
    "loss 9": _case(loss, 9, columns_in=9, columns_out=None),
    "loss 4": _case(loss, 4, columns_in=4, columns_out=None),
    "dropout": _case(dropout, 0.3, dropout=True),
    "block gpt2": _case(block, "gpt2", 4, 4, 2, 9),
    "block gpt2 dropout": _case(block, "gpt2", 4, 4, 2, 9, dropout=True),
    "block llama": _case(block, "llama", 9, 3, 2, 7, rope=2, dropout=True),
}


def make_rig(case: LayerCase, builder: Builder) -> Rig:
    """The layer on this rank, its parameters filled from global random tensors."""
    seqs = Sequences(LENGTHS, dropout=DropoutState(7, 3, (4, 0, 9)) if case.dropout else None)
    if case.rope:
        xp = builder.device.xp
        table = rope_table(seqs.positions(), rope_inv_freq(case.rope, 100.0), builder.dtype, xp)
        seqs = Sequences(seqs.lengths, dropout=seqs.dropout, rotation=table)
    rig = case.make(builder, seqs)
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
    dtype = mine.dtype if mine.dtype == np.int64 else builder.dtype
    return from_host(np.ascontiguousarray(mine, dtype=dtype), builder.device.xp)


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
