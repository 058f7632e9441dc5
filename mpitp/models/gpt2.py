"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases everywhere, a head tied to the embedding.

Hugging Face stores the linears of GPT-2 as (in, out) ("Conv1D"): they are turned at the checkpoint's boundary, and the
fused c_attn is cut into its parts q, k and v there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.mlp import GeluMLP
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.names import HfPiece

# Buffers of older checkpoints that hold no weights.
IGNORABLE_TENSORS = ("*h.*.attn.bias", "*h.*.attn.masked_bias")


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a GPT-2 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    hidden, heads = read.integer("n_embd", 768), read.integer("n_head", 12)
    if hidden < 1 or heads < 1 or hidden % heads:
        raise ConfigError(f"config.json: n_embd={hidden} must be a positive multiple of n_head={heads}")
    read.expect("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    read.expect("scale_attn_weights", (True,), True)
    read.expect("scale_attn_by_inverse_layer_idx", (False,), False)
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
        hf=dict(raw),
    )
    read.finish()
    return config


def build_block(config: DecoderConfig, build: Builder, index: int) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    hidden, drop, name = config.hidden_size, config.dropouts, f"blocks.{index}"
    residual_std = config.init_std / (2 * config.num_layers) ** 0.5  # GPT-2: by the number of residual branches
    ffn = build.layout.share(config.ffn_hidden)
    attention = build.attention(
        build.layout.heads(config.heads, config.kv_heads),
        config.head_dim,
        hidden,
        AttentionDropout(drop.attention, f"{name}.attention"),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        out_std=residual_std,
    )
    mlp = GeluMLP(
        build.column(("up",), hidden, ffn, bias=config.mlp_bias),
        build.row("down", ffn, hidden, bias=config.mlp_bias, std=residual_std),
    )
    dropouts = (Dropout(drop.residual, f"{name}.residual1"), Dropout(drop.residual, f"{name}.residual2"))
    norms = (build.layer_norm(hidden, config.norm_eps), build.layer_norm(hidden, config.norm_eps))
    return TransformerBlock(norms[0], attention, norms[1], mlp, dropouts)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a GPT-2 directory."""
    h = config.hidden_size
    pieces: dict[tuple[str, str], HfPiece] = {
        ("embedding.weight", "vocab"): HfPiece("transformer.wte.weight"),
        ("positions.weight", ""): HfPiece("transformer.wpe.weight"),
        ("final_norm.weight", ""): HfPiece("transformer.ln_f.weight"),
        ("final_norm.bias", ""): HfPiece("transformer.ln_f.bias"),
    }
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for norm, hf_norm in (("norm1", "ln_1"), ("norm2", "ln_2")):
            for kind in ("weight", "bias"):
                pieces[f"{ours}.{norm}.{kind}", ""] = HfPiece(f"{theirs}.{hf_norm}.{kind}")
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
