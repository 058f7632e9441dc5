"""Reading config.json: what is understood is used, what would change the maths and isn't understood is refused."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest

from mpitp.errors import ConfigError
from mpitp.models import MODEL_TYPES, DecoderConfig, config_from_hf
from mpitp.models.config import HARMLESS_KEYS, REQUIRED_VALUES, file_key
from tests.models.model_cases import GPT2, LLAMA, LLAMA3, QWEN2

LLAMA3_SCALING = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_model_types() -> None:
    assert set(MODEL_TYPES) == {"gpt2", "llama", "qwen2"}


def test_gpt2_defaults() -> None:
    config = config_from_hf({"model_type": "gpt2"})
    sizes = (config.vocab_size, config.hidden_size, config.num_layers, config.heads, config.head_dim, config.ffn_hidden)
    assert sizes == (50257, 768, 12, 12, 64, 3072)
    assert (config.max_positions, config.norm_eps, config.tied, config.rope_theta) == (1024, 1e-5, True, 0.0)
    assert config.qkv_bias and config.out_bias and config.mlp_bias
    assert (config.dropouts.embedding, config.dropouts.attention, config.dropouts.residual) == (0.1, 0.1, 0.1)
    assert config.eos_ids == () and config.bos_id is None


def test_llama() -> None:
    config = config_from_hf({**LLAMA, "bos_token_id": 1})
    assert (config.heads, config.kv_heads, config.head_dim, config.rope_theta) == (9, 3, 2, 100.0)
    assert (config.tied, config.qkv_bias, config.out_bias, config.mlp_bias) == (False,) * 4
    assert config.norm_eps == 1e-6 and config.eos_ids == (52, 51) and config.bos_id == 1
    assert config.hf == {**LLAMA, "bos_token_id": 1}


def test_qwen2_has_biases_on_q_k_and_v_alone() -> None:
    config = config_from_hf(QWEN2)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)


def test_null_is_the_default() -> None:
    raw = without({**LLAMA, "hidden_size": 18}, "num_key_value_heads", "head_dim")
    nulls = {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None, "rms_norm_eps": None}
    assert config_from_hf({**raw, **nulls}) == config_from_hf(raw)
    assert (config_from_hf(raw).kv_heads, config_from_hf(raw).head_dim) == (9, 2)
    assert config_from_hf({**GPT2, "n_inner": None}).ffn_hidden == 48


def rope_of(**changes: Any) -> tuple[float, dict[str, Any] | None]:
    config = config_from_hf({**without(LLAMA, "rope_theta"), **changes})
    return config.rope_theta, config.rope_scaling


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 500000}, 5e5, None),
        ({"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 9.0, ("linear", 2.0)),
        ({"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 2}}, 9.0, ("linear", 2)),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, 10000.0, ("linear", 2.0)),
        ({"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, 9.0, None),
        ({"rope_parameters": {"rope_theta": 9.0}}, 9.0, None),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 9.0}, 9.0, ("linear", 2.0)),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_theta": 9, "rope_scaling": None}, 9.0, None),
        ({"rope_parameters": LLAMA3, "rope_scaling": LLAMA3_SCALING, "rope_theta": 500.0}, 500.0, ("llama3", 4.0)),
    ],
)
def test_both_spellings_of_rope(changes: dict[str, Any], theta: float, scaling: tuple[str, float] | None) -> None:
    found_theta, found = rope_of(**changes)
    assert found_theta == theta
    assert (found and (found["rope_type"], found["factor"])) == scaling


def test_both_spellings_give_the_same_scaling() -> None:
    assert rope_of(rope_parameters=LLAMA3) == rope_of(rope_theta=500.0, rope_scaling=LLAMA3_SCALING)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": 8.0}}, "rope_theta=9.0 contradicts rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 9.0}},
            "rope_parameters=None contradicts rope_scaling",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 8.0}, "rope_theta": 9.0},
            "rope_theta=9.0 contradicts rope_scaling.rope_theta=8.0",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "RoPE scaling type 'llama3'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not supported; supported: default, linear, ll"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "not supported"),
        ({"rope_scaling": {"type": "linear"}}, "needs the keys"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "needs the keys"),
        ({"rope_scaling": without(LLAMA3_SCALING, "factor")}, "needs the keys"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor must be a positive number"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "needs the keys"),
        ({"rope_theta": 0.0}, "rope_theta must be a positive number"),
        ({"rope_theta": -5.0}, "rope_theta must be a positive number"),
        ({"rope_theta": "big"}, "rope_theta must be a finite number"),
    ],
)
def test_rope_that_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rope_of(**changes)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        (LLAMA, {"sliding_window_pattern": 3}, "unknown keys 'sliding_window_pattern' for model_type 'llama'"),
        (LLAMA, {f"a{i}": i for i in range(9)}, "unknown keys 'a0', 'a1', 'a2', 'a3', 'a4' for"),
        (GPT2, {"rope_theta": 9.0}, "unknown keys 'rope_theta'"),
        (QWEN2, {"attention_bias": False}, "unknown keys 'attention_bias'"),
        (GPT2, {"activation_function": "relu"}, "activation_function='relu' is not supported; supported: 'gelu_new'"),
        (GPT2, {"activation_function": "gelu"}, "activation_function='gelu' is not supported"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp=2 is not supported; supported: 1"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention is"),
        (LLAMA, {"layer_types": 5}, "layer_types 5 is not supported"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        (LLAMA, {"hidden_size": None}, "hidden_size must be a whole number, got None"),
        (LLAMA, {"vocab_size": "53"}, "vocab_size must be a whole number, got '53'"),
        (LLAMA, {"vocab_size": 53.0}, "vocab_size must be a whole number"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        (LLAMA, {"num_attention_heads": 0}, ": num_attention_heads must be at least 1"),
        (LLAMA, {"num_attention_heads": 0, "head_dim": None}, "must be a multiple of num_attention_heads=0"),
        (LLAMA, {"num_key_value_heads": 2}, "num_attention_heads=9 must be a multiple of num_key_value_heads=2: "),
        (LLAMA, {"head_dim": 3}, "head_dim must be even, got 3$"),
        (
            LLAMA,
            {"head_dim": None, "hidden_size": 27},
            r"head_dim must be even, got 3 \(hidden_size / num_attention_heads\)",
        ),
        (LLAMA, {"num_key_value_heads": 0}, ": num_key_value_heads must be at least 1"),
        (LLAMA, {"intermediate_size": -1}, "intermediate_size must be at least 1, got -1"),
        (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
        (QWEN2, {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        (GPT2, {"n_layer": 0}, "n_layer must be at least 1"),
        (GPT2, {"n_positions": 0}, "n_positions must be at least 1"),
        (GPT2, {"layer_norm_epsilon": -1}, "layer_norm_epsilon must be at least 0"),
        (LLAMA, {"head_dim": None}, "without a head_dim, hidden_size=8 must be a multiple of num_attention_heads=9"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        (LLAMA, {"rms_norm_eps": -1e-5}, "rms_norm_eps must be at least 0"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (LLAMA, {"attention_bias": 1}, "attention_bias must be true or false"),
        (LLAMA, {"attention_dropout": 1.0}, r"attention_dropout must lie in \[0, 1\)"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id must be made of whole numbers, got '</s>'"),
        (LLAMA, {"eos_token_id": [1, None]}, "eos_token_id must be made of whole numbers"),
        (LLAMA, {"bos_token_id": [1]}, "bos_token_id must be made of whole numbers"),
        (GPT2, {"n_embd": 13}, "n_embd=13 must be a positive multiple of n_head=6"),
        (GPT2, {"n_head": 0}, "must be a positive multiple of n_head=0"),
        (GPT2, {"resid_pdrop": -0.1}, "resid_pdrop must lie in"),
        (GPT2, {"n_inner": 0}, "n_inner must be at least 1"),
        (GPT2, {"model_type": "bert"}, "model_type 'bert' is not supported; supported: gpt2, llama, qwen2"),
        (GPT2, {"model_type": None}, "model_type None is not supported"),
        (GPT2, {"model_type": ["gpt2"]}, "is not supported"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**raw, **changes})


VALUES = {"tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 2, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("raw", [GPT2, LLAMA, QWEN2], ids=lambda raw: raw["model_type"])
def test_every_fact_is_known_by_the_key_it_comes_from(raw: dict[str, Any]) -> None:
    """Another value of the key gives another value of the fact."""
    config, model_type = config_from_hf({**raw, "tie_word_embeddings": True}), raw["model_type"]
    facts = {field.name for field in dataclasses.fields(config)} - {"hf", "model_type", "rope_scaling", "dropouts"}
    facts |= {f"dropouts.{field.name}" for field in dataclasses.fields(config.dropouts)}
    for fact in sorted(facts):
        key = file_key(model_type, fact)
        if key == fact and key not in raw:  # not in this kind of file
            continue
        now = operator.attrgetter(fact)(config)
        value = VALUES[key] if key in VALUES else now * 2 if isinstance(now, int) else now / 2 + 0.03
        changed = {**raw, "tie_word_embeddings": True, key: value}
        if key in ("num_key_value_heads", "n_head"):
            changed[key] = 1
        if model_type == "qwen2" and key in ("attention_bias", "mlp_bias"):  # it has no choice
            continue
        assert operator.attrgetter(fact)(config_from_hf(changed)) != now, (fact, key)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"])
def test_sizes_of_a_llama_must_be_there(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        config_from_hf(without(LLAMA, key))


@pytest.mark.parametrize("raw", [GPT2, LLAMA, QWEN2], ids=lambda raw: raw["model_type"])
def test_keys_that_change_nothing(raw: dict[str, Any]) -> None:
    plain = {"torch_dtype": "bfloat16", "architectures": ["X"], "use_cache": True, "transformers_version": "4.0"}
    allowed = {key: values[0] for key, values in REQUIRED_VALUES.items()}
    nulls = dict.fromkeys(HARMLESS_KEYS - set(raw) - {"bos_token_id"})
    assert config_from_hf({**raw, **plain, **allowed}) == config_from_hf(raw)
    assert config_from_hf({**nulls, **raw}) == config_from_hf(raw)
    assert set(REQUIRED_VALUES) <= HARMLESS_KEYS


def test_sizes_are_checked_when_a_config_is_made_by_hand() -> None:
    with pytest.raises(ConfigError, match="vocab_size must be at least 1, got 0"):
        DecoderConfig(
            model_type="llama", vocab_size=0, hidden_size=8, num_layers=1, heads=2, kv_heads=1, head_dim=4,
            ffn_hidden=8, max_positions=8, norm_eps=1e-6, tied=False, init_std=0.02, rope_theta=10.0,
        )  # fmt: skip
