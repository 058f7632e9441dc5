"""The invariant layout: the same bits on 1 to 6 ranks in float32, from the logits to the weights after five steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers.passes import DropoutState
from mpitp.layers.site import make_site
from mpitp.models import Batch, DecoderConfig, build_model, config_from_hf
from tests.models.model_cases import (
    GPT2,
    LATER_RAW,
    LLAMA,
    QWEN2,
    Arrays,
    forward_backward,
    make_batch,
    make_model,
    train,
)
from tests.sharded import assert_close, assert_same_bits

CHANGED: dict[str, dict[str, Any]] = {  # cases with fewer heads than blocks, or too short for the texts
    "gemma2": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "bloom": {"hidden_size": 24, "n_head": 6},
    "gpt_neox": {"hidden_size": 48, "num_attention_heads": 6},
    "phi3": {"original_max_position_embeddings": 12},
}
MODELS: dict[str, DecoderConfig] = {
    "gpt2": config_from_hf(GPT2),
    "llama 9/3": config_from_hf(LLAMA),
    "llama 8/2, tied": config_from_hf(
        {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    "llama 6/1, biases": config_from_hf(
        {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
    ),
    # every block one unit wide: vectors where there are matrices elsewhere
    "qwen2 6/2, narrow": config_from_hf(
        {**QWEN2, "intermediate_size": 6, "vocab_size": 6, "head_dim": 2, "eos_token_id": None}
    ),
}
LATER = {name: config_from_hf({**raw, **CHANGED.get(name, {})}) for name, raw in LATER_RAW.items()}


def invariant_run(group: Group, name: str, num_blocks: int = 6, dtype: str = "float32") -> Arrays:
    """All that can be told of a model: a pass, five steps with dropout and clipping, greedy and sampled text."""
    model = make_model(group, (MODELS | LATER)[name], dtype, invariant_blocks=num_blocks)
    result = forward_backward(model, [make_batch(model.config, 3, DropoutState(1, 0))])
    result["one token"] = model.gather_logits(model.forward(Batch.of_lists([[3]]))[0])
    model.zero_grad()
    result |= train(model, dropout=True)
    prompts = [[1, 2, 3, 4], [5], [2, 2]]
    for key, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0, top_p=0.9, seed=3))):
        texts = generate(model, prompts, 6, sampling, eos_ids=())
        result[key] = np.array([text.tokens for text in texts])
    return result


@cache
def one_rank(name: str, num_blocks: int = 6) -> Arrays:
    return invariant_run(SerialGroup(), name, num_blocks)


RUNS = [(name, ranks) for name in ("gpt2", "llama 9/3") for ranks in (2, 3, 4, 5, 6)]
RUNS += [(name, 3) for name in LATER] + [(name, ranks) for name in ("qwen3", "olmo2") for ranks in (2, 4, 5)]
RUNS += [("llama 8/2, tied", 3), ("llama 8/2, tied", 5), ("llama 6/1, biases", 4), ("qwen2 6/2, narrow", 6)]


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_same_bits_at_every_rank_count(name: str, ranks: int) -> None:
    for result in run_threads(ranks, invariant_run, name):
        assert_same_bits(result, one_rank(name))


@pytest.mark.parametrize("num_blocks", [1, 4, 5])
def test_same_bits_with_other_numbers_of_blocks(num_blocks: int) -> None:
    for result in run_threads(min(num_blocks, 3), invariant_run, "llama 9/3", num_blocks):
        assert_same_bits(result, one_rank("llama 9/3", num_blocks))


def plain(group: Group, name: str) -> Arrays:
    return invariant_run(group, name, num_blocks=0, dtype="float64")


@pytest.mark.parametrize("name", MODELS)
def test_differs_from_the_plain_layout_by_rounding(name: str) -> None:
    assert_close(one_rank(name), plain(SerialGroup(), name), 2e-3)
    invariant = invariant_run(SerialGroup(), name, dtype="float64")
    assert_close(invariant, plain(SerialGroup(), name), 1e-10)


def test_the_plain_layout_does_depend_on_the_rank_count() -> None:
    """So that the comparison above could fail."""
    results = [run_threads(ranks, invariant_run, "llama 9/3", 0)[0] for ranks in (1, 3)]
    with pytest.raises(AssertionError, match="the bits differ"):
        assert_same_bits(results[1], results[0])


# Sequences longer than a tile of attention, wide enough for the fast kernels; and widths that leave a rank one column.
LONG: dict[str, DecoderConfig] = {
    "wide": config_from_hf(
        {
            **QWEN2,
            "hidden_size": 130,
            "head_dim": 64,
            "vocab_size": 331,
            "intermediate_size": 341,
            "max_position_embeddings": 140,
        }
    ),
    "narrow": config_from_hf(
        {
            **GPT2,
            **{"vocab_size": 7, "n_embd": 66, "n_inner": 6, "tie_word_embeddings": False, "n_positions": 140},
            "eos_token_id": None,
        }
    ),
}


def long_pass(group: Group, name: str, dtype: str, shape: tuple[int, int]) -> Arrays:
    config = LONG[name]
    model = make_model(group, config, dtype, invariant_blocks=6)
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, (shape[0], shape[1] + 1))
    return forward_backward(model, [Batch.of_rows(tokens[:, :-1], tokens[:, 1:])])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 129), (3, 33)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", LONG)
def test_same_bits_in_every_shape(name: str, dtype: str, shape: tuple[int, int]) -> None:
    expected = long_pass(SerialGroup(), name, dtype, shape)
    for result in run_threads(4, long_pass, name, dtype, shape):
        assert_same_bits(result, expected)


def decoded_logits(group: Group, name: str) -> Arrays:
    """Logits after prompts and after single tokens that attend to the cache."""
    model = make_model(group, LONG[name], "float32", invariant_blocks=6)
    found = {}
    for prompts in ([[1] * 130], [[1, 2, 3], [4]], [[5]]):
        caches = model.new_caches([len(prompt) + 3 for prompt in prompts])
        fed, past = prompts, [0] * len(prompts)
        for step in range(4):
            found[f"{len(prompts[0])} {step}"] = model.next_logits(Batch.of_lists(fed, tuple(past)), caches)
            past = [seen + len(new) for seen, new in zip(past, fed, strict=True)]
            fed = [[step]] * len(prompts)
    return found


@pytest.mark.parametrize("name", LONG)
def test_same_bits_of_logits_from_the_cache(name: str) -> None:
    expected = decoded_logits(SerialGroup(), name)
    for ranks in (2, 4, 6):
        assert_same_bits(run_threads(ranks, decoded_logits, name)[0], expected)


def test_heads_one_wide_are_refused() -> None:
    config = config_from_hf({**GPT2, "n_embd": 6})
    with pytest.raises(ConfigError, match="head_dim of at least 2"):
        build_model(config, make_site(SerialGroup(), invariant_blocks=2))
    build_model(config, make_site(SerialGroup()))


@pytest.mark.parametrize(
    ("ranks", "num_blocks", "words"),
    [
        (1, 10, "invariant_blocks=10 exceeds num_attention_heads=9"),
        (3, 2, "2 blocks can't go to 3 ranks"),
        (10, 10, "use at most 9 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused(ranks: int, num_blocks: int, words: str) -> None:
    def build(group: Group) -> None:
        with pytest.raises(ConfigError, match=words):
            build_model(MODELS["llama 9/3"], make_site(group, invariant_blocks=num_blocks))

    run_threads(ranks, build)
