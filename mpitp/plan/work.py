r"""What a layer's pass makes a rank do: products, passes over memory, exponentials, operations that must start.

t rows of a pass on this rank (t' between the cut products under sequence parallelism), s bytes an element, a product
with the local weight [n, k], a local heads of width d, whose scores make A elements in tiles of each sequence:

| layer            | products (m n k)              | passes, bytes                         | exponentials |
|------------------|-------------------------------|---------------------------------------|--------------|
| linear, forward  | t n k                         | 2 t n s with a bias                   |              |
| linear, backward | t k n; n k t (of its weights) | t n s with a bias                     |              |
| heads, forward   | 2 a A d                       | 2 t (a + g) d s where q, k turn       | a A          |
| heads, backward  | 5 a A d                       | the same, and 2 t a d s               | a A          |
| cross heads      | as heads, over whole sources  | 6 t a d s, both ways                  | a A, both    |
| norm             |                               | 2 t' h s forward, 3 t' h s backward   |              |
| activation       |                               | (in + out) s; (2 in + out) s          | t f, t f     |
| router           | t' e h; both again backward   | 6 t' e s, both ways                   | t' e         |
| experts          | an even share of k t rows for | 5 k t h s forward, 9 k t h s backward | k t f, k t f |
|                  | each, as gate, up and down    | beside the activation's               |              |
| shared's gate    | t' h; both again backward     | 3 t' h s; 5 t' h s                    |              |
| a residual sum   |                               | 3 t' h s, both ways                   |              |
| a lookup         |                               | 2 t h s; backward v/tp h w, t rows    |              |
| loss, head's     |                               | 2 t v/tp s, both ways                 | t v/tp, both |

A gradient of weights is made, and by all microbatches but the first of a step added to what is there, in elements of w
bytes: 3 n k w, or of a table 3 v/tp h w. The scores of a tile stay in a cache; a tile is some queries by the keys that
they see (`ops/sight.py`). Where a machine's attention was measured as a whole, its rate takes the place of the heads'
products, exponentials and starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpitp.layers.algebra import Join
from mpitp.layers.attention import AttentionHeads
from mpitp.layers.cross_attention import CrossAttention, CrossHeads
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from mpitp.layers.exchange import ExchangeOverEp
from mpitp.layers.experts import Experts
from mpitp.layers.head_norm import HeadNorms
from mpitp.layers.heads_keys import HeadsKeys
from mpitp.layers.joint_norm import JointNorms
from mpitp.layers.keys import OwnKeys
from mpitp.layers.layer import Layer, unwrapped
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.mixture import SharedExpert
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.param import Param
from mpitp.layers.router import Router
from mpitp.layers.scale import Scale, SoftCap
from mpitp.layers.sinusoids import Sinusoids
from mpitp.ops.sight import DEVICE_LONG_TILE, DEVICE_TILE, EVERYTHING, LONG_TILE, TILE, Band, Sight
from mpitp.plan.kept import Sizes
from mpitp.plan.machine_file import Machine

STARTS_OF_TILE = 6, 12  # operations on a tile of scores, forward and backward
PRODUCTS_OF_TILE = 2, 5
STARTS_OF_ROUTER = 12  # of choosing, sorting and picking rows


@dataclass(frozen=True, slots=True)
class Scores:
    """A pass of attention: elements of scores of all heads of a width, over sequences of a length, in tiles."""

    length: int
    width: int
    area: float
    tiles: float
    tile: tuple[int, int]
    is_backward: bool = False

    def parts(self) -> Work:
        """What is done in it: q k^T and p v; backward the scores again, dp, and dv, dk, dq."""
        (tall, wide), d, turn = self.tile, self.width, self.is_backward
        forward = ((tall, wide, d, self.tiles), (tall, d, wide, self.tiles))
        backward = ((tall, wide, d, 2 * self.tiles), (wide, d, tall, 2 * self.tiles), (tall, d, wide, self.tiles))
        return Work(backward if turn else forward, exps=self.area, starts=STARTS_OF_TILE[turn] * self.tiles)


@dataclass(frozen=True, slots=True)
class Work:
    """`products`: (m, n, k, how often); `passes`: bytes of each; exponentials; starts beside those of both; passes of
    attention; rows that are added to a table's gradient.
    """

    products: tuple[tuple[int, int, int, float], ...] = ()
    passes: tuple[int, ...] = ()
    exps: float = 0.0
    starts: float = 0.0
    scores: tuple[Scores, ...] = ()
    added_rows: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.passes + other.passes,
            self.exps + other.exps,
            self.starts + other.starts,
            self.scores + other.scores,
            self.added_rows + other.added_rows,
        )

    def in_parts(self, machine: Machine, dtype: str) -> Work:
        """The same, with attention in parts where its rate as a whole isn't known."""
        if not self.scores or (machine.attention and getattr(machine.attention, dtype)):
            return self
        total = replace(self, scores=())
        for scores in self.scores:
            total = total + scores.parts()
        return total

    @property
    def flops(self) -> float:
        """Of the products."""
        own = sum(2.0 * m * n * k * count for m, n, k, count in self.products)
        return own + sum(scores.parts().flops for scores in self.scores)


