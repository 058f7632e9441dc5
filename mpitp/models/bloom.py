"""BLOOM (Le Scao et al. 2022): scores that fall with the distance (ALiBi) in place of positions, a norm behind the
embedding, q, k and v of a head beside one another in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import finished
from mpitp.models.gpt_neox import block_pieces
from mpitp.models.names import HfPiece, norm_pieces
from mpitp.models.traits import Traits

_POSITIONS = 2048  # in training; ALiBi has no table that ends


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a BLOOM directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    hidden, heads = read.integer("hidden_size"), read.integer("n_head")
    if hidden < 1 or heads < 1 or hidden % heads:
        raise ConfigError(f"config.json: hidden_size={hidden} must be a positive multiple of n_head={heads}")
    read.expect("apply_residual_connection_post_layernorm", (False,), False)
    read.flag("slow_but_exact", False)
    config = DecoderConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=read.integer("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=4 * hidden,
        max_positions=max(_POSITIONS, read.integer("seq_length", _POSITIONS)),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        tied=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        dropouts=Dropouts(0.0, read.rate("attention_dropout", 0.0), read.rate("hidden_dropout", 0.0)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        traits=Traits(activation="gelu_tanh", alibi=True, embedding_norm=True),
        eos_ids=read.eos_ids(),
        bos_id=read.bos_id(),
        hf=dict(raw),
    )
    return finished(read, config)


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=False)
    return pre_norm_block(config, build, attention, mlp, Builder.layer_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a BLOOM directory."""
    pieces = {("embedding.weight", "vocab"): HfPiece("transformer.word_embeddings.weight")}
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    pieces |= norm_pieces("embedding_norm", "transformer.word_embeddings_layernorm")
    pieces |= norm_pieces("final_norm", "transformer.ln_f")
    for i in range(config.num_layers):
        pieces |= block_pieces(config, f"blocks.{i}", f"transformer.h.{i}", "self_attention")
    return pieces
