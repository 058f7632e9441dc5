"""The Llama family (Touvron et al. 2023): RMSNorm, RoPE, SwiGLU, grouped KV heads; Qwen2 adds biases on q, k and v.

Mistral, Qwen3, SmolLM3, Phi-3, Mixtral and Qwen2-MoE build on what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, read_activation, read_sizes, with_traits
from mpitp.models.names import HfPiece, dense_pieces
from mpitp.models.rope_keys import RopeKeys, with_rope
from mpitp.models.windows import FULL, SLIDING, read_layer_types, read_window, windows_of

# Derived buffers of older checkpoints that hold no weights.
IGNORABLE_TENSORS = ("*.rotary_emb.inv_freq",)

_LLAMA = Defaults(max_positions=2048, norm_eps=1e-6, tied=False)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Llama directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _LLAMA)
    bias = read.flag("attention_bias", False)
    mlp_bias = read.flag("mlp_bias", False)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias))


def read_qwen2_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Qwen2 directory: a Llama with biases on q, k and v."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _LLAMA)
    return finished(read, DecoderConfig(**with_traits(facts, windows=qwen_windows(read, facts)), qkv_bias=True))


def llama_facts(read: HfConfigReader, defaults: Defaults, keys: RopeKeys | None = None) -> dict[str, Any]:
    """What every config of the family says, as keyword arguments of a DecoderConfig."""
    facts = read_sizes(read, defaults) | {"dropouts": Dropouts(attention=read.rate("attention_dropout", 0.0))}
    activation = read_activation(read, "hidden_act", "silu")
    return with_rope(with_traits(facts, activation=activation), read, keys)


def qwen_windows(read: HfConfigReader, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The windows of Qwen2 and Qwen3: they count where `use_sliding_window` says so, from `max_window_layers` on."""
    num_layers = facts["num_layers"]
    used, window = read.flag("use_sliding_window", False), read_window(read, 4096)
    first = read.integer("max_window_layers", 28)
    window = window if used else None
    by_default = [SLIDING if window is not None and block >= first else FULL for block in range(num_layers)]
    kinds = read_layer_types(read, num_layers, by_default)
    return windows_of(kinds, window, num_layers, facts["max_positions"])


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=True)
    return pre_norm_block(config, build, attention, mlp, Builder.rms_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Llama directory."""
    pieces = outer_pieces(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces |= rms_norm_pieces(ours, theirs) | linear_pieces(config, ours, theirs)
    return pieces


def rms_norm_pieces(ours: str, theirs: str) -> dict[tuple[str, str], HfPiece]:
    """The two norms of a block."""
    return {
        (f"{ours}.norm1.weight", ""): HfPiece(f"{theirs}.input_layernorm.weight"),
        (f"{ours}.norm2.weight", ""): HfPiece(f"{theirs}.post_attention_layernorm.weight"),
    }


def outer_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Embedding, last norm and head."""
    pieces: dict[tuple[str, str], HfPiece] = {
        ("embedding.weight", "vocab"): HfPiece("model.embed_tokens.weight"),
        ("final_norm.weight", ""): HfPiece("model.norm.weight"),
    }
    return pieces if config.tied else pieces | {("head.weight", "vocab"): HfPiece("lm_head.weight")}


def linear_pieces(config: DecoderConfig, ours: str, theirs: str) -> dict[tuple[str, str], HfPiece]:
    """The linears of a block, each part in a tensor of its own."""
    return attention_pieces(config, ours, theirs) | mlp_pieces(config, f"{ours}.mlp", f"{theirs}.mlp")


def attention_pieces(config: DecoderConfig, ours: str, theirs: str) -> dict[tuple[str, str], HfPiece]:
    """Those of its attention."""
    return _pieces(
        ours,
        theirs,
        ("attention.qkv", "q", "self_attn.q_proj", config.qkv_bias),
        ("attention.qkv", "k", "self_attn.k_proj", config.qkv_bias),
        ("attention.qkv", "v", "self_attn.v_proj", config.qkv_bias),
        ("attention.out", "out", "self_attn.o_proj", config.out_bias),
    )


def mlp_pieces(config: DecoderConfig, ours: str, theirs: str) -> dict[tuple[str, str], HfPiece]:
    """Those of an MLP."""
    return _pieces(
        ours,
        theirs,
        ("gate_up", "gate", "gate_proj", config.mlp_bias),
        ("gate_up", "up", "up_proj", config.mlp_bias),
        ("down", "down", "down_proj", config.mlp_bias),
    )


def _pieces(ours: str, theirs: str, *linears: tuple[str, str, str, bool]) -> dict[tuple[str, str], HfPiece]:
    """Of (our linear, its part, theirs, whether it has a bias)."""
    pieces: dict[tuple[str, str], HfPiece] = {}
    for linear, part, hf_linear, has_bias in linears:
        pieces |= dense_pieces(f"{ours}.{linear}", part, f"{theirs}.{hf_linear}", has_bias=has_bias)
    return pieces


def head_norm_pieces(ours: str, theirs: str) -> dict[tuple[str, str], HfPiece]:
    """The norms of q and k of a block."""
    return {
        (f"{ours}.attention.norms.{which}_weight", ""): HfPiece(f"{theirs}.self_attn.{which}_norm.weight")
        for which in ("q", "k")
    }
