"""Reading what every decoder's config.json says, by each type's own keys (`known_keys.FILE_KEYS`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import DecoderConfig, HfConfigReader, file_key
from mpitp.models.traits import Traits

# What files call the activations that `layers/activation.py` knows; several names of one function.
_TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(_TANH_GELUS, "gelu_tanh"),
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the reference's configuration class has where a file is silent.

    kv_heads, head_dim: None: as many as heads, hidden_size / heads. has_kv_heads, has_head_dim: whether the type reads
    such keys at all.
    """

    max_positions: int
    norm_eps: float
    tied: bool
    kv_heads: int | None = None
    head_dim: int | None = None
    has_kv_heads: bool = True
    has_head_dim: bool = True


def read_sizes(read: HfConfigReader, defaults: Defaults) -> dict[str, Any]:
    """The sizes and the like as keyword arguments of a DecoderConfig. Raises ConfigError for a size that is missing."""

    def key(fact: str) -> str:
        return file_key(read.model_type, fact)

    hidden, heads = read.integer(key("hidden_size")), read.integer(key("heads"))
    return {
        "model_type": read.model_type,
        "vocab_size": read.integer(key("vocab_size")),
        "hidden_size": hidden,
        "num_layers": read.integer(key("num_layers")),
        "heads": heads,
        "kv_heads": _kv_heads(read, key("kv_heads"), heads, defaults),
        "head_dim": _head_dim(read, hidden, heads, defaults),
        "ffn_hidden": read.integer(key("ffn_hidden")),
        "max_positions": read.integer(key("max_positions"), defaults.max_positions),
        "norm_eps": read.number(key("norm_eps"), defaults.norm_eps),
        "tied": read.flag(key("tied"), defaults.tied),
        "init_std": read.number(key("init_std"), 0.02),
        "eos_ids": read.eos_ids(),
        "bos_id": read.bos_id(),
        "hf": dict(read.raw_as_given),
    }


def with_traits(facts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The facts with more traits."""
    return {**facts, "traits": replace(facts.get("traits", Traits()), **more)}


def read_activation(read: HfConfigReader, key: str, default: str) -> str:
    """The activation, as `layers/activation.py` calls it."""
    return ACTIVATIONS[read.expect(key, tuple(ACTIVATIONS), default)]


def finished(read: HfConfigReader, config: DecoderConfig) -> DecoderConfig:
    """The config with what is to be said about the file. Raises ConfigError for keys that change the maths unread."""
    read.finish(config.max_positions)
    return replace(config, unread=read.unread, notices=tuple(read.notices()))


def _kv_heads(read: HfConfigReader, key: str, heads: int, defaults: Defaults) -> int:
    if not defaults.has_kv_heads:
        return heads
    is_silent = key not in read.raw
    return read.integer(key, defaults.kv_heads if is_silent and defaults.kv_heads is not None else heads)


def _head_dim(read: HfConfigReader, hidden: int, heads: int, defaults: Defaults) -> int:
    if defaults.head_dim is not None:
        return read.integer("head_dim", defaults.head_dim)
    given = read.raw.get("head_dim") if defaults.has_head_dim else None
    if given is None and (heads < 1 or hidden % heads):
        without = "without a head_dim, " if defaults.has_head_dim else ""
        raise ConfigError(
            f"config.json: {without}{file_key(read.model_type, 'hidden_size')}={hidden} must be a multiple of "
            f"{file_key(read.model_type, 'heads')}={heads}"
        )
    return read.integer("head_dim") if given is not None else hidden // heads
