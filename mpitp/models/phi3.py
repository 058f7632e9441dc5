"""Phi-3 (Abdin et al. 2024): a Llama whose files hold q, k and v as one tensor, gate and up as another; some turn a
part of a head only, and some have LongRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitp.models.config import DecoderConfig, Dropouts, HfConfigReader
from mpitp.models.facts import Defaults, finished, with_traits
from mpitp.models.llama import llama_facts, outer_pieces, rms_norm_pieces
from mpitp.models.names import HfPiece
from mpitp.models.rope_keys import RopeKeys
from mpitp.models.windows import SLIDING, read_window, windows_of

_DEFAULTS = Defaults(max_positions=4096, norm_eps=1e-5, tied=False, has_head_dim=False)
_ROPE = RopeKeys(
    partial_key="partial_rotary_factor",
    kinds={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    original=4096,
)
_EOS = 32000  # of transformers' class


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The config of a Phi-3 directory. Raises ConfigError for what is missing, unknown or not supported."""
    read = HfConfigReader(raw)
    read.without_default_ids(_EOS)
    facts = llama_facts(read, _DEFAULTS, _ROPE)
    read.rate("embd_pdrop", 0.0)  # transformers doesn't use it
    residual = read.rate("resid_pdrop", 0.0)
    window, num_layers = read_window(read, None), facts["num_layers"]
    kinds = [SLIDING] * num_layers if window is not None else []
    windows = windows_of(kinds, window, num_layers, facts["max_positions"])
    facts |= {"dropouts": Dropouts(attention=facts["dropouts"].attention, residual=residual)}
    return finished(read, DecoderConfig(**with_traits(facts, windows=windows)))


def hf_pieces(config: DecoderConfig) -> dict[tuple[str, str], HfPiece]:
    """Where each part of each parameter lies in a Phi-3 directory."""
    pieces = outer_pieces(config)
    q, kv, ffn = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn_hidden
    for i in range(config.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        pieces |= rms_norm_pieces(ours, theirs)
        for part, start in (("q", 0), ("k", q), ("v", q + kv)):
            fused = HfPiece(f"{theirs}.self_attn.qkv_proj.weight", start, q + 2 * kv)
            pieces[f"{ours}.attention.qkv.weight", part] = fused
        for part, start in (("gate", 0), ("up", ffn)):
            pieces[f"{ours}.mlp.gate_up.weight", part] = HfPiece(f"{theirs}.mlp.gate_up_proj.weight", start, 2 * ffn)
        pieces[f"{ours}.attention.out.weight", "out"] = HfPiece(f"{theirs}.self_attn.o_proj.weight")
        pieces[f"{ours}.mlp.down.weight", "down"] = HfPiece(f"{theirs}.mlp.down_proj.weight")
    return pieces
