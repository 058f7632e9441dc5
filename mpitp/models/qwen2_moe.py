"""Qwen2-MoE (Yang et al. 2024): a Qwen2 with narrow experts in some or all blocks, and one that all tokens go through.

Which blocks: every `decoder_sparse_step`-th, but those in `mlp_only_layers`; the others have a plain MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import attention_pieces, llama_facts, mlp_pieces, outer_pieces, rms_norm_pieces
from mpitp.models.mixture import Mixture, check_choice, expert_pieces, read_losses
from mpitp.models.names import HfPiece
from mpitp.models.windows import FULL, SLIDING, read_layer_types, read_window, windows_of

_DEFAULTS = Defaults(max_positions=32768, norm_eps=1e-6, tied=False, kv_heads=16)
_WORDS = ("gate_proj", "up_proj", "down_proj")


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Qwen2-MoE directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _DEFAULTS)
    mixture = Mixture(
        *check_choice(read, ("num_experts", "num_experts_per_tok")),
        _width(read, "moe_intermediate_size"),
        _sparse_blocks(read, facts["num_layers"]),
        shared=_width(read, "shared_expert_intermediate_size"),
        normed=read.flag("norm_topk_prob", False),
        **read_losses(read, 0.001),
    )
    facts = with_traits(facts, windows=_windows(read, facts), mixture=mixture)
    return finished(read, DecoderConfig(**facts, qkv_bias=read.flag("qkv_bias", True)))


def _width(read: HfConfigReader, key: str) -> int:
    width = read.integer(key)
    if width < 1:
        raise ConfigError(f"config.json: {key} must be at least 1, got {width}")
    return width


def _sparse_blocks(read: HfConfigReader, num_layers: int) -> tuple[int, ...]:
    """The blocks with experts."""
    step, plain = read.integer("decoder_sparse_step", 1), read.take("mlp_only_layers") or []
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step must be at least 1, got {step}")
    if not isinstance(plain, list) or any(type(block) is not int for block in plain):
        raise ConfigError(f"config.json: mlp_only_layers must be a list of whole numbers, got {plain!r:.60}")
    return tuple(i for i in range(num_layers) if i not in plain and (i + 1) % step == 0)


def _windows(read: HfConfigReader, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Where windows are used, every second of the first `max_window_layers` blocks has one."""
    num_layers = facts["num_layers"]
    used = read.flag("use_sliding_window", False)
    window = read_window(read, 4096) if used else None  # transformers writes 0 where it isn't used
    first = read.integer("max_window_layers", 28)
    by_default = [SLIDING if used and i < first and i % 2 == 0 else FULL for i in range(num_layers)]
    kinds = read_layer_types(read, num_layers, by_default)
    return windows_of(kinds, window, num_layers, facts["max_positions"])


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    mixture, attention = config.traits.mixture, attention_of(config, build, index, rotary)
    assert mixture is not None, "a Qwen2-MoE without experts"
    if index in mixture.blocks:
        mlp: Any = mixture.build(build, config.hidden_size, config.traits.activation, index)
    else:
        mlp = mlp_of(config, build, gated=True)
    return pre_norm_block(config, build, attention, mlp, Builder.rms_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Qwen2-MoE directory."""
    mixture, pieces = config.traits.mixture, outer_pieces(config)
    assert mixture is not None, "a Qwen2-MoE without experts"
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces |= rms_norm_pieces(ours, theirs) | attention_pieces(config, ours, theirs)
        if i not in mixture.blocks:
            pieces |= mlp_pieces(config, f"{ours}.mlp", f"{theirs}.mlp")
            continue
        pieces[f"{ours}.mlp.router.weight", ""] = HfPiece(f"{theirs}.mlp.gate.weight")
        pieces |= expert_pieces(ours, f"{theirs}.mlp", mixture.num_experts, _WORDS)
        pieces[f"{ours}.mlp.shared.gate", ""] = HfPiece(f"{theirs}.mlp.shared_expert_gate.weight")
        pieces |= mlp_pieces(config, f"{ours}.mlp.shared.mlp", f"{theirs}.mlp.shared_expert")
    return pieces