@dataclass(frozen=True, slots=True)
class Both:
    """Of a layer's forward, of the gradients of its input, and of those of its weights; `added`: of adding these to
    what earlier microbatches have left.
    """

    forward: Work = Work()
    input_grad: Work = Work()
    weight_grad: Work = Work()
    added: Work = Work()

    def __add__(self, other: Both) -> Both:
        return Both(
            self.forward + other.forward,
            self.input_grad + other.input_grad,
            self.weight_grad + other.weight_grad,
            self.added + other.added,
        )


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of some work on a machine."""

    products: float = 0.0
    passes: float = 0.0
    exps: float = 0.0
    starts: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.products + self.passes + self.exps + self.starts + self.attention


def seconds_of(work: Work, machine: Machine, dtype: str) -> Seconds:
    """On one rank of a machine; each product and each pass that has elements is an operation that starts."""
    compute, work = machine.compute, work.in_parts(machine, dtype)
    products = [(2.0 * m * n * k * count, (m, n, k), count) for m, n, k, count in work.products if m and n and k]
    passes = [size for size in work.passes if size]
    starts = work.starts + sum(count for _, _, count in products) + len(passes)
    return Seconds(
        sum(flops / machine.products.rate(dtype, *shape) for flops, shape, _ in products),
        sum(size / compute.pass_rate(size) for size in passes),
        work.exps / compute.exps_per_second,
        starts * compute.operation_seconds + work.added_rows * compute.added_row_seconds,
        sum(_attention_seconds(scores, machine, dtype) for scores in work.scores),
    )


def _attention_seconds(scores: Scores, machine: Machine, dtype: str) -> float:
    assert machine.attention is not None
    rate = machine.attention.rate(dtype, scores.length, scores.width, is_backward=scores.is_backward)
    return scores.area / rate


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens of each, and in what tiles attention takes them: queries, keys at most."""

    length: int
    tile: tuple[int, int] = (TILE, LONG_TILE)

    @classmethod
    def on(cls, machine: Machine, length: int) -> Sequences:
        """As attention takes them on its arrays."""
        is_device = machine.machine.device == "gpu"
        return cls(length, (DEVICE_TILE, DEVICE_LONG_TILE) if is_device else (TILE, LONG_TILE))


def work_of(layer: Layer | Param, s: Sizes, of: Sequences) -> Both:
    """Of a layer with all inside it, over `s.rows` rows of sequences."""
    if isinstance(layer, Param):
        return Both()
    layer = unwrapped(layer)
    match layer:
        case ColumnParallelLinear() | RowParallelLinear():
            return _linear(layer, s)
        case AttentionHeads():
            return _heads(layer, s, of)
        case CrossHeads():
            return _cross_heads(layer, s, of)
        case Router():
            return _router(layer, s)
        case Experts():
            return _experts(layer, s)
        case SharedExpert():
            return work_of(layer.mlp, s, of) + _gate(s)
        case MLP():
            return _mlp(layer, s, of)
        case LayerNorm() | RMSNorm() | HeadNorms() | JointNorms():
            return _norm(layer, s)
        case VocabParallelEmbedding() | PositionEmbedding() | Sinusoids():
            return _lookup(layer, s)
        case Dropout() | Scale() | LogitsBias() | SoftCap():
            return _one_by_one(layer, s)
    inside = sum_of(work_of(child, s, of) for child in layer.children().values())
    if isinstance(layer, CrossAttention):  # whose part of the memory's gradient is added to that of the others
        inside += Both(input_grad=Work(passes=(3 * s.shard * s.hidden * s.item,)))
    return inside + _joins(layer, s)


