"""Random arrivals: no block is lost or shared wrongly, nobody starves, the limits are kept, every text comes out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mpitp.errors import UsageError
from mpitp.infer.blocks import BLOCK, BlockPool, blocks_of
from mpitp.infer.engine import Engine
from mpitp.infer.orders import Reason
from mpitp.infer.requests import Request
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits, Plan, RunningText, WaitingText, plan_step
from mpitp.infer.speculation import Speculation
from tests.infer.imagined import Imagined, ImaginedExecutor, Notes, drafted_token, written


def request(prompt: tuple[int, ...], room: int, **more: Any) -> Request:
    return Request(prompt, room, Notes(), Sampling(), **more)


def drawn_prompt(rng: random.Random) -> tuple[int, ...]:
    """Many begin alike."""
    family = random.Random(rng.randrange(4))
    beginning = [family.randrange(50) for _ in range(rng.choice([0, 7, 16, 33, 48]))]
    return tuple(beginning + [rng.randrange(50) for _ in range(rng.randrange(1, 30))])


def check_books(engine: Engine) -> None:
    """Every block is held once by each text that has it, and by nobody else."""
    held = [block for text in engine.running.values() for block in text.blocks]
    assert all(engine.pool._holders[block] == held.count(block) for block in range(engine.pool.num_blocks))
    assert engine.pool.free == engine.pool.num_blocks - len(set(held))
    assert all(len(text.blocks) * BLOCK >= text.computed for text in engine.running.values())
    assert len(engine.running) <= engine.limits.texts


SPECULATIONS: dict[str, Any] = {"": None, "lookup": Speculation(5), "draft": Speculation(3, Imagined(drafted_token))}


@pytest.mark.parametrize(
    ("seed", "speculate"),
    [*((seed, "") for seed in range(8)), *((seed, how) for seed in range(4) for how in ("lookup", "draft"))],
)
def test_random_arrivals(seed: int, speculate: str) -> None:
    rng = random.Random(seed)
    texts = rng.choice([1, 3, 8])
    executor: Any = ImaginedExecutor(rng.choice([8, 12, 40]), drafts=speculate == "draft")
    limits = Limits(texts, rng.choice([2 * texts, 40]), drafted_rows=rng.choice([8, 40]))
    engine = Engine(executor, limits, speculation=SPECULATIONS[speculate])
    asked: dict[int, Request] = {}
    begun: list[int] = []
    leaders: set[int] = set()
    for _ in range(250):
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            group = [request(drawn_prompt(rng), rng.randrange(1, 40), ends=frozenset([3]))]
            number = engine.submit(group[0])
            asked[number] = group[0]
            leaders.add(number)
            for _ in range(rng.choice([0, 0, 2])):  # siblings, which go on from its prompt
                sibling = request(tuple(group[0].prompt), rng.randrange(1, 20), after=number)
                asked[engine.submit(sibling)] = sibling
        if rng.random() < 0.05 and (engine.running or engine.waiting):
            gone = rng.choice([*engine.running, *(text.number for text in engine.waiting)])
            engine.cancel(gone)
            del asked[gone]
            check_books(engine)
        engine.step()
        begun += [number for number in engine.plan.admitted if number not in begun] if engine.plan else []
        check_books(engine)
    while engine.step():
        check_books(engine)
    assert executor.most_rows <= engine.limits.rows
    first_of_a_prompt = [number for number in begun if number in leaders]
    assert first_of_a_prompt == sorted(first_of_a_prompt), "one has overtaken another"
    for each in asked.values():
        assert isinstance(each.listener, Notes)
        assert each.listener.tokens == written(tuple(each.prompt), each.room, 3 if each.ends else None)
        assert each.listener.reason is not None
    assert len(asked) > 100
    assert engine.pool.free == engine.pool.num_blocks and not any(engine.pool._holders)
    assert engine.reused_tokens > 500
    assert texts < 3 or executor.num_blocks > 12 or engine.preemptions > 0
    assert bool(speculate) == (engine.drafted_tokens > 100) == (engine.accepted_tokens > engine.drafted_tokens / 10)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_texts_that_need_the_whole_cache(blocks: int) -> None:
    """Also those whose beginning stands in it, in a block that is begun: nobody waits for ever."""
    engine = Engine(ImaginedExecutor(blocks), Limits(2, 8))  # type: ignore[arg-type]
    for length in range(1, BLOCK * blocks + 1):
        asked = [request((7,) * length, BLOCK * blocks + 1 - length) for _ in range(2)]
        for each in asked:
            engine.submit(each)
        for _ in range(20 * BLOCK * blocks):
            if not engine.step():
                break
            check_books(engine)
        assert [each.listener.tokens for each in asked] == [written(tuple(asked[0].prompt), asked[0].room, None)] * 2
    assert (engine.reused_tokens > 0) == (blocks > 1)  # a copy needs a block beside the one that it is made from


def test_the_same_events_give_the_same_plans() -> None:
    running = [RunningText(i, 16 * i, 16 * i + 1, i, i) for i in (1, 2, 3)]
    waiting = [WaitingText(9, 100, 0, 7)]
    plans = [plan_step(running, waiting, free, Limits(8, 32)) for free in (1, 1)]
    assert plans[0] == plans[1]
    assert plans[0].preempted == (3,) and plans[0].admitted == () and plans[0].grown == ((1, 1), (2, 1))


def check_drafts(plan: Plan, without: Plan, running: list[RunningText], limits: Limits) -> None:
    """Drafts have room, no more are taken than there are, and they change nothing else."""
    assert (plan.preempted, plan.admitted, plan.rows) == (without.preempted, without.admitted, without.rows)
    assert set(without.grown) <= set(plan.grown) or plan.drafts
    tried, grown, rows = dict(plan.drafts), dict(plan.grown), sum(count for _, count in plan.rows)
    assert rows <= limits.rows
    assert not tried or rows + sum(tried.values()) <= limits.drafted_rows
    for text in running:
        places = (text.blocks + grown.get(text.number, 0)) * BLOCK
        assert 0 <= tried.get(text.number, 0) <= text.drafts
        assert text.number not in dict(plan.rows) or text.computed + 1 + tried.get(text.number, 0) <= places


@pytest.mark.parametrize("free", range(30))
def test_no_plan_takes_more_than_there_is(free: int) -> None:
    rng = random.Random(free)
    for _ in range(300):
        running = []
        for number in range(rng.randrange(6)):
            computed = rng.randrange(100)
            blocks, own = blocks_of(max(computed, 1)), rng.randrange(3)
            running.append(RunningText(number, computed, computed + 1, blocks, own, rng.randrange(20)))
        waiting = [WaitingText(10 + i, rng.randrange(1, 90), 0, rng.randrange(1, 8)) for i in range(rng.randrange(5))]
        limits = Limits(6, 16, drafted_rows=12)
        plan = plan_step(running, waiting, free, limits)
        given_up = sum(text.own_blocks for text in running if text.number in plan.preempted)
        taken = sum(count for _, count in plan.grown) + sum(t.blocks for t in waiting if t.number in plan.admitted)
        assert taken <= free + given_up
        check_drafts(plan, plan_step([replace(t, drafts=0) for t in running], waiting, free, limits), running, limits)
        assert len(running) - len(plan.preempted) + len(plan.admitted) <= limits.texts
        assert not running or running[0].number not in plan.preempted
        dealt = dict(plan.rows)
        assert all(dealt[number] >= 1 for number in plan.admitted)


def test_a_short_prompt_is_not_kept_by_a_long_one() -> None:
    executor: Any = ImaginedExecutor(200)
    engine = Engine(executor, Limits(20, 64))
    for i in range(16):
        engine.submit(request((i, i + 1), 200))
    for _ in range(3):
        engine.step()
    engine.submit(request(tuple(range(50)) * 20, 5))
    engine.step()
    short = request((7, 7, 7), 5)
    engine.submit(short)
    for _ in range(3):
        engine.step()
    assert isinstance(short.listener, Notes) and short.listener.tokens


def test_siblings_share_a_prompt_and_copy_where_they_part() -> None:
    executor: Any = ImaginedExecutor(40)
    engine = Engine(executor, Limits(8, 200))
    prompt = tuple(range(40))
    first = engine.submit(request(prompt, 10))
    for i in range(3):
        engine.submit(request(prompt, 10, occurrence=i + 1, after=first))
    engine.step()
    assert len(engine.running) == 1
    engine.step()
    tables = [text.blocks for text in engine.running.values()]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 4, "each writes to a copy of its own"
    assert engine.reused_tokens == 3 * 39


def test_a_text_that_never_fits_is_refused() -> None:
    engine = Engine(ImaginedExecutor(4), Limits(4, 20))  # type: ignore[arg-type]
    engine.submit(request((1,) * 60, 5))
    with pytest.raises(UsageError, match=r"60 \+ 6 tokens doesn't fit into the cache of 64"):
        engine.submit(request((1,) * 60, 6))
    while engine.step():
        pass


def test_a_listener_ends_a_text() -> None:
    executor: Any = ImaginedExecutor(8)
    engine = Engine(executor, Limits(2, 20))
    whole = written((1, 2), 20)
    notes = Notes(stop=whole[4])
    engine.submit(Request((1, 2), 20, notes, Sampling()))
    while engine.step():
        pass
    assert notes.tokens == whole[: whole.index(whole[4]) + 1] and notes.reason is Reason.STOP


def test_blocks_lie_together_and_the_oldest_idle_one_goes_first() -> None:
    pool = BlockPool(6)
    first = pool.take(2)
    assert first == [0, 1]
    node = pool.file(0, 0, range(BLOCK))
    pool.file(1, node, range(5))
    pool.release(first)
    assert pool.free == 6 and pool.match([*range(BLOCK), 0, 1, 2, 9]).tokens == BLOCK + 3
    assert pool.take(5) == [2, 3, 4, 5, 1], "what is filed is kept as long as there is another place"
    assert pool.match([*range(BLOCK), 0, 1, 2, 9]).tokens == BLOCK
