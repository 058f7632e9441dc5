r"""What a forward pass leaves for backward, in closed form: the contexts of all layers, by their shapes alone.

t rows of a pass on this rank (t' of them between the cut products under sequence parallelism), width h, s bytes an
element, w bytes of one in which is summed (4 for the 16-bit floats, else s); a and g local query and KV heads of d:

| layer                | keeps                                                                           |
|----------------------|---------------------------------------------------------------------------------|
| embedding, positions | 8 bytes a row: ids, positions                                                   |
| norm                 | x: t' h s; the rows' statistics: w or 2 w a row                                 |
| a linear             | its input: t k s                                                                |
| heads                | q, k, v: t (a + 2g) d s; lse: t a w; all heads of whole sequences once more (cp)|
| activation           | its input: t n s                                                                |
| soft cap             | its ratio: t v/tp s                                                             |
| recompute            | its input, t' h s, and nothing of what is inside                                |
| loss                 | numerators t v/tp w, denominators t w, targets 8 t; of what classifies texts a  |
|                      | row for each of the b texts                                                     |
| cross attention      | its linears' inputs but the memory; q and o, k and v of whole sources: 4 t a d s;|
|                      | lse: t a w; the memory itself, t' h s, once for all blocks of a chunk (each      |
|                      | block's own copy, t h s, where it was gathered)                                 |
| patches, first rows  | pixels, 8 bytes a patch; 8 bytes and the first row of each text                 |
| a pass               | tables of rotary positions, 2 t (width/2) w                                     |

An array that two layers keep is counted once. Source and target of a pair have as many tokens here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpitp.backend.precision import wide_dtype
from mpitp.errors import ConfigError
from mpitp.layers.attention import AttentionHeads
from mpitp.layers.cross_attention import CrossAttention, CrossHeads
from mpitp.layers.crossing import ToDecoder
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding, TypeEmbedding, VocabParallelEmbedding
from mpitp.layers.exchange import StayHere
from mpitp.layers.experts import Experts
from mpitp.layers.first_rows import OnFirstRows
from mpitp.layers.gathered_dense import ColumnsToRows, GatherColumns, GatheredDense
from mpitp.layers.head_norm import HeadNorms
from mpitp.layers.heads_keys import HeadsKeys
from mpitp.layers.joint_norm import JointNorms
from mpitp.layers.layer import Layer, Wrapper, unwrapped, walk
from mpitp.layers.layer_scale import LayerScale
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.mixture import SharedExpert
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.parallel_block import ParallelBlock
from mpitp.layers.param import Param
from mpitp.layers.partition import piece_of
from mpitp.layers.patches import ClassAndMean, ImageTokens, PatchEmbedding
from mpitp.layers.recompute import Recompute
from mpitp.layers.router import Router
from mpitp.layers.rows import Rows
from mpitp.layers.scale import Scale, SoftCap
from mpitp.layers.sinusoids import Sinusoids
from mpitp.layers.site import Site
from mpitp.layers.source_rows import WholeSources
from mpitp.models.beside import Memory, takes_memory
from mpitp.models.layered import LayeredModel
from mpitp.models.stages import Chunk

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the formulas need of a pass: t, t', h, s and w; `whole`: rows of whole sequences where cp cuts them."""

    rows: int
    shard: int
    whole: int
    hidden: int
    item: int
    wide: int
    is_gathered: bool  # a cut product gets a copy of the rows of all ranks of tp
    texts: int = 0  # or images that begin here, of which there is one answer each

    @classmethod
    def of(cls, rows: Rows, site: Site, hidden: int) -> Sizes:
        """Of a pass over these rows, of which this rank of cp has its piece."""
        cp = site.mesh["cp"]
        mine = rows.cut(cp.rank, cp.size) if cp.size > 1 else rows
        own, texts = mine.num_tokens, len(mine.first_rows())
        shard = len(site.token_share(own)) if site.sequence_parallel else own
        item, wide = site.dtype.itemsize, wide_dtype(site.dtype).itemsize
        is_gathered = site.sequence_parallel and site.tp.size > 1
        return cls(own, shard, rows.num_tokens, hidden, item, wide, is_gathered, texts)

    @property
    def of_texts(self) -> Sizes:
        """Of layers that are handed a row a text."""
        return replace(self, rows=self.texts, shard=self.texts)


