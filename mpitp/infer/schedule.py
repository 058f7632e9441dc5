"""What the next step computes: a pure function of counts, without texts, arrays or clocks.

    plan_step(running, waiting, free, limits) -> Plan

Texts are told apart by their numbers and served by age. In each step

- every text that has its prompt behind it gets one row (its newest token);
- where no block is left for it, the youngest running text gives up its own and waits; it starts again from all tokens
  that it knows, and finishes later. The oldest is never the one, so there is always one that moves on;
- waiting texts come in by age while there is a place, and as many free blocks as all their known tokens need beside one
  more for each running text. None overtakes another, so none starves;
- what is left of the step's rows goes to prompts, in equal shares: a short one doesn't wait for a long one's end;
- what is left then of the step's rows and of the free blocks goes to drafts (`speculation.py`), in equal shares of at
  most `drafted_rows` rows: nobody waits, and nobody is preempted, for a token that may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitp.infer.blocks import BLOCK, blocks_of


@dataclass(frozen=True, slots=True)
class Limits:
    """`texts` that run at once, `rows` of one step, and whether a text that comes in gets all blocks it may ever need.

    rows is at least 2 * texts: each running text gets one, and prompts the others. drafted_rows: a step that has so
    many rows takes no drafts.
    """

    texts: int
    rows: int
    reserve: bool = False
    drafted_rows: int = 0


@dataclass(frozen=True, slots=True)
class RunningText:
    """Of `known` tokens (the prompt and what was chosen), the first `computed` are in the cache, in `blocks` blocks.

    `own_blocks`: that nobody else holds, so that they are free when this text gives them up. `drafts`: tokens that may
    come next and could be tried; 0 where more than the newest known token is still to be computed.
    """

    number: int
    computed: int
    known: int
    blocks: int
    own_blocks: int
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class WaitingText:
    """`known` tokens, of which `found` needn't be computed; to come in it takes `blocks` of the free ones."""

    number: int
    known: int
    found: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """By numbers of texts: who waits again, who comes in, who gets how many more blocks, who how many rows for tokens
    that are known, who how many more for drafts.
    """

    preempted: tuple[int, ...]
    admitted: tuple[int, ...]
    grown: tuple[tuple[int, int], ...]
    rows: tuple[tuple[int, int], ...]
    drafts: tuple[tuple[int, int], ...] = ()


def plan_step(running: Sequence[RunningText], waiting: Sequence[WaitingText], free: int, limits: Limits) -> Plan:
    """The plan of one step; both sequences are ordered by age, the oldest first.

    >>> plan_step([RunningText(1, 32, 33, 2, 2)], [WaitingText(2, 40, 16, 2)], 4, Limits(8, 24))
    Plan(preempted=(), admitted=(2,), grown=((1, 1),), rows=((1, 1), (2, 23)), drafts=())
    >>> plan_step([RunningText(1, 30, 31, 2, 2, drafts=4)], [], 0, Limits(8, 24, drafted_rows=8))
    Plan(preempted=(), admitted=(), grown=(), rows=((1, 1),), drafts=((1, 1),))
    """
    staying, preempted, grown, free = _grow(running, free)
    admitted = [] if preempted else _admit(waiting, free, len(staying), limits)
    todo = [(text.number, text.known - text.computed) for text in staying]
    todo += [(text.number, text.known - text.found) for text in admitted]
    rows = _deal(todo, limits.rows)
    left = min(limits.rows, limits.drafted_rows) - sum(count for _, count in rows)
    drafts = _take_drafts(staying, grown, free - sum(text.blocks for text in admitted), max(0, left))
    return Plan(
        tuple(text.number for text in preempted),
        tuple(text.number for text in admitted),
        tuple(grown.items()),
        tuple(rows),
        tuple(drafts),
    )


def _grow(
    running: Sequence[RunningText], free: int
) -> tuple[list[RunningText], list[RunningText], dict[int, int], int]:
    """Who stays, who is preempted, who gets how many blocks, and how many are left."""
    staying, preempted, candidates = [], [], list(running)
    grown: dict[int, int] = {}
    while candidates:
        text = candidates.pop(0)
        need = max(0, blocks_of(text.computed + 1) - text.blocks)
        while need > free and candidates:
            preempted.append(candidates.pop())
            free += preempted[-1].own_blocks
        if need <= free:
            staying.append(text)
            free -= need
            grown |= {text.number: need} if need else {}
        elif staying:
            preempted.append(text)
            free += text.own_blocks
        # else the oldest and only one waits a step: what the others held together is free then
    return staying, preempted, grown, free


def _admit(waiting: Sequence[WaitingText], free: int, running: int, limits: Limits) -> list[WaitingText]:
    admitted: list[WaitingText] = []
    for text in waiting[: max(0, limits.texts - running)]:
        kept_back = 0 if limits.reserve else running + len(admitted)
        if text.blocks > free - kept_back:
            break
        admitted.append(text)
        free -= text.blocks
    return admitted


def _take_drafts(staying: Sequence[RunningText], grown: dict[int, int], free: int, rows: int) -> list[tuple[int, int]]:
    """How many drafts of each text are tried in so many `rows`; the blocks that they take are added to `grown`."""
    wanted, taken = dict(_deal([(text.number, text.drafts) for text in staying], rows)), []
    for text in staying:
        blocks = text.blocks + grown.get(text.number, 0)
        count = min(wanted.get(text.number, 0), (blocks + free) * BLOCK - (text.computed + 1))
        more = max(0, blocks_of(text.computed + 1 + count) - blocks)
        free -= more
        if more:
            grown[text.number] = grown.get(text.number, 0) + more
        if count:
            taken.append((text.number, count))
    return taken


def _deal(todo: Sequence[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Rows for each text, of those it could use: one where one is enough, equal shares of the rest for the others."""
    left, dealt = rows, {}
    by_need = sorted(todo, key=lambda each: each[1])
    for place, (number, wanted) in enumerate(by_need):
        dealt[number] = min(wanted, left // (len(by_need) - place))
        left -= dealt[number]
    return [(number, dealt[number]) for number, _ in todo if dealt[number]]
