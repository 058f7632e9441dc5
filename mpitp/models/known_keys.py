"""What the keys of a config.json mean for the maths; the one place where they are listed.

The rule: a key that the reference implementation (transformers 5: its configuration class, the model's code, its common
code for RoPE, masks and caches) reads for a model type can change the maths, so mpitp uses it, or takes its neutral
values only. Whatever else a file holds the reference passes over, and so does mpitp, with one notice that names it.
Keys that transformers itself writes into most files are passed over without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The class that Hugging Face's tools look for in a config.json.
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "bloom": "BloomForCausalLM",
}

# What config.json calls the facts of a DecoderConfig, where it doesn't call them the same.
_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_hidden": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "dropouts.attention": "attention_dropout",
    "eos_ids": "eos_token_id",
    "bos_id": "bos_token_id",
}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "heads": "n_head",
    "kv_heads": "n_head",
    "ffn_hidden": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
    "dropouts.embedding": "embd_pdrop",
    "dropouts.attention": "attn_pdrop",
    "dropouts.residual": "resid_pdrop",
    "eos_ids": "eos_token_id",
    "bos_id": "bos_token_id",
}
_STABLELM_KEYS = _LLAMA_KEYS | {"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias"}
_STABLELM_KEYS |= {"dropouts.residual": "hidden_dropout"}
_GPT_NEOX_KEYS = _LLAMA_KEYS | {
    "kv_heads": "num_attention_heads",
    "norm_eps": "layer_norm_eps",
    "rope_theta": "rotary_emb_base",
    "dropouts.embedding": "hidden_dropout",
    "dropouts.residual": "hidden_dropout",
}
_OPT_KEYS = _LLAMA_KEYS | {
    "kv_heads": "num_attention_heads",
    "ffn_hidden": "ffn_dim",
    "init_std": "init_std",
    "norm_eps": "norm_eps",
    "dropouts.residual": "dropout",
}
_BLOOM_KEYS = _GPT2_KEYS | {
    "hidden_size": "hidden_size",
    "ffn_hidden": "hidden_size",
    "max_positions": "seq_length",
    "dropouts.embedding": "",
    "dropouts.attention": "attention_dropout",
    "dropouts.residual": "hidden_dropout",
}
FILE_KEYS = {
    "gpt2": _GPT2_KEYS,
    **dict.fromkeys(("llama", "qwen2", "mistral", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text"), _LLAMA_KEYS),
    **dict.fromkeys(("olmo2", "mixtral", "qwen2_moe"), _LLAMA_KEYS),
    "phi3": _LLAMA_KEYS | {"dropouts.residual": "resid_pdrop"},
    "stablelm": _STABLELM_KEYS,
    "gpt_neox": _GPT_NEOX_KEYS,
    "opt": _OPT_KEYS,
    "bloom": _BLOOM_KEYS,
}

# Other names under which the reference takes a key ("attribute_map").
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "bloom": {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "n_embed": "hidden_size"},
}

# Keys that change nothing in a causal language model's forward pass and that many files have.
_HARMLESS_WORDS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
    max_window_layers min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate
    rope_interleaved sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    use_bfloat16 use_cache sliding_window use_sliding_window layer_types cache_implementation classifier_dropout
"""
HARMLESS_KEYS = frozenset(_HARMLESS_WORDS.split())

# Of these, the values that are passed over without a word; others are named in the notice.
QUIET_VALUES: dict[str, tuple[Any, ...]] = {"pretraining_tp": (1,), "chunk_size_feed_forward": (0,)}

# Keys that are read and change the maths, and the values with which they don't (None never does).
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "compression_config": ({},),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "quantization_config": ({},),
    "rope_interleaved": (False,),
}
WITHOUT_ROPE = ("gpt2", "opt", "bloom")
ROPE_VALUES: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0,)}  # where there is RoPE


def required_values(model_type: str) -> dict[str, tuple[Any, ...]]:
    """The keys that a model type reads, and the values with which they change nothing."""
    return REQUIRED_VALUES if model_type in WITHOUT_ROPE else REQUIRED_VALUES | ROPE_VALUES


def windows_differ(raw: Mapping[str, Any], max_positions: int) -> str | None:
    """The key by which some layer would see less than all earlier positions; None where every layer sees all.

    For types that have no windows (`windows.py` reads those of the others). A window as long as the positions is none.
    """
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        return "layer_types"
    window = raw.get("sliding_window")
    if kinds is not None or window is None or (type(window) is int and window >= max_positions):
        return None
    return "sliding_window"


def named(keys: list[str], most: int = 20) -> str:
    """Keys for a message."""
    return ", ".join(f"{key!r:.80}" for key in keys[:most]) + (
        f" and {len(keys) - most} more" if len(keys) > most else ""
    )