def _norm(layer: LayerNorm | RMSNorm | HeadNorms | JointNorms, s: Sizes) -> Both:
    match layer:
        case HeadNorms():
            heads = (layer.heads.query.size + len(layer.heads.kv)) * layer.q_weight.data.shape[0]
            row = s.rows * heads * s.item
        case JointNorms():
            row = layer.values.start * s.rows * s.item
            return Both(Work(passes=(row, 2 * row)), Work(passes=(2 * row, 3 * row)))
        case _:
            row = s.shard * s.hidden * s.item
    return Both(Work(passes=(2 * row,)), Work(passes=(3 * row,)))


def _lookup(layer: VocabParallelEmbedding | PositionEmbedding | Sinusoids, s: Sizes) -> Both:
    """Rows of a table, to whose gradient rows are added; sines are nobody's."""
    row = Work(passes=(2 * s.rows * s.hidden * s.item,))
    if isinstance(layer, Sinusoids):
        return Both(row)
    table = sum(param.data.size for param in layer.params().values()) * s.wide
    return Both(row, weight_grad=Work(passes=(table,), added_rows=s.rows), added=Work(passes=(3 * table,)))


def _one_by_one(layer: Dropout | Scale | LogitsBias | SoftCap, s: Sizes) -> Both:
    """What is done to each element; a cap of logits goes with the loss, which knows how wide they are."""
    match layer:
        case SoftCap():
            return Both()
        case LogitsBias():
            return Both(Work(passes=(2 * s.rows * layer.bias.data.size * s.item,)))
        case Dropout():
            drawn = s.shard * s.hidden * bool(layer.rate)
            once = Work(passes=(2 * drawn * s.item,), exps=drawn)
        case _:
            once = Work(passes=(2 * s.shard * s.hidden * s.item,))
    return Both(once, once)


def sum_of(parts: Iterable[Both]) -> Both:
    """All of them."""
    total = Both()
    for part in parts:
        total = total + part
    return total


def loss_work(columns: int, s: Sizes, *, is_capped: bool = False) -> Both:
    """Of the loss over this rank's columns of logits, the cap that some models put on them included."""
    logits = s.rows * columns
    once = Work(passes=(2 * logits * s.item,) * (1 + is_capped), exps=logits * (1 + is_capped))
    return Both(once, once)


def _linear(layer: ColumnParallelLinear | RowParallelLinear, s: Sizes) -> Both:
    n, k = layer.product.shape
    bias = s.rows * n * s.item if layer.bias else 0
    return Both(
        Work(((s.rows, n, k, 1),), (2 * bias,)),
        Work(((s.rows, k, n, 1),)),
        Work(((n, k, s.rows, 1),), (bias,)),
        Work(passes=(3 * n * k * s.wide,)),
    )


def _mlp(layer: MLP, s: Sizes, of: Sequences) -> Both:
    taken, given = layer.up.product.shape[0], layer.down.product.shape[1]
    row = s.rows * s.item
    activation = Both(
        Work(passes=((taken + given) * row,), exps=s.rows * given),
        Work(passes=((2 * taken + given) * row,), exps=s.rows * given),
    )
    return work_of(layer.up, s, of) + activation + work_of(layer.down, s, of)


def _router(layer: Router, s: Sizes) -> Both:
    """Softmax, choice and sorting go over tables of t' e numbers; the last two start some operations of their own."""
    e, h = layer.product.shape
    table = s.shard * e * s.wide
    return Both(
        Work(((s.shard, e, h, 1),), (3 * table, 3 * table), s.shard * e, STARTS_OF_ROUTER),
        Work(((s.shard, h, e, 1),), (3 * table, 3 * table), starts=STARTS_OF_ROUTER),
        Work(((e, h, s.shard, 1),)),
    )


def _rows_of_experts(layer: Experts, s: Sizes) -> tuple[int, int]:
    """Rows that come to this rank's experts, where the routing deals them evenly, and those of each expert."""
    own, exchange = layer.gate_up.shape[0], layer.pairs.exchange
    ranks = exchange.group.size if isinstance(exchange, ExchangeOverEp) else 1
    rows = round(s.rows * layer.sizes.top_k * ranks * own / layer.sizes.num_experts)
    return rows, max(1, round(rows / max(own, 1)))


