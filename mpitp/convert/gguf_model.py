"""What a Llama-type GGUF file says about its model, in Hugging Face's terms: config.json, tensor names, row order.

GGUF's "llama" architecture turns neighbouring pairs of each head (RoPE as in the paper), Hugging Face turns the two
halves against each other, so rows 0, 2, 4, ... of a head of q and k come first in Hugging Face's order and 1, 3, 5, ...
after.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from mpitp.convert.gguf_file import GgufFile
from mpitp.errors import FileError


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face model_type."""

    model_type: str
    hf_class: str
    interleaved: bool  # whether RoPE turns neighbouring pairs


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", False),
}

# Keys of the architecture that are read, or that say what holds anyway.
KNOWN_KEYS = """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.finetuned rope.scale_linear expert_count expert_used_count tensor_data_layout
""".split()
# Other keys that llama.cpp reads, with values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
# What llama.cpp reads for any architecture: the gguf package lists all keys of the format.
_READ_KEYS = frozenset(
    key.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for key in vars(group).values()
    if isinstance(key, str) and key.startswith("{arch}.")
)

TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling of each frequency, worked out
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Llama 3.1 to 3.3: the one setting in use, but for the factor
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def architecture_of(file: GgufFile) -> Architecture:
    """The file's architecture, when it is one that can be converted."""
    name = file.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise FileError(
            f"{file.path}: the architecture {name!r} can't be converted; supported: {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) != 1:
        raise FileError(
            f"{file.path} is one of {file.metadata['split.count']} parts: merge them with `gguf-split --merge`"
        )
    for key, value in _other_keys(file, name).items():
        if key in _READ_KEYS and value not in NEUTRAL_VALUES.get(key, ()):
            raise FileError(f"{file.path}: {name}.{key}={value!r:.60} changes the maths in a way that isn't supported")
    return ARCHITECTURES[name]


def passed_over(file: GgufFile) -> list[str]:
    """What is to be said of the keys that nobody reads, or that change nothing: a line, or none."""
    architecture_of(file)
    name = file.get("general.architecture", str)
    keys = [f"{name}.{key}" for key in _other_keys(file, name)]
    return [f"{file.path}: passed over, since they don't change the maths: {', '.join(keys[:20])}"] if keys else []


def _other_keys(file: GgufFile, name: str) -> dict[str, Any]:
    """The architecture's keys that aren't used."""
    own = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    return {key: value for key, value in own.items() if key not in KNOWN_KEYS}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """config.json, but for the ids of special tokens and the dtype."""
    kind = architecture_of(file)
    name = file.get("general.architecture", str)
    shapes = file.shapes()
    if "token_embd.weight" not in shapes:
        raise FileError(f"{file.path} holds no token_embd.weight: is it a vocabulary without a model?")
    hidden, heads = file.get(f"{name}.embedding_length", int), file.get(f"{name}.attention.head_count", int)
    if heads < 1 or file.get(f"{name}.expert_count", int, 0):
        raise FileError(
            f"{file.path}: {heads} attention heads, {file.metadata.get(f'{name}.expert_count', 0)} experts: no Llama"
        )
    head_dim = file.get(f"{name}.attention.key_length", int, hidden // heads)
    _check_head_dims(file, name, head_dim)
    theta = _short(file.get(f"{name}.rope.freq_base", float, 10000.0))
    config = {
        "architectures": [kind.hf_class],
        "model_type": kind.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": file.get(f"{name}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get(f"{name}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.get(f"{name}.context_length", int),
        "rms_norm_eps": _short(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, name, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if kind.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    return config


def hf_names(file: GgufFile) -> dict[str, str]:
    """GGUF name to Hugging Face name of every tensor that is a weight."""
    names = {}
    for name in file.shapes():
        match = _BLOCK.fullmatch(name)
        if name in TOP_TENSORS:
            names[name] = TOP_TENSORS[name]
        elif match and match[2] in BLOCK_TENSORS:
            names[name] = f"model.layers.{match[1]}.{BLOCK_TENSORS[match[2]]}.{match[3]}"
        elif name != ROPE_FACTORS:
            raise FileError(f"{file.path}: tensor {name} is not one of a Llama-type model")
    return names


def is_rotated(name: str) -> bool:
    """Whether the tensor's rows are heads that RoPE turns."""
    match = _BLOCK.fullmatch(name)
    return bool(match) and match[2] in ("attn_q", "attn_k")  # type: ignore[index]


def halves_from_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Whole heads [heads * d, ...] from GGUF's order of rows into Hugging Face's."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _check_head_dims(file: GgufFile, name: str, head_dim: int) -> None:
    for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
        value = file.get(key, int, head_dim)
        if value != head_dim:
            raise FileError(
                f"{file.path}: {key}={value} differs from the head's width {head_dim}; that isn't supported"
            )
    if head_dim < 2 or head_dim % 2:
        raise FileError(f"{file.path}: heads are {head_dim} wide; RoPE needs an even width")


def _rope_scaling(file: GgufFile, name: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = file.get(f"{name}.rope.scaling.type", str, "linear")  # as llama.cpp has it: by a factor, where there is one
    if ROPE_FACTORS in file.shapes():
        return _llama3_scaling(file, theta, head_dim)
    if kind == "linear":
        old = file.get(f"{name}.rope.scale_linear", float, 1.0)
        factor = _short(file.get(f"{name}.rope.scaling.factor", float, old))
        return {"rope_type": "linear", "factor": factor} if factor not in (0, 1) else None
    if kind != "none":
        raise FileError(f"{file.path}: RoPE scaling {kind!r} isn't supported; supported: none, linear, and Llama 3's")
    return None


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling is stored as one factor a frequency; find the parameters that give these factors."""
    factors = np.concatenate([rows for _, rows in file.rows(ROPE_FACTORS, 1)]).astype(np.float64)
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise FileError(
            f"{file.path}: {ROPE_FACTORS} isn't Llama 3's scaling, the only one by factors that is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _short(value: float) -> float:
    """A float32 of the file as the decimal number that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))
