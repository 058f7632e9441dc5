"""The facts of a decoder-only model that layers and programs need, and strict reading of Hugging Face's config.json.

Each model type reads its own keys (`models/gpt2.py`, `models/llama.py`). A key is either used, or known to change
nothing in the maths, or an error: silence about a key that does change the maths would be wrong numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitp.errors import ConfigError

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
_FILE_KEYS = {"gpt2": _GPT2_KEYS, "llama": _LLAMA_KEYS, "qwen2": _LLAMA_KEYS}


def file_key(model_type: str, fact: str) -> str:
    """The key of config.json (and of the run file's [model]) that a fact such as "kv_heads" comes from."""
    return _FILE_KEYS.get(model_type, {}).get(fact, fact)


@dataclass(frozen=True, slots=True)
class Dropouts:
    """Dropout rates of the embedding's output, the attention probabilities and the residual branches."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; sizes in the glossary's terms. `hf` is the config.json it was read from."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    max_positions: int
    norm_eps: float
    tied: bool
    init_std: float
    dropouts: Dropouts = Dropouts()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 0.0  # 0: learned positions
    rope_scaling: dict[str, Any] | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn_hidden",
            "max_positions",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"config.json: {self.key(name)} must be at least 1, got {getattr(self, name)}")
        if not self.norm_eps >= 0:
            raise ConfigError(f"config.json: {self.key('norm_eps')} must be at least 0, got {self.norm_eps}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"config.json: {self.key('heads')}={self.heads} must be a multiple of "
                f"{self.key('kv_heads')}={self.kv_heads}: each KV head serves as many heads as any other"
            )
        if self.rope_theta and self.head_dim % 2:
            without = "" if self.hf.get("head_dim") else f" ({self.key('hidden_size')} / {self.key('heads')})"
            raise ConfigError(
                f"config.json: RoPE turns pairs, so {self.key('head_dim')} must be even, got {self.head_dim}{without}"
            )

    def key(self, fact: str) -> str:
        """What config.json calls one of these fields."""
        return file_key(self.model_type, fact)


# Keys that transformers writes into any config.json and that don't change a causal language model's forward pass.
_HARMLESS_WORDS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
    max_window_layers min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate
    rope_interleaved sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    use_bfloat16 use_cache sliding_window use_sliding_window layer_types
"""
HARMLESS_KEYS = frozenset(_HARMLESS_WORDS.split())

# Harmless keys that are so only with these values (None always is).
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "pretraining_tp": (1,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
}

_MISSING: Any = object()


class HfConfigReader:
    """Takes typed values out of a config.json and at the end refuses what nobody took."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw, self._taken = raw, set[str]()

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"config.json: {key} must be a whole number, got {value!r}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A finite number."""
        value = self._take(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise ConfigError(f"config.json: {key} must be a finite number, got {value!r}")
        return float(value)

    def rate(self, key: str, default: float) -> float:
        """A dropout rate, 0 <= rate < 1."""
        value = self.number(key, default)
        if not 0 <= value < 1:
            raise ConfigError(f"config.json: {key} must lie in [0, 1), got {value}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """A value of which only some are implemented."""
        value = self._take(key, default)
        if value not in allowed:
            raise ConfigError(
                f"config.json: {key}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}"
            )
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        """A nested object, or None."""
        value = self._take(key, None)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key} must be an object or null, got {value!r}")
        return dict(value) if value is not None else None

    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-text ids: one, several or none."""
        value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            self._check_id("eos_token_id", token)
        return tuple(ids)

    def bos_id(self) -> int | None:
        """The begin-of-text id, or None."""
        value = self.raw.get("bos_token_id")
        if value is not None:
            self._check_id("bos_token_id", value)
        return value

    def finish(self) -> None:
        """Refuse keys that were not taken and are not known to be harmless, and harmless ones with harmful values."""
        unknown = [key for key in self.raw if key not in self._taken and key not in HARMLESS_KEYS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._taken, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; remove it if it doesn't"
            raise ConfigError(
                f"config.json: unknown keys {', '.join(map(repr, unknown[:5]))} for model_type "
                f"{self.raw.get('model_type')!r}: it may change the maths, so the model is refused{hint}"
            )
        for key, allowed in REQUIRED_VALUES.items():
            value = self.raw.get(key)
            if key not in self._taken and value is not None and value not in allowed:
                raise ConfigError(f"config.json: {key}={value!r} is not supported; supported: {allowed[0]!r}")
        layer_types = self.raw.get("layer_types")
        if layer_types is not None and (
            not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
        ):
            raise ConfigError(f"config.json: layer_types {layer_types!r} is not supported; only full_attention is")

    def _check_id(self, key: str, token: Any) -> None:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"config.json: {key} must be made of whole numbers, got {token!r}")

    def _take(self, key: str, default: Any) -> Any:
        self._taken.add(key)
        value = self.raw.get(key, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                raise ConfigError(f"config.json: {key} is missing")
            return default
        return value
