"""Continue prompts token by token.

One forward pass over all prompts fills the KV cache (prefill); then every pass feeds the one newest token of each text
that still goes on (decode). Prompts of different lengths lie one after the other without padding, so each is computed
as if it were alone. It is the engine (`engine.py`) that does it, with room for all texts at once: rank 0 chooses the
tokens and sends them along with the next step's work, so ranks can't drift apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mpitp.comm.group import Group
from mpitp.errors import UsageError
from mpitp.infer.blocks import blocks_of
from mpitp.infer.engine import Engine
from mpitp.infer.executor import Executor, row_by_row
from mpitp.infer.orders import Reason, WorkOrder
from mpitp.infer.requests import SILENT, Request, room_behind
from mpitp.infer.sampling import Sampling
from mpitp.infer.schedule import Limits
from mpitp.infer.speculation import Speculation
from mpitp.models.model import CausalLM

OnToken = Callable[[int, int], None]  # (prompt's index, token)


@dataclass(slots=True)
class Completion:
    """What followed one prompt. `finish_reason`: "eos" (an end token, not included) or "length"."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass(slots=True)
class Drafts:
    """`tried` tokens, the right ones of them, and how often tokens of a text were chosen in one step."""

    tried: int = 0
    right: int = 0
    steps: int = 0


@dataclass(slots=True)
class Speed:
    """Tokens and seconds of the two phases; the prompts' tokens count as prefill. `drafts`: on the first rank."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafts: Drafts = field(default_factory=Drafts)


@dataclass(slots=True)
class Follower:
    """Is told of texts as they grow, on every rank: `on_token` of each token, `speed` is added to."""

    on_token: OnToken | None = None
    speed: Speed = field(default_factory=Speed)


GREEDY = Sampling()


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: Iterable[int] | None = None,
    follower: Follower | None = None,
    world: Group | None = None,
    speculation: Speculation | None = None,
) -> list[Completion]:
    """At most `max_new_tokens` tokens for each prompt (token ids); the same on every rank.

    A text ends before one of `eos_ids` (None: those of the model's config). `world`: the ranks that must go on with the
    same tokens, the first of which chooses them; None: those that the model is laid on. `speculation`: tokens that may
    come next are tried together.

    Raises UsageError for no prompt, an empty prompt, one longer than the model's positions, or max_new_tokens < 1;
    NumericError when the model's logits are not finite.
    """
    ends = frozenset(model.config.eos_ids if eos_ids is None else eos_ids)
    follower, world = follower or Follower(), world or model.site.ranks
    checked = checked_prompts(prompts, max_new_tokens)
    rooms = [room_behind(prompt, max_new_tokens, model.config.cached_positions) for prompt in checked]
    record = _Record([Completion() for _ in checked], follower)
    num_blocks = sum(blocks_of(len(prompt) + room - 1) for prompt, room in zip(checked, rooms, strict=True))
    with row_by_row(model):
        executor = Executor(model, num_blocks, world, None if speculation is None else speculation.draft)
        if world.rank:
            executor.follow(record.order)
        else:
            _lead(executor, _requests(checked, rooms, sampling, ends), record, speculation)
    return record.completions


def _requests(
    prompts: Sequence[Sequence[int]], rooms: Sequence[int], sampling: Sampling, ends: frozenset[int]
) -> list[Request]:
    seen: Counter[tuple[int, ...]] = Counter()
    requests = []
    for prompt, room in zip(prompts, rooms, strict=True):
        requests.append(Request(prompt, room, SILENT, sampling, ends, seen[tuple(prompt)]))
        seen[tuple(prompt)] += 1
    return requests


def _lead(executor: Executor, requests: Sequence[Request], record: _Record, speculation: Speculation | None) -> None:
    """On the first rank: all texts at once, each with all the places that it may need."""
    drafted_rows = 0 if speculation is None else speculation.rows
    rows = max(sum(len(request.prompt) for request in requests) + 2 * len(requests), drafted_rows)
    limits = Limits(len(requests), rows, reserve=True, drafted_rows=drafted_rows)
    engine = Engine(executor, limits, files=False, speculation=speculation)
    for request in requests:
        engine.submit(request)
    record.begin()
    while engine.step():
        record.step(engine.computed_tokens)
        record.told(engine.told)
        record.begin()
    engine.end()
    record.follower.speed.drafts = Drafts(engine.drafted_tokens, engine.accepted_tokens, engine.chosen_runs)


@dataclass(slots=True)
class _Record:
    """What has come of the prompts, whose texts are numbered from 1 on; kept on every rank."""

    completions: list[Completion]
    follower: Follower
    _started: float = 0.0
    _computed: int = 0  # tokens, in all steps so far
    _ordered: int = 0  # in the step under way

    def begin(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def step(self, computed_tokens: int) -> None:
        """A step has ended, by which so many tokens were computed in all."""
        speed, seconds = self.follower.speed, time.perf_counter() - self._started
        tokens, self._computed = computed_tokens - self._computed, computed_tokens
        if self._computed == tokens:
            speed.prefill_tokens += tokens
            speed.prefill_seconds += seconds
        else:
            speed.decode_tokens += tokens
            speed.decode_seconds += seconds

    def order(self, order: WorkOrder) -> None:
        """On the other ranks: an order has come, and with the first of a step what the step before has chosen."""
        if order.told:  # behind the prompts, of which all are computed in one step, a token chosen is one computed
            self.step(self._computed + len(order.told) if self._computed else self._ordered)
            self.told(order.told)
        if order.told or not self._started:
            self.begin()
        self._ordered = sum(len(run.tokens) for run in order.runs)

    def told(self, told: Iterable[tuple[int, int, Reason]]) -> None:
        """Tokens were chosen."""
        for number, token, reason in told:
            completion = self.completions[number - 1]
            if reason is Reason.EOS:
                completion.finish_reason = "eos"
                continue
            completion.tokens.append(token)
            if self.follower.on_token is not None:
                self.follower.on_token(number - 1, token)


def checked_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Sequence[Sequence[int]]:
    """The prompts, if there is one, none is empty, and at least one token is asked for."""
    if max_new_tokens < 1:
        raise UsageError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    if not prompts:
        raise UsageError("no prompt was given; give at least one")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise UsageError(f"prompt {index + 1} is empty (it has no tokens); give it some text")
    return prompts
