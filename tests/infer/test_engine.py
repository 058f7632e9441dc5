"""Real models: whatever goes on around a text, it is the text that it is alone; in the invariant mode to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor, row_by_row
from mpitp.infer.generate import generate
from mpitp.infer.requests import Request
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits
from mpitp.layers.product import DenseProduct
from mpitp.models import CausalLM, config_from_hf
from tests.infer.imagined import Notes
from tests.models.model_cases import LLAMA, RAW, make_model

LONGER = {"max_position_embeddings": 128}
MODELS = {
    "llama": config_from_hf({**LLAMA, **LONGER}),
    "gpt2": config_from_hf({**RAW["gpt2"], "n_positions": 128}),
    "wide": config_from_hf({**LLAMA, **LONGER, "hidden_size": 160, "head_dim": 16, "intermediate_size": 201}),
}
RNG = np.random.default_rng(5)
COMMON = RNG.integers(0, 53, 37).tolist()
PROMPTS = [COMMON + [1, 2], [5], COMMON[:20] + [7], COMMON + [1, 3, 4], [9] * 50, COMMON + [1, 2]]
ROOM = 24
SAMPLED = Sampling(temperature=1.1, top_p=0.9, seed=4)


def written(
    group: Group, model: CausalLM, prompts: Sequence[Sequence[int]], limits: Limits, blocks: int
) -> list[Notes]:
    """All texts through one engine, one arriving each step."""
    notes = [Notes() for _ in prompts]
    executor = Executor(model, blocks, group)
    with row_by_row(model):
        if group.rank:
            executor.follow()
            return notes
        engine = Engine(executor, limits)
        for prompt, note in zip(prompts, notes, strict=True):
            engine.submit(Request(prompt, ROOM, note, SAMPLED, num_best=2))
            engine.step()
        engine.tell_rest()
        while engine.step():
            pass
        engine.end()
    assert engine.pool.free == blocks
    if len(prompts) > 1:
        assert engine.reused_tokens > 50
        assert blocks > 12 or engine.preemptions
    return notes


def results(notes: Sequence[Notes]) -> list[Any]:
    return [(note.tokens, [(s.chosen, s.best) for s in note.scores if s is not None]) for note in notes]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_texts_are_those_that_come_alone(name: str) -> None:
    model = make_model(SerialGroup(), MODELS[name])
    alone = [generate(model, [prompt], ROOM, SAMPLED, eos_ids=())[0].tokens for prompt in PROMPTS]

    def run(group: Group) -> list[list[int]]:
        notes = written(group, make_model(group, MODELS[name]), PROMPTS, Limits(4, 11), 7)
        return [note.tokens for note in notes]

    for ranks in (1, 3):
        assert run_threads(ranks, run)[0] == alone


@pytest.mark.parametrize("name", ["wide", "gpt2"])
def test_invariant_texts_are_the_same_to_the_bit(name: str) -> None:
    """Alone; in a crowd with reused beginnings, small pieces of prompts and preemptions; on more ranks."""

    def invariant(group: Group) -> CausalLM:
        return make_model(group, MODELS[name], "float32", invariant_blocks=6)

    model, group = invariant(SerialGroup()), SerialGroup()
    alone = [results(written(group, model, [prompt], Limits(1, 64), 20))[0] for prompt in PROMPTS]
    assert all(isinstance(block.attention.qkv.product, DenseProduct) for block in model.blocks)

    def crowd(group: Group) -> Any:
        return results(written(group, invariant(group), PROMPTS, Limits(4, 11), 7))

    assert crowd(group) == alone
    for ranks in (3,):
        assert run_threads(ranks, crowd)[0] == alone


def test_penalties_and_bias_reach_the_choice() -> None:
    from mpitp.infer.sampling import Penalties

    model = make_model(SerialGroup(), MODELS["llama"])

    def text(**penalties: Any) -> list[int]:
        return generate(model, [[1, 2, 3]], 30, Sampling(penalties=Penalties(**penalties)), eos_ids=())[0].tokens

    assert len(set(text(presence=1000.0))) == 30, "none comes twice"
    assert text(bias={17: 1000.0}) == [17] * 30
    assert text(bias={17: 1000.0}, frequency=2000.0)[:2] != [17, 17]
    assert text() == generate(model, [[1, 2, 3]], 30, eos_ids=())[0].tokens
