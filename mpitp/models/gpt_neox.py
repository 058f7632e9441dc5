"""GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP side by side behind a LayerNorm each, RoPE on a part of
each head, q, k and v of a head beside one another in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.parallel_block import ParallelBlock
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, dropouts_of, mlp_of, parallel_block, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, read_activation, read_sizes, with_traits
from mpitp.models.names import HfPiece, dense_pieces, norm_pieces
from mpitp.models.rope_keys import RopeKeys, with_rope

# Buffers of older checkpoints that hold no weights.
IGNORABLE_TENSORS = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")

_DEFAULTS = Defaults(max_positions=2048, norm_eps=1e-5, tied=False, has_kv_heads=False, has_head_dim=False)
_ROPE = RopeKeys(theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct")


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a GPT-NeoX directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    hidden = read.rate("hidden_dropout", 0.0)
    facts = read_sizes(read, _DEFAULTS)
    facts |= {"dropouts": Dropouts(hidden, read.rate("attention_dropout", 0.0), hidden)}
    activation = read_activation(read, "hidden_act", "gelu")
    facts = with_traits(facts, activation=activation, parallel=read.flag("use_parallel_residual", True))
    bias = read.flag("attention_bias", True)
    config = DecoderConfig(**with_rope(facts, read, _ROPE), qkv_bias=bias, out_bias=bias, mlp_bias=True)
    return finished(read, config)


def build_block(
    config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None
) -> TransformerBlock | ParallelBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=False)
    if config.traits.parallel:
        return parallel_block(config, build, (attention, mlp), dropouts_of(config, index), one_norm=False)
    return pre_norm_block(config, build, attention, mlp, Builder.layer_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a GPT-NeoX directory."""
    pieces = {
        ("embedding.weight", "vocab"): HfPiece("gpt_neox.embed_in.weight"),
        **norm_pieces("final_norm", "gpt_neox.final_layer_norm"),
    }
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("embed_out.weight")
    for i in range(config.num_layers):
        pieces |= block_pieces(config, f"blocks.{i}", f"gpt_neox.layers.{i}", "attention")
    return pieces


def block_pieces(config: DecoderConfig, ours: str, theirs: str, attention: str) -> dict[tuple[str, str], HfPiece]:
    """Those of a block, in which q, k and v are one tensor: of the first head, then of the second."""
    pieces = norm_pieces(f"{ours}.norm1", f"{theirs}.input_layernorm")
    pieces |= norm_pieces(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
    d, size = config.head_dim, 3 * config.heads * config.head_dim
    for kind in ("weight", "bias"):
        fused = f"{theirs}.{attention}.query_key_value.{kind}"
        for i, part in enumerate("qkv"):
            pieces[f"{ours}.attention.qkv.{kind}", part] = HfPiece(fused, i * d, size, unit=d, stride=3 * d)
    pieces |= dense_pieces(f"{ours}.attention.out", "out", f"{theirs}.{attention}.dense")
    pieces |= dense_pieces(f"{ours}.mlp.up", "up", f"{theirs}.mlp.dense_h_to_4h")
    return pieces | dense_pieces(f"{ours}.mlp.down", "down", f"{theirs}.mlp.dense_4h_to_h")
