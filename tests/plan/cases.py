"""Small models, runs and a machine for the tests of plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitp.config import RunConfig, run_config_from
from mpitp.models.config import DecoderConfig
from mpitp.plan.anatomy import Anatomy, Facts
from mpitp.plan.machine_file import Machine, read_machine
from mpitp.train.setup import model_config

GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 6, "n_layer": 4, "n_positions": 32, "vocab_size": 301}
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 301,
    "num_hidden_layers": 4, "intermediate_size": 130, "max_position_embeddings": 32, "tie_word_embeddings": True,
    "head_dim": 6,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 301,
    "num_hidden_layers": 5, "intermediate_size": 64, "max_position_embeddings": 32, "head_dim": 8,
    "sliding_window": 8, "query_pre_attn_scalar": 8,
}  # fmt: skip
MOE = {
    **LLAMA, "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 70, "mlp_only_layers": [1], "output_router_logits": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"gpt2": GPT2, "llama": LLAMA, "gemma2": GEMMA2, "moe": MOE}


def run_of(kind: str, changes: dict[str, Any]) -> RunConfig:
    """A run of a small model with some keys changed; its text isn't there."""
    tables: dict[str, Any] = {
        "model": dict(KINDS[kind]),
        "data": {"train": "none", "seq_len": 16},
        "train": {"steps": 1, "run_dir": "none", "micro_batch_size": 2, "global_batch_size": 24},
        "mesh": {},
        "optim": {"bucket_mib": 0.05},
    }
    for name, value in changes.items():
        section, key = name.split(".")
        tables[section][key] = value
    return run_config_from(tables)


def decoder_of(config: RunConfig) -> DecoderConfig:
    return model_config(config, None)


def machine(name: str = "ethernet_cpu") -> Machine:
    return read_machine(Path(__file__).parents[2] / "examples" / "machines" / f"{name}.toml")


def anatomy_of(config: RunConfig, on: Machine | None = None) -> Anatomy:
    facts = Facts(decoder_of(config), config.model.dtype, config.data.seq_len, config.mesh.cp_form)
    return Anatomy(facts, on or machine())
