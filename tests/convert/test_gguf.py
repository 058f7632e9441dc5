"""GGUF files written by the gguf package come out as the Hugging Face directory they were made from."""

import json
import math
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from mpitp.checkpoint import load_config, load_model
from mpitp.cli import main
from mpitp.comm.serial import SerialGroup
from mpitp.convert.gguf_to_hf import convert_gguf
from mpitp.data.tokenizer import load_tokenizer
from mpitp.errors import FileError
from mpitp.layers.site import make_site
from mpitp.models.ends import TOKENIZER, notices_of, with_ends

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 8, 2
SENTENCEPIECE = json.loads((Path(__file__).parent / "sentencepiece.json").read_text())
BYTE_ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def bpe_vocabulary():
    """(tokens, types, merges): the bytes, a few merges, two control tokens and a user's own."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "1 2"]
    tokens = BYTE_ALPHABET + [merge.replace(" ", "") for merge in merges] + ["<s>", "<|end|>", "[user]"]
    return tokens, [1] * (len(tokens) - 3) + [3, 3, 4], merges


def hf_tensors(tied=True, bias=False, vocab_size=None, seed=1):
    """A random Llama in Hugging Face's names and row order."""
    rng = np.random.default_rng(seed)
    vocab = vocab_size or len(bpe_vocabulary()[0])
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for i in range(LAYERS):
        block = {
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        for name, shape in block.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if bias and "attn" in name and (bias == "all" or "o_proj" not in name):
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleave(rows, heads):
    """How llama.cpp's converter reorders q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, tensors, architecture="llama", tokenizer=None, quantise=None, blocks=None, **changes):
    """A GGUF file; changes: metadata by key ("." written "__"), None leaves a key out; blocks: of some tensors, the
    bytes that stand for them and their kind.
    """
    writer = gguf.GGUFWriter(path, architecture)
    tokens, types, merges = bpe_vocabulary()
    metadata = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    everything = {f"{architecture}.{key}": value for key, value in metadata.items()}
    everything |= tokenizer or {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    everything |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in everything.items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in tensors.items():
        if name in (blocks or {}):
            stored, kind = blocks[name]
            writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        kind = quantise if array.ndim == 2 else None
        if kind is None:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer, key, value):
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


@pytest.fixture
def source(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model"


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, "all")])
def test_every_tensor_comes_back(tied, bias, source, target):
    tensors = hf_tensors(tied, bias)
    config = convert_gguf(write_gguf(source, tensors), target)
    saved = safetensors.numpy.load_file(target / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
    assert config == json.loads((target / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied and config["attention_bias"] is bool(bias)
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (HEAD_DIM, 1e-5, 10000.0)
    load_model(target, make_site(SerialGroup()))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_weights_are_the_floats_they_stand_for(kind, source, target):
    kind = gguf.GGMLQuantizationType[kind]
    tensors = hf_tensors()
    write_gguf(source, tensors, quantise=kind)
    convert_gguf(source, target)
    saved = safetensors.numpy.load_file(target / "model.safetensors")
    for name, array in tensors.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind) if array.ndim == 2 else array
        np.testing.assert_array_equal(saved[name], expected, err_msg=name)


def test_qwen2_keeps_its_rows(source, target):
    tensors = hf_tensors(bias="qkv")
    convert_gguf(write_gguf(source, tensors, "qwen2", tokenizer__ggml__pre="qwen2"), target)
    saved = safetensors.numpy.load_file(target / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
    load_model(target, make_site(SerialGroup()))


def test_other_dtypes_and_several_files(source, target):
    tensors = hf_tensors()
    convert_gguf(write_gguf(source, tensors), target, dtype="bfloat16", max_shard_bytes=20_000)
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"
    model = load_model(target, make_site(SerialGroup()))
    table = dict(model.named_params())["embedding.weight"].data
    expected = tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(table, expected)


def llama3_factors(theta, factor, context=8192):
    """transformers' formula, for one frequency after the other."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        if wavelength < context / 4.0:
            factors.append(1.0)
        elif wavelength > context / 1.0:
            factors.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_rope_scaling(source, target):
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert convert_gguf(write_gguf(source, hf_tensors(), **scaling), target)["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    tensors = hf_tensors() | {"rope_freqs.weight": llama3_factors(500000.0, 8.0)}
    write_gguf(source, tensors, llama__rope__freq_base=500000.0)
    assert convert_gguf(source, target, overwrite=True)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    load_model(target, make_site(SerialGroup()))
    tensors["rope_freqs.weight"][1] = 3.0
    write_gguf(source, tensors, llama__rope__freq_base=500000.0)
    with pytest.raises(FileError, match="isn't Llama 3's scaling"):
        convert_gguf(source, target, overwrite=True)


def test_the_tokenizer(source, target):
    tokens, _, _ = bpe_vocabulary()
    convert_gguf(write_gguf(source, hf_tensors(), tokenizer__ggml__eot_token_id=len(tokens) - 3), target)
    tokenizer = load_tokenizer(target)
    pieces = [tokens[i] for i in tokenizer.encode("hello hello\n\n12<|end|>[user]")]
    assert pieces == ["hello", "Ġhello", "ĊĊ", "1", "2", "<|end|>", "[user]"]
    assert tokenizer.decode(tokenizer.encode(" hello é<|end|>")) == " hello é"
    assert tokens[tokenizer.eos_id] == "<|end|>" and tokens[tokenizer.bos_id] == "<s>"
    assert json.loads((target / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"bos_token_id": len(tokens) - 3, "eos_token_id": [len(tokens) - 2, len(tokens) - 3]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["x", "12", "Ġ", "3", "4"]),
        ("smollm", ["x", "1", "2", "Ġ", "3", "4"]),
        ("qwen2", ["x", "1", "2", "Ġ", "3", "4"]),
        ("llama-bpe", ["<s>", "x", "12", "Ġ", "3", "4"]),
    ],
)
def test_pre_tokenizers_differ_in_digits_and_bos(name, words, source, target):
    tokens, _, _ = bpe_vocabulary()
    convert_gguf(write_gguf(source, hf_tensors(), tokenizer__ggml__pre=name), target)
    assert [tokens[i] for i in load_tokenizer(target).encode("x12 34")] == words


def sentencepiece_keys():
    """sentencepiece.json (a BPE model trained with sentencepiece 0.2, byte fallback) as the keys of a GGUF file."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE["tokens"],
        "tokenizer.ggml.scores": [float(score) for score in SENTENCEPIECE["scores"]],
        "tokenizer.ggml.token_type": SENTENCEPIECE["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_sentencepiece_vocabulary(source, target):
    """What the sentencepiece library encodes with this model is in its file too."""
    tensors = hf_tensors(vocab_size=len(SENTENCEPIECE["tokens"]))
    convert_gguf(write_gguf(source, tensors, tokenizer=sentencepiece_keys()), target)
    converted = load_tokenizer(target)
    assert len(SENTENCEPIECE["cases"]) > 30
    for text, ids in SENTENCEPIECE["cases"].items():
        assert converted.encode(text) == [1, *ids]
        assert converted.decode([1, *ids]) == text


# What is refused


def test_files_that_are_no_gguf(tmp_path, target):
    path = tmp_path / "x.gguf"
    for content, words in (
        (b"", "must begin with b'GGUF', but begins with b''"),
        (b"PK\x03\x04" * 10, "begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"GGUF\x03\x00\x00\x00", "truncated or damaged"),
        (b"GGUF" + b"\xff" * 60, "truncated or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileError) as caught:
            convert_gguf(path, target)
        assert words in str(caught.value) and str(path) in str(caught.value)
    with pytest.raises(FileError, match="No such file"):
        convert_gguf(tmp_path / "none.gguf", target)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.999])
def test_truncated_files(part, source, target, tmp_path):
    content = write_gguf(source, hf_tensors()).read_bytes()
    source.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(FileError, match="truncated or damaged"):
        convert_gguf(source, target)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llama__embedding_length": None}, "the GGUF key llama.embedding_length is missing"),
        ({"llama__embedding_length": "64"}, "must be a int, got '64'"),
        ({"llama__attention__head_count": 0}, "0 attention heads"),
        ({"llama__attention__head_count_kv": 3}, "its metadata make no model"),
        ({"llama__expert_count": 8}, "8 experts"),
        (
            {"llama__block_count": 3},
            "9 tensors don't fit the metadata, the first is model.layers.2.input_layernorm.weight",
        ),
        ({"llama__feed_forward_length": 95}, "don't fit the metadata"),
        ({"llama__attention__sliding_window": 32}, "llama.attention.sliding_window=32 changes the maths"),
        ({"llama__rope__scaling__attn_factor": 0.5}, "llama.rope.scaling.attn_factor=0.5 changes the maths"),
        ({"llama__attention__causal": False}, "llama.attention.causal=False changes the maths"),
        ({"llama__block_count": 2**31}, "num_hidden_layers must be at most 10000"),
        ({"llama__context_length": 2**31}, "max_position_embeddings must be at most"),
        ({"tokenizer__ggml__eot_token_id": 9999}, "eos_token_id=9999 is outside the vocabulary"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count=4 differs from the head's width 8"),
        ({"llama__rope__scaling__type": "yarn"}, "RoPE scaling 'yarn' isn't supported"),
        ({"split__count": 3}, "is one of 3 parts"),
        ({"tokenizer__ggml__pre": "tekken"}, "the pre-tokenizer 'tekken' isn't known"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre is missing, or"),
        ({"tokenizer__ggml__pre": "default"}, "convert the model again with a current one"),
        ({"tokenizer__ggml__model": "t5"}, "a tokenizer of kind 't5' can't be converted"),
        ({"tokenizer__ggml__merges": ["h e x"]}, "'h e x' is not two tokens"),
        ({"tokenizer__ggml__merges": ["h q"]}, "the vocabulary and the merges don't fit"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "have 2 types"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "eos_token_id=9999 is not one of"),
        ({"tokenizer__ggml__bos_token_id": None, "tokenizer__ggml__add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_contents_that_cannot_be_converted(changes, words, source, target, tmp_path):
    write_gguf(source, hf_tensors(), **changes)
    with pytest.raises(FileError) as caught:
        convert_gguf(source, target)
    assert words in str(caught.value) and str(source) in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_keys_that_llama_cpp_does_not_read_or_that_change_nothing_are_named(source, target, capsys):
    neutral = {
        "llama__tensor_data_layout": "Meta AI original pth",
        "llama__rope__scaling__attn_factor": 1.0,
        "llama__attention__causal": True,
        "llama__made_by": "somebody",
    }
    write_gguf(source, hf_tensors(), **neutral)
    assert main(["convert", str(source), str(target)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mpitp: ")]
    assert len(told) == 1 and told[0].endswith(
        "passed over, since they don't change the maths: llama.rope.scaling.attn_factor, llama.attention.causal, "
        "llama.made_by"
    )


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"llama__rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama__rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama__rope__scaling__factor": 1.0}, None),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}, None),
    ],
)
def test_a_factor_without_a_type_is_linear(keys, scaling, source, target):
    assert convert_gguf(write_gguf(source, hf_tensors(), **keys), target)["rope_scaling"] == scaling


@pytest.mark.parametrize("token", ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"])
def test_an_end_of_turn_without_a_key_ends_a_text(token, source, target):
    tokens, _, _ = bpe_vocabulary()
    tokens[-2] = token
    last = len(tokens)
    keys = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__eos_token_id": last - 3}
    config = convert_gguf(write_gguf(source, hf_tensors(), **keys), target)
    assert config["eos_token_id"] == [last - 3, last - 2]
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [last - 3, last - 2]
    loaded = load_config(target)
    assert loaded.eos_ids == (last - 3, last - 2)
    assert notices_of(with_ends(loaded, TOKENIZER, load_tokenizer(target).eos_ids)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value, source, target, tmp_path):
    tensors = hf_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    write_gguf(source, tensors)
    with pytest.raises(FileError, match=r"blk.1.ffn_up.weight holds numbers that are not finite"):
        convert_gguf(source, target)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("key", "value"),
    [("scores", "x"), ("scores", math.nan), ("token_type", "x"), ("token_type", 7), ("token_type", -1)]
    + [("token_type", 1.0), ("token_type", True)],
)
def test_scores_and_types_of_tokens_are_numbers(key, value, source, target):
    values = [value] * len(SENTENCEPIECE["tokens"])
    tokenizer = sentencepiece_keys() | {f"tokenizer.ggml.{key}": values}
    write_gguf(source, hf_tensors(vocab_size=len(values)), tokenizer=tokenizer)
    with pytest.raises(FileError, match=rf"tokenizer.ggml.{key} must be made of .*, got {value!r}"):
        convert_gguf(source, target)
    assert not target.exists()


def test_another_architecture_and_another_tensor(source, target):
    with pytest.raises(FileError, match="the architecture 'gpt2' can't be converted; supported: llama, qwen2"):
        convert_gguf(write_gguf(source, hf_tensors(), "gpt2"), target)
    tensors = hf_tensors() | {"blk.0.ssm_a": np.zeros(3, np.float32)}
    with pytest.raises(FileError, match=r"tensor blk.0.ssm_a is not one of a Llama-type model"):
        convert_gguf(write_gguf(source, tensors), target)
    with pytest.raises(FileError, match=r"holds no token_embd.weight"):
        convert_gguf(write_gguf(source, {"model.norm.weight": np.zeros(3, np.float32)}), target)


def test_a_weight_beyond_float16(source, target, tmp_path):
    tensors = hf_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    write_gguf(source, tensors)
    with pytest.raises(FileError, match="up_proj.weight is beyond what float16 holds; save as bfloat16"):
        convert_gguf(source, target, dtype="float16")
    assert list(tmp_path.iterdir()) == [source]


def test_the_command(source, target, capsys):
    write_gguf(source, hf_tensors())
    assert main(["convert", str(source), str(target), "--dtype", "float16"]) == 0
    printed = capsys.readouterr()
    assert "2 layers of 64, 4 heads on 2 KV heads" in printed.out and "converting: 100%" in printed.err
    assert main(["convert", str(source), str(target)]) == 4
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["convert", str(source), str(target), "--overwrite"]) == 0
    assert main(["convert", str(source), str(target), "--dtype", "int8"]) == 2
