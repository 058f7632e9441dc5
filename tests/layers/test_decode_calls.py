"""A few newest tokens on their short way through the layers: the bits of the layers' own forward, of any model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitp.checkpoint.load import load_model
from mpitp.comm import Group, SerialGroup, run_threads
from mpitp.convert.rounding import round_weights
from mpitp.layers import decode_calls
from mpitp.layers.decode_calls import DecodeCalls
from mpitp.layers.paged_cache import PagedCaches
from mpitp.layers.rows import Rows, Run
from mpitp.layers.site import make_site
from mpitp.models import Batch, config_from_hf
from mpitp.models.activations import round_activations
from mpitp.models.model import CausalLM
from mpitp.ops.groupwise import Grouping
from mpitp.trace.tracer import Tracer
from tests.convert.test_rounding import save
from tests.models.model_cases import LATER_RAW, LLAMA, RAW, make_model

PROMPTS = [[3, 1], [6], [5, 0]]
TABLES = [[(0, 16)], [(32, 48)], [(16, 32)]]
STEPS = 3

pytestmark = pytest.mark.usefixtures("accelerated")  # compiled kernels are what it calls


def logits(model: CausalLM, texts: int, short: DecodeCalls | None) -> list[np.ndarray]:
    """Of the prompts and of some steps behind them."""
    caches, found = PagedCaches(64), []
    caches.tables = TABLES[:texts]
    past = [0] * texts
    news = [list(prompt) for prompt in PROMPTS[:texts]]
    for _ in range(STEPS + 1):
        runs = tuple(Run(i, past[i], len(new), i) for i, new in enumerate(news))
        taken = short if short is not None and short.takes(Rows(runs), caches) else None
        found.append(model.next_logits(Batch(np.array(sum(news, [])), Rows(runs)), caches, short=taken))
        past = [before + len(new) for before, new in zip(past, news, strict=True)]
        news = [[int(token)] for token in found[-1].argmax(axis=1)]
    return found


def check(model: CausalLM, texts: int) -> None:
    for expected, found in zip(logits(model, texts, None), logits(model, texts, model.decode_calls()), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", RAW | LATER_RAW)
@pytest.mark.parametrize("ranks", [1, 3])
def test_bits_are_those_of_the_layers(name: str, ranks: int) -> None:
    config = config_from_hf((RAW | LATER_RAW)[name])

    def run(group: Group) -> None:
        check(make_model(group, config), texts=3)

    run_threads(ranks, run)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype: str) -> None:
    for texts in (1, 2):
        check(make_model(SerialGroup(), config_from_hf(LLAMA), dtype=dtype), texts)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_weights_in_8_and_4_bits(bits: int, activations: str, tmp_path: Path) -> None:
    round_weights(save(tmp_path / "floats"), tmp_path / "rounded", Grouping(bits))

    def run(group: Group) -> None:
        model = load_model(tmp_path / "rounded", make_site(group))
        round_activations(model, activations)
        for texts in (1, 3):
            check(model, texts)

    for ranks in (1, 2):
        run_threads(ranks, run)


def test_it_is_taken_for_newest_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by all of a plain Llama's layers: none of them is asked as ever."""
    model = make_model(SerialGroup(), config_from_hf(LLAMA))
    taken, asked = [], []
    forward, as_ever = DecodeCalls.forward, decode_calls._as_ever
    monkeypatch.setattr(DecodeCalls, "forward", lambda self, x, run: taken.append(len(x)) or forward(self, x, run))
    monkeypatch.setattr(decode_calls, "_as_ever", lambda layer: asked.append(type(layer).__name__) or as_ever(layer))
    logits(model, 2, model.decode_calls())
    assert taken == [2] * STEPS
    assert asked == ["VocabParallelEmbedding"]
    logits(make_model(SerialGroup(), config_from_hf(LLAMA), invariant_blocks=2), 2, None)
    assert taken == [2] * STEPS


def test_layers_that_are_observed_are_seen_in_every_step() -> None:
    seen = []
    for is_short in (False, True):
        tracer = Tracer()
        model = make_model(tracer.watch(SerialGroup()), config_from_hf(LLAMA))
        tracer.attach(model)
        logits(model, 2, model.decode_calls() if is_short else None)
        seen.append([(span.name, span.phase) for span in tracer.spans])
    assert len(seen[0]) > 10 * (STEPS + 1) and seen[0] == seen[1]
