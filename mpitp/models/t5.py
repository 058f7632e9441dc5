"""T5 (Raffel et al. 2020), v1.1 and FLAN among its files: relative positions, RMS norms before the branches, no biases,
scores that aren't scaled; an MLP with a gate or without.

A head that is the embedding's own table gets its rows times hidden_size^-0.5; v1.1 has a table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import HfConfigReader
from mpitp.models.encoder_decoder_config import (
    ENCODER_DECODER_VALUES,
    RELATIVE,
    EncoderDecoderConfig,
    PairDropouts,
    Side,
    expect_class,
)
from mpitp.models.facts import ACTIVATIONS
from mpitp.models.names import HfPiece

ARCHITECTURE = "T5ForConditionalGeneration"
# Older files have a bias of the first cross attention, which the reference never adds.
IGNORABLE_TENSORS = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
KEYS = {
    "hidden_size": "d_model",
    "encoder.head_dim": "d_kv",
    "decoder.head_dim": "d_kv",
    "encoder.num_layers": "num_layers",
    "decoder.num_layers": "num_decoder_layers",
    "encoder.heads": "num_heads",
    "decoder.heads": "num_heads",
    "heads": "num_heads",
    "encoder.ffn_hidden": "d_ff",
    "decoder.ffn_hidden": "d_ff",
    "norm_eps": "layer_norm_epsilon",
    "num_buckets": "relative_attention_num_buckets",
    "furthest": "relative_attention_max_distance",
}


def read_config(raw: Mapping[str, Any]) -> EncoderDecoderConfig:
    """The config of a T5 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw, ENCODER_DECODER_VALUES)
    expect_class(read, ARCHITECTURE)
    hidden, layers, rate = read.integer("d_model"), read.integer("num_layers"), read.rate("dropout_rate", 0.1)
    activation, is_gated = _activation(read)
    tied, pad = read.flag("tie_word_embeddings", True), read.integer("pad_token_id", 0)
    is_scaled = read.flag("scale_decoder_outputs", tied)
    side = Side(layers, read.integer("num_heads"), read.integer("d_kv", 64), read.integer("d_ff"))
    if hidden < 1:
        raise ConfigError(f"config.json: d_model must be at least 1, got {hidden}")
    config = EncoderDecoderConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        encoder=side,
        decoder=replace(side, num_layers=read.integer("num_decoder_layers", layers)),
        is_pre_norm=True,
        positions=RELATIVE,
        max_positions=0,
        norm_eps=read.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        is_gated=is_gated,
        init_std=read.number("initializer_factor", 1.0) * hidden**-0.5,
        num_buckets=read.integer("relative_attention_num_buckets", 32),
        furthest=read.integer("relative_attention_max_distance", 128),
        logits_scale=hidden**-0.5 if is_scaled else 1.0,
        tied=tied,
        dropouts=PairDropouts(rate, rate, rate, rate),
        start_id=read.integer("decoder_start_token_id", pad),
        eos_ids=read.eos_ids(),
        keys=KEYS,
        hf=dict(raw),
    )
    read.take("n_positions")  # nothing is as long as these: positions are relative
    read.finish(0)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))


def _activation(read: HfConfigReader) -> tuple[str, bool]:
    """What feed_forward_proj names: a function, and whether it is a gate. "gated-gelu" means the tanh GELU."""
    word = read.expect("feed_forward_proj", (*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS)), "relu")
    name = word.removeprefix("gated-")
    function = "gelu_new" if word == "gated-gelu" else name
    read.refuse_unless("dense_act_fn", read.take("dense_act_fn"), function)  # follow from feed_forward_proj
    read.refuse_unless("is_gated_act", read.take("is_gated_act"), name != word)
    return ACTIVATIONS[function], name != word


def hf_pieces(config: EncoderDecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a T5 directory."""
    pieces = {("encoder.embedding.weight", "vocab"): HfPiece("shared.weight")}
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    for ours, theirs in (("encoder.", "encoder"), ("", "decoder")):
        table = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        pieces[f"{ours}blocks.0.attention.heads.bias", "heads"] = HfPiece(table)
        pieces[f"{ours}final_norm.weight", ""] = HfPiece(f"{theirs}.final_layer_norm.weight")
    for i in range(config.encoder.num_layers):
        pieces |= _block_pieces(config, f"encoder.blocks.{i}", f"encoder.block.{i}.layer", has_cross=False)
    for i in range(config.decoder.num_layers):
        pieces |= _block_pieces(config, f"blocks.{i}", f"decoder.block.{i}.layer", has_cross=True)
    return pieces


def _block_pieces(
    config: EncoderDecoderConfig, ours: str, theirs: str, *, has_cross: bool
) -> dict[tuple[str, str], HfPiece]:
    """Those of one block, whose sublayers the file numbers."""
    last = 2 if has_cross else 1
    names = {(f"{ours}.attention.qkv", part): f"{theirs}.0.SelfAttention.{part}" for part in "qkv"}
    names[f"{ours}.attention.out", "out"] = f"{theirs}.0.SelfAttention.o"
    if has_cross:
        names[f"{ours}.cross.q", "q"] = f"{theirs}.1.EncDecAttention.q"
        names |= {(f"{ours}.cross.kv", part): f"{theirs}.1.EncDecAttention.{part}" for part in "kv"}
        names[f"{ours}.cross.out", "out"] = f"{theirs}.1.EncDecAttention.o"
    dense = f"{theirs}.{last}.DenseReluDense"
    inner = {"gate": "wi_0", "up": "wi_1"} if config.is_gated else {"up": "wi"}
    names |= {(f"{ours}.mlp.{'_'.join(inner)}", part): f"{dense}.{name}" for part, name in inner.items()}
    names[f"{ours}.mlp.down", "down"] = f"{dense}.wo"
    names |= {(f"{ours}.norm{i + 1}", ""): f"{theirs}.{i}.layer_norm" for i in range(last + 1)}
    return {(f"{name}.weight", part): HfPiece(f"{tensor}.weight") for (name, part), tensor in names.items()}


def copies(config: EncoderDecoderConfig) -> dict[str, str]:
    """Tensors that the files may hold beside the one table, and what they are copies of."""
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(["lm_head.weight"] if config.tied else [])]
    return dict.fromkeys(names, "shared.weight")
