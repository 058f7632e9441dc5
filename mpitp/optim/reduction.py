"""How the gradients that the ranks of the data axes have each of their own rows become the gradients of the whole step.

    begin(rounds)        the most microbatches that any of these ranks has
      layer_done(name)   a microbatch's backward has done that layer: its gradients may be on their way
      batch_done         it has done all layers
    finish               every gradient is that of the step, on every rank that updates with it
    updated              the optimizer has changed `params`: every rank has the weights again that it computes with

A rank with fewer microbatches makes up for them in `finish`, so that all come to the same collectives. A runner that
tells nothing of its progress has all done there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from mpitp.backend.arrays import Array, array_module
from mpitp.comm.mesh import Mesh
from mpitp.layers.param import Param
from mpitp.layers.shards import Shard, data_axes, make_shards
from mpitp.models.layered import LayeredModel
from mpitp.models.runner import Progress
from mpitp.optim.buckets import Bucket, Rounds, backward_order, plan_buckets, spread_weights

NamedParams = list[tuple[str, Param]]
BUCKET_BYTES = 4 << 20


class Reduction(Progress):
    """Sums gradients over the axes along which they are partial.

    `params`: what this rank's optimizer updates. `counted`: those whose gradients, after `finish`, make up the norm.
    """

    params: NamedParams
    counted: NamedParams

    @abstractmethod
    def begin(self, rounds: int) -> None:
        """A step begins; nothing is left of an earlier one, which may have been given up."""

    @abstractmethod
    def finish(self) -> None:
        """Make the gradients of `params` and `counted` those of the whole step. A collective."""

    @abstractmethod
    def updated(self) -> None:
        """The optimizer has updated `params`. A collective where ranks have updated different ones."""

    def idle_forward(self) -> None:
        """Others run a forward pass that this rank has no rows for."""


class InBuckets(Reduction):
    """All gradients whole on all ranks, in buckets that start behind the last microbatch's backward.

    `zero` 1: each rank gets its rows of the sums, updates its rows of the weights (ZeRO-1), and gathers the others'.
    2: gradients are scattered after every microbatch, and no rank keeps more than its rows (ZeRO-2).
    """

    def __init__(self, model: LayeredModel, zero: int = 0, bucket_bytes: int = BUCKET_BYTES) -> None:
        mesh = model.site.mesh
        self.zero, self.shards = zero, make_shards(model.named_params(), mesh)
        self.all_params = [shard.param for shard in self.shards]
        self.params = self.counted = [(s.name, s.piece if zero else s.param) for s in self.shards]
        self.buckets = Rounds(_buckets(model, self.shards, mesh, bucket_bytes, is_scattered=zero > 0))
        self.unsummed = [shard for shard in self.shards if zero and not shard.param.placement.partial]
        self.rounds = self.rounds_done = 0

    def begin(self, rounds: int) -> None:
        self.rounds, self.rounds_done = rounds, 0
        self.buckets.reset()
        for param in (*self.all_params, *(param for _, param in self.params)):
            param.grad = None

    def layer_done(self, name: str) -> None:
        if self.zero > 1 or self.rounds_done == self.rounds - 1:
            self.buckets.layer_done(name)

    def batch_done(self) -> None:
        self.rounds_done += 1
        if self.zero > 1:
            self.buckets.finish()

    def finish(self) -> None:
        if self.zero < 2:
            self.buckets.finish()
        while self.zero > 1 and self.rounds_done < self.rounds:
            self.batch_done()
        for shard in self.unsummed:  # nobody else has a copy (experts that ep deals): the piece is all of it
            shard.piece.grad, shard.param.grad = shard.param.grad, None

    def updated(self) -> None:
        """With ZeRO, gather every rank's rows of the weights."""
        if self.zero:
            spread_weights(self.buckets.buckets)


def _buckets(
    model: LayeredModel, shards: Sequence[Shard], mesh: Mesh, most_bytes: int, *, is_scattered: bool
) -> list[Bucket]:
    """Of the parameters that are partial along an axis; those of one bucket along the same ones."""
    by_param = {id(shard.param): shard for shard in shards}
    kinds = {key: (s.param.placement.partial, s.param.grad_dtype) for key, s in by_param.items()}
    plan = plan_buckets(backward_order(model.layers), {k: v for k, v in kinds.items() if v[0]}, most_bytes)
    made = []
    for layer, params in plan:
        rest = params[0].placement.partial - set(data_axes(params[0].placement))
        made.append(Bucket([by_param[id(param)] for param in params], layer, is_scattered, mesh.along(*rest)))
    return made


class InOrder(Reduction):
    """Microbatch after microbatch in the order of their numbers, whatever rank has them: the invariant mode.

    The gradient of each is there by itself, and ((g_0 + g_1) + g_2) + ... has the same bits however they are dealt, as
    long as it is in turn (`train/deal.py`): after each round the first rank goes on from the sum. `zero` 1: each rank
    updates its rows.
    """

    def __init__(self, model: LayeredModel, zero: int = 0, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.shards, self.zero = make_shards(model.named_params(), model.site.mesh), zero
        self.counted = [(shard.name, shard.param) for shard in self.shards]
        self.params = [(shard.name, shard.piece) for shard in self.shards] if zero else self.counted
        self.totals: dict[str, Array] = {}
        self.rounds = self.rounds_done = 0
        self.buckets = _buckets(model, self.shards, model.site.mesh, bucket_bytes, is_scattered=True) if zero else []

    def begin(self, rounds: int) -> None:
        self.rounds, self.rounds_done = rounds, 0
        self.totals = {}
        for _, param in (*self.counted, *self.params):
            param.grad = None

    def batch_done(self) -> None:
        """Add this round's gradients to the sum."""
        self.rounds_done += 1
        for shard in self.shards:
            so_far = self.totals.get(shard.name) if shard.group.rank == 0 else None
            partials = [grad for grad in (so_far, shard.param.grad) if grad is not None]
            shard.param.grad = None
            self.totals[shard.name] = shard.group.all_reduce_in_order(partials, _like(shard.param))

    def finish(self) -> None:
        """Make up for rounds without rows; hand the sums out."""
        while self.rounds_done < self.rounds:
            self.batch_done()
        for shard in self.shards:
            shard.param.grad = self.totals.pop(shard.name)
            if self.zero:
                mine = shard.rows[shard.group.rank]
                shard.piece.grad = shard.param.grad[mine.start : mine.stop]

    def updated(self) -> None:
        """With ZeRO, gather every rank's rows of the weights."""
        for shard in self.shards:
            shard.param.grad = None
        spread_weights(self.buckets)


def _like(param: Param) -> Array:
    """An array of the shape and dtype of its gradient."""
    return array_module(param.data).empty(param.data.shape, param.grad_dtype)


def make_reduction(model: LayeredModel, zero: int = 0, bucket_bytes: int = BUCKET_BYTES) -> Reduction:
    """The one for a model on its site."""
    return InOrder(model, zero, bucket_bytes) if model.site.num_blocks else InBuckets(model, zero, bucket_bytes)
