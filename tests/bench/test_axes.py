"""`mpitp bench axes`: the bytes of each axis are those of the formulas, and peers are asked in turn."""

from __future__ import annotations

from typing import Any

import pytest

from mpitp.bench import axes
from mpitp.bench.axes import LAYOUTS, measure, message_rate, report
from mpitp.comm import SerialGroup, run_threads
from mpitp.errors import UsageError
from tests.bench.test_command import numbers, parsed

SIZES = "--layers 3 --hidden 24 --heads 6 --vocab 18 --ffn 12 --batch 2 --seq 20 --rounds 1".split()
TOKENS, WIDTH, ITEM = 2 * 20, 24, 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_axis_sends_its_bytes(ranks: int) -> None:
    args = parsed("axes", *SIZES, "--microbatches", "6")
    found = run_threads(ranks, lambda group: measure(args, group))
    assert all(each["layouts"] == found[0]["layouts"] for each in found)
    layouts, small = found[0]["layouts"], 0.06  # counts, losses, and a norm of every part
    assert set(layouts) == set(LAYOUTS)
    message, others = TOKENS * WIDTH * ITEM, 2 * (ranks - 1) / ranks
    sums = 6 * (4 * 3 + 2) * message * others  # four a block, embedding and head
    assert layouts["tp"]["sent_bytes"] == pytest.approx(sums + 6 * 3 * TOKENS * ITEM * others, rel=small)
    gradients = 4 * (18 * 24 + 20 * 24 + 3 * (4 * 24 * 24 + 4 * 24 + 2 * 12 * 24 + 12 + 24 + 4 * 24) + 2 * 24)
    assert layouts["dp"]["sent_bytes"] == pytest.approx(gradients * others, rel=small)
    table = 18 * 24 * ITEM  # tied between the ends; a stage in the middle sends both ways instead
    messages = 6 * TOKENS * WIDTH * ITEM
    assert layouts["pp zb"]["sent_bytes"] == pytest.approx(messages + (table if ranks == 2 else messages), rel=small)
    lines = report(found[0])
    assert len(lines) == 5 + len(LAYOUTS) and lines[-1].startswith("dp zero 3")


class FakePeer:
    """Answers as a peer does."""

    version = "9.9"
    asked: list[tuple[str, tuple[int, int]]] = []

    def __init__(self, python: str, program: str, settings: dict[str, Any], ranks: int, place: tuple[int, int]) -> None:
        assert program == "torch_axes.py" and settings["address"] == "127.0.0.1" and settings["microbatches"] == 2
        self.what = settings["form"], place

    def ask(self, line: str) -> dict[str, Any]:
        self.asked.append(self.what)
        return {"seconds": 1.0}

    def end(self) -> None:
        pass


def test_a_peer_runs_beside_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "Peer", FakePeer)
    args = parsed("axes", *SIZES, "--microbatches", "2", "--against", "torch", "--peer-python", "python")
    facts = run_threads(2, lambda group: measure(args, group))[0]
    assert set(facts["peers"]) == {"torch, tp", "torch, ddp", "torch, fsdp", "torch, pp"}
    assert facts["torch"] == "9.9" and facts["peers"]["torch, fsdp"]["beside"] == "dp zero 3"
    places = {rank: {place[1] for form, place in FakePeer.asked if place[0] == rank} for rank in (0, 1)}
    assert places[0] == places[1], "the ranks of a form meet at one port"
    assert "PyTorch 9.9" in "\n".join(report(facts)) and all(number >= 0 for number in numbers(facts["peers"]))


def test_what_cannot_be_measured() -> None:
    with pytest.raises(UsageError, match="a job of 1"):
        measure(parsed("axes", *SIZES), SerialGroup())
    with pytest.raises(UsageError, match="can't be dealt evenly to 3"):
        run_threads(3, lambda group: measure(parsed("axes", *SIZES, "--microbatches", "4"), group))
    words = ["--microbatches", "5", "--against", "torch", "--peer-python", "python"]
    with pytest.raises(UsageError, match="that 5 ranks divide; not heads 6"):
        run_threads(5, lambda group: measure(parsed("axes", *SIZES, *words, "--layers", "5"), group))


def test_the_rate_of_a_message() -> None:
    rates = run_threads(3, message_rate)
    assert rates[0] == rates[1] == rates[2] > 0
