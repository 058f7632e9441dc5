#!/usr/bin/env python3
"""The English model of the package glassllm as a Hugging Face directory.

    scripts/convert_glassllm.py "$(scripts/fetch_assets.py glassllm)" models/glassllm

glassllm keeps weights as (in, out) and turns neighbouring pairs in RoPE; Hugging Face keeps (out, in) and turns halves.
Its tokenizer is a BPE over characters in which U+2581 stands for a space.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mpitp.checkpoint.safetensors_file import SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file
from mpitp.convert.gguf_model import halves_from_pairs
from mpitp.data.tokenizer import Tokenizer, save_tokenizer
from mpitp.files import publishing, write_json

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
LINEARS = {
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}


def convert(package: Path, directory: Path) -> None:
    """package: where glassllm is unpacked."""
    weights = package / "glassllm" / "weights"
    with np.load(weights / "en.npz") as file:
        arrays = dict(file)
    theirs = json.loads(str(arrays.pop("__config__")))
    tensors = dict(hf_tensor(name, array, theirs) for name, array in arrays.items())
    layout = plan_file({name: ("F16", array.shape) for name, array in tensors.items()})
    with publishing(directory) as staging:
        write_json(staging / "config.json", hf_config(theirs, tensors))
        write_json(staging / "generation_config.json", {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0})
        save_tokenizer(tokenizer(json.loads((weights / "en.tokenizer.json").read_text())), staging)
        create_file(staging / "model.safetensors", layout)
        writer = SafetensorsWriter(staging / "model.safetensors", layout)
        for name, array in tensors.items():
            writer.write(name, array)
        writer.close()


def hf_tensor(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Name and values in Hugging Face's terms."""
    top = {"E": "model.embed_tokens.weight", "norm_f.gamma": "model.norm.weight"}
    if name in top:
        return top[name], array
    _, block, kind = name.split(".", 2)
    if kind in LINEARS:
        array = np.ascontiguousarray(array.T)
        if kind in ("attn.W_Q", "attn.W_K"):
            array = halves_from_pairs(array, config["d_model"] // config["n_heads"])
        return f"model.layers.{block}.{LINEARS[kind]}.weight", array
    return f"model.layers.{block}.{NORMS[kind.removesuffix('.gamma')]}.weight", array


def hf_config(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": config["max_len"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


def tokenizer(content: dict[str, Any]) -> Tokenizer:
    """The same tokens as glassllm's own tokenizer gives."""
    merges = [tuple(pair) for pair in content["merges"]]
    tokens = SPECIAL + content["alphabet"] + [left + right for left, right in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>"))
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()])
    backend.add_special_tokens(SPECIAL)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": json.loads(backend.to_str()), "tokenizer_config.json": config}
    return Tokenizer({name: json.dumps(document, ensure_ascii=False).encode() for name, document in files.items()})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
