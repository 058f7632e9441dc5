"""Qwen3 (Yang et al. 2025): a Llama that normalises q and k head by head, with a head_dim of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import head_norm_pieces, llama_facts, qwen_windows
from mpitp.models.llama import hf_pieces as llama_pieces
from mpitp.models.names import HfPiece

_DEFAULTS = Defaults(max_positions=32768, norm_eps=1e-6, tied=False, kv_heads=32, head_dim=128)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Qwen3 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _DEFAULTS)
    bias = read.flag("attention_bias", False)
    facts = with_traits(facts, head_norms=True, windows=qwen_windows(read, facts))
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias))


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Qwen3 directory."""
    pieces = llama_pieces(config)
    for i in range(config.num_layers):
        pieces |= head_norm_pieces(f"blocks.{i}", f"model.layers.{i}")
    return pieces
