from __future__ import annotations

from collections import Counter, deque

import pytest

from mpitp.pipeline.actions import Action, Kind, grid_of, receive_before, send_after
from mpitp.pipeline.schedules import SCHEDULES, Lists, make_schedule

CASES = [
    (name, stages, stages * 2, chunks)
    for name in SCHEDULES
    for stages in (1, 2, 3, 5)
    for chunks in ((2, 3) if name == "interleaved" else (1,))
]


def run_by_messages(lists: Lists) -> int:
    """Walk through all lists as a runner does: started sends, awaited receives. How many messages there were."""
    grid = grid_of(lists)
    todo, mail, count = [deque(own) for own in lists], set(), 0
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(todo):
            while own:
                wanted = receive_before(own[0], stage, grid)
                if wanted is not None and (wanted.peer, stage, wanted.tag) not in mail:
                    break
                if wanted is not None:
                    mail.remove((wanted.peer, stage, wanted.tag))
                sent = send_after(own.popleft(), stage, grid)
                if sent is not None:
                    mail.add((stage, sent.peer, sent.tag))
                    count += 1
                moved = True
    assert not any(todo) and not mail
    return count


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_a_runner_ends_with_every_message_taken(name: str, stages: int, microbatches: int, chunks: int) -> None:
    lists = make_schedule(name, stages, microbatches, chunks)
    hops = stages * chunks - 1 if stages > 1 else 0
    assert run_by_messages(lists) == 2 * microbatches * hops


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CASES)
def test_no_two_messages_between_two_stages_share_a_tag(name: str, stages: int, microbatches: int, chunks: int) -> None:
    lists = make_schedule(name, stages, microbatches, chunks)
    grid = grid_of(lists)
    sent = [(stage, send_after(action, stage, grid)) for stage, own in enumerate(lists) for action in own]
    seen = Counter((stage, message.peer, message.tag) for stage, message in sent if message is not None)
    assert all(count == 1 for count in seen.values())
    assert all(0 <= tag < 2 * microbatches * chunks for _, _, tag in seen)


def test_parts_go_round_the_stages() -> None:
    grid = grid_of(make_schedule("interleaved", 3, 3, 2))
    assert [grid.place(part) for part in range(-1, 7)] == [None, (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), None]
    last = send_after(Action(Kind.FORWARD, 2, 0), 2, grid)
    assert last is not None and last.peer == 0
    assert receive_before(Action(Kind.FORWARD, 2, 1), 0, grid) is not None
    assert receive_before(Action(Kind.FORWARD, 2, 0), 0, grid) is None
    assert send_after(Action(Kind.WEIGHT_GRAD, 2, 1), 0, grid) is None
