"""A client's request as the engine sees it, and what the client is told of it.

A job is one or several texts. Tokens become text as they come; a stop string ends a text before itself, so text that
may be the beginning of one is held back until it is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpitp.data.stream import StreamDecoder
from mpitp.infer.orders import Reason
from mpitp.infer.requests import Grammar, Listener
from mpitp.infer.sampling import Likelihoods, Sampling

FINISHED = {Reason.EOS: "stop", Reason.STOP: "stop", Reason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Piece:
    """More of a text: what became certain, and the tokens that came, with their likelihoods where they are wanted."""

    text: str
    tokens: tuple[int, ...] = ()
    scores: tuple[Likelihoods, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A text is whole. `reason`: "stop" or "length"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The job can't go on: what to tell the client, with which HTTP status."""

    message: str
    status: int = 500


Event = Piece | Ended | Failed


@dataclass(frozen=True, slots=True)
class TextSpec:
    """One text to write; see `Request`. `sibling`: it goes on from the prompt of the text before it."""

    prompt: Sequence[int]
    room: int
    sampling: Sampling
    ends: frozenset[int]
    decoder: Callable[[], StreamDecoder]
    stops: tuple[str, ...] = ()
    occurrence: int = 0
    num_best: int | None = None
    grammar: Grammar | None = None
    sibling: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """The texts of one client's request. `events` belongs to the HTTP thread, `numbers` and `left` to the engine's."""

    specs: list[TextSpec]
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    numbers: list[int] = field(default_factory=list)
    left: int = 0  # texts that haven't ended yet

    def __post_init__(self) -> None:
        self.left = len(self.specs)


class TextListener(Listener):
    """Hands on what comes of one text: `tell(event)`; `ended()` once."""

    def __init__(self, spec: TextSpec, tell: Callable[[Event], None], ended: Callable[[], None]) -> None:
        self._decoder, self._stops = spec.decoder(), spec.stops
        self._tell, self._ended = tell, ended
        self._held = ""
        self._tokens: list[int] = []
        self._scores: list[Likelihoods] = []

    def token(self, token: int, scores: Likelihoods | None) -> bool:
        self._tokens.append(token)
        if scores is not None:
            self._scores.append(scores)
        text = self._held + self._decoder.push(token)
        place = first_stop(text, self._stops)
        if place is not None:
            self._held = ""
            self._hand_on(text[:place])
            self._stops = ("",)  # all that follows is cut off
            return False
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        self._hand_on(text[: len(text) - keep])
        return True

    def end(self, reason: Reason) -> None:
        rest = "" if self._stops == ("",) else self._held + self._decoder.flush()
        place = first_stop(rest, self._stops)
        self._hand_on(rest[:place])
        self._tell(Ended(FINISHED[reason]))
        self._ended()

    def _hand_on(self, text: str) -> None:
        if text or self._tokens:
            self._tell(Piece(text, tuple(self._tokens), tuple(self._scores)))
            self._tokens, self._scores = [], []


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins.

    >>> first_stop("one two", ("two", "ne t"))
    1
    """
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return min(places, default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many of the last letters may be the beginning of a stop string.

    >>> held_back("one tw", ("two", "w."))
    2
    """
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[len(text) - length :]) for stop in stops):
            return length
    return 0