def kept_of_chunk(model: LayeredModel, chunk: Chunk, sizes: Sizes) -> int:
    """Bytes that a pass through the layers of a chunk leaves, its loss and the pass's own tables included."""
    layers = {name: model.layers[name] for name in chunk.names}
    pooling = next((name for name, layer in layers.items() if isinstance(unwrapped(layer), ClassAndMean)), "")
    behind = set(list(layers)[list(layers).index(pooling) + 1 :]) if pooling else set()  # a row an image
    total = sum(kept_of(layer, sizes.of_texts if name in behind else sizes) for name, layer in layers.items())
    total += _tables(layers, sizes) + _memory_from_elsewhere(model, chunk, sizes)
    vocab = model.loss.vocab.size
    total += sum(isinstance(unwrapped(x), SoftCap) for x in layers.values()) * sizes.rows * vocab * sizes.item
    if chunk.ends_in_loss:
        of_texts = any(isinstance(unwrapped(x), OnFirstRows | ClassAndMean) for x in layers.values())
        rows = sizes.texts if of_texts else sizes.rows
        total += rows * (vocab * sizes.wide + sizes.wide + INDEX_BYTES)
    return total


def put_off_of_chunk(model: LayeredModel, chunk: Chunk, sizes: Sizes) -> int:
    """Bytes that a pass through a chunk leaves behind backward, where its weight gradients are put off; what all blocks
    of a decoder read is counted once.
    """
    layers = {name: model.layers[name] for name in chunk.names}
    cross = [layer for _, layer in walk(layers) if isinstance(layer, CrossAttention)]
    memories = 0 if sizes.is_gathered else max(len(cross) - 1, 0)
    return sum(put_off(layer, sizes) for layer in layers.values()) - memories * sizes.rows * sizes.hidden * sizes.item


def _memory_from_elsewhere(model: LayeredModel, chunk: Chunk, s: Sizes) -> int:
    """The encoder's output, where it comes from another stage."""
    comes = isinstance(model.beside, Memory) and takes_memory(chunk)
    return memory_bytes(s) if comes else 0


def memory_bytes(s: Sizes) -> int:
    """Of an encoder's output on a rank."""
    return s.shard * s.hidden * s.item


def kept_of(layer: Layer | Param, sizes: Sizes) -> int:
    """Bytes that a pass through one layer leaves. Raises ConfigError for a layer without a formula."""
    s = sizes
    match layer:
        case Recompute() | LayerScale():
            return s.shard * s.hidden * s.item
        case Wrapper():
            return kept_of(layer.inner, s)
        case Param() | Dropout() | Scale() | SoftCap() | Sinusoids() | LogitsBias() | ImageTokens() | GatherColumns():
            return 0
        case ClassAndMean() | ColumnsToRows():
            return 0
        case VocabParallelEmbedding():
            return s.rows * INDEX_BYTES
        case TypeEmbedding() | PositionEmbedding():
            return s.shard * INDEX_BYTES
        case ToDecoder() | CrossAttention() | CrossHeads():
            return _crossing(layer, s)
        case PatchEmbedding():
            return (s.rows - s.texts) * (layer.weight.data[0].size * s.item + INDEX_BYTES)
        case OnFirstRows():
            return s.texts * INDEX_BYTES + sum(kept_of(child, s.of_texts) for child in layer.children().values())
        case GatheredDense():
            return kept_of(layer.dense, s) + s.rows * layer.dense.product.shape[0] * s.item
        case LayerNorm() | RMSNorm() | HeadNorms() | JointNorms():
            return _norm(layer, s)
        case ColumnParallelLinear() | RowParallelLinear():
            return s.rows * layer.product.shape[1] * s.item
        case AttentionHeads():
            return _heads(layer, s)
        case Router():
            return s.shard * (s.hidden * s.item + _choice(layer, s))
        case Experts():
            return _experts(layer, s)
        case SharedExpert():
            read = 0 if s.is_gathered else s.shard * s.hidden * s.item  # the router's x
            return s.shard * (s.hidden + 1) * s.item + kept_of(layer.mlp, s) - read
        case MLP():
            return kept_of(layer.up, s) + s.rows * layer.up.product.shape[0] * s.item + kept_of(layer.down, s)
    return _of_children(layer, s)


def kept_again(layer: Layer, sizes: Sizes) -> int:
    """Bytes that backward makes again before it uses them: of the largest layer inside that recomputes."""
    if isinstance(layer, Recompute):
        return kept_of(layer.inner, sizes) - kept_of(layer, sizes)
    if isinstance(layer, Wrapper):
        return kept_again(layer.inner, sizes)
    inner = [child for child in layer.children().values() if not isinstance(child, Param)]
    return max((kept_again(child, sizes) for child in inner), default=0)


