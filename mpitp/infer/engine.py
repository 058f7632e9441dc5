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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from mpitp.comm.group import Group
from mpitp.errors import NumericError, UsageError
from mpitp.infer.blocks import BLOCK, ROOT, BlockPool, Match, blocks_of
from mpitp.infer.orders import Next, OrderChannel, Reason, TextRun, WorkOrder, merged
from mpitp.infer.requests import Request
from mpitp.infer.sampling import NO_PENALTIES, likelihoods, uniform_draw
from mpitp.infer.schedule import Limits, Plan, RunningText, WaitingText, plan_step
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.paged_cache import PagedCaches
from mpitp.layers.product import RowByRowProduct
from mpitp.layers.rows import Rows, Run
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM


class Executor:
    """Carries work orders out on this rank, with a cache of `num_blocks` blocks.

    `world`: the ranks that get the orders; None: those that the model is laid on.
    """

    def __init__(self, model: CausalLM, num_blocks: int, world: Group | None = None) -> None:
        self.model, self.num_blocks = model, num_blocks
        self.caches = PagedCaches(num_blocks * BLOCK, one_by_one=bool(model.site.num_blocks))
        self.channel = OrderChannel(world or model.site.ranks, num_blocks * BLOCK)

    def execute(self, order: WorkOrder) -> np.ndarray:
        """Logits [b, v] behind the runs that want them, equal on every rank.

        Raises NumericError where they are not finite, on every rank alike.
        """
        for source, target, count in order.copies:
            self.caches.copy(source, target, count)
        if not order.runs:
            return np.empty((0, self.model.config.vocab_size), self.model.dtype)
        self.caches.tables = [run.table for run in order.runs]
        runs = tuple(Run(slot, run.first, len(run.tokens), slot) for slot, run in enumerate(order.runs))
        batch = Batch(np.array([token for run in order.runs for token in run.tokens], np.int64), Rows(runs))
        wanted = [slot for slot, run in enumerate(order.runs) if run.wanted]
        if len(wanted) == len(runs):
            logits = self.model.next_logits(batch, self.caches)
        else:
            logits = self.model.next_logits(batch, self.caches, wanted)
        if not np.isfinite(logits).all():  # equal on every rank, and so is the decision
            raise NumericError("logits that are not finite: the model's weights are damaged, or overflow in this dtype")
        return logits

    def follow(self, on_order: Callable[[WorkOrder], object] = lambda order: None) -> None:
        """On the other ranks: carry out what comes until the engine ends; `on_order` is told of each first."""
        while True:
            order = self.channel.receive()
            on_order(order)
            if order.next is Next.END:
                return
            self.execute(order)


@contextmanager
def row_by_row(model: CausalLM) -> Iterator[None]:
    """Meanwhile the rows of an invariant model are multiplied one by one: a text's bits don't depend on others."""
    linears = [layer for layer in _linears(model.all_layers().values()) if model.site.num_blocks]
    before = [layer.product for layer in linears]
    for layer in linears:
        layer.product = RowByRowProduct(layer.product)
    try:
        yield
    finally:
        for layer, product in zip(linears, before, strict=True):
            layer.product = product


def _linears(layers: Iterable[object]) -> Iterator[ColumnParallelLinear | RowParallelLinear]:
    for layer in layers:
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            yield layer
        elif isinstance(layer, Layer):
            yield from _linears(layer.children().values())


@dataclass(slots=True, eq=False)
class Text:
    """A text under way: `known` tokens (the prompt, then what was chosen), the first `computed` of them cached.

    `filed` of its `blocks` are filed under their content, the last of these as `node`.
    """

    number: int
    request: Request
    known: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    table: tuple[tuple[int, int], ...] = ()
    filed: int = 0
    node: int = ROOT

    @property
    def new(self) -> list[int]:
        """What was chosen so far."""
        return self.known[len(self.request.prompt) :]

    @property
    def is_done_with_prompt(self) -> bool:
        """Whether another text with the same prompt finds all of it in the cache."""
        return self.computed >= len(self.request.prompt)


