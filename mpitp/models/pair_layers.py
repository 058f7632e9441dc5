"""The layers of a model with an encoder and a decoder, put together from its config's facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial

from mpitp.layers.activation import activation_of
from mpitp.layers.attention import AttentionDropout, SelfAttention
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import AttentionSizes, Builder
from mpitp.layers.cross_block import CrossBlock
from mpitp.layers.crossing import OnSource, ToDecoder
from mpitp.layers.dropout import Dropout
from mpitp.layers.dropped_activation import DroppedActivation
from mpitp.layers.groupwise import GroupwiseProduct
from mpitp.layers.layer import Layer
from mpitp.layers.mlp import MLP
from mpitp.layers.norm import LayerNorm, RMSNorm
from mpitp.layers.post_norm_block import PostNormBlock
from mpitp.layers.post_norm_cross_block import PostNormCrossBlock
from mpitp.layers.product import DenseProduct
from mpitp.layers.relative_bias import RelativeBias
from mpitp.layers.scale import Scale
from mpitp.layers.sinusoids import Sinusoids
from mpitp.layers.site import Site
from mpitp.models.encoder_decoder import HEAD
from mpitp.models.encoder_decoder_config import LEARNED, RELATIVE, SINES, EncoderDecoderConfig
from mpitp.models.stages import TO_DECODER
from mpitp.ops.relative_buckets import Buckets
from mpitp.ops.sight import CAUSAL, EVERYTHING

Table = DenseProduct | GroupwiseProduct
Makers = dict[str, Callable[[], Layer]]
FIRST = "encoder.embedding"  # whose table the others share
BIAS = "attention.heads.bias"  # of a block: a side's blocks share one


def layer_makers(config: EncoderDecoderConfig, site: Site, has: Callable[[str], bool]) -> Makers:
    """What makes each layer, by name, in forward order. `has`: whether this rank has the layer of that name; what it
    shares with one that it doesn't have is a replica.
    """
    build, vocab = Builder(site, config.init_std), site.share(config.vocab_size)
    tables = replace(build, init_std=config.init_std / config.logits_scale)  # a scaled table begins as much larger
    table = cache(lambda: tables.vocab_table(vocab, config.hidden_size, is_replica=not has(FIRST)))
    encoder, decoder = (Stack(config, build, has, is_decoder=each) for each in (False, True))
    makers: Makers = {f"encoder.{name}": partial(_on_source, make) for name, make in encoder.makers(table).items()}
    makers[TO_DECODER] = lambda: ToDecoder(site.shard_type, site.batch_type)
    makers |= decoder.makers(table)
    if config.logits_scale != 1:
        makers["head scale"] = lambda: Scale(config.logits_scale)
    own = lambda: build.vocab_table(vocab, config.hidden_size)  # noqa: E731
    makers[HEAD] = lambda: build.head(table() if config.tied else own(), vocab)
    return makers | ({"logits bias": lambda: build.logits_bias(vocab)} if config.logits_bias else {})


def tied_params(config: EncoderDecoderConfig) -> dict[str, str]:
    """Parameters that are another one, and which."""
    tied = dict.fromkeys(["embedding.weight", *([f"{HEAD}.weight"] if config.tied else [])], f"{FIRST}.weight")
    if config.positions == RELATIVE:
        for prefix, side in (("encoder.", config.encoder), ("", config.decoder)):
            tied |= {f"{prefix}blocks.{i}.{BIAS}": f"{prefix}blocks.0.{BIAS}" for i in range(1, side.num_layers)}
    return tied


def _on_source(make: Callable[[], Layer]) -> Layer:
    return OnSource(make())


class Stack:
    """One side of the model: what stands before its blocks, the blocks, and what stands behind them."""

    def __init__(
        self, config: EncoderDecoderConfig, build: Builder, has: Callable[[str], bool], *, is_decoder: bool
    ) -> None:
        self.config, self.build, self.has, self.is_decoder = config, build, has, is_decoder
        self.side, self.prefix = (config.decoder, "") if is_decoder else (config.encoder, "encoder.")
        self.heads = build.site.heads(self.side.heads, self.side.heads)

    def makers(self, table: Callable[[], Table]) -> Makers:
        """What makes each layer, by name, in forward order."""
        config, build, hidden = self.config, self.build, self.config.hidden_size
        vocab = build.site.share(config.vocab_size)
        makers: Makers = {"embedding": lambda: build.embedding(table(), vocab, config.held_id)}
        if config.embedding_scale != 1:
            makers["embedding scale"] = lambda: Scale(config.embedding_scale)
        if config.positions == LEARNED:
            makers["positions"] = lambda: build.positions(config.max_positions, hidden, config.position_offset)
        elif config.positions == SINES:
            makers["positions"] = Sinusoids
        if config.embedding_norm:
            makers["embedding_norm"] = lambda: build.layer_norm(hidden, config.norm_eps)
        makers |= self._dropout("embedding dropout", config.dropouts.embedding)
        block = self._decoder_block if self.is_decoder else self._encoder_block
        makers |= {f"blocks.{i}": partial(block, i) for i in range(self.side.num_layers)}
        if config.is_pre_norm:
            makers["final_norm"] = lambda: build.rms_norm(hidden, config.norm_eps)
            makers |= self._dropout("final dropout", config.dropouts.embedding)
        return makers

    def _dropout(self, name: str, rate: float) -> Makers:
        return {name: lambda: Dropout(rate, f"{self.prefix}{name}")} if rate else {}

    @cached_property
    def bias(self) -> RelativeBias | None:
        """One table for all blocks."""
        if self.config.positions != RELATIVE:
            return None
        buckets = Buckets(self.config.num_buckets, self.config.furthest, both_ways=not self.is_decoder)
        return self.build.relative_bias(self.heads.query, buckets, is_replica=not self.has(self._name(0)))

    def _encoder_block(self, index: int) -> Layer:
        name, attention, mlp = self._name(index), self._attention(index), self._mlp(index)
        dropouts = (self._residual(name, 1), self._residual(name, 2))
        if self.config.is_pre_norm:
            return TransformerBlock(self._rms_norm(), attention, self._rms_norm(), mlp, dropouts)
        return PostNormBlock(attention, self._layer_norm(), mlp, self._layer_norm(), dropouts)

    def _decoder_block(self, index: int) -> Layer:
        name = self._name(index)
        dropout = AttentionDropout(self.config.dropouts.attention, f"{name}.cross")
        cross = self.build.cross_attention(self._sizes(), dropout)
        branches, drops = (self._attention(index), cross, self._mlp(index)), self._residual
        dropouts = (drops(name, 1), drops(name, 2), drops(name, 3))
        if self.config.is_pre_norm:
            return CrossBlock(*branches, (self._rms_norm(), self._rms_norm(), self._rms_norm()), dropouts)
        norms = (self._layer_norm(), self._layer_norm(), self._layer_norm())
        return PostNormCrossBlock(*branches, norms, dropouts)

    def _name(self, index: int) -> str:
        return f"{self.prefix}blocks.{index}"

    def _rms_norm(self) -> RMSNorm:
        return self.build.rms_norm(self.config.hidden_size, self.config.norm_eps)

    def _layer_norm(self) -> LayerNorm:
        return self.build.layer_norm(self.config.hidden_size, self.config.norm_eps)

    def _residual(self, name: str, number: int) -> Dropout:
        return Dropout(self.config.dropouts.residual, f"{name}.residual{number}")

    def _sizes(self) -> AttentionSizes:
        """Of every attention of this side; T5 doesn't scale scores."""
        config, has_bias = self.config, not self.config.is_pre_norm
        scale = 1.0 if config.positions == RELATIVE else None
        return AttentionSizes(self.heads, self.side.head_dim, config.hidden_size, has_bias, has_bias, scale=scale)

    def _attention(self, index: int) -> SelfAttention:
        sizes = replace(self._sizes(), sight=CAUSAL if self.is_decoder else EVERYTHING, change=self.bias)
        dropout = AttentionDropout(self.config.dropouts.attention, f"{self._name(index)}.attention")
        return self.build.attention(sizes, dropout)

    def _mlp(self, index: int) -> MLP:
        config, build, hidden = self.config, self.build, self.config.hidden_size
        share, has_bias = build.columns(self.side.ffn_hidden), not config.is_pre_norm
        up = build.column(("gate", "up") if config.is_gated else ("up",), hidden, share, bias=has_bias)
        function = activation_of(config.activation, gated=config.is_gated)
        if config.dropouts.inner:
            function = DroppedActivation(function, config.dropouts.inner, f"{self._name(index)}.inner", share)
        return MLP(up, function, build.row("down", share, hidden, bias=has_bias))
