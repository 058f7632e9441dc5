"""Texts that come and go between steps, computed together.

Rank 0 has an `Engine`: it keeps the texts and the books of the cache, plans each step (`schedule.py`), sends the work
order (`orders.py`), chooses the tokens. Every rank, rank 0 too, carries orders out by `Executor.execute`; the others do
nothing else (`follow`).

    engine = Engine(executor, limits)        on rank 0
    number = engine.submit(Request(...));  while engine.step(): ...;  engine.end()
    executor.follow(on_order)                on all others, until engine.end()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mpitp.errors import UsageError
from mpitp.infer.blocks import BLOCK, ROOT, BlockPool, Match, blocks_of
from mpitp.infer.executor import Executor
from mpitp.infer.orders import Next, Reason, TextRun, WorkOrder, merged
from mpitp.infer.requests import Request
from mpitp.infer.sampling import likelihoods
from mpitp.infer.schedule import Limits, Plan, RunningText, WaitingText, plan_step
from mpitp.infer.speculation import Drafts, Speculation
from mpitp.infer.texts import Text


class Engine:
    """Rank 0's side: texts wait, run, and end. Not for several threads.

    `files`: whether beginnings are found again in the cache. `speculation`: where drafts come from; the executor has
    its model.
    """

    def __init__(
        self, executor: Executor, limits: Limits, *, files: bool = True, speculation: Speculation | None = None
    ) -> None:
        self.executor, self.limits, self.speculation = executor, limits, speculation
        self.speculator = None
        if speculation is not None:
            self.speculator = speculation.speculator(executor.model.config.vocab_size)
        self.pool = BlockPool(executor.num_blocks, files=files)
        self.waiting: deque[Text] = deque()  # by age
        self.running: dict[int, Text] = {}  # by age
        self.reused_tokens = self.preemptions = self.computed_tokens = 0
        self.chosen_runs = self.drafted_tokens = self.accepted_tokens = 0
        self._texts = 0
        self._orders = 0
        self._told: list[tuple[int, int, Reason]] = []
        self._copies: list[tuple[int, int, int]] = []
        self.plan: Plan | None = None  # of the newest step

    def submit(self, request: Request) -> int:
        """Queue a text; its number. Raises UsageError for one that the whole cache couldn't hold."""
        most = blocks_of(len(request.prompt) + request.room - 1)
        if most > self.pool.num_blocks:
            raise UsageError(
                f"a text of {len(request.prompt)} + {request.room} tokens doesn't fit into the cache of "
                f"{self.pool.num_blocks * BLOCK}; ask for fewer tokens"
            )
        self._texts += 1
        self.waiting.append(Text(self._texts, request, list(request.prompt)))
        return self._texts

    def cancel(self, number: int) -> None:
        """Take a text back, wherever it is; its blocks are free for the next step. Unknown numbers are let be."""
        text = self.running.pop(number, None)
        if text is not None:
            self._let_go(text)
        else:
            self.waiting = deque(text for text in self.waiting if text.number != number)

    def step(self) -> bool:
        """Compute and choose the next tokens; False: there is nothing to do."""
        if not self.waiting and not self.running:
            return False
        found = self._matches()
        waiting = [self._as_waiting(text, match) for text, match in found]
        plan = plan_step(
            [self._as_running(text) for text in self.running.values()], waiting, self.pool.free, self.limits
        )
        self._copies = self._carry_out(plan, {text.number: match for text, match in found})
        runs = self._runs(plan)
        drafts = self._drafts(runs, dict(plan.drafts))
        logits = self._do([_with_drafts(run, drafts.get(run.text, ())) for run in runs])
        self._advance(runs)
        self._choose_all(runs, drafts, logits)
        self.plan = plan
        return True

    def tell_rest(self) -> None:
        """There will be nothing to do for a while: the other ranks may sleep."""
        self._send(WorkOrder(self._next_order(), next=Next.SLEEP))

    def end(self) -> list[tuple[int, int, Reason]]:
        """Let the other ranks go; what was chosen last."""
        told = self._told
        self.executor.channel.send(WorkOrder(self._next_order(), told=tuple(told), next=Next.END))
        return told

    @property
    def told(self) -> Sequence[tuple[int, int, Reason]]:
        """What the newest step chose: (text, token, reason)."""
        return self._told

    # The plan's input

    def _matches(self) -> list[tuple[Text, Match]]:
        """The waiting texts that could come in now, with what the cache has of them."""
        found: list[tuple[Text, Match]] = []
        for text in self.waiting:
            if len(self.running) + len(found) >= self.limits.texts:
                break
            if not self._waits_for_another(text):
                found.append((text, self._match(text)))
        return found

    def _match(self, text: Text) -> Match:
        """What the cache has of a text. A begun block is left out where the pool is too small to keep it beside all the
        blocks that the text takes: it would wait for ever.
        """
        match = self.pool.match(text.known)
        return match if self._taken_blocks(text, match) <= self.pool.num_blocks else match.whole()

    def _waits_for_another(self, text: Text) -> bool:
        """Whether the text whose prompt this one has too is still computing it."""
        if text.request.after is None:
            return False
        first = self.running.get(text.request.after)
        if first is not None:
            return not first.is_done_with_prompt
        return any(other.number == text.request.after for other in self.waiting)

    def _as_waiting(self, text: Text, match: Match) -> WaitingText:
        return WaitingText(text.number, len(text.known), match.tokens, self._taken_blocks(text, match))

    def _taken_blocks(self, text: Text, match: Match) -> int:
        """How many of the free blocks the text takes when it comes in."""
        places = len(text.request.prompt) + text.request.room - 1 if self.limits.reserve else len(text.known) + 1
        kept = {*match.blocks, *([match.source] if match.part else [])}
        idle = sum(1 for block in kept if not self.pool.is_held(block))  # free now, but no longer
        most = min(blocks_of(places), self.pool.num_blocks)
        return most - len(match.blocks) + idle

    def _as_running(self, text: Text) -> RunningText:
        own = sum(1 for block in text.blocks if not self.pool.is_shared(block))
        drafts = 0
        if self.speculator is not None and self.speculation is not None and len(text.known) - text.computed == 1:
            drafts = self.speculator.most(text, min(self.speculation.tokens, text.room - 1))
        return RunningText(text.number, text.computed, len(text.known), len(text.blocks), own, drafts)

    # Carrying it out

    def _carry_out(self, plan: Plan, found: dict[int, Match]) -> list[tuple[int, int, int]]:
        """Blocks change hands; the copies to be made in the cache."""
        for number in plan.preempted:
            self._wait_again(self.running.pop(number))
        kept = [found[number] for number in plan.admitted]
        for match in kept:  # before any block is taken, which could be one of them
            self.pool.hold(match.blocks)
            self.pool.hold([match.source] if match.part else [])
        for number, count in plan.grown:
            self._grow(self.running[number], count)
        admitted = [self._taken_from_queue(number) for number in plan.admitted]
        copies = [copy for text, match in zip(admitted, kept, strict=True) for copy in self._bring_in(text, match)]
        for match in kept:
            self.pool.release([match.source] if match.part else [])
        return copies

    def _taken_from_queue(self, number: int) -> Text:
        text = next(text for text in self.waiting if text.number == number)
        self.waiting.remove(text)
        return text

    def _bring_in(self, text: Text, match: Match) -> list[tuple[int, int, int]]:
        text.blocks, text.computed, text.followed = list(match.blocks), match.tokens, match.tokens
        text.filed, text.node = len(match.blocks), match.node
        places = len(text.request.prompt) + text.request.room - 1 if self.limits.reserve else len(text.known)
        self._grow(text, blocks_of(places) - len(text.blocks))
        self.running[text.number] = text
        if len(self.running) > 1 and text.number < max(self.running):  # it has been here before
            self.running = dict(sorted(self.running.items()))
        self.reused_tokens += match.tokens
        return [(match.source * BLOCK, text.blocks[text.filed] * BLOCK, match.part)] if match.part else []

    def _grow(self, text: Text, count: int) -> None:
        text.blocks += self.pool.take(count, text.blocks[-1] if text.blocks else None)
        text.table = _table(text.blocks)

    def _wait_again(self, text: Text) -> None:
        self.preemptions += 1
        self._let_go(text)
        younger = next((i for i, other in enumerate(self.waiting) if other.number > text.number), len(self.waiting))
        self.waiting.insert(younger, text)

    def _let_go(self, text: Text) -> None:
        if text.blocks:
            self._file(text, with_part=True)
        self.pool.release(text.blocks)
        text.blocks, text.table, text.computed, text.followed, text.filed, text.node = [], (), 0, 0, 0, ROOT

    def _runs(self, plan: Plan) -> list[TextRun]:
        """What is computed of tokens that are known."""
        runs = []
        for number, count in plan.rows:
            text = self.running[number]
            stop = text.computed + count
            tokens = tuple(text.known[text.computed : stop])
            runs.append(TextRun(number, text.computed, tokens, text.table, int(stop == len(text.known))))
        return runs

    def _drafts(self, runs: Sequence[TextRun], counts: Mapping[int, int]) -> Drafts:
        if self.speculator is None:
            return {}
        texts = [self.running[run.text] for run in runs]
        return self.speculator.drafts(texts, runs, counts, lambda asked: self._do(asked, model=1))

    def _do(self, runs: Sequence[TextRun], model: int = 0) -> np.ndarray:
        """One pass of all ranks; the first of a step takes along what was chosen and is to be copied."""
        order = WorkOrder(self._next_order(), tuple(runs), tuple(self._copies), tuple(self._told), model=model)
        self._copies = []
        self._send(order)
        return self.executor.execute(order)

    def _send(self, order: WorkOrder) -> None:
        self.executor.channel.send(order)
        self._told = []

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    # After the step

    def _advance(self, runs: Sequence[TextRun]) -> None:
        for run in runs:
            text = self.running[run.text]
            was_done = text.is_done_with_prompt
            self._count_computed(text, len(run.tokens))
            if text.computed >= (text.filed + 1) * BLOCK or (not was_done and text.is_done_with_prompt):
                self._file(text, with_part=not was_done)

    def _count_computed(self, text: Text, count: int) -> None:
        text.computed += count
        self.computed_tokens += count
        if len(self.executor.models) == 1:
            text.followed = text.computed

    def _file(self, text: Text, *, with_part: bool) -> None:
        """File the blocks that are full now; `with_part`: and what is in the one behind them."""
        stop = min(text.computed, text.followed)
        while stop >= (text.filed + 1) * BLOCK:
            at = text.filed * BLOCK
            text.node = self.pool.file(text.blocks[text.filed], text.node, text.known[at : at + BLOCK])
            text.filed += 1
        part = text.known[text.filed * BLOCK : stop]
        if with_part and part:
            self.pool.file(text.blocks[text.filed], text.node, part)

    def _choose_all(self, runs: Sequence[TextRun], drafts: Drafts, logits: np.ndarray) -> None:
        """Choose behind all runs that reach the end of what is known; logits [sum of (1 + drafts), v]."""
        start = 0
        for run in (run for run in runs if run.wanted):
            text, tried = self.running[run.text], drafts.get(run.text, ())
            self.chosen_runs += 1
            self.drafted_tokens += len(tried)
            goes_on = self._choose_behind(text, tried, logits[start : start + 1 + len(tried)])
            start += 1 + len(tried)
            if goes_on and tried:
                self._roll_back(text)

    def _choose_behind(self, text: Text, drafts: Sequence[int], logits: np.ndarray) -> bool:
        """A token from logits [0], and one from each next row as long as what was chosen is the draft that the row
        stands behind; whether the text goes on.
        """
        for place, row in enumerate(logits):
            token = self._choose(text, row)
            if token is None:
                return False
            if place == len(drafts) or token != drafts[place]:
                break
            self.accepted_tokens += 1
            self._count_computed(text, 1)
        return True

    def _roll_back(self, text: Text) -> None:
        """What was tried in vain is forgotten: its places are written over, its blocks are free again."""
        text.followed = min(text.followed, text.computed)
        kept = len(text.blocks) if self.limits.reserve else blocks_of(text.computed)
        self.pool.release(text.blocks[kept:])
        text.blocks = text.blocks[:kept]
        text.table = _table(text.blocks)

    def _choose(self, text: Text, logits: np.ndarray) -> int | None:
        """The next token of a text from logits [v]; None: the text has ended."""
        request = text.request
        token = request.pick(logits, text.new, None if request.grammar is None else request.grammar.allowed())
        reason = self._reason(text, token, logits)
        self._told.append((text.number, token, reason))
        if reason is Reason.GOES_ON:
            return token
        self._let_go(self.running.pop(text.number))
        request.listener.end(reason)
        return None

    def _reason(self, text: Text, token: int, logits: np.ndarray) -> Reason:
        """Take a chosen token; how the text goes on."""
        request = text.request
        if token in request.ends:
            return Reason.EOS
        text.known.append(token)
        scores = None if request.num_best is None else likelihoods(logits, token, request.num_best)
        goes_on = request.listener.token(token, scores)
        if not goes_on or (request.grammar is not None and not request.grammar.accept(token)):
            return Reason.STOP
        return Reason.LENGTH if len(text.known) - len(request.prompt) >= request.room else Reason.GOES_ON


def _with_drafts(run: TextRun, drafts: tuple[int, ...]) -> TextRun:
    """The run with drafts behind what is known, and the logits behind each of them."""
    return replace(run, tokens=run.tokens + drafts, wanted=1 + len(drafts)) if drafts else run


def _table(blocks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Extents of places."""
    return merged([(block * BLOCK, (block + 1) * BLOCK) for block in blocks])
