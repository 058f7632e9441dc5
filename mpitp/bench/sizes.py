"""The sizes of a model as options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from mpitp.errors import UsageError

DTYPES = ("float32", "float64")


def add_size_arguments(
    parser: argparse.ArgumentParser, defaults: dict[str, Any], chosen: Collection[str] | None = None
) -> None:
    """--layers, --hidden, ... with these defaults. `chosen`: these sizes alone; None: all."""
    options = (
        ("layers", "transformer blocks"),
        ("hidden", "model width"),
        ("heads", "query heads"),
        ("kv-heads", "key/value heads (default: as many as query heads)"),
        ("head-dim", "width of a head (default: hidden / heads)"),
        ("ffn", "inner width of the MLP (default: 4 x hidden, 8/3 x hidden for llama)"),
        ("vocab", "vocabulary"),
    )
    for name, text in (each for each in options if chosen is None or each[0] in chosen):
        default = defaults.get(name)
        told = f"{text}; default {default}" if default else text
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=told)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")


def config_of(args: argparse.Namespace, model_type: str, max_positions: int) -> Any:
    """The `DecoderConfig` of the options. Raises UsageError or ConfigError for sizes that make no model."""
    from mpitp.models.config import DecoderConfig

    is_gpt2 = model_type == "gpt2"
    kv_heads, head_dim = args.kv_heads or args.heads, args.head_dim or args.hidden // max(args.heads, 1)
    if is_gpt2 and (kv_heads != args.heads or head_dim * args.heads != args.hidden):
        raise UsageError("a gpt2 model has as many KV heads as heads, and head_dim = hidden / heads; use --model llama")
    return DecoderConfig(
        model_type=model_type,
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_layers=args.layers,
        heads=args.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=args.ffn or (4 * args.hidden if is_gpt2 else 8 * args.hidden // 3),
        max_positions=max_positions,
        norm_eps=1e-5,
        tied=True,
        init_std=0.02,
        qkv_bias=is_gpt2,
        out_bias=is_gpt2,
        mlp_bias=is_gpt2,
        rope_theta=0.0 if is_gpt2 else 10000.0,
    )


def describe(config: Any, num_params: int) -> str:
    """One line."""
    return (
        f"{config.model_type}: {config.num_layers} layers x {config.hidden_size} wide, {config.heads} heads "
        f"({config.kv_heads} KV) of {config.head_dim}, FFN {config.ffn_hidden}, vocabulary {config.vocab_size}; "
        f"{num_params / 1e6:.1f} M parameters"
    )


def positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError for an option that must be at least 1 and isn't."""
    for name in names:
        value = getattr(args, name.replace("-", "_"), None)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
