"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018): the Transformer of 2017, norms behind branches.

BART has learned positions and a norm behind the embedding, Marian sines and embeddings times sqrt(hidden_size). The
head is the embedding's own table; behind it stands a bias that isn't trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import HfConfigReader
from mpitp.models.encoder_decoder_config import (
    ENCODER_DECODER_VALUES,
    LEARNED,
    SINES,
    EncoderDecoderConfig,
    PairDropouts,
    Side,
    expect_class,
)
from mpitp.models.facts import read_activation
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces

ARCHITECTURE, MARIAN_ARCHITECTURE = "BartForConditionalGeneration", "MarianMTModel"
IGNORABLE_TENSORS = ("model.encoder.version", "model.decoder.version")
MARIAN_IGNORABLE_TENSORS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
OFFSET = 2  # rows of BART's position tables before the first position's
# Keys of older files that the reference no longer looks at, and the values that what it does stands for.
_OLDER = {
    "bart": {
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
    },
    "marian": {
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "share_encoder_decoder_embeddings": (True,),
        "static_position_embeddings": (True,),
    },
}
KEYS = {
    "hidden_size": "d_model",
    "max_positions": "max_position_embeddings",
    "heads": "encoder_attention_heads",
    **{f"{side}.num_layers": f"{side}_layers" for side in ("encoder", "decoder")},
    **{f"{side}.heads": f"{side}_attention_heads" for side in ("encoder", "decoder")},
    **{f"{side}.head_dim": "d_model" for side in ("encoder", "decoder")},
    **{f"{side}.ffn_hidden": f"{side}_ffn_dim" for side in ("encoder", "decoder")},
}


def read_config(raw: Mapping[str, Any]) -> EncoderDecoderConfig:
    """The config of a BART directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = _reader(raw, ARCHITECTURE)
    facts = _facts(read, start=2, pad=1)
    return _finished(
        read, EncoderDecoderConfig(**facts, positions=LEARNED, position_offset=OFFSET, embedding_norm=True)
    )


def read_marian_config(raw: Mapping[str, Any]) -> EncoderDecoderConfig:
    """The config of a Marian directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = _reader(raw, MARIAN_ARCHITECTURE)
    facts = _facts(read, start=None, pad=None)
    read.expect("decoder_vocab_size", (facts["vocab_size"],), facts["vocab_size"])
    if facts["hidden_size"] % 2:
        raise ConfigError(f"config.json: d_model={facts['hidden_size']} must be even: sines and cosines have half each")
    return _finished(read, EncoderDecoderConfig(**facts, positions=SINES))


def _reader(raw: Mapping[str, Any], architecture: str) -> HfConfigReader:
    read = HfConfigReader(raw, ENCODER_DECODER_VALUES | _OLDER[str(raw.get("model_type"))])
    expect_class(read, architecture)
    return read


def _facts(read: HfConfigReader, start: int | None, pad: int | None) -> dict[str, Any]:
    """What both say. `start`, `pad`: where the file names no id that targets begin with, or that fills gaps."""
    hidden, rate = read.integer("d_model"), read.rate("dropout", 0.1)
    read.expect("tie_word_embeddings", (True,), True)
    is_scaled = read.flag("scale_embedding", False)
    if hidden < 1:
        raise ConfigError(f"config.json: d_model must be at least 1, got {hidden}")
    attention, inner = read.rate("attention_dropout", 0.0), read.rate("activation_dropout", 0.0)
    return {
        "model_type": read.model_type,
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden,
        "encoder": _side(read, "encoder", hidden),
        "decoder": _side(read, "decoder", hidden),
        "is_pre_norm": False,
        "max_positions": read.integer("max_position_embeddings", 1024),
        "norm_eps": 1e-5,
        "activation": read_activation(read, "activation_function", "gelu"),
        "init_std": read.number("init_std", 0.02),
        "embedding_scale": hidden**0.5 if is_scaled else 1.0,
        "logits_bias": True,
        "dropouts": PairDropouts(rate, attention, rate, inner),
        "start_id": read.integer("decoder_start_token_id", *(() if start is None else (start,))),
        "eos_ids": read.eos_ids(),
        "bos_id": read.bos_id(),
        "held_id": read.integer("pad_token_id", *(() if pad is None else (pad,))),
        "keys": KEYS,
        "hf": dict(read.raw_as_given),
    }


def _side(read: HfConfigReader, side: str, hidden: int) -> Side:
    heads = read.integer(f"{side}_attention_heads")
    if heads < 1 or hidden % heads:
        raise ConfigError(f"config.json: d_model={hidden} must be a multiple of {side}_attention_heads={heads}")
    return Side(read.integer(f"{side}_layers"), heads, hidden // heads, read.integer(f"{side}_ffn_dim"))


def _finished(read: HfConfigReader, config: EncoderDecoderConfig) -> EncoderDecoderConfig:
    read.take("num_hidden_layers")  # an older file's word for encoder_layers, which is there too
    read.finish(config.max_positions)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))


def hf_pieces(config: EncoderDecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a BART or Marian directory."""
    pieces = {
        ("encoder.embedding.weight", "vocab"): HfPiece("model.shared.weight"),
        ("logits bias.bias", "vocab"): HfPiece("final_logits_bias"),
    }
    for ours, side in (("encoder.", "encoder"), ("", "decoder")):
        theirs = f"model.{side}"
        if config.positions == LEARNED:
            pieces[f"{ours}positions.weight", ""] = HfPiece(f"{theirs}.embed_positions.weight")
        if config.embedding_norm:
            pieces |= norm_pieces(f"{ours}embedding_norm", f"{theirs}.layernorm_embedding")
        for i in range(getattr(config, side).num_layers):
            pieces |= _block(f"{ours}blocks.{i}", f"{theirs}.layers.{i}", has_cross=side == "decoder")
    return pieces


def _block(ours: str, theirs: str, *, has_cross: bool) -> dict[tuple[str, str], HfPiece]:
    names = {(f"{ours}.attention.qkv", part): f"{theirs}.self_attn.{part}_proj" for part in "qkv"}
    names[f"{ours}.attention.out", "out"] = f"{theirs}.self_attn.out_proj"
    if has_cross:
        names[f"{ours}.cross.q", "q"] = f"{theirs}.encoder_attn.q_proj"
        names |= {(f"{ours}.cross.kv", part): f"{theirs}.encoder_attn.{part}_proj" for part in "kv"}
        names[f"{ours}.cross.out", "out"] = f"{theirs}.encoder_attn.out_proj"
    names |= {(f"{ours}.mlp.up", "up"): f"{theirs}.fc1", (f"{ours}.mlp.down", "down"): f"{theirs}.fc2"}
    pieces: dict[tuple[str, str], HfPiece] = {}
    for (name, part), tensor in names.items():
        pieces |= dense_pieces(name, part, tensor)
    norms = ["self_attn_layer_norm", *(["encoder_attn_layer_norm"] if has_cross else []), "final_layer_norm"]
    for number, name in enumerate(norms, 1):
        pieces |= norm_pieces(f"{ours}.norm{number}", f"{theirs}.{name}")
    return pieces


def copies(config: EncoderDecoderConfig) -> dict[str, str]:
    """Tensors that the files may hold beside the one table."""
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return dict.fromkeys(names, "model.shared.weight")
