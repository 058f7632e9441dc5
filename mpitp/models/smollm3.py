"""SmolLM3 (Bakouch et al. 2025): a Llama some of whose blocks, every fourth by default, do without RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.errors import ConfigError
from mpitp.models.config import DecoderConfig, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import llama_facts
from mpitp.models.rope_keys import RopeKeys
from mpitp.models.windows import FULL, SLIDING, read_layer_types, read_window, windows_of

_DEFAULTS = Defaults(max_positions=32768, norm_eps=1e-6, tied=True, kv_heads=4, has_head_dim=False)
_BOS, _EOS = 128000, 128001  # of transformers' class


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a SmolLM3 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    read.without_default_ids(_BOS)
    read.without_default_ids(_EOS)
    facts = llama_facts(read, _DEFAULTS, RopeKeys(theta=2_000_000.0))
    bias, mlp_bias = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    num_layers = facts["num_layers"]
    unrotated = _unrotated(read, num_layers)
    is_used, window = read.flag("use_sliding_window", False), read_window(read, None)
    window = window if is_used else None
    by_default = [SLIDING if window is not None and block in unrotated else FULL for block in range(num_layers)]
    kinds = read_layer_types(read, num_layers, by_default)
    windows = windows_of(kinds, window, num_layers, facts["max_positions"])
    facts = with_traits(facts, unrotated=unrotated, windows=windows)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias))


def _unrotated(read: HfConfigReader, num_layers: int) -> tuple[int, ...]:
    """The blocks without RoPE: where `no_rope_layers` has a 0, or every `no_rope_layer_interval`-th."""
    interval, turned = read.integer("no_rope_layer_interval", 4), read.take("no_rope_layers")
    if turned is None:
        if interval < 1:
            raise ConfigError(f"config.json: no_rope_layer_interval must be at least 1, got {interval}")
        turned = [int((block + 1) % interval != 0) for block in range(num_layers)]
    if not isinstance(turned, list) or len(turned) < num_layers or any(each not in (0, 1) for each in turned):
        raise ConfigError(
            f"config.json: no_rope_layers must be a list of 1 (with RoPE) and 0 for each of {num_layers} layers, got "
            f"{turned!r:.60}"
        )
    return tuple(block for block in range(num_layers) if not turned[block])
