"""Makes parallel layers on a site: the only place where shares become placements of parameters.

Parameters come out zero; loading or `layers/init.py` fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpitp.errors import ConfigError
from mpitp.layers.activation import activation_of
from mpitp.layers.attention import AttentionDropout, AttentionHeads, KvReplicas, Scores, SelfAttention
from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.groupwise import GroupwiseEmbedding, GroupwiseProduct, groupwise_product
from mpitp.layers.head_norm import HeadNorms
from mpitp.layers.joint_norm import JointNorms
from mpitp.layers.keys import OWN_KEYS, Keys
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mappings import (
    CopyToTP,
    EntryPair,
    ExitPair,
    GatherFromSP,
    MaxFromTP,
    ReduceFromTP,
    ReduceScatterToSP,
)
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.param import Param
from mpitp.layers.partition import HeadShare, Share, runs_of
from mpitp.layers.placement import Cut, Part
from mpitp.layers.product import DenseProduct, Product
from mpitp.layers.relative_bias import RelativeBias
from mpitp.layers.rotary import Rotary
from mpitp.layers.site import Site
from mpitp.layers.source_rows import OWN_SOURCES, WholeSources
from mpitp.layers.summation import LibrarySum, OrderedSum, Summation
from mpitp.ops.groupwise import Grouping
from mpitp.ops.relative_buckets import Buckets
from mpitp.ops.score_change import ScoreChange
from mpitp.ops.sight import CAUSAL, Sight

if TYPE_CHECKING:  # what few models have is imported by what makes it: a process that has none starts sooner
    from mpitp.layers.convolution import ColumnParallelConvolution, RowParallelConvolution, RowsConvolution
    from mpitp.layers.cross_attention import CrossAttention
    from mpitp.layers.first_rows import OnFirstRows
    from mpitp.layers.gathered_dense import Gather, GatheredDense
    from mpitp.ops.convolution import Geometry


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What an attention layer is like, whatever rank it is on."""

    heads: HeadShare
    head_dim: int
    hidden: int
    qkv_bias: bool = False
    out_bias: bool = False
    out_std: float | None = None  # of the output projection's initial weights; None: the builder's
    sight: Sight = CAUSAL
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    change: ScoreChange | None = None  # of the scores behind that


