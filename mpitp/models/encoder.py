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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from mpitp.backend.arrays import Array, from_host
from mpitp.errors import ConfigError
from mpitp.layers.activation import activation_of
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import TypeEmbedding
from mpitp.layers.layer import Layer
from mpitp.layers.partition import Share
from mpitp.layers.post_norm_block import PostNormBlock
from mpitp.layers.product import Product
from mpitp.layers.site import Site
from mpitp.models.batch import Batch, check_lengths
from mpitp.models.blocks import dropouts_of, encoder_branches
from mpitp.models.encoder_config import CLASSIFICATION, FEATURES, MASKED, TOKENS, EncoderConfig
from mpitp.models.layered import HfNames, LayeredModel
from mpitp.models.stages import Chosen, Chunk, token_costs

EMBEDDING, HEAD = "embedding", "head"
ENDS = (EMBEDDING, "positions", "types", "embedding_norm", "embedding dropout")  # what stands before the blocks
LOOKUPS = ENDS[:3]
TIED = {f"{HEAD}.weight": f"{EMBEDDING}.weight"}  # the head of masked tokens

MakeHead = Callable[[EncoderConfig, Builder], dict[str, Layer]]


class Encoder(LayeredModel):
    """An encoder on a site. Make one with `new_encoder`, or `mpitp.checkpoint.encoder.load_encoder`."""

    config: EncoderConfig

    def __init__(
        self, config: EncoderConfig, site: Site, layers: dict[str, Layer], names: HfNames, chunks: Sequence[Chunk]
    ) -> None:
        loss = Builder(site, 0.0).loss(classes_share(config, site), num_classes_blocks(config, site))
        super().__init__(site, layers, loss, names, chunks)
        self.config = config

    def inputs(self, batch: Batch) -> Array:
        self._check(batch.tokens, self.config.vocab_size, "token id", "the model's vocabulary")
        if batch.types is not None:
            self._check(batch.types, self.config.num_types, "token type", "the model's types")
        check_lengths(batch.rows, self.config.max_positions, "text", "cut it")
        return from_host(batch.tokens, self.device.xp)

    def check_targets(self, targets: np.ndarray) -> None:
        if self.config.head == FEATURES:
            raise ConfigError("this model has no head whose loss could be computed: it gives features alone")
        what = "token id" if self.config.head == MASKED else "class"
        self._check(np.maximum(targets, 0), self.config.num_classes, what, "the model's")

    @property
    def trunk(self) -> dict[str, Layer]:
        """All but the head."""
        return {name: layer for name, layer in self.layers.items() if name in ENDS or name.startswith("blocks.")}

    def hidden(self, batch: Batch) -> Array:
        """What the last block makes of each token, [t, h], the same on every rank."""
        return self.run_layers(list(self.trunk.values()), batch, self.new_pass(batch))[0]

    def _check(self, ids: np.ndarray, size: int, what: str, of: str) -> None:
        bad = ids[(ids < 0) | (ids >= size)]
        if len(bad):
            raise ConfigError(f"{what} {bad[0]} lies outside {of} {size}; was the text prepared for this model?")


def put_together(
    config: EncoderConfig, site: Site, names: HfNames, make_head: Mapping[str, MakeHead], chosen: Chosen
) -> Encoder:
    """The encoder on a site, all parameters zero; of its layers the chosen ones, chunk by chunk (none: all)."""
    makers = _makers(config, Builder(site, config.init_std), make_head, chosen.has(EMBEDDING))
    chunks = chosen.made_of(makers, site.batch_type, "" if config.head == FEATURES else list(makers)[-1])
    layers = {name: makers[name]() for chunk in chunks for name in chunk.names}
    model = Encoder(config, site, layers, names, chunks)
    model.stage_layers = chosen.stages
    return model


def layer_costs(config: EncoderConfig, layers: Mapping[str, Layer]) -> dict[str, float]:
    """Multiplications a token that each layer takes forward; a head that sees a row of each text takes next to none."""
    lookups = dict.fromkeys(LOOKUPS, float(config.hidden_size))
    if config.head in (MASKED, TOKENS):
        return token_costs(layers, lookups, {HEAD: config.num_classes})
    return token_costs(layers, {**lookups, HEAD: 0.0}, {})


def _makers(
    config: EncoderConfig, build: Builder, make_head: Mapping[str, MakeHead], has_embedding: bool
) -> dict[str, Callable[[], Layer]]:
    """What makes each layer, by name, in forward order. `has_embedding`: whether the embedding is made too; where it
    isn't, the head of masked tokens has a replica of its table.
    """
    vocab, hidden = build.site.share(config.vocab_size), config.hidden_size
    table = cache(lambda: build.vocab_table(vocab, hidden, is_replica=not has_embedding))
    makers: dict[str, Callable[[], Layer]] = {EMBEDDING: lambda: build.embedding(table(), vocab)}
    makers["positions"] = lambda: build.positions(config.max_positions, hidden, config.position_offset)
    if config.num_types:
        makers["types"] = lambda: TypeEmbedding(build.between(config.num_types, hidden, std=config.init_std))
    makers["embedding_norm"] = lambda: build.layer_norm(hidden, config.norm_eps)
    if config.dropouts.embedding:
        makers["embedding dropout"] = lambda: Dropout(config.dropouts.embedding, "embedding")
    makers |= {f"blocks.{i}": partial(build_block, config, build, i) for i in range(config.num_layers)}
    if config.head == MASKED:
        return makers | masked_head(config, build, table, vocab)
    head = cache(lambda: make_head[config.head](config, build))
    names = make_head[config.head](config, replace(build, site=build.site.abstract()))
    return makers | {name: partial(_one_of, head, name) for name in names}


def _one_of(make: Callable[[], Mapping[str, Layer]], name: str) -> Layer:
    return make()[name]


def build_block(config: EncoderConfig, build: Builder, index: int) -> PostNormBlock:
    """Block `index`."""
    attention, mlp = encoder_branches(config, build, f"blocks.{index}")
    norms = [build.layer_norm(config.hidden_size, config.norm_eps) for _ in range(2)]
    return PostNormBlock(attention, norms[0], mlp, norms[1], dropouts_of(config, index))


def masked_head(
    config: EncoderConfig, build: Builder, table: Callable[[], Product], vocab: Share
) -> dict[str, Callable[[], Layer]]:
    """What makes a dense layer, its norm, and the head over the embedding's own table with a bias."""
    hidden, activation = config.hidden_size, activation_of(config.head_activation or config.activation, gated=False)
    return {
        "transform": lambda: build.gathered_dense(hidden, hidden, activation),
        "transform_norm": lambda: build.layer_norm(hidden, config.norm_eps),
        HEAD: lambda: build.head(table(), vocab, bias=True),
    }


def tokens_head(config: EncoderConfig, build: Builder) -> dict[str, Layer]:
    """A class for each token."""
    dropout: dict[str, Layer] = {"head dropout": Dropout(config.head_dropout, "head")} if config.head_dropout else {}
    return {**dropout, HEAD: build.classifier(config.hidden_size, len(config.labels))}


def head_dropout(config: EncoderConfig, name: str) -> dict[str, Layer]:
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
