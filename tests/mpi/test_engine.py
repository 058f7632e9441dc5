"""The engine on real MPI ranks: work orders arrive, ranks that have nothing to do rest."""

from __future__ import annotations

import time

import pytest

from mpitp.comm import Group
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor, row_by_row
from mpitp.infer.generate import Follower, generate
from mpitp.infer.requests import Request
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits
from mpitp.infer.speculation import Speculation
from tests.infer.imagined import Notes
from tests.infer.test_engine import MODELS
from tests.infer.test_speculation import speculation
from tests.models.model_cases import make_model

pytestmark = pytest.mark.mpi
PROMPTS = [[1, 2, 3] * 7, [1, 2, 3] * 6 + [4], [5]]


def test_texts_come_from_all_ranks_which_rest_between(world: Group) -> None:
    model = make_model(world, MODELS["llama"])
    executor = Executor(model, 6, world)
    with row_by_row(model):
        if world.rank:
            started, spent = time.monotonic(), time.thread_time()
            executor.follow()
            texts = None
            assert time.monotonic() - started > 0.5
            assert time.thread_time() - spent < 0.4 + (time.monotonic() - started - 0.5), (
                "a rank that rests burns its core"
            )
        else:
            texts = run_engine(Engine(executor, Limits(2, 9)))
    texts = world.broadcast_object(texts)
    alone = make_model(world.split(world.rank, 0), MODELS["llama"])
    expected = run_engine(Engine(Executor(alone, 6), Limits(2, 9)))
    assert texts == expected


def run_engine(engine: Engine) -> list[list[int]]:
    """The texts; half a second without work lies between."""
    notes = [Notes() for _ in PROMPTS]
    for prompt, note in zip(PROMPTS, notes, strict=True):
        engine.submit(Request(prompt, 6, note, Sampling()))
        while engine.step():
            pass
    engine.tell_rest()
    time.sleep(0.5)
    engine.submit(Request(PROMPTS[0], 3, Notes(), Sampling()))
    while engine.step():
        pass
    engine.end()
    return [note.tokens for note in notes]


@pytest.mark.parametrize("how", ["lookup", "small"])
def test_drafts_change_nothing(world: Group, how: str) -> None:
    def texts(group: Group, asked: Speculation | None) -> list[list[int]]:
        follower = Follower()
        model = make_model(group, MODELS["llama"])
        found = generate(model, PROMPTS, 20, eos_ids=(), follower=follower, speculation=asked)
        assert asked is None or group.rank or follower.speed.drafts.right
        return [text.tokens for text in found]

    assert texts(world, speculation(how, world)) == texts(world.split(world.rank, 0), None)
