"""Predict mode: a question about an operation before it is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpitp.step.film import PARTIAL, REPLICATED, SHARDED, Op


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, which answers are right, and the answer in words."""

    text: str
    right: str
    answer: str

    def is_right(self, given: str) -> bool:
        """Whether an answer is right; brackets, spaces and capitals don't matter."""
        return _plain(given) == _plain(self.right)


def question_about(op: Op, ranks: int) -> Question:
    """A question about the operation that comes next, always the same one for the same operation."""
    if op.collective or op.number % 3 == 2:
        return _about_communication(op)
    array = op.made
    name = f"{op.layer} ({op.phase}) computes {op.equation}.\n"
    if op.number % 3 == 0:
        letters = {REPLICATED: "r", SHARDED: "s", PARTIAL: "p"}
        text = f"{name}How are the ranks' {array.name} placed: r replicated, s sharded, p partial?"
        return Question(text, letters[array.placement], f"{array.name} is {array.placement_text}")
    rank = op.number % ranks
    shape = array.pictures[rank].shape
    text = f"{name}Which shape has {array.name} on rank {rank}? (like 4, 6)"
    return Question(text, ", ".join(map(str, shape)), f"{array.name} on rank {rank} is {list(shape)}")


def _about_communication(op: Op) -> Question:
    text = f"Next in {op.layer} ({op.phase}): must the ranks communicate now? y or n"
    if op.collective:
        return Question(text, "y", f"yes, {op.collective}: {op.equation}")
    return Question(text, "n", f"no, every rank works by itself: {op.equation}")


def _plain(text: str) -> str:
    numbers = re.findall(r"\d+", text)
    return " ".join(numbers) if numbers else text.strip().lower()[:1]