def put_off(layer: Layer, sizes: Sizes) -> int:
    """Bytes that weight gradients hold which are added later: x and dy of every linear inside, and what is computed at
    once, the gradients of tables, norms and biases.
    """
    inside = [inner for _, inner in walk({"": layer})]
    linears = [inner for inner in inside if isinstance(inner, ColumnParallelLinear | RowParallelLinear)]
    experts = [inner for inner in inside if isinstance(inner, Experts)]
    columns = sum(sum(linear.product.shape) for linear in linears)
    columns += sum(each.sizes.top_k * (2 * sizes.hidden + 3 * _inner(each)) for each in experts)
    matrices = {id(param) for linear in linears for param in linear.product.params().values()}
    matrices |= {id(param) for each in experts for param in each.params().values()}
    params = [child for each in inside for child in each.children().values() if isinstance(child, Param)]
    made = sum(param.data.size * param.grad_dtype.itemsize for param in params if id(param) not in matrices)
    return sizes.rows * sizes.item * columns + made


def _of_children(layer: Layer, sizes: Sizes) -> int:
    children = layer.children().values()
    if not children:
        raise ConfigError(f"plan memory has no formula for what a {type(layer).__name__} keeps")
    total = sum(kept_of(child, sizes) for child in children)
    if isinstance(layer, ParallelBlock):  # both branches read one array
        shared = sizes.shard * sizes.hidden * sizes.item
        gathered = sizes.is_gathered and layer.norm2 is None
        total -= 0 if gathered else shared
    return total


def _choice(layer: Router, s: Sizes) -> int:
    """Of one row: probabilities, their log sum, and the chosen experts with their scores."""
    return (layer.product.shape[0] + 1) * s.wide + layer.routing.top_k * (s.item + INDEX_BYTES)


def _inner(layer: Experts) -> int:
    """Columns of an expert on this rank."""
    return layer.down.shape[2]


def _experts(layer: Experts, s: Sizes) -> int:
    """Of rows that the routing deals evenly: as they go in and come out, their inner columns, and where they go."""
    rows, k = s.rows * layer.sizes.top_k, layer.sizes.top_k
    places = 3 if isinstance(layer.pairs.exchange, StayHere) else 5
    scores = s.rows * k * s.item if s.is_gathered else 0
    return scores + rows * ((2 * s.hidden + 3 * _inner(layer)) * s.item + places * INDEX_BYTES)


def _heads(layer: AttentionHeads, s: Sizes) -> int:
    """Its o is what the output projection keeps."""
    a, g, d = layer.heads.query.size, len(layer.heads.kv), layer.head_dim
    own = s.rows * ((a + 2 * g) * d * s.item)
    if not isinstance(layer.keys, HeadsKeys):
        return own + s.rows * a * s.wide
    group = layer.keys.group
    mine = piece_of(a, group.rank, group.size)
    kv = len({layer.heads.kv_index(head) for head in mine})
    exchanged = s.whole * ((2 * len(mine) + 2 * kv) * d * s.item + len(mine) * s.wide)
    return own + exchanged + 2 * INDEX_BYTES * s.whole


def _norm(layer: LayerNorm | RMSNorm | HeadNorms | JointNorms, s: Sizes) -> int:
    """What is normed, and the statistics of each row, or of each head of it."""
    match layer:
        case HeadNorms():
            heads = layer.heads.query.size + len(layer.heads.kv)
            return s.rows * ((heads + len(layer.heads.kv)) * layer.q_weight.data.shape[0] * s.item + heads * s.wide)
        case JointNorms():
            return s.rows * (layer.values.stop * s.item + 2 * s.wide)
    return s.shard * (s.hidden * s.item + s.wide * (2 if isinstance(layer, LayerNorm) else 1))


def _crossing(layer: ToDecoder | CrossAttention | CrossHeads, s: Sizes) -> int:
    """The memory is kept where it is made; with sequence parallelism each block has gathered one of its own. k and v
    are of whole sources.
    """
    match layer:
        case ToDecoder():
            return memory_bytes(s)
        case CrossHeads():
            heads, width = layer.heads.query.size, layer.heads.query.size * layer.head_dim
            return s.rows * (width * s.item + heads * s.wide) + s.whole * 2 * width * s.item
    gathered = kept_of(layer.kv, s) if s.is_gathered else 0
    order = 2 * INDEX_BYTES * s.whole if isinstance(layer.sources, WholeSources) else 0
    return kept_of(layer.q, s) + gathered + kept_of(layer.heads, s) + kept_of(layer.out, s) + order


def _tables(layers: dict[str, Layer], s: Sizes) -> int:
    """cos and sin, one pair of tables for all layers that turn alike and don't recompute."""
    found = {layer.rotary for _, layer in walk(layers) if isinstance(layer, AttentionHeads) and layer.rotary}
    return sum(2 * s.rows * (rotary.width // 2) * s.wide for rotary in found)
