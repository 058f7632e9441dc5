"""Predict mode: a question about an operation before it is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpitp.step.film import PARTIAL, REPLICATED, SHARDED, Op


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, which answer is right, that answer in words, and which answers can be one.

    `form`: a pattern that every answer has, right or not; `hint`: the same in words.
    """

    text: str
    right: str
    answer: str
    form: re.Pattern[str]
    hint: str

    def is_answer(self, given: str) -> bool:
        """Whether this is an answer at all, and not a slip of the keys."""
        return bool(self.form.fullmatch(given.strip().lower()))

    def is_right(self, given: str) -> bool:
        """Whether an answer is right; brackets, spaces and capitals don't matter."""
        return _plain(given) == _plain(self.right)


_SHAPE = (re.compile(r"[\[(]?\s*\d+(\s*[, x]\s*\d+)*\s*,?\s*[\])]?"), "numbers, like 4, 6")
_LETTER = (re.compile("r|replicated|s|sharded|p|partial"), "r, s or p")
_YES_NO = (re.compile("y|yes|n|no"), "y or n")


def question_about(op: Op) -> Question:
    """A question about the operation that comes next, always the same one for the same operation."""
    if op.collective or op.number % 3 == 2:
        return _about_communication(op)
    array = op.made
    name = f"{op.layer} ({op.phase}) computes {op.equation}.\n"
    if op.number % 3 == 0:
        letters = {REPLICATED: "r", SHARDED: "s", PARTIAL: "p"}
        text = f"{name}How are the ranks' {array.name} placed: r replicated (I, R), s sharded (V), p partial (P)?"
        return Question(text, letters[array.placement], f"{array.name} is {array.placement_text}", *_LETTER)
    place = op.number % len(op.ranks)
    rank, shape = op.ranks[place], array.pictures[place].shape
    text = f"{name}Which shape has {array.name} on rank {rank}? (like 4, 6)"
    return Question(text, ", ".join(map(str, shape)), f"{array.name} on rank {rank} is {list(shape)}", *_SHAPE)


def _about_communication(op: Op) -> Question:
    text = f"Next in {op.layer} ({op.phase}): must the ranks communicate now? y or n"
    if op.collective:
        return Question(text, "y", f"yes, {op.collective}: {op.equation}", *_YES_NO)
    return Question(text, "n", f"no, every rank works by itself: {op.equation}", *_YES_NO)


def _plain(text: str) -> str:
    numbers = re.findall(r"\d+", text)
    return " ".join(numbers) if numbers else text.strip().lower()[:1]
