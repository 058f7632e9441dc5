"""OPT (Zhang et al. 2022): a GPT-2 with ReLU whose table of positions has two rows that none uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, read_activation, read_sizes, with_traits
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces

_DEFAULTS = Defaults(max_positions=2048, norm_eps=1e-5, tied=True, has_kv_heads=False, has_head_dim=False)
_UNUSED_POSITIONS = 2


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of an OPT directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = read_sizes(read, _DEFAULTS)
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        read.expect(key, (True,), True)
    read.expect("_remove_final_layer_norm", (False,), False)
    read.expect("layerdrop", (0.0,), 0.0)
    width = read.integer("word_embed_proj_dim", facts["hidden_size"])
    if width != facts["hidden_size"]:
        raise ConfigError(
            f"config.json: word_embed_proj_dim={width} is not supported; supported: hidden_size={facts['hidden_size']}"
        )
    dropouts = Dropouts(attention=read.rate("attention_dropout", 0.0), residual=read.rate("dropout", 0.1))
    activation = read_activation(read, "activation_function", "relu")
    facts = with_traits(facts, activation=activation, position_offset=_UNUSED_POSITIONS)
    facts |= {"norm_eps": _DEFAULTS.norm_eps, "dropouts": dropouts}  # the reference's norms know no other eps
    config = DecoderConfig(**facts, qkv_bias=True, out_bias=True, mlp_bias=True)
    return finished(read, config)


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=False)
    return pre_norm_block(config, build, attention, mlp, Builder.layer_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in an OPT directory."""
    outer = "model.decoder"
    pieces = {
        ("embedding.weight", "vocab"): HfPiece(f"{outer}.embed_tokens.weight"),
        ("positions.weight", ""): HfPiece(f"{outer}.embed_positions.weight"),
        **norm_pieces("final_norm", f"{outer}.final_layer_norm"),
    }
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"{outer}.layers.{i}"
        pieces |= norm_pieces(f"{ours}.norm1", f"{theirs}.self_attn_layer_norm")
        pieces |= norm_pieces(f"{ours}.norm2", f"{theirs}.final_layer_norm")
        for part in "qkv":
            pieces |= dense_pieces(f"{ours}.attention.qkv", part, f"{theirs}.self_attn.{part}_proj")
        pieces |= dense_pieces(f"{ours}.attention.out", "out", f"{theirs}.self_attn.out_proj")
        pieces |= dense_pieces(f"{ours}.mlp.up", "up", f"{theirs}.fc1")
        pieces |= dense_pieces(f"{ours}.mlp.down", "down", f"{theirs}.fc2")
    return pieces
