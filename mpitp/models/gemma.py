"""Gemma (Mesnard et al. 2024): a Llama with a tanh GELU as the gate, norms whose factor is 1 + weight, embeddings times
the root of their width, and a head_dim of its own. Gemma 2 and 3 build on what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.layers.block import TransformerBlock
from mpitp.layers.build import Builder
from mpitp.layers.rotary import Rotary
from mpitp.models.blocks import attention_of, mlp_of, pre_norm_block
from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, read_activation, read_sizes, with_traits
from mpitp.models.rope_keys import with_rope

_DEFAULTS = Defaults(max_positions=8192, norm_eps=1e-6, tied=True, kv_heads=16, head_dim=256)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Gemma directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    facts = gemma_facts(read, _DEFAULTS)
    name = (
        "gelu_tanh" if read.take("hidden_act") == "gelu" else read_activation(read, "hidden_act", "gelu_pytorch_tanh")
    )
    bias = read.flag("attention_bias", False)
    facts = with_rope(with_traits(facts, activation=name), read)
    return finished(read, DecoderConfig(**facts, qkv_bias=bias, out_bias=bias))


def gemma_facts(read: HfConfigReader, defaults: Defaults) -> dict[str, Any]:
    """What every config of the family says, as keyword arguments of a DecoderConfig."""
    read.expect("use_bidirectional_attention", (False, None), None)
    facts = read_sizes(read, defaults) | {"dropouts": Dropouts(attention=read.rate("attention_dropout", 0.0))}
    return with_traits(facts, embedding_scale=facts["hidden_size"] ** 0.5)


def build_block(config: DecoderConfig, build: Builder, index: int, rotary: Rotary | None) -> TransformerBlock:
    """Block `index`, its parameters still zero."""
    attention, mlp = attention_of(config, build, index, rotary), mlp_of(config, build, gated=True)
    return pre_norm_block(config, build, attention, mlp, Builder.offset_rms_norm, index)
