"""Generation: what the cache, the batch, the ranks and the seed may and may not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import ConfigError, NumericError, UsageError
from mpitp.infer.generate import Completion, Follower, Speed, generate
from mpitp.infer.sampling import Sampling
from mpitp.models import Batch, CausalLM
from tests.models.model_cases import CONFIGS, make_model

MODELS = ["gpt2", "llama 9/3", "llama biases, tied, 5/1, llama3", "qwen2 6/2, tied"]
PROMPTS = [[1, 2, 3, 4, 5], [7], [8, 9, 10], [7, 7]]
SAMPLED = Sampling(temperature=1.3, top_k=20, top_p=0.95, seed=11)


def model_of(name: str, group: Group | None = None) -> CausalLM:
    return make_model(group or SerialGroup(), CONFIGS[name])


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def uncached_greedy(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """The most likely continuation, the whole text computed anew for every token."""
    text = list(prompt)
    for _ in range(count):
        logits, _ = model.forward(Batch.of_lists([text]))
        text.append(int(model.gather_logits(logits)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_most_likely_token_of_the_uncached_model(name: str) -> None:
    model = model_of(name)
    found = tokens_of(generate(model, PROMPTS, 6, eos_ids=()))
    assert found == [uncached_greedy(model, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_equal_the_uncached_ones(name: str, ranks: int) -> None:
    """Prompts of unequal lengths, fed in unequal pieces, one of them dropped on the way."""

    def check(group: Group) -> None:
        model = model_of(name, group)
        texts = np.random.default_rng(0).integers(0, 53, (3, 12)).tolist()
        caches = model.new_caches([12, 9, 12])
        past, before = [0, 0, 0], (0, 1, 2)
        for active, pieces in (((0, 1, 2), (5, 1, 3)), ((0, 1, 2), (1, 4, 2)), ((0, 2), (1, 1)), ((2,), (6,))):
            caches.keep([row for row, i in enumerate(before) if i in active])
            before = active
            fed = [texts[i][past[i] : past[i] + n] for i, n in zip(active, pieces, strict=True)]
            logits = model.next_logits(Batch.of_lists(fed, tuple(past[i] for i in active)), caches)
            for row, (i, n) in enumerate(zip(active, pieces, strict=True)):
                past[i] += n
                whole, _ = model.forward(Batch.of_lists([texts[i][: past[i]]]))
                np.testing.assert_allclose(logits[row], model.gather_logits(whole)[-1], rtol=0, atol=1e-12)

    run_threads(ranks, check)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_unequal_prompts_equals_the_single_ones(name: str, sampling: Sampling) -> None:
    model = model_of(name)
    alone = [tokens_of(generate(model, [prompt], 7, sampling))[0] for prompt in PROMPTS]
    assert tokens_of(generate(model, PROMPTS, 7, sampling)) == alone
    assert tokens_of(generate(model, PROMPTS[::-1], 7, sampling)) == alone[::-1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_text_on_any_number_of_ranks(name: str, ranks: int) -> None:
    def texts(group: Group) -> list[list[list[int]]]:
        model = model_of(name, group)
        return [tokens_of(generate(model, PROMPTS, 6, sampling, eos_ids=())) for sampling in (Sampling(), SAMPLED)]

    expected = texts(SerialGroup())
    assert run_threads(ranks, texts) == [expected] * ranks


def test_an_end_token_ends_one_text_and_is_left_out() -> None:
    model = model_of("gpt2")
    plain = tokens_of(generate(model, PROMPTS, 8, eos_ids=()))
    end = plain[0][3]
    found = generate(model, PROMPTS, 8, eos_ids=[end, 10**6])
    for text, completion in zip(plain, found, strict=True):
        stop = text.index(end) if end in text else None
        assert completion.tokens == text[:stop]
        assert completion.finish_reason == ("length" if stop is None else "eos")
    assert found[0].finish_reason == "eos"


def test_end_tokens_come_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama 9/3")
    assert model.config.eos_ids == (52, 51)
    for end in (52, 51):
        monkeypatch.setattr(model, "next_logits", lambda batch, caches, end=end: np.eye(53)[[end]])
        assert generate(model, [[1, 2]], 5) == [Completion([], "eos")]
        assert generate(model, [[1, 2]], 5, eos_ids=()) == [Completion([end] * 5, "length")]


def test_texts_end_at_the_last_position() -> None:
    model = model_of("gpt2")
    assert model.config.max_positions == 24
    prompts = [list(range(24)), list(range(23)), list(range(20)), [1]]
    found = generate(model, prompts, 50, eos_ids=())
    assert [len(completion.tokens) for completion in found] == [1, 2, 5, 24]
    assert all(completion.finish_reason == "length" for completion in found)
    assert found[2].tokens == uncached_greedy(model, prompts[2], 5)


def test_tokens_are_handed_on_as_they_come() -> None:
    def run(group: Group) -> tuple[list[tuple[int, int]], list[list[int]]]:
        seen: list[tuple[int, int]] = []
        texts = generate(
            model_of("gpt2", group), PROMPTS, 4, follower=Follower(lambda i, token: seen.append((i, token)))
        )
        return seen, tokens_of(texts)

    for seen, texts in run_threads(2, run):
        assert [[token for i, token in seen if i == prompt] for prompt in range(4)] == texts
        assert [i for i, _ in seen[:4]] == [0, 1, 2, 3], "one token of each text at a time"


def test_speed_counts_tokens() -> None:
    speed = Speed()
    generate(model_of("gpt2"), PROMPTS, 4, eos_ids=(), follower=Follower(speed=speed))
    assert (speed.prefill_tokens, speed.decode_tokens) == (11, 4 * 3)
    assert speed.prefill_seconds > 0 and speed.decode_seconds > 0


def test_seeds_and_equal_prompts() -> None:
    model = model_of("gpt2")

    def sample(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return tokens_of(generate(model, prompts, 12, Sampling(1.5, seed=seed), eos_ids=()))

    assert sample([[1, 2]], 5) == sample([[1, 2]], 5)
    assert len({tuple(sample([[1, 2]], seed)[0]) for seed in range(6)}) == 6
    thrice = sample([[1, 2], [1, 2], [3], [1, 2]], 5)
    assert len({tuple(text) for text in thrice}) == 4
    assert [thrice[0]] == sample([[1, 2]], 5), "more of the same don't change the first"
    greedy = tokens_of(generate(model, [[1, 2], [1, 2]], 5))
    assert greedy[0] == greedy[1]


@pytest.mark.parametrize(
    ("prompts", "count", "error", "words"),
    [
        ([], 3, UsageError, "no prompt"),
        ([[1], []], 3, UsageError, "prompt 2 is empty"),
        ([[1]], 0, UsageError, "at least 1, got 0"),
        ([[1]], -1, UsageError, "at least 1, got -1"),
        ([[1] * 25], 3, UsageError, "25 tokens is longer than the model's 24 positions"),
        ([[1, 53]], 3, ConfigError, "token id 53 lies outside the model's vocabulary of 53"),
        ([[-1]], 3, ConfigError, "token id -1 lies outside"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_refused(prompts: Any, count: int, error: type[Exception], words: str, ranks: int) -> None:
    def check(group: Group) -> None:
        with pytest.raises(error, match=words):
            generate(model_of("gpt2", group), prompts, count)

    run_threads(ranks, check)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_logits_that_are_not_numbers_stop_every_rank(sampling: Sampling) -> None:
    def check(group: Group) -> None:
        model = model_of("llama 9/3", group)
        if group.rank == 1:
            dict(model.named_params())["blocks.1.mlp.down.weight"].data[0, 0] = np.nan
        with np.errstate(all="ignore"), pytest.raises(NumericError, match="not finite"):
            generate(model, PROMPTS, 3, sampling)

    run_threads(2, check)
