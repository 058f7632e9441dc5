"""Carrying work orders out: what every rank does with its piece of the model and of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.errors import NumericError
from mpitp.infer.blocks import BLOCK
from mpitp.infer.orders import Next, OrderChannel, TextRun, WorkOrder
from mpitp.layers.layer import Layer
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.paged_cache import PagedCaches
from mpitp.layers.product import RowByRowProduct
from mpitp.layers.rows import Rows, Run
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM


class Executor:
    """Carries work orders out on this rank, with a cache of `num_blocks` blocks.

    `world`: the ranks that get the orders; None: those that the model is laid on. `draft`: a second model, which drafts
    (`speculation.py`), with a cache of as many blocks.
    """

    def __init__(
        self, model: CausalLM, num_blocks: int, world: Group | None = None, draft: CausalLM | None = None
    ) -> None:
        self.model, self.num_blocks = model, num_blocks
        self.models = [model] if draft is None else [model, draft]
        self.caches = [PagedCaches(num_blocks * BLOCK, one_by_one=bool(each.site.num_blocks)) for each in self.models]
        self.short = [each.decode_calls() for each in self.models]
        self.channel = OrderChannel(world or model.site.ranks, num_blocks * BLOCK)

    def execute(self, order: WorkOrder) -> np.ndarray:
        """Logits [sum of wanted, v] behind the tokens that want them, equal on every rank.

        Raises NumericError where they are not finite, on every rank alike.
        """
        for source, target, count in order.copies:
            for each in self.caches:
                each.copy(source, target, count)
        model, caches = self.models[order.model], self.caches[order.model]
        if not order.runs:
            return np.empty((0, model.config.vocab_size), model.dtype)
        caches.tables = [run.table for run in order.runs]
        runs = tuple(Run(slot, run.first, len(run.tokens), slot) for slot, run in enumerate(order.runs))
        batch = Batch(np.array([token for run in order.runs for token in run.tokens], np.int64), Rows(runs))
        more: dict[str, Any] = {}
        if any(run.wanted != 1 for run in order.runs):
            more["wanted"] = _wanted_rows(order.runs)
        if self.short[order.model].takes(batch.rows, caches):
            more["short"] = self.short[order.model]
        logits = model.next_logits(batch, caches, **more)
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


def _wanted_rows(runs: Sequence[TextRun]) -> list[int]:
    """The rows of a batch of these runs whose logits are wanted."""
    rows: list[int] = []
    stop = 0
    for run in runs:
        stop += len(run.tokens)
        rows += range(stop - run.wanted, stop)
    return rows


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
