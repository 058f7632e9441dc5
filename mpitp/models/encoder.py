"""An encoder (Devlin et al. 2019): every token sees every other one of its own text, and a head says what is read off.

    embedding, positions, types    x = E[tokens] + P[positions] + T[types]                                  [t, h]
    embedding_norm                 x = norm(x)
    blocks.0, ...                  x = block_i(x): post-norm, two all-reduces forward, two backward         [t, h]

    head      features          nothing, or the pooler: tanh(x_first W^T + b)
              masked            logits = norm(f(x W^T + b)) E^T + b: the vocabulary for each token          [t, v/tp]
              classification    logits of each text's first token                                           [b, c/tp]
              tokens            logits of each token                                                        [t, c/tp]
    loss      sum over counted targets of -log softmax(logits)[target]

Texts of different lengths lie one after the other without padding: each sees itself alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array, from_host
from mpitp.errors import ConfigError
from mpitp.layers.activation import activation_of
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.build import AttentionSizes, Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import TypeEmbedding
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP
from mpitp.layers.partition import Share
from mpitp.layers.post_norm_block import PostNormBlock
from mpitp.layers.product import Product
from mpitp.layers.site import Site
from mpitp.models.batch import Batch
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, TOKENS, EncoderConfig
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.stages import Chunk
from mpitp.ops.sight import EVERYTHING

HEAD = "head"


class Encoder(LayeredModel):
    """An encoder on a site. Make one with `new_encoder`, or `mpitp.checkpoint.encoder.load_encoder`."""

    config: EncoderConfig

    def __init__(
        self, config: EncoderConfig, site: Site, layers: dict[str, Layer], num_trunk: int, names: HfNames
    ) -> None:
        loss = Builder(site, 0.0).loss(classes_share(config, site), num_classes_blocks(config, site))
        chunk = Chunk(tuple(layers), site.batch_type, ends_in_loss=config.head != FEATURES)
        super().__init__(site, layers, loss, names, (chunk,))
        self.config, self.num_trunk = config, num_trunk

    def inputs(self, batch: Batch) -> Array:
        self._check(batch.tokens, self.config.vocab_size, "token id", "the model's vocabulary")
        if batch.types is not None:
            self._check(batch.types, self.config.num_types, "token type", "the model's types")
        runs = batch.rows.runs
        if not runs or min(run.length for run in runs) < 1:
            raise ConfigError("a text without tokens; every text needs at least one")
        longest = max(run.first + run.length for run in runs)
        if longest > self.config.max_positions:
            raise ConfigError(
                f"a text of {longest} tokens exceeds the model's {self.config.max_positions} positions; cut it"
            )
        return from_host(batch.tokens, self.device.xp)

    def check_targets(self, targets: np.ndarray) -> None:
        if self.config.head == FEATURES:
            raise ConfigError("this model has no head whose loss could be computed: it gives features alone")
        what = "token id" if self.config.head == MASKED else "class"
        self._check(np.maximum(targets, 0), self.config.num_classes, what, "the model's")

    @property
    def trunk(self) -> dict[str, Layer]:
        """All but the head."""
        return dict(list(self.layers.items())[: self.num_trunk])

    def hidden(self, batch: Batch) -> Array:
        """What the last block makes of each token, [t, h], the same on every rank."""
        return self.run_layers(list(self.trunk.values()), batch, self.new_pass(batch))[0]

    def _check(self, ids: np.ndarray, size: int, what: str, of: str) -> None:
        bad = ids[(ids < 0) | (ids >= size)]
        if len(bad):
            raise ConfigError(f"{what} {bad[0]} lies outside {of} {size}; was the text prepared for this model?")


def build_encoder(config: EncoderConfig, site: Site, pieces: HfNames, make_head: Mapping[str, Any]) -> Encoder:
    """The encoder on a site, all parameters zero. make_head: for each head, a function of (config, builder) that makes
    its layers by name.
    """
    build = Builder(site, config.init_std)
    vocab, hidden = site.share(config.vocab_size), config.hidden_size
    table = build.vocab_table(vocab, hidden)
    layers: dict[str, Layer] = {"embedding": build.embedding(table, vocab)}
    layers["positions"] = build.positions(config.max_positions, hidden, config.position_offset)
    if config.num_types:
        layers["types"] = TypeEmbedding(site.whole(config.num_types, hidden, std=config.init_std))
    layers["embedding_norm"] = build.layer_norm(hidden, config.norm_eps)
    if config.dropouts.embedding:
        layers["embedding dropout"] = Dropout(config.dropouts.embedding, "embedding")
    layers |= {f"blocks.{i}": build_block(config, build, i) for i in range(config.num_layers)}
    num_trunk = len(layers)
    if config.head == MASKED:
        layers |= masked_head(config, build, table, vocab)
    else:
        layers |= make_head[config.head](config, build)
    return Encoder(config, site, layers, num_trunk, pieces)


def build_block(config: EncoderConfig, build: Builder, index: int) -> PostNormBlock:
    """Block `index`."""
    hidden, drop, site, name = config.hidden_size, config.dropouts, build.site, f"blocks.{index}"
    own = site.heads(config.heads, config.heads)
    sizes = AttentionSizes(own, config.head_dim, hidden, True, True, sight=EVERYTHING)
    attention = build.attention(sizes, AttentionDropout(drop.attention, f"{name}.attention"))
    share = site.share(config.ffn_hidden)
    up = build.column(("up",), hidden, share, bias=True)
    mlp = MLP(up, activation_of(config.activation, gated=False), build.row("down", share, hidden, bias=True))
    dropouts = (Dropout(drop.residual, f"{name}.residual1"), Dropout(drop.residual, f"{name}.residual2"))
    norms = (build.layer_norm(hidden, config.norm_eps), build.layer_norm(hidden, config.norm_eps))
    return PostNormBlock(attention, norms[0], mlp, norms[1], dropouts)


def masked_head(config: EncoderConfig, build: Builder, table: Product, vocab: Share) -> dict[str, Layer]:
    """A dense layer, its norm, and the embedding's own table with a bias."""
    hidden, activation = config.hidden_size, activation_of(config.activation, gated=False)
    return {
        "transform": build.gathered_dense(hidden, hidden, activation),
        "transform_norm": build.layer_norm(hidden, config.norm_eps),
        HEAD: build.head(table, vocab, bias=True),
    }


def tokens_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """A class for each token."""
    dropout: dict[str, Layer] = {"head dropout": Dropout(config.head_dropout, "head")} if config.head_dropout else {}
    return {**dropout, HEAD: build.classifier(config.hidden_size, len(config.labels))}


def dropouts_of(config: EncoderConfig, name: str) -> dict[str, Layer]:
    """The head's dropout under a name, where there is one."""
    return {name: Dropout(config.head_dropout, f"head.{name}")} if config.head_dropout else {}


def classes_share(config: EncoderConfig, site: Site) -> Share:
    """What this rank holds of what a target is one of."""
    if config.head in (CLASSIFICATION, TOKENS):
        return site.share_of_few(len(config.labels))
    return site.share(config.vocab_size)


def num_classes_blocks(config: EncoderConfig, site: Site) -> int:
    """Into how many blocks that is cut."""
    return min(site.num_blocks, max(config.num_classes, 1))
