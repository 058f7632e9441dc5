"""Buckets: gradients that are reduced together, as soon as the last of them is there.

    backward:   layer n      layer n-1     layer n-2    ...
                g g g        g g g         g g g
                bucket 0 |   bucket 1           |   each starts when backward has left the layer of its last gradient

Few large sums are faster than many small ones, and those that have started move on while backward goes on below. A
parameter that several layers share is there when the first of them, in forward order, is done: a tied head's gradient
waits for the embedding's. Every rank starts the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.group import Group, Pending
from mpitp.layers.layer import Layer
from mpitp.layers.param import Param
from mpitp.layers.shards import Shard


def backward_order(layers: Mapping[str, Layer]) -> list[tuple[str, list[Param]]]:
    """Each layer, the last one first, with the parameters whose gradients are whole when its backward is done."""
    seen: set[int] = set()
    order = []
    for name, layer in layers.items():
        new = [param for param in layer.params().values() if id(param) not in seen]
        seen |= {id(param) for param in new}
        order.append((name, new))
    return order[::-1]


@dataclass(slots=True)
class Bucket:
    """Some shards of one kind. `layer`: the one whose backward gives the last gradient. `is_scattered`: each rank gets
    the sum of its own rows, into the pieces; else all get all, into the parameters.
    """

    shards: list[Shard]
    layer: str
    is_scattered: bool
    rest: Group  # the ranks along other axes over which the sum goes on
    pending: Pending | None = field(default=None)

    @property
    def group(self) -> Group:
        """The ranks whose gradients are added first."""
        return self.shards[0].group

    def start(self) -> None:
        """Start the reduction of the gradients as they are; the parameters forget them."""
        flat = self._packed()
        for shard in self.shards:
            shard.param.grad = None
        if self.is_scattered:
            self.pending = self.group.start_reduce_scatter(flat, self.sizes())
        else:
            self.pending = self.group.start_all_reduce(flat, out=flat)

    def finish(self) -> None:
        """Wait for the sum. A piece adds it to what it has, a parameter takes it."""
        assert self.pending is not None, "a bucket that wasn't started"
        flat, self.pending, start = self.pending.wait(), None, 0
        flat = self.rest.all_reduce(flat, out=flat)
        for shard in self.shards:
            target = shard.piece if self.is_scattered else shard.param
            size = int(np.prod(target.data.shape))
            target.accumulate(flat[start : start + size].reshape(target.data.shape))
            start += size

    def sizes(self) -> list[int]:
        """Elements that each rank keeps."""
        widths = [int(np.prod(shard.param.data.shape[1:])) for shard in self.shards]
        ranks = range(self.group.size)
        return [sum(len(s.rows[r]) * w for s, w in zip(self.shards, widths, strict=True)) for r in ranks]

    def gather(self) -> Pending:
        """Start to gather the ranks' pieces of the weights."""
        xp = array_module(self.shards[0].param.data)
        return self.group.start_all_gather(xp.concatenate([s.piece.data.reshape(-1) for s in self.shards]))

    def spread(self, joined: Array) -> None:
        """Write what was gathered to the weights."""
        start = 0
        for shard, rows in self._in_rank_order():
            target = shard.param.data[rows.start : rows.stop]
            target[...] = joined[start : start + target.size].reshape(target.shape)
            start += target.size

    def _packed(self) -> Array:
        """All gradients in one flat array, in the order in which the ranks keep them where they are scattered."""
        first = self.shards[0].param
        size = sum(shard.param.data.size for shard in self.shards)
        flat = self.group.empty((size,), first.grad_dtype, array_module(first.data))
        start = 0
        for shard, rows in self._in_rank_order() if self.is_scattered else self._whole():
            count = len(rows) * (shard.param.data.size // max(len(shard.param.data), 1))
            grad = shard.param.grad
            flat[start : start + count] = 0 if grad is None else grad[rows.start : rows.stop].reshape(-1)
            start += count
        return flat

    def _whole(self) -> Iterator[tuple[Shard, range]]:
        yield from ((shard, range(len(shard.param.data))) for shard in self.shards)

    def _in_rank_order(self) -> Iterator[tuple[Shard, range]]:
        yield from ((shard, shard.rows[rank]) for rank in range(self.group.size) for shard in self.shards)


@dataclass(slots=True)
class Rounds:
    """Starts the buckets of a round in their order, each when it can be, and ends them."""

    buckets: Sequence[Bucket]
    started: int = 0
    done: set[str] = field(default_factory=set)

    def layer_done(self, name: str) -> None:
        """Start what was waiting for this layer."""
        self.done.add(name)
        while self.started < len(self.buckets) and self.buckets[self.started].layer in self.done:
            self._start_next()

    def finish(self) -> None:
        """Start the others, wait for all."""
        while self.started < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()
        self.reset()

    def reset(self) -> None:
        """Nothing has been started."""
        self.started = 0
        self.done.clear()

    def _start_next(self) -> None:
        self.buckets[self.started].start()
        self.started += 1


def spread_weights(buckets: Sequence[Bucket]) -> None:
    """Give every rank all rows of the weights, of which each has updated its own."""
    for bucket, pending in [(bucket, bucket.gather()) for bucket in buckets]:
        bucket.spread(pending.wait())


def plan_buckets(
    order: Sequence[tuple[str, list[Param]]], kinds: Mapping[int, object], most_bytes: int
) -> list[tuple[str, list[Param]]]:
    """Deal parameters, in the order in which backward leaves them, to buckets of at most `most_bytes` (one larger
    parameter is a bucket of its own): the layer to wait for, and the parameters.

    `kinds`: by `id`, what the parameters of one bucket must have in common; those that aren't named are left out.
    """
    flat = [(layer, param) for layer, params in order for param in params if id(param) in kinds]
    found: list[tuple[str, list[Param]]] = []
    for _, run in groupby(flat, lambda entry: kinds[id(entry[1])]):
        filled = most_bytes + 1
        for layer, param in run:
            size = param.data.size * param.grad_dtype.itemsize
            if filled + size > most_bytes:
                found.append((layer, []))
                filled = 0
            found[-1] = (layer, [*found[-1][1], param])
            filled += size
    return found