class Engine:
    """Rank 0's side: texts wait, run, and end. Not for several threads.

    `files`: whether beginnings are found again in the cache.
    """

    def __init__(self, executor: Executor, limits: Limits, *, files: bool = True) -> None:
        self.executor, self.limits = executor, limits
        self.pool = BlockPool(executor.num_blocks, files=files)
        self.waiting: deque[Text] = deque()  # by age
        self.running: dict[int, Text] = {}  # by age
        self.reused_tokens = self.preemptions = self.computed_tokens = 0
        self._texts = 0
        self._orders = 0
        self._told: list[tuple[int, int, Reason]] = []
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
        copies = self._carry_out(plan, {text.number: match for text, match in found})
        order = self._order(plan, copies)
        logits = self._do(order)
        self._advance(order)
        wanting = [self.running[run.text] for run in order.runs if run.wanted]
        for row, text in enumerate(wanting):
            self._choose(text, logits[row])
        self.plan = plan
        return True

    def tell_rest(self) -> None:
        """There will be nothing to do for a while: the other ranks may sleep."""
        self._do(WorkOrder(self._next_order(), next=Next.SLEEP))

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
                found.append((text, self.pool.match(text.known)))
        return found

    def _waits_for_another(self, text: Text) -> bool:
        """Whether the text whose prompt this one has too is still computing it."""
        if text.request.after is None:
            return False
        first = self.running.get(text.request.after)
        if first is not None:
            return not first.is_done_with_prompt
        return any(other.number == text.request.after for other in self.waiting)

    def _as_waiting(self, text: Text, match: Match) -> WaitingText:
        places = len(text.request.prompt) + text.request.room - 1 if self.limits.reserve else len(text.known) + 1
        kept = {*match.blocks, *([match.source] if match.part else [])}
        idle = sum(1 for block in kept if not self.pool.is_held(block))  # free now, but no longer
        most = min(blocks_of(places), self.pool.num_blocks)
        return WaitingText(text.number, len(text.known), match.tokens, most - len(match.blocks) + idle)

    def _as_running(self, text: Text) -> RunningText:
        own = sum(1 for block in text.blocks if not self.pool.is_shared(block))
        return RunningText(text.number, text.computed, len(text.known), len(text.blocks), own)

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
        text.blocks, text.computed = list(match.blocks), match.tokens
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
        text.table = merged([(block * BLOCK, (block + 1) * BLOCK) for block in text.blocks])

    def _wait_again(self, text: Text) -> None:
        self.preemptions += 1
        self._let_go(text)
        younger = next((i for i, other in enumerate(self.waiting) if other.number > text.number), len(self.waiting))
        self.waiting.insert(younger, text)

    def _let_go(self, text: Text) -> None:
        if text.blocks:
            self._file(text, with_part=True)
        self.pool.release(text.blocks)
        text.blocks, text.table, text.computed, text.filed, text.node = [], (), 0, 0, ROOT

    def _order(self, plan: Plan, copies: Sequence[tuple[int, int, int]]) -> WorkOrder:
        runs = []
        for number, count in plan.rows:
            text = self.running[number]
            stop = text.computed + count
            tokens = tuple(text.known[text.computed : stop])
            runs.append(TextRun(number, text.computed, tokens, text.table, stop == len(text.known)))
        return WorkOrder(self._next_order(), tuple(runs), tuple(copies), tuple(self._told))

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _do(self, order: WorkOrder) -> np.ndarray:
        self.executor.channel.send(order)
        self._told = []
        return self.executor.execute(order)

    # After the step

    def _advance(self, order: WorkOrder) -> None:
        for run in order.runs:
            text = self.running[run.text]
            was_done = text.is_done_with_prompt
            text.computed += len(run.tokens)
            self.computed_tokens += len(run.tokens)
            if text.computed >= (text.filed + 1) * BLOCK or (not was_done and text.is_done_with_prompt):
                self._file(text, with_part=not was_done)

    def _file(self, text: Text, *, with_part: bool) -> None:
        """File the blocks that are full now; `with_part`: and what is in the one behind them."""
        while text.computed >= (text.filed + 1) * BLOCK:
            at = text.filed * BLOCK
            text.node = self.pool.file(text.blocks[text.filed], text.node, text.known[at : at + BLOCK])
            text.filed += 1
        part = text.known[text.filed * BLOCK : text.computed]
        if with_part and part:
            self.pool.file(text.blocks[text.filed], text.node, part)

    def _choose(self, text: Text, logits: np.ndarray) -> None:
        request, sampling = text.request, text.request.sampling
        changed = logits
        if sampling.penalties != NO_PENALTIES:
            changed = sampling.penalties.applied(logits, request.prompt, text.new)
        if request.grammar is not None:
            changed = np.where(request.grammar.allowed(), changed, -np.inf)
        draw = uniform_draw(sampling.seed, request.occurrence, len(text.known)) if sampling.temperature else 0.0
        token = sampling.choose(changed, draw)
        reason = self._reason(text, token, logits)
        self._told.append((text.number, token, reason))
        if reason is not Reason.GOES_ON:
            self._let_go(self.running.pop(text.number))
            request.listener.end(reason)

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
