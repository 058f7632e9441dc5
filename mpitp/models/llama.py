"""The Llama family (Touvron et al. 2023): RMSNorm, RoPE, SwiGLU, grouped KV heads; Qwen2 adds biases on q, k and v.

Both `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (older files) are read; a file that has
both must say the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.layers.attention import AttentionDropout
from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.mlp import SwiGluMLP
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.names import HfPiece

# Derived buffers of older checkpoints that hold no weights.
IGNORABLE_TENSORS = ("*.rotary_emb.inv_freq",)

_DEFAULT_THETA = 10000.0
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Llama directory. Raises ConfigError for what is missing, unknown or not supported."""
    return _read(raw, "llama")


def read_qwen2_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Qwen2 directory: a Llama with biases on q, k and v."""
    return _read(raw, "qwen2")


def _read(raw: Mapping[str, Any], model_type: str) -> DecoderConfig:
    read = HfConfigReader(raw)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    read.expect("hidden_act", ("silu",), "silu")
    theta, scaling = _read_rope(read)
    is_qwen = model_type == "qwen2"
    attention_bias = True if is_qwen else read.flag("attention_bias", False)
    config = DecoderConfig(
        model_type=model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=read.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=_read_head_dim(read, hidden, heads),
        ffn_hidden=read.integer("intermediate_size"),
        max_positions=read.integer("max_position_embeddings", 2048),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        tied=read.flag("tie_word_embeddings", False),
        init_std=read.number("initializer_range", 0.02),
        dropouts=Dropouts(attention=read.rate("attention_dropout", 0.0)),
        qkv_bias=attention_bias,
        out_bias=attention_bias and not is_qwen,
        mlp_bias=False if is_qwen else read.flag("mlp_bias", False),
        rope_theta=theta,
        rope_scaling=scaling,
        eos_ids=read.eos_ids(),
        bos_id=read.bos_id(),
        hf=dict(raw),
    )
    read.finish()
    return config


def _read_head_dim(read: HfConfigReader, hidden: int, heads: int) -> int:
    if read.raw.get("head_dim") is None and (heads < 1 or hidden % heads):
        raise ConfigError(
            f"config.json: without a head_dim, hidden_size={hidden} must be a multiple of num_attention_heads={heads}"
        )
    return read.integer("head_dim", hidden // max(heads, 1))


def _read_rope(read: HfConfigReader) -> tuple[float, dict[str, Any] | None]:
    """theta and the scaling (None: none), from either spelling."""
    read.number("rope_theta", _DEFAULT_THETA)
    objects = {key: read.mapping(key) for key in ("rope_parameters", "rope_scaling")}
    thetas = {"rope_theta": read.raw.get("rope_theta")}
    thetas |= {f"{key}.rope_theta": values.get("rope_theta") for key, values in objects.items() if values}
    given = {key: theta for key, theta in thetas.items() if theta is not None}
    for key, theta in given.items():
        _check_positive(key, theta)
    scalings = {key: _checked_scaling(values) for key, values in objects.items() if values is not None}
    for found in (given, scalings):
        (first, value), *others = found.items() or [("", None)]
        for key, other in others:
            if other != value:
                raise ConfigError(f"config.json: {first}={value} contradicts {key}={other}; one of them must go")
    return float(next(iter(given.values()), _DEFAULT_THETA)), next(iter(scalings.values()), None)


def _checked_scaling(scaling: dict[str, Any]) -> dict[str, Any] | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("type", kind) != kind or not isinstance(kind, str) or kind not in _SCALING_KEYS:
        raise ConfigError(
            f"config.json: RoPE scaling type {kind!r} is not supported; supported: {', '.join(_SCALING_KEYS)}"
        )
    values = {key: value for key, value in scaling.items() if key not in ("type", "rope_type", "rope_theta")}
    if set(values) != set(_SCALING_KEYS[kind]):
        raise ConfigError(
            f"config.json: RoPE scaling {kind!r} needs the keys {_SCALING_KEYS[kind]}, got {tuple(values)}"
        )
    for key, value in values.items():
        _check_positive(f"RoPE scaling {key}", value)
    return None if kind == "default" else {"rope_type": kind} | values


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"config.json: {name} must be a positive number, got {value!r}")


def build_block(config: DecoderConfig, build: Builder, index: int) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    hidden, name = config.hidden_size, f"blocks.{index}"
    ffn = build.layout.share(config.ffn_hidden)
    attention = build.attention(
        build.layout.heads(config.heads, config.kv_heads),
        config.head_dim,
        hidden,
        AttentionDropout(config.dropouts.attention, f"{name}.attention"),
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
    )
    mlp = SwiGluMLP(
        build.column(("gate", "up"), hidden, ffn, bias=config.mlp_bias),
        build.row("down", ffn, hidden, bias=config.mlp_bias),
    )
    rate = config.dropouts.residual
    dropouts = (Dropout(rate, f"{name}.residual1"), Dropout(rate, f"{name}.residual2"))
    norms = (build.rms_norm(hidden, config.norm_eps), build.rms_norm(hidden, config.norm_eps))
    return TransformerBlock(norms[0], attention, norms[1], mlp, dropouts)


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Llama directory."""
    pieces: dict[tuple[str, str], HfPiece] = {
        ("embedding.weight", "vocab"): HfPiece("model.embed_tokens.weight"),
        ("final_norm.weight", ""): HfPiece("model.norm.weight"),
    }
    if not config.tied:
        pieces["head.weight", "vocab"] = HfPiece("lm_head.weight")
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces[f"{ours}.norm1.weight", ""] = HfPiece(f"{theirs}.input_layernorm.weight")
        pieces[f"{ours}.norm2.weight", ""] = HfPiece(f"{theirs}.post_attention_layernorm.weight")
        for linear, part, hf_linear, has_bias in (
            ("attention.qkv", "q", "self_attn.q_proj", config.qkv_bias),
            ("attention.qkv", "k", "self_attn.k_proj", config.qkv_bias),
            ("attention.qkv", "v", "self_attn.v_proj", config.qkv_bias),
            ("attention.out", "out", "self_attn.o_proj", config.out_bias),
            ("mlp.gate_up", "gate", "mlp.gate_proj", config.mlp_bias),
            ("mlp.gate_up", "up", "mlp.up_proj", config.mlp_bias),
            ("mlp.down", "down", "mlp.down_proj", config.mlp_bias),
        ):
            pieces[f"{ours}.{linear}.weight", part] = HfPiece(f"{theirs}.{hf_linear}.weight")
            if has_bias:
                bias_part = "" if part in ("out", "down") else part
                pieces[f"{ours}.{linear}.bias", bias_part] = HfPiece(f"{theirs}.{hf_linear}.bias")
    return pieces
