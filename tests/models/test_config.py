"""Reading config.json: what is understood is used, what would change the maths and isn't understood is refused."""

from __future__ import annotations

import dataclasses
import operator
import time
from typing import Any

import pytest

from mpitp.errors import ConfigError
from mpitp.models import MODEL_TYPES, DecoderConfig, config_from_hf, kinds
from mpitp.models.config import file_key
from mpitp.models.encoder_decoders import ENCODER_DECODER_TYPES
from mpitp.models.encoders import ENCODER_TYPES
from mpitp.models.known_keys import ARCHITECTURES, FILE_KEYS, HARMLESS_KEYS, REQUIRED_VALUES
from mpitp.models.nearest import NEAREST, NEAREST_OTHERS, NO_DECODERS, TAKEN, what_it_is
from mpitp.models.vision_config import CLASSES
from tests.models.model_cases import GPT2, LLAMA, LLAMA3, QWEN2

LLAMA3_SCALING = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_model_types() -> None:
    llamas = {"llama", "qwen2", "mistral", "qwen3", "smollm3", "phi3", "stablelm"}
    assert llamas | {"gpt2", "gpt_neox", "opt", "gemma"} <= set(MODEL_TYPES)


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
        (
            {"rope_scaling": {"type": "axial", "factor": 2.0}},
            "'axial' is not supported; supported: default, linear, dy",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "needs the keys"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs the keys"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [2.0]}},
            "must be a list of numbers",
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
                "original_max_position_embeddings": 8,
            },
            "original_max_position_embeddings=8 contradicts rope_scaling.original_max_position_embeddings=4",
        ),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "not supported"),
        ({"rope_scaling": {"type": "linear"}}, "needs the keys"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}}, "needs the keys"),
        ({"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
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
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; supported: 1.0"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* is not supported"),
        (GPT2, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* is not supported"),
        (LLAMA, {"is_causal": False}, "is_causal=False is not supported; supported: True"),
        (LLAMA, {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config=.* is not supported"),
        (LLAMA, {"attention_chunk_size": 8}, "attention_chunk_size=8 is not supported; supported: None"),
        (LLAMA, {"sliding_window": 8}, "sliding_window=8 is not supported"),
        (GPT2, {"hidden_size": 24}, "hidden_size=24 contradicts n_embd=12"),
        (GPT2, {"activation_function": "mish"}, "activation_function='mish' is not supported; supported: 'gelu', "),
        (GPT2, {"scale_attn_weights": 1}, "scale_attn_weights must be true or false"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        (LLAMA, {"hidden_act": "gelu_10"}, "hidden_act='gelu_10' is not supported; supported: 'gelu', "),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention is"),
        (LLAMA, {"layer_types": 5}, "layer_types=5 is not supported"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be at least 1, or null"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 2}, "supported: full_attention and sliding_attention"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "has sliding_attention, but there is no sliding_window"),
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
        (LLAMA, {"eos_token_id": True}, "eos_token_id must be made of whole numbers, got True"),
        (LLAMA, {"eos_token_id": -1}, "eos_token_id=-1 is outside the vocabulary of 53; expected 0 to 52"),
        (LLAMA, {"eos_token_id": [1, 53]}, "eos_token_id=53 is outside the vocabulary of 53"),
        (GPT2, {"bos_token_id": 99}, "bos_token_id=99 is outside the vocabulary of 53"),
        (LLAMA, {"initializer_range": -0.5}, r"initializer_range must lie in \[0, 100\], got -0.5"),
        (LLAMA, {"initializer_range": 1e30}, "initializer_range must lie in"),
        (LLAMA, {"rms_norm_eps": 1e30}, "rms_norm_eps must be at most 1, got 1e"),
        (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        (LLAMA, {"rope_theta": 10**400}, "rope_theta must be a (finite|positive) number"),
        (LLAMA, {"hidden_size": 2**63}, "hidden_size must be at most 2147483647, got 9223372036854775808"),
        (LLAMA, {"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 10000, got 1000"),
        (LLAMA, {"vocab_size": 10**30}, "vocab_size must be at most"),
        (GPT2, {"n_embd": 12 * 10**30}, "n_embd must be at most 2147483647"),
        (LLAMA, {"bos_token_id": [1]}, "bos_token_id must be made of whole numbers"),
        (GPT2, {"n_embd": 13}, "n_embd=13 must be a positive multiple of n_head=6"),
        (GPT2, {"n_head": 0}, "must be a positive multiple of n_head=0"),
        (GPT2, {"resid_pdrop": -0.1}, "resid_pdrop must lie in"),
        (GPT2, {"n_inner": 0}, "n_inner must be at least 1"),
        (GPT2, {"model_type": "bert"}, "model_type 'bert' is not supported; supported: gpt2, llama, qwen2"),
        (GPT2, {"model_type": "qwen3_moe"}, "the nearest is 'qwen2_moe', but here q and k are normalised head by head"),
        (GPT2, {"model_type": "gpt-neox"}, "was 'gpt_neox' meant"),
        (GPT2, {"model_type": "bert"}, "it is an encoder: mpitp embed, classify, eval"),
        (GPT2, {"model_type": "mamba"}, "it is a recurrent model"),
        (GPT2, {"model_type": None}, "model_type None is not supported.*what the file must say first"),
        (GPT2, {"model_type": ["gpt2"]}, "is not supported"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**raw, **changes})


def test_every_model_type_has_its_class_and_its_keys() -> None:
    assert set(ARCHITECTURES) == set(FILE_KEYS) == set(MODEL_TYPES)


def test_the_nearest_of_types_that_are_not_supported_are_supported() -> None:
    assert {near for near, _ in NEAREST.values()} <= set(MODEL_TYPES)
    assert not set(MODEL_TYPES) & {*NEAREST, *NO_DECODERS}
    assert {near for near, _ in NEAREST_OTHERS.values()} <= set(TAKEN)
    assert not {*TAKEN, *NEAREST} & set(NEAREST_OTHERS)
    assert what_it_is("electra").startswith("; the nearest is 'bert', but here embeddings may be narrower")


VALUES = {"tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 2, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("raw", [GPT2, LLAMA, QWEN2], ids=lambda raw: raw["model_type"])
def test_every_fact_is_known_by_the_key_it_comes_from(raw: dict[str, Any]) -> None:
    """Another value of the key gives another value of the fact."""
    config, model_type = config_from_hf({**raw, "tie_word_embeddings": True}), raw["model_type"]
    facts = {field.name for field in dataclasses.fields(config)} - {"hf", "ends", "notices", "unread"}
    facts -= {"model_type", "rope_scaling", "dropouts"}
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
    allowed = {key: values[0] for key, values in REQUIRED_VALUES.items() if values}
    nulls = dict.fromkeys(HARMLESS_KEYS - set(raw) - {"bos_token_id"})
    assert config_from_hf({**raw, **plain, **allowed}) == config_from_hf(raw)
    assert config_from_hf({**nulls, **raw}) == config_from_hf(raw)
    assert config_from_hf({**nulls, **raw}).notices == ()


@pytest.mark.parametrize(
    ("raw", "keys", "named"),
    [
        (LLAMA, {"gradient_checkpointing": False, "output_past": True}, ["gradient_checkpointing", "output_past"]),
        (LLAMA, {"pretraining_tp": 2}, ["pretraining_tp"]),
        (LLAMA, {"quantization_config": None}, ["quantization_config"]),
        (LLAMA, {"partial_rotary_factor": 1.0}, ["partial_rotary_factor"]),
        (GPT2, {"_num_labels": 1}, ["_num_labels"]),
        (GPT2, {"rope_theta": 9.0, "partial_rotary_factor": 0.5}, ["rope_theta", "partial_rotary_factor"]),
        (QWEN2, {"attention_bias": False}, ["attention_bias"]),
        (
            LLAMA,
            {"sliding_window_pattern": 3, "auto_map": {"AutoConfig": "a.b"}},
            ["sliding_window_pattern", "auto_map"],
        ),
        (LLAMA, {f"a{i}": i for i in range(9)}, [f"a{i}" for i in range(9)]),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 1.0, "beta_fast": 1, "partial_rotary_factor": 1.0}},
            ["rope_scaling.beta_fast", "rope_scaling.partial_rotary_factor"],
        ),
    ],
)
def test_keys_that_the_reference_does_not_read_pass_with_one_notice(
    raw: dict[str, Any], keys: dict[str, Any], named: list[str]
) -> None:
    config, plain = config_from_hf({**raw, **keys}), config_from_hf(raw)
    assert dataclasses.replace(config, rope_scaling=None) == plain
    assert len(config.notices) == 1 and plain.notices == ()
    assert config.notices[0].endswith(", ".join(map(repr, named)))
    assert config.hf == {**raw, **keys}


@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 24},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": None},
        {
            "layer_types": ["full_attention"] * 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
        },
    ],
)
def test_windows_that_hide_nothing(keys: dict[str, Any]) -> None:
    assert config_from_hf({**QWEN2, **keys}) == config_from_hf(QWEN2)


def test_another_name_for_an_activation_is_the_same_function() -> None:
    assert config_from_hf({**LLAMA, "hidden_act": "swish"}) == config_from_hf(LLAMA)
    assert config_from_hf({**GPT2, "activation_function": "gelu_fast"}) == config_from_hf(GPT2)


def test_gpt2_takes_the_general_names_of_its_keys() -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    raw = {names.get(key, key): value for key, value in GPT2.items()}
    assert config_from_hf(raw) == config_from_hf(GPT2) == config_from_hf({**GPT2, "hidden_size": 12})
    assert config_from_hf(raw).notices == () and config_from_hf(raw).hf == raw


def test_default_ids_that_nobody_chose_are_no_ids_of_a_smaller_model() -> None:
    config = config_from_hf({**GPT2, "bos_token_id": 50256, "eos_token_id": 50256})
    assert config.eos_ids == () and config.bos_id is None
    assert "'bos_token_id: 50256', 'eos_token_id: 50256'" in config.notices[0]


def test_thousands_of_keys_that_nobody_reads_are_one_short_notice() -> None:
    keys = {f"{'x' * 5000}{i}": i for i in range(20_000)}
    started = time.process_time()
    (notice,) = config_from_hf({**LLAMA, **keys}).notices
    assert len(notice) < 3000 and "and 19980 more" in notice
    assert time.process_time() - started < 5


def test_a_slip_is_named_in_the_notice() -> None:
    raw = {**without(LLAMA, "num_key_value_heads"), "num_key_value_head": 3}
    assert config_from_hf(raw).notices[0].endswith("(was 'num_key_value_heads' for 'num_key_value_head' meant?)")


def test_sizes_are_checked_when_a_config_is_made_by_hand() -> None:
    with pytest.raises(ConfigError, match="vocab_size must be at least 1, got 0"):
        DecoderConfig(
            model_type="llama", vocab_size=0, hidden_size=8, num_layers=1, heads=2, kv_heads=1, head_dim=4,
            ffn_hidden=8, max_positions=8, norm_eps=1e-6, tied=False, init_std=0.02, rope_theta=10.0,
        )  # fmt: skip


def test_kinds_are_told_without_importing_them():
    assert tuple(ENCODER_TYPES) == kinds.ENCODERS and tuple(ENCODER_DECODER_TYPES) == kinds.ENCODER_DECODERS
    assert tuple(CLASSES) == kinds.VISION
