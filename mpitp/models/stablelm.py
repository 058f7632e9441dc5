"""StableLM (Bellagente et al. 2024): a Llama with LayerNorms, RoPE on a part of each head, and, where the file says so,
attention and MLP side by side behind one norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.parallel_block import ParallelBlock
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, parallel_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import linear_pieces, llama_facts, outer_pieces
from mpitp.models.names import HfPiece, norm_pieces
from mpitp.models.rope_keys import RopeKeys

_DEFAULTS = Defaults(max_positions=4096, norm_eps=1e-5, tied=False, kv_heads=32, has_head_dim=False)
_ROPE = RopeKeys(partial=0.25, partial_key="partial_rotary_factor")


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a StableLM directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = llama_facts(read, _DEFAULTS, _ROPE)
    read.expect("qk_layernorm", (False,), False)
    facts = with_traits(facts, parallel=read.flag("use_parallel_residual", False))
    dropouts = Dropouts(attention=facts["dropouts"].attention, residual=read.rate("hidden_dropout", 0.0))
    return finished(read, DecoderConfig(**facts | {"dropouts": dropouts}, qkv_bias=read.flag("use_qkv_bias", False)))


def build_block(
    config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None
) -> TransformerBlock | ParallelBlock:
    """Block `index`, its parameters still zero. The MLP's branch alone has dropout."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=True)
    residual = f"blocks.{index}.residual"
    dropouts = (Dropout(0.0, f"{residual}1"), Dropout(config.dropouts.residual, f"{residual}2"))
    if config.traits.parallel:
        return parallel_block(config, build, (attention, mlp), dropouts, one_norm=True)
    norms = [build.layer_norm(config.hidden_size, config.norm_eps) for _ in range(2)]
    return TransformerBlock(norms[0], attention, norms[1], mlp, dropouts)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a StableLM directory."""
    pieces = outer_pieces(config) | {("final_norm.bias", ""): HfPiece("model.norm.bias")}
    norms = [("norm1", "input_layernorm")] + ([] if config.traits.parallel else [("norm2", "post_attention_layernorm")])
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for norm, hf_norm in norms:
            pieces |= norm_pieces(f"{ours}.{norm}", f"{theirs}.{hf_norm}")
        pieces |= linear_pieces(config, ours, theirs)
    return pieces
