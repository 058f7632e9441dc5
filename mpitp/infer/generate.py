"""Continue prompts token by token.

One forward pass over all prompts fills the KV cache (prefill); then every pass feeds the one newest token of each text
that still goes on (decode). Prompts of different lengths lie one after the other without padding, so each is computed
as if it were alone. Rank 0 chooses the tokens and broadcasts them: ranks can't drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpitp.errors import NumericError, UsageError
from mpitp.infer.sampling import Sampling, uniform_draw
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM

OnToken = Callable[[int, int], None]  # (prompt's index, token)


@dataclass(slots=True)
class Completion:
    """What followed one prompt. `finish_reason`: "eos" (an end token, not included) or "length"."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass(slots=True)
class Speed:
    """Tokens and seconds of the two phases; the prompts' tokens count as prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


GREEDY = Sampling()


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: Iterable[int] | None = None,
    on_token: OnToken | None = None,
    speed: Speed | None = None,
) -> list[Completion]:
    """At most `max_new_tokens` tokens for each prompt (token ids); the same on every rank.

    A text ends before one of `eos_ids` (None: those of the model's config). `on_token` is called on every rank with
    (prompt's index, token) as soon as a token is known; `speed`, if given, is filled in.

    Raises UsageError for no prompt, an empty prompt, one longer than the model's positions, or max_new_tokens < 1;
    NumericError when the model's logits are not finite.
    """
    ends = frozenset(model.config.eos_ids if eos_ids is None else eos_ids)
    limits = [_room(model, prompt, max_new_tokens) for prompt in checked_prompts(prompts, max_new_tokens)]
    completions = [Completion() for _ in prompts]
    occurrences = _occurrences(prompts)
    speed = speed or Speed()
    caches = model.new_caches([len(prompt) + room for prompt, room in zip(prompts, limits, strict=True)])
    active, fed, past = list(range(len(prompts))), [list(prompt) for prompt in prompts], [0] * len(prompts)
    while active:
        started = time.perf_counter()
        batch = Batch.of_lists([fed[i] for i in active], tuple(past[i] for i in active))
        logits = model.next_logits(batch, caches)
        if not np.isfinite(logits).all():  # equal on every rank, and so is the decision
            raise NumericError("logits that are not finite: the model's weights are damaged, or overflow in this dtype")
        places = [past[i] + len(fed[i]) for i in active]
        chosen = _choose(model, logits, sampling, [occurrences[i] for i in active], places)
        _count(speed, batch, is_prefill=past[active[0]] == 0, seconds=time.perf_counter() - started)
        still = []
        for row, (i, token) in enumerate(zip(active, chosen, strict=True)):
            past[i], fed[i] = past[i] + len(fed[i]), [token]
            if token in ends:
                completions[i].finish_reason = "eos"
                continue
            completions[i].tokens.append(token)
            if on_token is not None:
                on_token(i, token)
            if len(completions[i].tokens) < limits[i]:
                still.append(row)
        for cache in caches:
            cache.keep(still)
        active = [active[row] for row in still]
    return completions


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


def _room(model: CausalLM, prompt: Sequence[int], max_new_tokens: int) -> int:
    """How many new tokens fit: the last one need not be fed back, so it needs no position."""
    positions = model.config.max_positions
    if len(prompt) > positions:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens is longer than the model's {positions} positions; shorten it"
        )
    return min(max_new_tokens, positions - len(prompt) + 1)


def _occurrences(prompts: Sequence[Sequence[int]]) -> list[int]:
    seen: dict[tuple[int, ...], int] = {}
    counts = []
    for prompt in prompts:
        key = tuple(prompt)
        counts.append(seen.get(key, 0))
        seen[key] = counts[-1] + 1
    return counts


def _choose(
    model: CausalLM, logits: np.ndarray, sampling: Sampling, occurrences: list[int], places: list[int]
) -> list[int]:
    """The next token of every row of logits [b, v], decided on rank 0."""
    group = model.layout.group
    chosen = np.zeros(len(places), np.int64)
    if group.rank == 0:
        for row, (occurrence, place) in enumerate(zip(occurrences, places, strict=True)):
            draw = uniform_draw(sampling.seed, occurrence, place) if sampling.temperature else 0.0
            chosen[row] = sampling.choose(logits[row], draw)
    return [int(token) for token in group.broadcast(chosen)]


def _count(speed: Speed, batch: Batch, *, is_prefill: bool, seconds: float) -> None:
    if is_prefill:
        speed.prefill_tokens += len(batch.tokens)
        speed.prefill_seconds += seconds
    else:
        speed.decode_tokens += len(batch.tokens)
        speed.decode_seconds += seconds
