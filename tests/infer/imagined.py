"""An executor without a model: its cache holds, at each place, the whole beginning of the text that was written there.

So it finds out at once when a text is given places that hold something else, whatever was shared, copied or preempted
before. The next token follows from the beginning alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitp.comm import SerialGroup
from mpitp.infer.blocks import BLOCK
from mpitp.infer.orders import OrderChannel, Reason, WorkOrder, decoded, encoded
from mpitp.infer.requests import Listener
from mpitp.infer.sampling import Likelihoods

VOCAB = 50
Beginning = tuple[int, ...]


def next_token(text: Beginning) -> int:
    """Any function of the whole text, which often repeats itself."""
    return text[-5] if len(text) > 5 and hash(text) % 4 else hash(text) % VOCAB


def written(prompt: Beginning, room: int, end: int | None = None) -> list[int]:
    """The text that must come of a prompt."""
    text = list(prompt)
    while len(text) < len(prompt) + room and (end is None or next_token(tuple(text)) != end):
        text.append(next_token(tuple(text)))
    return text[len(prompt) :]


def drafted_token(text: Beginning) -> int:
    """What a small model makes of a text: mostly the same."""
    return next_token(text) if hash((text, 1)) % 3 else 7


@dataclass(frozen=True, slots=True)
class Imagined:
    """In the place of a model: what it takes for the next token, and what is asked of its config."""

    token: Callable[[Beginning], int]
    vocab_size: int = VOCAB
    cached_positions: int = 45

    @property
    def config(self) -> Imagined:
        return self


class ImaginedExecutor:
    """In the place of an `Executor`."""

    def __init__(self, num_blocks: int, *, drafts: bool = False) -> None:
        self.num_blocks = num_blocks
        self.channel = OrderChannel(SerialGroup(), num_blocks * BLOCK)
        self.models = [Imagined(next_token), Imagined(drafted_token)][: 1 + drafts]
        self.model = self.models[0]
        self.caches: list[list[Beginning]] = [[()] * (num_blocks * BLOCK) for _ in self.models]
        self.most_rows = 0

    def execute(self, order: WorkOrder) -> Any:
        assert decoded(encoded(order), self.num_blocks * BLOCK) == order
        for cache in self.caches:
            for source, target, count in order.copies:
                cache[target : target + count] = cache[source : source + count]
        stored = self.caches[order.model]
        if not order.model:
            self.most_rows = max(self.most_rows, sum(len(run.tokens) for run in order.runs))
        logits = []
        for run in order.runs:
            places = [place for start, stop in run.table for place in range(start, stop)]
            text = stored[places[run.first - 1]] if run.first else ()
            assert [stored[p] for p in places[: run.first]] == [text[: i + 1] for i in range(run.first)]
            for place, token in enumerate(run.tokens):
                text = (*text, token)
                stored[places[run.first + place]] = text
                if place >= len(run.tokens) - run.wanted:
                    logits.append(np.eye(VOCAB)[self.models[order.model].token(text)])
        return np.array(logits).reshape(-1, VOCAB)


class Notes(Listener):
    """Keeps what it is told."""

    def __init__(self, stop: int | None = None) -> None:
        self.tokens: list[int] = []
        self.scores: list[Likelihoods | None] = []
        self.reason: Reason | None = None
        self.stop = stop

    def token(self, token: int, scores: Likelihoods | None) -> bool:
        assert self.reason is None
        self.tokens.append(token)
        self.scores.append(scores)
        return token != self.stop

    def end(self, reason: Reason) -> None:
        assert self.reason is None
        self.reason = reason
