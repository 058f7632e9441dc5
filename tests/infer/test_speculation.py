"""Whatever is drafted, a text is the one that comes without drafts: greedy or drawn, in any crowd, on any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.errors import NumericError, UsageError
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor, row_by_row
from mpitp.infer.generate import Follower, generate
from mpitp.infer.requests import Request
from mpitp.infer.sampling import Penalties, Sampling
from mpitp.infer.schedule import Limits
from mpitp.infer.speculation import Speculation, lookup
from mpitp.models import CausalLM, config_from_hf
from tests.infer.imagined import Notes
from tests.infer.test_engine import COMMON, MODELS, PROMPTS, results
from tests.models.model_cases import LLAMA, make_model

SMALL = config_from_hf({**LLAMA, "max_position_embeddings": 60, "num_hidden_layers": 1})
GREEDY, DRAWN = Sampling(), Sampling(temperature=0.2, seed=4)
PUNISHED = Sampling(penalties=Penalties(repetition=1.2, frequency=0.1, bias={3: 0.5}))


def speculation(how: str, group: Group) -> Speculation:
    """`same`: the model drafts for itself, and is mostly right."""
    if how == "lookup":
        return Speculation(6)
    return Speculation(3, make_model(group, SMALL if how == "small" else MODELS["llama"]))


@pytest.mark.parametrize(
    ("tokens", "most", "found"),
    [
        ([1, 2, 3, 9, 2, 3], 3, [9, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 1, [4]),  # the latest of equally long endings
        ([5, 1, 2, 3, 9, 1, 2, 4, 8, 5, 1, 2], 2, [3, 9]),  # a longer one before it
        ([1, 2, 3, 4, 5, 7, 9, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], 1, [8]),  # no more than four tokens count
        ([7, 7, 7], 5, [7]),
        ([1, 2, 3, 2], 5, []),  # one token is no ending
        ([1], 5, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_what_followed_the_last_time(tokens: list[int], most: int, found: list[int]) -> None:
    assert list(lookup(tokens, most)) == found


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PUNISHED], ids=["greedy", "drawn", "punished"])
@pytest.mark.parametrize("how", ["lookup", "small", "same"])
def test_generated_texts_are_those_without(how: str, sampling: Sampling) -> None:
    model, end = make_model(SerialGroup(), MODELS["llama"]), [11]
    expected = generate(model, PROMPTS, 30, sampling, end)

    def run(group: Group) -> Any:
        follower = Follower()
        large = make_model(group, MODELS["llama"])
        found = generate(large, PROMPTS, 30, sampling, end, follower, speculation=speculation(how, group))
        return found, follower.speed

    for ranks in (1, 3):
        told = run_threads(ranks, run)
        assert [found for found, _ in told] == [expected] * ranks
        drafts, chosen = told[0][1].drafts, sum(len(text.tokens) for text in expected)
        assert drafts.tried >= drafts.right > 0
        assert chosen - 3 * len(PROMPTS) <= drafts.steps + drafts.right <= chosen + len(PROMPTS)
        assert {speed.decode_tokens for _, speed in told[1:]} <= {told[0][1].decode_tokens}
        if how == "same" and sampling is GREEDY:
            assert drafts.right > 0.7 * drafts.tried


def crowd(group: Group, model: CausalLM, asked: Speculation | None, blocks: int) -> list[Notes]:
    """The texts through one engine, one arriving a step, in a cache that is too small for all."""
    notes = [Notes() for _ in PROMPTS]
    executor = Executor(model, blocks, group, asked and asked.draft)
    with row_by_row(model):
        if group.rank:
            executor.follow()
            return notes
        engine = Engine(executor, Limits(4, 40, drafted_rows=12), speculation=asked)
        for prompt, note in zip(PROMPTS, notes, strict=True):
            engine.submit(Request(prompt, 24, note, DRAWN if len(prompt) == 39 else GREEDY, num_best=2))
            engine.step()
        while engine.step():
            held = [block for text in engine.running.values() for block in text.blocks]
            assert engine.pool.free == blocks - len(set(held)), "what was tried in vain gives its blocks back"
        engine.end()
    assert engine.pool.free == blocks and engine.preemptions and engine.reused_tokens
    assert asked is None or engine.accepted_tokens
    return notes


@pytest.mark.parametrize("how", ["lookup", "same"])
def test_invariant_texts_are_the_same_to_the_bit(how: str) -> None:
    def run(group: Group, *, drafts: bool) -> Any:
        model = make_model(group, MODELS["gpt2"], "float32", invariant_blocks=6)
        asked = Speculation(6) if how == "lookup" else Speculation(3, make_model(group, MODELS["gpt2"], "float32"))
        return results(crowd(group, model, asked if drafts else None, 7))

    expected = run(SerialGroup(), drafts=False)
    for ranks in (1, 2, 3, 4):
        assert run_threads(ranks, lambda group: run(group, drafts=True))[0] == expected


def test_a_text_beyond_the_small_model_goes_on_without() -> None:
    model = make_model(SerialGroup(), MODELS["llama"])
    small = make_model(SerialGroup(), config_from_hf({**LLAMA, "max_position_embeddings": 41}))
    expected = generate(model, [COMMON, [1]], 60, eos_ids=())
    follower = Follower()
    asked = Speculation(3, small)
    assert generate(model, [COMMON, [1]], 60, eos_ids=(), follower=follower, speculation=asked) == expected
    assert follower.speed.drafts.tried


def test_a_text_with_an_id_that_the_small_model_lacks_goes_on_without() -> None:
    model = make_model(SerialGroup(), MODELS["llama"])
    small = make_model(SerialGroup(), config_from_hf({**LLAMA, "vocab_size": 40, "eos_token_id": 3}))
    last, prompts = model.config.vocab_size - 1, [[1, 2, 3], [4, 5, 4, 5]]
    for asked in (prompts, [[1, last, 2], *prompts]):
        expected, follower = generate(model, asked, 12, eos_ids=()), Follower()
        found = generate(model, asked, 12, eos_ids=(), follower=follower, speculation=Speculation(3, small))
        assert found == expected and follower.speed.drafts.tried


def test_drafts_that_are_not_numbers_end_it_on_all_ranks() -> None:
    def run(group: Group) -> None:
        asked = speculation("small", group)
        assert asked.draft is not None
        dict(asked.draft.named_params())["final_norm.weight"].data[...] = np.nan
        with pytest.raises(NumericError):
            generate(make_model(group, MODELS["llama"]), [[1, 2]], 5, eos_ids=(), speculation=asked)

    run_threads(2, run)


def test_options_that_cannot_be() -> None:
    import argparse

    from mpitp.infer import speculate_options

    for how, tokens, words in (("draft:", 3, "lookup or draft:DIR"), ("none", 3, "lookup"), ("lookup", 0, "1 .. 64")):
        with pytest.raises(UsageError, match=words):
            speculate_options.check(argparse.Namespace(speculate=how, speculate_tokens=tokens))
