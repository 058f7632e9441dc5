"""The configs of the golden files of decoders beside GPT-2, Llama and Qwen2; see `golden.py`, which makes them."""

from __future__ import annotations

from typing import Any

from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 12,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
GQA: dict[str, Any] = {**SIZES, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.2, 3.0],
    "original_max_position_embeddings": 8,
}
_QWEN2_MOE: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 5,
    "shared_expert_intermediate_size": 9,
    "router_aux_loss_coef": 0.05,
    "output_router_logits": True,
}

DECODERS: dict[str, PreTrainedConfig] = {
    "llama-dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 8},
        num_key_value_heads=3,
        hidden_act="gelu",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        **NO_IDS,
    ),
    "gpt2-options": GPT2Config(
        vocab_size=31,
        n_positions=32,
        n_embd=12,
        n_layer=2,
        n_head=3,
        activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **NO_IDS,
    ),
    "mistral": MistralConfig(**{**GQA, "num_key_value_heads": 1}, head_dim=6, sliding_window=5, **NO_IDS),
    "qwen3": Qwen3Config(**GQA, head_dim=6, tie_word_embeddings=True, rope_parameters=YARN, **NO_IDS),
    "smollm3": SmolLM3Config(**GQA, no_rope_layer_interval=2, **NO_IDS),
    "olmo2": Olmo2Config(
        **{**SIZES, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
        attention_bias=True,
        **NO_IDS,
    ),
    "phi3": Phi3Config(
        **{**GQA, "hidden_size": 32},
        original_max_position_embeddings=8,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5},
        **NO_IDS,
    ),
    "stablelm": StableLmConfig(
        **GQA,
        use_qkv_bias=True,
        use_parallel_residual=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **NO_IDS,
    ),
    "gpt-neox": GPTNeoXConfig(
        **{**SIZES, "hidden_size": 24},
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        **NO_IDS,
    ),
    "opt": OPTConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        ffn_dim=17,
        dropout=0.0,
        **NO_IDS,
    ),
    # 5 heads: two of the slopes of 4, one of those of 8
    "bloom": BloomConfig(vocab_size=31, hidden_size=20, n_layer=2, n_head=5, **NO_IDS),
    "gemma": GemmaConfig(**{**GQA, "num_key_value_heads": 1}, head_dim=6, **NO_IDS),
    "gemma2": Gemma2Config(
        **GQA,
        head_dim=6,
        query_pre_attn_scalar=9,
        sliding_window=4,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        **NO_IDS,
    ),
    "gemma3": Gemma3TextConfig(
        **{**GQA, "num_hidden_layers": 3},
        head_dim=6,
        query_pre_attn_scalar=9,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        **NO_IDS,
    ),
}
# Mixtures of experts: their losses have the auxiliary one too. Qwen2-MoE: blocks 1 and 3 have experts (every second one
# has), but 1 is named as one that hasn't; in the other case every block has, and the chosen probabilities are made 1.
MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(
        **{**GQA, "intermediate_size": 13},
        num_local_experts=5,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.05,
        output_router_logits=True,
        sliding_window=None,
        **NO_IDS,
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **{**GQA, "num_hidden_layers": 4},
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        **_QWEN2_MOE,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        **NO_IDS,
    ),
    "qwen2-moe-normed": Qwen2MoeConfig(**GQA, **_QWEN2_MOE, norm_topk_prob=True, **NO_IDS),
}
DECODERS |= MIXTURES
# Cases without a continuation: their angles depend on the length of the text so far.
BY_LENGTH = ("llama-dynamic", "phi3")
