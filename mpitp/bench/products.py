r"""The matrix products of a training step, to be timed alone: the floor under the step's time.

A linear with weight W [n, k] on this rank takes three products of 2 t n k operations each,

    y = x W^T      dx = dy W      dW = dy^T x

and attention takes, for each sequence and query head, two products for each block of queries in the forward (with the
keys that its last one sees), and five for each block of keys in the backward (with the queries that see its first one):

    S = q k^T   o = P v   |   S = q k^T   dP = do v^T   dv = P^T do   dk = dS^T q   dq = dS k

They run on arrays laid out as in the step (transposed views, heads as strided views of the fused projection) and write
into memory that is already there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.models.config import DecoderConfig
from mpitp.models.encoder import Encoder
from mpitp.models.encoder_config import MASKED, EncoderConfig
from mpitp.models.encoder_decoder import EncoderDecoder
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.vision import Vision
from mpitp.models.vision_config import VisionConfig
from mpitp.ops.sight import CAUSAL, EVERYTHING, Sight


@dataclass(frozen=True, slots=True)
class Product:
    """out = a @ b."""

    a: Array
    b: Array
    out: Array

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.a.shape[0] * self.a.shape[1] * self.b.shape[1]


def run_products(products: Sequence[Product]) -> None:
    """Compute them all."""
    for product in products:
        np.matmul(product.a, product.b, out=product.out)


AnyModel = CausalLM | Encoder | EncoderDecoder | Vision


def linear_weights(model: AnyModel) -> Iterator[Array]:
    """This rank's weights that are multiplied by activations of all tokens; a tied table counts as the head that it is,
    the classifier of an image, which sees one row of it, not at all.
    """
    if isinstance(model, Vision):
        yield from (p.data for name, p in model.named_params() if p.data.ndim == 2 and name.startswith("blocks."))
        return
    is_tied = model.config.head == MASKED if isinstance(model, Encoder) else model.config.tied
    added = ("positions.weight", "types.weight", "heads.bias", "logits bias.bias")  # looked up, or numbers to be added
    for name, param in model.named_params():
        is_table = name.removeprefix("encoder.") == "embedding.weight" and not is_tied
        if param.data.ndim == 2 and not (is_table or name.endswith(added)):
            yield param.data


def linear_products(model: AnyModel, num_tokens: int) -> list[Product]:
    """The three products of every linear of the model, for `num_tokens` rows."""
    arrays = _Arrays(model.dtype)
    products = []
    for w in linear_weights(model):
        n, k = w.shape
        x, dy = arrays.get("x", num_tokens, k), arrays.get("dy", num_tokens, n)
        products.append(Product(x, w.T, arrays.get("y", num_tokens, n)))
        products.append(Product(dy, w, arrays.get("dx", num_tokens, k)))
        products.append(Product(dy.T, x, arrays.get("dw", n, k)))
    return products


def patch_products(model: Vision, num_patches: int) -> list[Product]:
    """The two products of the patch embedding: pixels have no gradient."""
    w = model["patches"].weight.data
    w, arrays = w.reshape(len(w), w[0].size), _Arrays(model.dtype)
    x, dy = arrays.get("x", num_patches, w.shape[1]), arrays.get("dy", num_patches, len(w))
    return [Product(x, w.T, arrays.get("y", num_patches, len(w))), Product(dy.T, x, arrays.get("dw", *w.shape))]


def attention_products(model: AnyModel, lengths: Sequence[int]) -> list[Product]:
    """Those of this rank's heads in all blocks, for sequences of these lengths; of pairs both texts have them."""
    config = model.config
    if isinstance(config, EncoderDecoderConfig):
        own, before = config.decoder.num_layers, config.encoder.num_layers
        return _products(model, lengths, CAUSAL) * own + _products(model, lengths, EVERYTHING) * (own + before)
    sight = EVERYTHING if isinstance(config, EncoderConfig | VisionConfig) else CAUSAL
    return _products(model, lengths, sight) * config.num_layers


def _products(model: AnyModel, lengths: Sequence[int], sight: Sight) -> list[Product]:
    """Of one block, or of a cross attention."""
    config, dim = model.config, model.config.head_dim
    heads = model.site.heads(config.heads, config.kv_heads if isinstance(config, DecoderConfig) else config.heads)
    arrays = _Arrays(model.dtype)
    a, g = heads.query.size, len(heads.kv)
    products = []
    for length in lengths:
        qkv = arrays.get("qkv", length, (a + 2 * g) * dim).reshape(length, a + 2 * g, dim)
        do = arrays.get("do", length, a * dim).reshape(length, a, dim)
        for head in range(a):
            kv = a + heads.kv_index(head)
            products += _head_products(arrays, (qkv[:, head], qkv[:, kv], qkv[:, kv + g], do[:, head]), sight)
    return products


def _head_products(arrays: _Arrays, qkv_do: tuple[Array, Array, Array, Array], sight: Sight) -> list[Product]:
    products = []
    q, k, v, do = qkv_do
    length, dim = q.shape
    q_head = arrays.get("q", length, dim)  # scaled, so contiguous
    of_queries, of_keys = arrays.get("of queries", length, dim), arrays.get("of keys", length, dim)
    for tile in (tile for block in sight.query_blocks(np, length, length) for tile in block.tiles):
        rows, cols = tile.queries, tile.keys
        scores = arrays.get("scores", rows.stop - rows.start, cols.stop - cols.start)
        products += [Product(q_head[rows], k[cols].T, scores), Product(scores, v[cols], of_queries[rows])]
    for tile in (tile for block in sight.key_blocks(np, length, length) for tile in block.tiles):
        rows, cols = tile.queries, tile.keys
        shape = rows.stop - rows.start, cols.stop - cols.start
        scores, dscores = arrays.get("scores", *shape), arrays.get("dscores", *shape)
        products += [
            Product(q_head[rows], k[cols].T, scores),
            Product(do[rows], v[cols].T, dscores),
            Product(scores.T, do[rows], of_keys[cols]),
            Product(dscores.T, q_head[rows], of_keys[cols]),
            Product(dscores, k[cols], of_queries[rows]),
        ]
    return products


class _Arrays:
    """Arrays by role and shape, filled with numbers of ordinary size and shared by the products."""

    def __init__(self, dtype: Any) -> None:
        self._made: dict[tuple[str, int, int], Array] = {}
        self._dtype, self._rng = dtype, np.random.default_rng(0)

    def get(self, role: str, rows: int, cols: int) -> Array:
        key = (role, rows, cols)
        if key not in self._made:
            self._made[key] = self._rng.standard_normal((rows, cols), np.float32).astype(self._dtype)
        return self._made[key]
