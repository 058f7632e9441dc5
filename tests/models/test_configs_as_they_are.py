"""Configs of the kinds that lie about: each is read, its sizes are those of the model, and nothing needless is said.

They are written after what the makers publish, with the keys and spellings of their time.
"""

from __future__ import annotations

from typing import Any

import pytest

from mpitp.comm import SerialGroup
from mpitp.layers.site import make_site
from mpitp.models import abstract_model, config_from_hf

WRITTEN = {"transformers_version": "4.40.0", "torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02}
LONG = [1.0 + i / 8 for i in range(48)]

# name: (config.json, millions of parameters, words of the notice)
FOUND: dict[str, tuple[dict[str, Any], float, str]] = {
    "mistral 7b": (
        {
            **WRITTEN, "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
        }, 7241.7, "",
    ),
    "qwen3 0.6b": (
        {
            **WRITTEN, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936,
        }, 596.0, "",
    ),
    "gemma 2 2b": (
        {
            **WRITTEN, "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
            "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
            "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
        }, 2614.3, "'hidden_act'",
    ),
    "gemma 3 1b": (
        {
            **WRITTEN, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
            "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
            "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
        }, 999.9, "",
    ),
    "phi 3 mini 128k": (
        {
            **WRITTEN, "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
            "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
            "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "rope_scaling": {"long_factor": LONG, "short_factor": LONG, "type": "longrope"},
            "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
        }, 3821.1, "'auto_map'",
    ),
    "pythia 70m": (
        {
            **WRITTEN, "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
            "hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8,
            "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "use_parallel_residual": True, "vocab_size": 50304,
        }, 70.4, "",
    ),
    "opt 125m": (
        {
            **WRITTEN, "_name_or_path": "opt-125m", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
            "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0,
            "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072,
            "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
            "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
            "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768,
        }, 125.2, "'activation_dropout'",
    ),
    "bloom 560m": (
        {
            **WRITTEN, "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0, "hidden_size": 1024,
            "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_head": 16,
            "n_inner": None, "n_layer": 24, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1,
            "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
            "vocab_size": 250880,
        }, 559.2, "'offset_alibi'",
    ),
    "stablelm 2 1.6b": (
        {
            **WRITTEN, "architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
            "num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
            "tie_word_embeddings": False, "use_qkv_bias": True, "vocab_size": 100352,
        }, 1644.5, "",
    ),
    "smollm3 3b": (
        {
            **WRITTEN, "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
            "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 128256,
        }, 3075.1, "'pretraining_tp'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_is_read(name: str) -> None:
    raw, millions, words = FOUND[name]
    config = config_from_hf(raw)
    params = abstract_model(config, make_site(SerialGroup())).named_params()
    assert round(sum(param.data.size for _, param in params) / 1e6, 1) == millions
    assert len(config.notices) == bool(words)
    assert words in "".join(config.notices)
