"""What is asked of the engine, and who is told of what comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpitp.errors import UsageError
from mpitp.infer.orders import Reason
from mpitp.infer.sampling import NO_PENALTIES, Likelihoods, Sampling, uniform_draw


class Listener(ABC):
    """Is told of one text as it grows, on rank 0, in the engine's own thread: it must be quick."""

    @abstractmethod
    def token(self, token: int, scores: Likelihoods | None) -> bool:
        """A token of the text; False ends the text behind it (a stop string, say)."""

    @abstractmethod
    def end(self, reason: Reason) -> None:
        """The text has ended: nothing more comes. A text that was taken back isn't told."""


class Silence(Listener):
    """Wants to be told nothing."""

    def token(self, token: int, scores: Likelihoods | None) -> bool:
        return True

    def end(self, reason: Reason) -> None:
        pass


SILENT = Silence()


class Grammar(ABC):
    """What may come next in a text that must have a form."""

    @abstractmethod
    def allowed(self) -> np.ndarray:
        """bool [v]: which tokens may come next."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """A token was chosen; whether anything may come behind it."""


@dataclass(frozen=True, slots=True)
class Request:
    """One text to write.

    prompt: token ids. room: at most so many new ones. ends: tokens that end it. occurrence: tells texts of one prompt
    and seed apart. num_best: so many best tokens are told of with each one, None: no likelihoods. after: the number of
    a text with the same prompt, whose cache it goes on from once that prompt is computed.
    """

    prompt: Sequence[int]
    room: int
    listener: Listener
    sampling: Sampling
    ends: frozenset[int] = frozenset()
    occurrence: int = 0
    num_best: int | None = None
    grammar: Grammar | None = None
    after: int | None = None

    def pick(self, logits: np.ndarray, new: Sequence[int], allowed: np.ndarray | None = None) -> int:
        """The token behind the prompt and the tokens `new`, for logits [v]; `allowed`: bool [v], None: any.

        A function of its arguments: the random number belongs to the token's place in the text.
        """
        sampling, changed = self.sampling, logits
        if sampling.penalties != NO_PENALTIES:
            changed = sampling.penalties.applied(logits, self.prompt, new)
        if allowed is not None:
            changed = np.where(allowed, changed, -np.inf)
        place = len(self.prompt) + len(new)
        draw = uniform_draw(sampling.seed, self.occurrence, place) if sampling.temperature else 0.0
        return sampling.choose(changed, draw)


def room_behind(prompt: Sequence[int], max_new_tokens: int, positions: int) -> int:
    """How many new tokens fit: the last one need not be fed back, so it needs no position.

    Raises UsageError for a prompt that is empty or longer than the model's positions.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    if not len(prompt):
        raise UsageError("the prompt is empty (it has no tokens); give it some text")
    if len(prompt) > positions:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens is longer than the model's {positions} positions; shorten it"
        )
    return min(max_new_tokens, positions - len(prompt) + 1)
