"""Tiny models of every kind, and one run of one: logits, loss, gradients, norms and weights as global arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitp.backend.arrays import to_host
from mpitp.backend.device import Device
from mpitp.comm import Group
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import make_site
from mpitp.models import Batch, CausalLM, DecoderConfig, build_model, config_from_hf
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep
from tests.sharded import fill, gradients, weights

Arrays = dict[str, Any]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 53,
    "n_embd": 12,
    "n_head": 6,
    "n_layer": 2,
    "n_inner": 37,
    "n_positions": 24,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.2,
    "resid_pdrop": 0.15,
    "eos_token_id": 52,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 24,
    "rope_theta": 100.0,
    "eos_token_id": [52, 51],
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 12}

RAW: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2 untied": {**GPT2, "tie_word_embeddings": False, "n_inner": None, "vocab_size": 9, "eos_token_id": 8},
    "llama 9/3": LLAMA,
    "llama biases, tied, 5/1, llama3": {
        **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
        **{"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": True},
        **{"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, "attention_dropout": 0.2},
    },
    "llama 8/2, linear": {
        **LLAMA,
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": None, "hidden_size": 16},
        **{
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "intermediate_size": 8,
            "vocab_size": 7,
            "eos_token_id": [6, 5],
        },
    },
    "llama 7/7": {**LLAMA, "num_attention_heads": 7, "num_key_value_heads": None, "intermediate_size": 3},
    "qwen2 6/2, tied": {**QWEN2, "tie_word_embeddings": True, "head_dim": None},
}
LATER_RAW: dict[str, dict[str, Any]] = {  # for the tests of layouts
    "gemma3": {
        **LLAMA,
        **{"model_type": "gemma3_text", "num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 4},
        **{"query_pre_attn_scalar": 9, "final_logit_softcapping": 2.0, "head_dim": 4, "tie_word_embeddings": True},
        **{"layer_types": ["sliding_attention", "full_attention"], "rope_local_base_freq": 10.0},
    },
    "gemma2": {
        **LLAMA,
        **{"model_type": "gemma2", "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 4},
        **{"sliding_window": 3, "attn_logit_softcapping": 1.5, "attention_dropout": 0.2},
    },
    "qwen3": {
        **LLAMA,
        **{"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2, "use_sliding_window": True},
        **{"sliding_window": 3, "max_window_layers": 1},
    },
    "olmo2": {**LLAMA, "model_type": "olmo2", "num_attention_heads": 6, "num_key_value_heads": 2},
    "mistral": {**LLAMA, "model_type": "mistral", "num_attention_heads": 6, "sliding_window": 4},
    "smollm3": {
        **{key: value for key, value in LLAMA.items() if key != "head_dim"},
        **{"model_type": "smollm3", "num_attention_heads": 6, "hidden_size": 24, "no_rope_layer_interval": 2},
    },
    "gemma": {**LLAMA, "model_type": "gemma", "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 4},
    "bloom": {"model_type": "bloom", "vocab_size": 53, "hidden_size": 20, "n_layer": 2, "n_head": 5},
    "gpt_neox": {
        **{key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads", "rope_theta")},
        **{"model_type": "gpt_neox", "num_attention_heads": 5, "hidden_size": 40, "hidden_dropout": 0.1},
    },
    "stablelm": {
        **{key: value for key, value in LLAMA.items() if key != "head_dim"},
        **{"model_type": "stablelm", "num_attention_heads": 6, "hidden_size": 24, "use_parallel_residual": True},
        **{"partial_rotary_factor": 0.5, "hidden_dropout": 0.1},
    },
    "phi3": {
        **{key: value for key, value in LLAMA.items() if key != "head_dim"},
        **{"model_type": "phi3", "num_attention_heads": 6, "hidden_size": 24, "original_max_position_embeddings": 5},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 1.5]},
    },
    "opt": {
        **{"model_type": "opt", "vocab_size": 53, "hidden_size": 12, "num_attention_heads": 6, "ffn_dim": 13},
        **{"num_hidden_layers": 2, "max_position_embeddings": 24},
    },
}
_LOSSES = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.05}
MIXTURE_RAW: dict[str, dict[str, Any]] = {  # mixtures of experts, with both auxiliary losses
    "mixtral": {
        **LLAMA,
        **{"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 7},
        **{"rms_norm_eps": 1e-5, **_LOSSES},
    },
    "qwen2_moe": {
        **{key: value for key, value in QWEN2.items() if key != "head_dim"},
        **{"model_type": "qwen2_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5},
        **{"shared_expert_intermediate_size": 4, "num_hidden_layers": 3, "mlp_only_layers": [1], **_LOSSES},
    },
}
CONFIGS: dict[str, DecoderConfig] = {name: config_from_hf(raw) for name, raw in RAW.items()}
LENGTH = 7


def make_batch(
    config: DecoderConfig,
    rows: int = 3,
    dropout: DropoutState | None = None,
    first: int = 0,
    samples: Sequence[int] = (),
) -> Batch:
    """Rows `first` .. of one long batch; each row has another number of targets that don't count."""
    tokens = np.stack([np.random.default_rng(row).integers(0, config.vocab_size, LENGTH + 1) for row in range(64)])
    targets = np.where(np.arange(LENGTH) < np.arange(64)[:, None] % 5, -1, tokens[:, 1:])
    chosen = slice(first, first + rows)
    return Batch.of_rows(tokens[chosen, :-1], targets[chosen], dropout, samples)


def make_model(group: Group, config: DecoderConfig, dtype: str = "float64", **options: Any) -> CausalLM:
    """A model whose every parameter, biases and norms too, is filled from global random tensors."""
    model = build_model(config, make_site(group, dtype=dtype, **options))
    fill(model.named_params(), std=0.2)
    return model


def forward_backward(model: CausalLM, batches: Sequence[Batch]) -> Arrays:
    """Logits of the first batch, mean loss and every gradient, as global arrays on every rank."""
    group = model.site.ranks
    logits, _ = model.forward(batches[0])
    result: Arrays = {"logits": to_host(model.gather_logits(logits))}
    step = TrainStep(model, make_optimizer(model))
    result["loss"] = step.accumulate(batches)[0]
    result["norm"] = step.grad_norm()
    return result | {f"grad {name}": grad for name, grad in gradients(group, model.named_params()).items()}


def make_optimizer(model: CausalLM, eps: float = 1e-8) -> AdamW:
    return AdamW(model.named_params(), AdamWSettings(betas=(0.9, 0.95), eps=eps, weight_decay=0.1))


def train(model: CausalLM, steps: int = 5, eps: float = 1e-8, clip_norm: float = 0.5, dropout: bool = False) -> Arrays:
    """Losses and norms of some AdamW steps, and the weights after them."""
    step = TrainStep(model, make_optimizer(model, eps), clip_norm)
    losses, norms = [], []
    for i in range(steps):
        result = step([make_batch(model.config, 3, DropoutState(5, i) if dropout else None)], 1e-3 * (i + 1))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    after = weights(model.site.ranks, model.named_params())
    return {"losses": np.array(losses), "norms": np.array(norms)} | {f"weight {k}": v for k, v in after.items()}


def whole_run(
    group: Group,
    name: str,
    dtype: str = "float64",
    eps: float = 1e-8,
    num_blocks: int = 0,
    device: Device | None = None,
) -> Arrays:
    """Forward, backward and five optimizer steps of one tiny model."""
    model = make_model(group, CONFIGS[name], dtype, device=device, invariant_blocks=num_blocks)
    result = forward_backward(model, [make_batch(model.config)])
    model.zero_grad()
    return result | train(model, eps=eps)
