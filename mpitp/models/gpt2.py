"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU (or another activation), biases everywhere, a head
tied to the embedding.

Hugging Face stores the linears of GPT-2 as (in, out) ("Conv1D"): they are turned at the checkpoint's boundary, and the
fused c_attn is cut into its parts q, k and v there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import finished, read_activation
from mpitp.models.names import HfPiece, norm_pieces
from mpitp.models.traits import Traits

# Buffers of older checkpoints that hold no weights.
IGNORABLE_TENSORS = ("*h.*.attn.bias", "*h.*.attn.masked_bias")

_DEFAULT_ID = 50256  # of bos and eos in transformers' class


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a GPT-2 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    read.without_default_ids(_DEFAULT_ID)
    hidden, heads = read.integer("n_embd", 768), read.integer("n_head", 12)
    if hidden < 1 or heads < 1 or hidden % heads:
        raise ConfigError(f"config.json: n_embd={hidden} must be a positive multiple of n_head={heads}")
    traits = Traits(activation=read_activation(read, "activation_function", "gelu_new"))
    config = DecoderConfig(
        model_type="gpt2",
        vocab_size=read.integer("vocab_size", 50257),
        hidden_size=hidden,
        num_layers=read.integer("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden=read.integer("n_inner", 4 * hidden),
        max_positions=read.integer("n_positions", 1024),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        tied=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        dropouts=Dropouts(read.rate("embd_pdrop", 0.1), read.rate("attn_pdrop", 0.1), read.rate("resid_pdrop", 0.1)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        eos_ids=read.eos_ids(),
        bos_id=read.bos_id(),
        traits=traits,
        hf=dict(raw),
    )
    scales = _score_scales(read, config.num_layers, config.head_dim)
    return finished(read, replace(config, traits=replace(traits, score_scales=scales)))


def _score_scales(read: HfConfigReader, num_layers: int, head_dim: int) -> tuple[float, ...]:
    """What each block's scores are multiplied by; (): the usual 1 / sqrt(head_dim)."""
    is_scaled = read.flag("scale_attn_weights", True)
    by_depth = read.flag("scale_attn_by_inverse_layer_idx", False)
    if is_scaled and not by_depth:
        return ()
    scale = head_dim**-0.5 if is_scaled else 1.0
    return tuple(scale / (block + 1 if by_depth else 1) for block in range(num_layers))


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    residual_std = config.init_std / (2 * config.num_layers) ** 0.5  # GPT-2: by the number of residual branches
    attention = attention_of(config, build, index, rotary, out_std=residual_std)
    mlp = mlp_of(config, build, gated=False, out_std=residual_std)
    return pre_norm_block(config, build, attention, mlp, Builder.layer_norm, index)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a GPT-2 directory."""
    h = config.hidden_size
    pieces: dict[tuple[str, str], HfPiece] = {
        ("embedding.weight", "vocab"): HfPiece("transformer.wte.weight"),
        ("positions.weight", ""): HfPiece("transformer.wpe.weight"),
        **norm_pieces("final_norm", "transformer.ln_f"),
    }
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        pieces |= norm_pieces(f"{ours}.norm1", f"{theirs}.ln_1") | norm_pieces(f"{ours}.norm2", f"{theirs}.ln_2")
        for j, part in enumerate(("q", "k", "v")):
            for kind in ("weight", "bias"):
                name = f"{theirs}.attn.c_attn.{kind}"
                pieces[f"{ours}.attention.qkv.{kind}", part] = HfPiece(name, j * h, 3 * h, kind == "weight")
        for ours_linear, part, hf_linear in (
            ("attention.out", "out", "attn.c_proj"),
            ("mlp.up", "up", "mlp.c_fc"),
            ("mlp.down", "down", "mlp.c_proj"),
        ):
            pieces[f"{ours}.{ours_linear}.weight", part] = HfPiece(f"{theirs}.{hf_linear}.weight", transposed=True)
            bias_part = "up" if part == "up" else ""
            pieces[f"{ours}.{ours_linear}.bias", bias_part] = HfPiece(f"{theirs}.{hf_linear}.bias")
    return pieces
