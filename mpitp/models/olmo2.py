"""OLMo-2 (OLMo et al. 2024): a Llama with norms behind its branches, and norms of q and k over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.branch_norm_block import BranchNormBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of
from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import linear_pieces, llama_facts, outer_pieces
from mpitp.models.names import HfPiece

_DEFAULTS = Defaults(max_positions=2048, norm_eps=1e-5, tied=False)
_EOS = 50279  # of transformers' class


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of an OLMo-2 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    read.without_default_ids(_EOS)
    facts = with_traits(llama_facts(read, _DEFAULTS), joint_norms=True)
    bias = read.flag("attention_bias", False)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias))


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> BranchNormBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=True)
    norms = [build.rms_norm(config.hidden_size, config.norm_eps) for _ in range(2)]
    return BranchNormBlock(attention, norms[0], mlp, norms[1])


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in an OLMo-2 directory."""
    pieces = outer_pieces(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces[f"{ours}.norm1.weight", ""] = HfPiece(f"{theirs}.post_attention_layernorm.weight")
        pieces[f"{ours}.norm2.weight", ""] = HfPiece(f"{theirs}.post_feedforward_layernorm.weight")
        for part in ("q", "k"):
            pieces[f"{ours}.attention.norms.{part}_weight", part] = HfPiece(f"{theirs}.self_attn.{part}_norm.weight")
        pieces |= linear_pieces(config, ours, theirs)
    return pieces
