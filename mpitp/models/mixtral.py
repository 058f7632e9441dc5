"""Mixtral (Jiang et al. 2024): a Mistral each of whose MLPs is a mixture of experts, two a token, scores normed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, pre_norm_block
from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import attention_pieces, llama_facts, outer_pieces, rms_norm_pieces
from mpitp.models.mixture import Mixture, check_choice, expert_pieces, read_losses
from mpitp.models.names import HfPiece
from mpitp.models.rope_keys import RopeKeys
from mpitp.models.windows import SLIDING, read_window, windows_of

_DEFAULTS = Defaults(max_positions=131072, norm_eps=1e-5, tied=False, kv_heads=8)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Mixtral directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _DEFAULTS, RopeKeys(theta=1e6))
    num_layers, window = facts["num_layers"], read_window(read, None)
    kinds = [SLIDING] * num_layers if window is not None else []
    windows = windows_of(kinds, window, num_layers, facts["max_positions"])
    num_experts, top_k = check_choice(read, ("num_local_experts", "num_experts_per_tok"))
    read.expect("router_jitter_noise", (0, 0.0), 0.0)
    blocks = tuple(range(num_layers))
    mixture = Mixture(num_experts, top_k, facts["ffn_hidden"], blocks, **read_losses(read, 0.001))
    return finished(read, DecoderConfig(**with_traits(facts, windows=windows, mixture=mixture)))


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    mixture = config.traits.mixture
    assert mixture is not None, "a Mixtral without experts"
    experts = mixture.build(build, config.hidden_size, config.traits.activation, index)
    return pre_norm_block(config, build, attention_of(config, build, index, rotary), experts, Builder.rms_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Mixtral directory."""
    mixture, pieces = config.traits.mixture, outer_pieces(config)
    assert mixture is not None, "a Mixtral without experts"
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces |= rms_norm_pieces(ours, theirs) | attention_pieces(config, ours, theirs)
        pieces[f"{ours}.mlp.router.weight", ""] = HfPiece(f"{theirs}.block_sparse_moe.gate.weight")
        pieces |= expert_pieces(ours, f"{theirs}.block_sparse_moe", mixture.num_experts, ("w1", "w3", "w2"))
    return pieces