def down_work(layer: Experts, s: Sizes) -> Work:
    """Of the products for down's gradient, behind which rows travel home."""
    rows, each = _rows_of_experts(layer, s)
    _, h, f = layer.down.shape
    return Work(((h, f, each, rows / each),))


def _experts(layer: Experts, s: Sizes) -> Both:
    """Each own expert has as many rows."""
    (own, columns, h), f = layer.gate_up.shape, layer.down.shape[2]
    rows, each = _rows_of_experts(layer, s)
    times, row = rows / each, rows * s.item
    return Both(
        Work(((each, columns, h, times), (each, h, f, times)), ((columns + f) * row, 5 * h * row), rows * f),
        Work(((each, f, h, times), (each, h, columns, times)), ((2 * columns + f) * row, 9 * h * row), rows * f),
        down_work(layer, s) + Work(((columns, h, each, times),)),
        Work(passes=(3 * own * columns * h * s.wide, 3 * own * h * f * s.wide)),
    )


def _gate(s: Sizes) -> Both:
    """A product with one column, whose outcome multiplies rows."""
    row = s.shard * s.hidden * s.item
    return Both(
        Work(((s.shard, 1, s.hidden, 1),), (3 * row,)),
        Work(((s.shard, s.hidden, 1, 1),), (5 * row,)),
        Work(((1, s.hidden, s.shard, 1),)),
    )


def _heads(layer: AttentionHeads, s: Sizes, of: Sequences) -> Both:
    a, g, d = layer.heads.query.size, len(layer.heads.kv), layer.head_dim
    group_size = 1 if isinstance(layer.keys, OwnKeys) else s.whole / max(s.rows, 1)  # ranks that share the scores
    area, tiles = tiles_of(layer.sight, of)
    heads = a * (s.whole // of.length) / group_size
    tall = min(of.tile[0], of.length)
    wide = max(1, round(area / max(tiles, 1) / tall))  # keys of a tile
    turned = 2 * s.rows * (a + g) * d * s.item if layer.rotary else 0
    exchanged = 2 * s.rows * (2 * a + 2 * g) * d * s.item if isinstance(layer.keys, HeadsKeys) else 0
    whole = [Scores(of.length, d, heads * area, heads * tiles, (tall, wide), turn) for turn in (False, True)]
    added = 3 * round(heads * area) * s.item if layer.bias else 0  # a number for each score
    return Both(
        Work(passes=(turned, exchanged, added), scores=(whole[0],)),
        Work(passes=(turned, exchanged, added, 2 * s.rows * a * d * s.item), scores=(whole[1],)),
    )


def _cross_heads(layer: CrossHeads, s: Sizes, of: Sequences) -> Both:
    """Every query over a whole source; q, k, v and their gradients are laid head by head, and back."""
    a, d = layer.heads.query.size, layer.head_dim
    area, tiles = tiles_of(EVERYTHING, of)
    heads, tall = a * (s.whole // of.length), min(of.tile[0], of.length)
    wide = max(1, round(area / max(tiles, 1) / tall))
    laid = 2 * 3 * s.rows * a * d * s.item
    whole = [Scores(of.length, d, heads * area, heads * tiles, (tall, wide), turn) for turn in (False, True)]
    return Both(Work(passes=(laid,), scores=(whole[0],)), Work(passes=(laid,), scores=(whole[1],)))


def tiles_of(sight: Sight, of: Sequences) -> tuple[int, int]:
    """Elements of scores of a head over one sequence, and the tiles that they come in."""
    band = sight if isinstance(sight, Band) else Band()
    length, (tall, wide) = of.length, of.tile
    behind = length if band.behind is None else band.behind
    ahead = length if band.ahead is None else band.ahead
    area = tiles = 0
    for first in range(0, length, tall):
        stop = min(first + tall, length)
        keys = min(length, stop + ahead) - max(0, first - behind)
        area += (stop - first) * keys
        tiles += -(-keys // wide)
    return area, tiles


def _joins(layer: Layer, s: Sizes) -> Both:
    """The sums of residual connections that a block's equations name."""
    count = sum(isinstance(step, Join) for step in layer.algebra.forward) if layer.algebra else 0
    once = Work(passes=(3 * s.shard * s.hidden * s.item,) * count)
    return Both(once, once)
