"""Gemma 2 (Riviere et al. 2024) and the text part of Gemma 3 (Kamath et al. 2025): a Gemma with norms before and behind
each branch, a scale of scores of its own, and blocks that see a window between those that see all.

Gemma 2 holds scores and logits below caps; Gemma 3 normalises q and k, and turns them by another theta in the blocks
with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.layers.sandwich_block import SandwichBlock
from mpitp.models.blocks import attention_of, mlp_of
from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, read_activation, with_traits
from mpitp.models.gemma import gemma_facts
from mpitp.models.llama import head_norm_pieces, linear_pieces, outer_pieces
from mpitp.models.names import HfPiece
from mpitp.models.rope_keys import check_positive, with_layered_rope, with_rope
from mpitp.models.windows import FULL, SLIDING, read_layer_types, read_window, windows_of

_GEMMA2 = Defaults(max_positions=8192, norm_eps=1e-6, tied=True, kv_heads=4, head_dim=256)
_GEMMA3 = Defaults(max_positions=131072, norm_eps=1e-6, tied=True, kv_heads=4, head_dim=256)
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # of Gemma 3


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Gemma 2 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = _facts(read, _GEMMA2, every=2)
    facts = with_traits(facts, score_cap=_cap(read, "attn_logit_softcapping", 50.0))
    facts = with_rope(with_traits(facts, logit_cap=_cap(read, "final_logit_softcapping", 30.0)), read)
    bias = read.flag("attention_bias", False)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias))


def read_gemma3_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Gemma 3 directory of text (gemma3_text). Raises ConfigError as above."""
    read = HfConfigReader(raw)
    facts = _facts(read, _GEMMA3, every=read.integer("sliding_window_pattern", 6))
    read.take("attn_logit_softcapping")  # transformers doesn't use it in Gemma 3
    facts = with_traits(facts, head_norms=True, logit_cap=_cap(read, "final_logit_softcapping", 0.0))
    facts = with_layered_rope(facts, read, _GLOBAL_THETA, _LOCAL_THETA)
    bias = read.flag("attention_bias", False)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias))


def _facts(read: HfConfigReader, defaults: Defaults, every: int) -> dict[str, Any]:
    """What both say. `every`: every so many blocks one sees all, where the file names no kinds."""
    facts = gemma_facts(read, defaults)
    num_layers = facts["num_layers"]
    if every < 1:
        check_positive("sliding_window_pattern", every)
    by_default = [FULL if (block + 1) % every == 0 else SLIDING for block in range(num_layers)]
    kinds = read_layer_types(read, num_layers, by_default)
    scalar = read.number("query_pre_attn_scalar", 256)
    check_positive("query_pre_attn_scalar", scalar)
    return with_traits(
        facts,
        activation=read_activation(read, "hidden_activation", "gelu_pytorch_tanh"),
        windows=windows_of(kinds, read_window(read, 4096), num_layers, facts["max_positions"]),
        local_blocks=tuple(block for block in range(num_layers) if kinds[block] == SLIDING),
        score_scales=(scalar**-0.5,) * num_layers,
    )


def _cap(read: HfConfigReader, key: str, default: float) -> float:
    """A cap; 0 for none. A file that is silent has the default, null means none."""
    if key in read.raw and read.take(key) is None:
        return 0.0
    cap = read.number(key, default)
    if cap or key in read.raw:
        check_positive(key, cap)
    return cap


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> SandwichBlock:
    """Block `index`, its parameters still zero."""
    traits = config.traits
    if traits.local_theta and index in traits.local_blocks:
        rotary = Rotary(config.head_dim, traits.local_theta, traits.local_scaling)
    attention = attention_of(config, build, index, rotary, norm_offset=1.0)
    norms = [build.offset_rms_norm(config.hidden_size, config.norm_eps) for _ in range(4)]
    return SandwichBlock((norms[0], norms[1], norms[2], norms[3]), attention, mlp_of(config, build, gated=True))


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Gemma 2 or 3 directory."""
    pieces = outer_pieces(config)
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for norm, hf_norm in (
            ("norm1", "input_layernorm"),
            ("post_norm1", "post_attention_layernorm"),
            ("norm2", "pre_feedforward_layernorm"),
            ("post_norm2", "post_feedforward_layernorm"),
        ):
            pieces[f"{ours}.{norm}.weight", ""] = HfPiece(f"{theirs}.{hf_norm}.weight")
        pieces |= linear_pieces(config, ours, theirs)
        pieces |= head_norm_pieces(ours, theirs) if config.traits.head_norms else {}
    return pieces
