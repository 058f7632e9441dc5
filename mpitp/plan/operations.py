r"""What a layer's pass costs by shapes alone: flops of its matrix products, and bytes that it reads and writes.

t rows of a pass on this rank (t' of them between the cut products under sequence parallelism), a product with the local
weight [n, k], a local query heads and g KV heads of width d; q x u: the tiles of scores that attention computes:

| kind        | flops forward, backward     | elements read and written forward, backward                     |
|-------------|-----------------------------|-----------------------------------------------------------------|
| product     | 2 t n k, 4 t n k            | t k + n k + t n,  2 t n + 2 t k + n k (weights) + n k (gradient)|
| attention   | 4 a q u d, 10 a q u d       | t (a + 2g) d + t a d,  2 t (a + 2g) d + 2 t a d                 |
| cross       | the same; u: tokens of the source                                             |
| experts     | as a product: k t rows, n = 3 f/tp                                            |
| patches     | 2 t n k, 2 t n k            | t k + n k + t n,  t n + t k + n k (gradient): no dx             |
| lookup      | none                        | 2 t h, 2 t h                                                    |
| elementwise | none                        | in + out, in + 2 out                                            |
| residual    | none                        | 3 t' h, 3 t' h                                                  |
| loss        | none                        | 2 t v/tp, 2 t v/tp                                              |

Flops are those of products alone: all the rest is bound by memory, and its bytes tell its time. Every array counts as
read once and written once a pass: the least that an operation can do. Scores live in a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpitp.errors import ConfigError
from mpitp.layers.attention import AttentionHeads
from mpitp.layers.cross_attention import CrossHeads
from mpitp.layers.embedding import PositionEmbedding, TypeEmbedding, VocabParallelEmbedding
from mpitp.layers.experts import Experts
from mpitp.layers.heads_keys import HeadsKeys
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.logits_bias import LogitsBias
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.partition import piece_of
from mpitp.layers.patches import ImageTokens, PatchEmbedding
from mpitp.layers.ring_keys import RingKeys
from mpitp.layers.router import Router
from mpitp.layers.rows import Rows, Run
from mpitp.ops.sight import EVERYTHING, Sight

PRODUCT, ATTENTION, LOOKUP, NORM = "product", "attention", "lookup", "norm"
ELEMENTWISE, RESIDUAL, LOSS = "elementwise", "residual", "loss"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one pass, forward and backward.

    `shape`: t, n and k of a product; of attention a sequence's length, heads and their width.
    """

    kind: str
    flops: tuple[int, int] = (0, 0)
    moved: tuple[int, int] = (0, 0)
    shape: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Ends:
    """Elements of what goes into a layer and what comes out; bytes of one, and of one in which is summed."""

    rows: int
    taken: int
    given: int
    item: int
    wide: int


def cost_of(layer: Layer, ends: Ends, rows: Rows) -> Cost:
    """Of a layer without layers inside, over the rows that this rank has. Raises ConfigError for one that multiplies
    by a matrix and has no formula here.
    """
    match layer:
        case ColumnParallelLinear() | RowParallelLinear():
            return _product(layer, ends)
        case AttentionHeads():
            return _attention(layer, ends, rows)
        case CrossHeads():
            return _cross_attention(layer, ends, rows)
        case PatchEmbedding():
            return _patches(layer, ends)
        case ImageTokens():
            return Cost(ELEMENTWISE, _resampled(layer), _elementwise(ends))
        case Router():
            return _router(layer, ends)
        case Experts():
            return _experts(layer, ends)
        case VocabParallelEmbedding():
            return Cost(LOOKUP, moved=(2 * ends.given * ends.item, 2 * ends.given * ends.wide))
        case VocabParallelCrossEntropy():
            moved = ends.taken * (ends.item + ends.wide)
            return Cost(LOSS, moved=(moved, moved))
    kind = NORM if isinstance(layer, LayerNorm | RMSNorm) else ELEMENTWISE
    if not isinstance(layer, PositionEmbedding | TypeEmbedding | LogitsBias) and any(
        param.data.ndim > 1 for param in layer.params().values()
    ):
        raise ConfigError(
            f"plan graph has no formula for the work of a {type(layer).__name__}; it knows the layers of decoders, "
            "encoders, vision transformers and encoder-decoders"
        )
    return Cost(kind, moved=_elementwise(ends))


def _elementwise(ends: Ends) -> tuple[int, int]:
    """x is read and y written; dy and x are read, dx written."""
    return (ends.taken + ends.given) * ends.item, (2 * ends.taken + ends.given) * ends.item


def _product(layer: ColumnParallelLinear | RowParallelLinear, ends: Ends) -> Cost:
    """Columns that another rank counts (a KV head that several ranks hold) are left out of dx."""
    (n, k), t = layer.product.shape, ends.rows
    own = sum(rows.stop - rows.start for rows in layer.dx_blocks) if isinstance(layer, ColumnParallelLinear) else n
    forward = (t * k + n * k + t * n) * ends.item
    backward = (2 * t * n + 2 * t * k + n * k) * ends.item + n * k * ends.wide
    return Cost(PRODUCT, (2 * t * n * k, 2 * t * (own + n) * k), (forward, backward), (t, n, k))


