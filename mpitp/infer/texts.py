"""A text under way in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpitp.infer.blocks import ROOT
from mpitp.infer.requests import Request


@dataclass(slots=True, eq=False)
class Text:
    """A text under way: `known` tokens (the prompt, then what was chosen), the first `computed` of them cached.

    `followed`: as many of them are in the cache of the drafting model too, where there is one. `filed` of its `blocks`
    are filed under their content, the last of these as `node`.
    """

    number: int
    request: Request
    known: list[int]
    computed: int = 0
    followed: int = 0
    blocks: list[int] = field(default_factory=list)
    table: tuple[tuple[int, int], ...] = ()
    filed: int = 0
    node: int = ROOT

    @property
    def new(self) -> list[int]:
        """What was chosen so far."""
        return self.known[len(self.request.prompt) :]

    @property
    def room(self) -> int:
        """How many more tokens may be chosen."""
        return self.request.room - len(self.known) + len(self.request.prompt)

    @property
    def is_done_with_prompt(self) -> bool:
        """Whether another text with the same prompt finds all of it in the cache."""
        return self.computed >= len(self.request.prompt)
