"""Texts of sources, by a model with an encoder and a decoder.

The sources are encoded once, all together; each block's keys and values of them are made once too. Then every pass
feeds the newest token of each continuation that is under way (several a text, where there are beams), over a cache that
follows the beams. Rank 0 alone chooses, and tells the others what to feed next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpitp.comm.group import Group
from mpitp.errors import NumericError, UsageError
from mpitp.infer.beams import BeamSearch, Moves, OneByOne, Search
from mpitp.infer.generate import Completion, checked_prompts
from mpitp.infer.rules import Rules
from mpitp.infer.sampling import Sampling
from mpitp.layers.rows import Rows, Run
from mpitp.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True, slots=True)
class Feed:
    """What the next pass takes: for each row its token, its text's number, and the row before that it continues."""

    tokens: list[int]
    texts: list[int]
    parents: list[int]


def translate(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    max_new_tokens: int,
    rules: Rules,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    world: Group | None = None,
) -> list[Completion]:
    """At most `max_new_tokens` tokens for each source (token ids); the same on every rank of `world` (None: those that
    the model is laid on), whose first rank chooses.

    Raises UsageError for no source, an empty one, or beams that are to be drawn; NumericError when the model's logits
    are not finite.
    """
    if rules.beams.count > 1 and sampling.temperature:
        raise UsageError("beams are the likeliest texts; to draw tokens by a temperature go without (--beams 1)")
    world = world or model.site.ranks
    positions = model.config.max_positions
    most = min(max_new_tokens, positions) if positions else max_new_tokens
    crossing = model.encode(checked_prompts(sources, max_new_tokens))
    searches = _searches(sources, most, rules, sampling)
    feed = _first_feed(searches, rules.start)
    caches, place = model.new_caches([most] * len(feed.tokens)), 0
    while feed.tokens:
        if place:
            caches.keep(feed.parents)
        runs = tuple(Run(text, place, 1, slot) for slot, text in enumerate(feed.texts))
        logits = model.next_logits(feed.tokens, Rows(runs), crossing, caches)
        if not np.isfinite(logits).all():  # equal on every rank, and so is the decision
            raise NumericError("logits that are not finite: the model's weights are damaged, or overflow in this dtype")
        feed = world.broadcast_object(_next_feed(searches, feed, logits) if world.rank == 0 else None)
        place += 1
    found = [_completion(search, rules) for search in searches] if world.rank == 0 else None
    told: list[Completion] = world.broadcast_object(found)
    return told


def _searches(sources: Sequence[Sequence[int]], most: int, rules: Rules, sampling: Sampling) -> list[Search]:
    applied = partial(rules.applied, most=most)
    seen: Counter[tuple[int, ...]] = Counter()
    searches: list[Search] = []
    for source in sources:
        if rules.beams.count > 1:
            searches.append(BeamSearch(rules.beams, applied, rules.ends, most))
        else:
            searches.append(OneByOne(sampling, applied, rules.ends, most, seen[tuple(source)]))
        seen[tuple(source)] += 1
    return searches


def _first_feed(searches: Sequence[Search], start: int) -> Feed:
    texts = [number for number, search in enumerate(searches) for _ in range(search.rows)]
    return Feed([start] * len(texts), texts, list(range(len(texts))))


def _next_feed(searches: Sequence[Search], feed: Feed, logits: np.ndarray) -> Feed:
    """What the texts that were fed go on with."""
    tokens: list[int] = []
    texts: list[int] = []
    parents: list[int] = []
    for number in dict.fromkeys(feed.texts):
        rows = [row for row, text in enumerate(feed.texts) if text == number]
        moves: Moves = searches[number].step(logits[rows])
        tokens += moves.tokens
        texts += [number] * len(moves.tokens)
        parents += [rows[row] for row in moves.rows]
    return Feed(tokens, texts, parents)


def _completion(search: Search, rules: Rules) -> Completion:
    text = search.best()
    is_ended = bool(text) and text[-1] in rules.ends
    return Completion(text[:-1] if is_ended else text, "eos" if is_ended else "length")
