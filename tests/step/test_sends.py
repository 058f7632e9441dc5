"""Collectives drawn message by message: everybody ends with what the collective promises, at the textbook's price."""

from __future__ import annotations

import pytest

from mpitp.step.sends import ALGORITHMS, CONJUGATES, WHOLE, WINDOW, Message, Rounds, kind_of, schedules, told_rounds
from mpitp.trace.traffic import wire_bytes

RANKS = (1, 2, 3, 4, 5, 7, 8)
Held = dict[int, list[frozenset[int]]]  # by node and piece: whose contributions


def carry_out(rounds: Rounds, held: Held) -> Held:
    """Messages of one round leave at once; nothing is added twice."""
    for messages in rounds:
        before = {node: list(pieces) for node, pieces in held.items()}
        for message in messages:
            pieces = range(len(held[message.dest])) if message.piece == WHOLE else [message.piece]
            for piece in pieces:
                came = before[message.source][piece]
                if message.adds and message.dest != WINDOW and message.source != WINDOW:
                    assert not came & held[message.dest][piece], "a contribution is counted twice"
                held[message.dest][piece] = came | held[message.dest][piece] if message.adds else came
    return held


def own(ranks: int) -> Held:
    held = {rank: [frozenset({rank})] * ranks for rank in range(ranks)}
    return held | {WINDOW: [frozenset()] * ranks}


def sent(rounds: Rounds, ranks: int, rank: int) -> int:
    """Pieces that a rank sends."""
    return sum(m.times * (ranks if m.piece == WHOLE else 1) for each in rounds for m in each if m.source == rank)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_all_reduce(ranks: int, algorithm: str) -> None:
    everyone = frozenset(range(ranks))
    held = carry_out(ALGORITHMS["all_reduce"][algorithm](ranks), own(ranks))
    assert all(piece == everyone for rank in range(ranks) for piece in held[rank])


@pytest.mark.parametrize("ranks", RANKS)
def test_others(ranks: int) -> None:
    scattered = carry_out(ALGORITHMS["reduce_scatter"]["ring"](ranks), own(ranks))
    assert all(scattered[rank][rank] == frozenset(range(ranks)) for rank in range(ranks))
    begin: Held = {r: [frozenset({r}) if p == r else frozenset() for p in range(ranks)] for r in range(ranks)}
    gathered = carry_out(ALGORITHMS["all_gather"]["ring"](ranks), begin)
    assert all(gathered[rank] == [frozenset({piece}) for piece in range(ranks)] for rank in range(ranks))
    exchanged = [(m.source, m.dest) for each in ALGORITHMS["all_to_all"]["direct"](ranks) for m in each]
    assert sorted(exchanged) == [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    told = carry_out(
        ALGORITHMS["broadcast"]["chain"](ranks), {0: [frozenset({0})], **{r: [frozenset()] for r in range(1, ranks)}}
    )
    assert all(pieces == [frozenset({0})] for pieces in told.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_rings_send_what_the_ledger_counts(ranks: int) -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        (rounds,) = [make(ranks) for name, make in ALGORITHMS[kind].items() if name in ("ring", "direct")]
        given = 1 if kind == "all_gather" else ranks
        for rank in range(ranks):
            assert sent(rounds, ranks, rank) == pytest.approx(wire_bytes(kind, ranks, given, ranks))


def test_words_and_the_page() -> None:
    assert told_rounds(((Message(0, 1, 2, adds=True),),)) == ["round 1 adds: 0>1 piece 2"]
    assert set(ALGORITHMS) == set(CONJUGATES) == set(schedules(3))
    assert schedules(2)["all_gather"]["ring"] == [[[0, 1, 0, 0, 1], [1, 0, 1, 0, 1]]]
    assert kind_of("all_reduce_in_order sum") == kind_of("all_reduce max") == "all_reduce"