def _patches(layer: PatchEmbedding, ends: Ends) -> Cost:
    """Pixels have no gradient."""
    t, (n, k) = ends.rows, (len(layer.weight.data), layer.weight.data[0].size)
    forward = (t * k + n * k + t * n) * ends.item
    backward = (t * n + t * k) * ends.item + n * k * ends.wide
    return Cost(PRODUCT, (2 * t * n * k, 2 * t * n * k), (forward, backward), (t, n, k))


def _resampled(layer: ImageTokens) -> tuple[int, int]:
    """Positions of the images' grid out of those of the table's, once a pass."""
    if layer.table_grid == layer.grid:
        return 0, 0
    (rows, columns), (own_rows, own_columns) = layer.table_grid, layer.grid
    flops = 2 * rows * columns * own_rows * own_columns * layer.positions.data.shape[-1]
    return flops, flops


def _router(layer: Router, ends: Ends) -> Cost:
    """Its product; what else it does goes over its few columns."""
    e, h = layer.product.shape
    t = ends.taken // h
    forward, backward = (t * h + e * h) * ends.item, (2 * t * h + e * h) * ends.item + e * h * ends.wide
    table = 6 * t * e * ends.wide
    return Cost(PRODUCT, (2 * t * e * h, 4 * t * e * h), (forward + table, backward + table), (t, e, h))


def _experts(layer: Experts, ends: Ends) -> Cost:
    """Of rows that the routing deals evenly, k of a token: gate, up and down take as much as one product with 3f."""
    (e, columns, h), f = layer.gate_up.shape, layer.down.shape[2]
    t, n = ends.rows * layer.sizes.top_k, columns + f
    forward = (t * (2 * h + n) + e * n * h) * ends.item
    backward = (t * (4 * h + 2 * n) + e * n * h) * ends.item + e * n * h * ends.wide
    return Cost(PRODUCT, (2 * t * n * h, 4 * t * n * h), (forward, backward), (t, n, h))


def gate_cost(ends: Ends) -> Cost:
    """Of the shared expert's gate: a product with one column, by which rows are multiplied."""
    forward = (ends.taken + ends.given) * ends.item
    flops = 2 * ends.taken
    return Cost(ELEMENTWISE, (flops, 2 * flops), (forward, 2 * forward))


def _attention(layer: AttentionHeads, ends: Ends, rows: Rows) -> Cost:
    heads, d = _heads_here(layer), layer.head_dim
    forward = backward = 0
    for sight, queries, keys in _meetings(layer, rows):
        forward += _scores(sight, queries, keys, by_keys=False)
        backward += _scores(sight, queries, keys, by_keys=True)
    flops = 2 * 2 * heads * d * forward, 5 * 2 * heads * d * backward
    moved = (ends.taken + ends.given) * ends.item
    return Cost(ATTENTION, flops, (moved, 2 * moved), (rows.runs[0].length if rows.runs else 0, heads, d))


def _cross_attention(layer: CrossHeads, ends: Ends, rows: Rows) -> Cost:
    """Of every query over all keys of its sample's source, which has as many tokens; k and v come beside q."""
    heads, d = layer.heads.query.size, layer.head_dim
    areas = [
        sum(_scores(EVERYTHING, run.length, run.length, by_keys=turn) for run in rows.runs) for turn in (False, True)
    ]
    flops = 2 * 2 * heads * d * areas[0], 5 * 2 * heads * d * areas[1]
    moved = (3 * ends.taken + ends.given) * ends.item
    return Cost(ATTENTION, flops, (moved, 2 * moved), (rows.runs[0].length if rows.runs else 0, heads, d))


def _scores(sight: Sight, queries: int, keys: int, *, by_keys: bool) -> int:
    """Elements of the tiles of scores that a head computes."""
    blocks = sight.key_blocks(np, queries, keys) if by_keys else sight.query_blocks(np, queries, keys)
    tiles = (tile for block in blocks for tile in block.tiles)
    return sum((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in tiles)


def _heads_here(layer: AttentionHeads) -> int:
    """Query heads whose scores this rank computes."""
    heads = layer.heads.query.size
    keys = layer.keys
    return len(piece_of(heads, keys.group.rank, keys.group.size)) if isinstance(keys, HeadsKeys) else heads


def _meetings(layer: AttentionHeads, rows: Rows) -> Iterator[tuple[Sight, int, int]]:
    """(what is seen, queries, keys) of each run of queries and the keys that it meets."""
    if isinstance(layer.keys, RingKeys):
        for everyone in rows.everyone:
            for number, mine in enumerate(rows.runs):
                for other in everyone[number - number % 2 : number - number % 2 + 2]:
                    yield from _ring_meeting(layer.sight, mine, other)
        return
    whole = rows.uncut() if isinstance(layer.keys, HeadsKeys) else rows
    yield from ((layer.sight, run.length, run.length) for run in whole.runs)


def _ring_meeting(sight: Sight, mine: Run, other: Run) -> Iterator[tuple[Sight, int, int]]:
    seeing = sight.at(mine.positions, other.positions).seeing()
    if seeing:
        positions = mine.positions[seeing.start : seeing.stop]
        yield sight.at(positions, other.positions), len(seeing), other.length