@dataclass(frozen=True, slots=True)
class Builder:
    """Layers of one model: what it is laid on, and the scale of its initial weights."""

    site: Site
    init_std: float
    grouping: Grouping | None = None  # of weights in 8 or 4 bits; None: floats

    def weight(self, cuts: Sequence[tuple[str, Cut]], other: int, dim: int, std: float | None = None) -> Param:
        """A matrix cut along `dim` into named parts, `other` wide along its other dim."""
        whole = Cut.whole(other)
        parts = [Part(name, (cut, whole) if dim == 0 else (whole, cut)) for name, cut in cuts]
        return self.site.param(self.site.placement(parts, dim), std=self.init_std if std is None else std, decay=True)

    def product(
        self, cuts: Sequence[tuple[str, Cut]], other: int, dim: int, std: float | None = None
    ) -> DenseProduct | GroupwiseProduct:
        """What a linear multiplies by: a matrix as in `weight`, of floats, or of groups of whole numbers."""
        return self._product(self.grouping, cuts, other, dim, std)

    def _product(
        self, grouping: Grouping | None, cuts: Sequence[tuple[str, Cut]], other: int, dim: int, std: float | None = None
    ) -> DenseProduct | GroupwiseProduct:
        if grouping is None:
            return DenseProduct(self.weight(cuts, other, dim, std))
        abstract = replace(self, site=self.site.abstract())
        return groupwise_product(self.site, abstract.weight(cuts, other, dim).placement, grouping)

    def columns(self, units: int) -> Share:
        """This rank's share of columns that a row-parallel product takes: whole groups, where weights come in such."""
        size = self.grouping.size if self.grouping else 1
        if units % size:
            raise ConfigError(f"{units} columns can't be dealt in groups of {size} weights")
        return self.site.share(units // size).scaled(size)

    def entry(self) -> EntryPair:
        """What stands before a column-parallel product."""
        if not self.site.sequence_parallel:
            return CopyToTP(self.site.summation())
        return GatherFromSP(self.site.tp, weights=self.site.mesh.weights("tp"))

    def exit(self, summation: Summation) -> ExitPair:
        """What stands after a row-parallel product. `summation`: how it adds where every rank gets the whole."""
        if not self.site.sequence_parallel:
            return ReduceFromTP(summation)
        return ReduceScatterToSP(self.site.tp, weights=self.site.mesh.weights("tp"))

    def keys(self) -> Keys:
        """How queries meet their keys."""
        group = self.site.mesh["cp"]
        if group.size == 1:
            return OWN_KEYS
        if self.site.cp_form == "ring":
            from mpitp.layers.ring_keys import RingKeys

            return RingKeys(group)
        from mpitp.layers.heads_keys import HeadsKeys

        return HeadsKeys(group)

    def between(self, *shape: int, std: float = 0.0, value: float = 0.0) -> Param:
        """A parameter that every rank holds whole and that meets the rows between the cut products."""
        return self.site.whole(*shape, std=std, value=value, partial=self.site.shard_axes)

    def positions(self, max_positions: int, hidden: int, offset: int = 0) -> PositionEmbedding:
        """Learned positions. `offset`: rows at the beginning of the table that no position uses."""
        return PositionEmbedding(self.between(offset + max_positions, hidden, std=self.init_std), offset)

    def layer_norm(self, hidden: int, eps: float) -> LayerNorm:
        """LayerNorm over `hidden` columns."""
        return LayerNorm(self.between(hidden, value=1.0), self.between(hidden), eps)

    def rms_norm(self, hidden: int, eps: float) -> RMSNorm:
        """RMSNorm over `hidden` columns."""
        return RMSNorm(self.between(hidden, value=1.0), eps)

    def offset_rms_norm(self, hidden: int, eps: float) -> RMSNorm:
        """RMSNorm over `hidden` columns whose factors are 1 + weight."""
        return RMSNorm(self.between(hidden), eps, offset=1.0)

    def head_norms(self, heads: HeadShare, head_dim: int, eps: float, offset: float = 0.0) -> HeadNorms:
        """RMSNorms of q and k heads with factors offset + weight, which begin as ones."""
        blocks = self.site.num_blocks
        partial = [] if blocks else ["tp"]
        q, k = (self.site.whole(head_dim, value=1.0 - offset, partial=partial) for _ in "qk")
        return HeadNorms(heads, (q, k), eps, offset, OrderedSum(self.site.tp) if blocks else None, blocks)

    def joint_norms(self, heads: HeadShare, head_dim: int, eps: float) -> JointNorms:
        """RMSNorms of q and k over all heads together, whose weights begin as ones."""
        parts = Part("q", (Cut.of(heads.query.scaled(head_dim)),)), Part("k", (_kv_cut(heads, head_dim),))
        q, k = (self.site.param(self.site.placement([part]), value=1.0) for part in parts)
        return JointNorms(heads, (q, k), eps, self.site.summation(), self.site.num_blocks)

    def column(self, names: Sequence[str], width: int, share: Share, *, bias: bool) -> ColumnParallelLinear:
        """Column-parallel linear from `width` to len(names) * share.units outputs: one part a name, all cut alike.

        y [t, len(names) * share.size] has this rank's columns of each part, part beside part.
        """
        # One product for all parts, unless blocks are multiplied one by one: then part after part within a block.
        blocks = [
            range(block.start + i * share.size, block.stop + i * share.size)
            for block in share.local_blocks
            for i in range(len(names))
        ]
        if not self.site.num_blocks:
            blocks = [range(len(names) * share.size)]
        cuts, summands = [(name, Cut.of(share)) for name in names], len(names) * self.site.num_blocks
        return self._column(cuts, width, (blocks, None, summands), bias=bias)

    def _column(
        self,
        cuts: Sequence[tuple[str, Cut]],
        width: int,
        blocks: tuple[Sequence[range], Sequence[range] | None, int],
        *,
        bias: bool,
    ) -> ColumnParallelLinear:
        """With the blocks of the forward, those of dx, and how many of these all ranks have."""
        product = self.product(cuts, width, dim=0)
        bias_parts = [Part(name, (cut,)) for name, cut in cuts]
        bias_param = self.site.param(self.site.placement(bias_parts)) if bias else None
        return ColumnParallelLinear(product, bias_param, self.entry(), *blocks)

    def row(self, name: str, share: Share, width: int, *, bias: bool, std: float | None = None) -> RowParallelLinear:
        """Row-parallel linear from share.units inputs to `width` outputs."""
        product = self.product([(name, Cut.of(share))], width, dim=1, std=std)
        reduce, blocks = self.exit(self.site.summation()), share.local_blocks
        return RowParallelLinear(product, self.between(width) if bias else None, reduce, blocks, self.site.num_blocks)

    def convolution_by_outputs(
        self, geometry: Geometry, channels: int, share: Share, *, bias: bool = True
    ) -> ColumnParallelConvolution:
        """A convolution from `channels` to share.units channels, of which each rank computes some."""
        from mpitp.layers.convolution import ColumnParallelConvolution

        out, whole, size = Cut.of(share), Cut.whole(channels), Cut.whole(geometry.kernel)
        weight = self._kernel((out, whole, size, size))
        bias_param = self.site.param(self.site.placement([Part("", (out,))])) if bias else None
        copy, blocks = CopyToTP(self.site.summation()), share.local_blocks
        return ColumnParallelConvolution(weight, bias_param, copy, geometry, blocks, self.site.num_blocks)

    def convolution_by_inputs(
        self, geometry: Geometry, share: Share, outputs: int, *, bias: bool = True
    ) -> RowParallelConvolution:
        """A convolution from share.units channels, of which each rank has some, to `outputs` channels."""
        from mpitp.layers.convolution import RowParallelConvolution

        size = Cut.whole(geometry.kernel)
        weight = self._kernel((Cut.whole(outputs), Cut.of(share), size, size))
        reduce, bias_param = ReduceFromTP(self.site.summation()), self.site.whole(outputs) if bias else None
        return RowParallelConvolution(weight, bias_param, reduce, geometry, share.local_blocks, self.site.num_blocks)

    def convolution_by_rows(
        self, geometry: Geometry, channels: int, outputs: int, *, bias: bool = True
    ) -> RowsConvolution:
        """A convolution of images whose rows are cut over the ranks. It has no invariant mode: where images are cut
        decides in which pieces the gradient of W is added up.
        """
        from mpitp.layers.convolution import RowsConvolution
        from mpitp.layers.halo import Halo

        if self.site.num_blocks:
            raise ConfigError("a convolution cut by rows of the image has no invariant mode; cut it by channels")
        weight = self.site.whole(outputs, channels, *[geometry.kernel] * 2, std=self.init_std, partial=["tp"])
        bias_param = self.site.whole(outputs, partial=["tp"]) if bias else None
        return RowsConvolution(weight, bias_param, Halo(self.site.tp, geometry))

    def _kernel(self, dims: tuple[Cut, ...]) -> Param:
        return self.site.param(self.site.placement([Part("", dims)]), std=self.init_std, decay=True)

    def mlp(
        self,
        hidden: int,
        share: Share,
        *,
        gated: bool,
        bias: bool,
        out_std: float | None = None,
        activation: str | None = None,
    ) -> MLP:
        """An MLP of share.units inner columns: SwiGLU when gated, else GELU, or with another `activation` (see
        `activation.py`). `out_std`: of the second linear's weights.
        """
        up = self.column(("gate", "up") if gated else ("up",), hidden, share, bias=bias)
        inner = activation_of(activation or ("silu" if gated else "gelu_tanh"), gated=gated)
        return MLP(up, inner, self.row("down", share, hidden, bias=bias, std=out_std))

    def attention(
        self,
        sizes: AttentionSizes,
        dropout: AttentionDropout,
        rotary: Rotary | None = None,
        norms: HeadNorms | JointNorms | None = None,
    ) -> SelfAttention:
        """Self-attention over this rank's heads. `norms`: of q and k."""
        heads, d = sizes.heads, sizes.head_dim
        query = heads.query.scaled(d)
        cuts = [("q", Cut.of(query)), ("k", _kv_cut(heads, d)), ("v", _kv_cut(heads, d))]
        blocks, dx_blocks = _qkv_blocks(heads, d, one_by_one=bool(self.site.num_blocks))
        kv_heads = heads.query.units // heads.group_size
        summands = self.site.num_blocks + 2 * kv_heads if self.site.num_blocks else 0
        qkv = self._column(cuts, sizes.hidden, (blocks, dx_blocks, summands), bias=sizes.qkv_bias)
        replicas = KvReplicas.of(heads, self.site.summation())
        scores = Scores(sizes.sight, sizes.scale, sizes.change)
        core = AttentionHeads(heads, d, replicas, dropout, rotary, scores, self.keys())
        out = self.row("out", query, sizes.hidden, bias=sizes.out_bias, std=sizes.out_std)
        return SelfAttention(qkv, core, out, norms)

    def cross_attention(self, sizes: AttentionSizes, dropout: AttentionDropout) -> CrossAttention:
        """Attention of a decoder's rows to an encoder's output, over this rank's heads."""
        from mpitp.layers.cross_attention import CrossAttention, CrossHeads

        heads, d = sizes.heads, sizes.head_dim
        own = heads.query.scaled(d)
        q = self.column(("q",), sizes.hidden, own, bias=sizes.qkv_bias)
        kv = self.column(("k", "v"), sizes.hidden, own, bias=sizes.qkv_bias)
        core = CrossHeads(heads, d, d**-0.5 if sizes.scale is None else sizes.scale, dropout)
        out = self.row("out", own, sizes.hidden, bias=sizes.out_bias, std=sizes.out_std)
        group = self.site.mesh["cp"]
        sources = OWN_SOURCES if group.size == 1 else WholeSources(group)
        return CrossAttention(q, kv, core, out, self.site.shard_type, sources)

    def relative_bias(self, heads: Share, buckets: Buckets, *, is_replica: bool = False) -> RelativeBias:
        """A number for each bucket of distances and each of this rank's heads. `is_replica`: another stage owns it."""
        part = Part("heads", (Cut.whole(buckets.count), Cut.of(heads)))
        table = self.site.param(self.site.placement([part], fused=1), std=self.init_std, decay=True)
        table.placement = replace(table.placement, is_owner=table.placement.is_owner and not is_replica)
        return RelativeBias(table, buckets)

    def logits_bias(self, vocab: Share) -> LogitsBias:
        """A constant for each token of the vocabulary, zeros until loaded."""
        part = Part("vocab", (Cut.whole(1), Cut.of(vocab)))
        return LogitsBias(self.site.param(self.site.placement([part], fused=1)))

    def vocab_table(self, vocab: Share, hidden: int, *, is_replica: bool = False) -> DenseProduct | GroupwiseProduct:
        """The rows of a vocabulary, cut over the ranks. `is_replica`: of a table that another stage owns."""
        grouping = self.grouping.of_tables if self.grouping else None
        table = self._product(grouping, [("vocab", Cut.of(vocab))], hidden, dim=0)
        for param in table.params().values() if is_replica else ():
            param.placement = replace(param.placement, is_owner=False)
        return table

    def embedding(self, table: DenseProduct | GroupwiseProduct, vocab: Share, held: int | None = None) -> Layer:
        """Lookup in a table. Its sum is exact in any order: one rank has each row. `held`: see the layer."""
        reduce = self.exit(LibrarySum(self.site.tp))
        if isinstance(table, GroupwiseProduct):
            return GroupwiseEmbedding(table, vocab, reduce)
        return VocabParallelEmbedding(table.weight, vocab, reduce, held)

    def head(self, table: Product, vocab: Share, *, bias: bool = False) -> ColumnParallelLinear:
        """The language-model head over a table of its own, or over the embedding's."""
        parts = [Part("vocab", (Cut.of(vocab),))]
        bias_param = self.site.param(self.site.placement(parts)) if bias else None
        return ColumnParallelLinear(table, bias_param, self.entry(), vocab.local_blocks, None, self.site.num_blocks)

    def gathered_dense(self, width: int, outputs: int, activation: Layer | None) -> GatheredDense:
        """A column-parallel linear whose outputs every rank gets whole, behind an activation."""
        from mpitp.layers.gathered_dense import GatheredDense

        share = self.site.share(outputs)
        dense = self.column(("dense",), width, share, bias=True)
        return GatheredDense(dense, activation, self.gather(share))

    def gather(self, columns: Share) -> Gather:
        """How the columns of all ranks come together again."""
        from mpitp.layers.gathered_dense import ColumnsToRows, GatherColumns

        if self.site.sequence_parallel:
            return ColumnsToRows(self.site.tp, columns, self.site.mesh.weights("tp"))
        return GatherColumns(self.site.tp, columns)

    def on_first_rows(self, width: int, make: Callable[[Builder], Mapping[str, Layer]]) -> OnFirstRows:
        """Layers on the first row of each sequence; `make`: makes them, for rows that lie whole on every rank."""
        from mpitp.layers.first_rows import OnFirstRows

        return OnFirstRows(make(self.on_whole_rows()), width, self.site.tp if self.site.sequence_parallel else None)

    def on_whole_rows(self) -> Builder:
        """The same for layers whose rows lie whole on every rank, with sequence parallelism too."""
        return replace(self, site=replace(self.site, sequence_parallel=False))

    def classifier(self, width: int, labels: int) -> ColumnParallelLinear:
        """Logits of some classes, cut over the ranks."""
        share = self.site.share_of_few(labels)
        summands = min(self.site.num_blocks, labels)
        return self._column([("labels", Cut.of(share))], width, (share.local_blocks, None, summands), bias=True)

    def loss(self, vocab: Share, num_blocks: int | None = None) -> VocabParallelCrossEntropy:
        """Cross entropy over a vocabulary, or over classes, cut over the ranks. `num_blocks`: into which that is cut;
        None: the site's.
        """
        reduce = ReduceFromTP(self.site.summation())
        blocks = self.site.num_blocks if num_blocks is None else num_blocks
        return VocabParallelCrossEntropy(vocab, MaxFromTP(self.site.tp), reduce, blocks)


def _kv_cut(heads: HeadShare, head_dim: int) -> Cut:
    """KV heads as a rank holds them: each a block of its own, owned where the first query head of its group is."""
    kv_heads = heads.query.units // heads.group_size
    blocks = tuple(_rows(range(g, g + 1), head_dim) for g in heads.kv)
    return Cut(kv_heads * head_dim, _rows(heads.kv, head_dim), _rows(heads.kv_owned, head_dim), blocks, "tp")


def _rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _qkv_blocks(heads: HeadShare, head_dim: int, *, one_by_one: bool) -> tuple[list[range], list[range]]:
    """Local rows [q | k | v] as blocks to multiply, and as blocks that count for dx (replicas count where owned).

    A KV head that lives on several ranks is a block of its own: the same shape everywhere, so that its replicas'
    weights get the same bits and stay equal. One by one: a KV head comes just before the query block in which its first
    query head lies. That is where its owner sits, so walking the ranks' lists one after the other gives one and the
    same global order at any rank count.
    """
    a, g = heads.query.size, len(heads.kv)
    owned = range(heads.kv_owned.start - heads.kv.start, heads.kv_owned.stop - heads.kv.start)
    if not one_by_one:
        held_shared = [head - heads.kv.start for head in heads.kv_shared if head in heads.kv]
        alone = {a + i for i in held_shared} | {a + g + i for i in held_shared}
        runs = [_rows(run, head_dim) for run in runs_of(a + 2 * g, alone)]
        if len(owned) == g:
            return runs, [_rows(range(a + 2 * g), head_dim)]
        dx = [range(a), range(a + owned.start, a + owned.stop), range(a + g + owned.start, a + g + owned.stop)]
        return runs, [_rows(block, head_dim) for block in dx]
    singles = [range(a + i, a + i + 1) for i in range(2 * g)]
    dx = []
    for block, local in zip(heads.query.blocks, heads.query.local_blocks, strict=True):
        for i in owned:
            if (heads.kv.start + i) * heads.group_size in block:
                dx += [singles[i], singles[g + i]]
        dx.append(local)
    blocks = [*heads.query.local_blocks, *singles]
    return [_rows(block, head_dim) for block in blocks], [_rows(block, head_dim) for block in dx]
