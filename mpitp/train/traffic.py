"""What replicas send in a training step, in closed form: gradients in buckets, and with ZeRO the weights once more.

    P_b elements in bucket b, P_l in layer l, w bytes of one in which gradients are summed, s of a weight, p ranks
    ZeRO 0      all_reduce of P_b w, a step
    ZeRO 1      reduce_scatter of P_b w a step, all_gather of this rank's rows of P_b s, an update
    ZeRO 2      reduce_scatter of P_b w a microbatch, the same all_gather
    ZeRO 3      all_gather of this rank's rows of P_l s a pass through layer l, forward and backward, reduce_scatter of
                P_l w a backward pass; ranks without rows in a pass join it
    invariant   all_reduce_in_order, a parameter and a round of microbatches: each rank's P w where it has a microbatch,
                and from the second round on the sum so far of the first rank; ZeRO-1's all_gather as above

With sequence parallelism what is partial along tp too is summed on along it: all_reduce of P_b w (with ZeRO, of this
rank's rows of it), each time. A tied table that lies on several stages: send and recv of P w between each two of them,
a step (invariant: a microbatch).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from mpitp.comm.group import Group
from mpitp.layers.gathered import DealtParam, GatheredWeights
from mpitp.layers.layer import BACKWARD, FORWARD
from mpitp.models.layered import LayeredModel
from mpitp.optim.buckets import Bucket
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import InBuckets, InOrder, Reduction
from mpitp.trace.tracer import Tracer
from mpitp.trace.traffic import Key, Own, forward_passes

NORM, OPTIMIZER = "gradient norm", "optimizer"  # spans: one a step, one an update


@dataclass(frozen=True, slots=True)
class Calls:
    """So many calls of one collective at one place among `group`, `share` bytes of this rank in all of them."""

    key: Key
    group: Group
    count: int
    share: int
    formula: str


def replica_traffic(reduction: Reduction, tracer: Tracer) -> dict[Key, Own]:
    """This rank's part, for the steps that `tracer` has seen whole; {} where it hasn't seen all."""
    if tracer.model is None or tracer.is_full:
        return {}
    table: dict[Key, Own] = {}
    for calls in (*_of_reduction(reduction, tracer), *_of_tied(tracer.model, reduction, tracer)):
        if calls.group.size > 1:
            before = table.setdefault(calls.key, Own(0, Fraction(0), calls.formula, tracer.axis_of(calls.group)))
            before.calls, before.share = before.calls + calls.count, before.share + calls.share
    return table


def _spans(tracer: Tracer, name: str) -> int:
    return sum(span.name == name for span in tracer.spans)


def _of_reduction(reduction: Reduction, tracer: Tracer) -> Iterator[Calls]:
    steps, updates = _spans(tracer, NORM), _spans(tracer, OPTIMIZER)
    if isinstance(reduction, InBuckets):
        rounds = steps * reduction.rounds if reduction.zero > 1 else steps
        for bucket in reduction.buckets.buckets:
            yield from _of_bucket(bucket, rounds)
            yield from _of_weights(bucket, updates)
    elif isinstance(reduction, InOrder):
        yield from _in_order(reduction, tracer, steps)
        for bucket in reduction.buckets:
            yield from _of_weights(bucket, updates)
    elif isinstance(reduction, WithDealtWeights):
        assert tracer.model is not None
        for name, layer in tracer.model.layers.items():
            if isinstance(layer, GatheredWeights):
                forward = forward_passes(layer, name, tracer.work)[0] + reduction.idle_passes[FORWARD]
                backward = tracer.work.of(name, BACKWARD)[0] + reduction.idle_passes[BACKWARD]
                for dealt in layer.dealt:
                    yield from _of_dealt(dealt, forward, backward)


def _of_bucket(bucket: Bucket, steps: int) -> Iterator[Calls]:
    """The sums of its gradients: over the axes of data, then over others."""
    whole = sum(shard.param.data.size * shard.param.grad_dtype.itemsize for shard in bucket.shards)
    op = "reduce_scatter" if bucket.is_scattered else "all_reduce sum"
    yield Calls((op, "buckets.start", ""), bucket.group, steps, steps * whole, "P w")
    kept = [(shard.piece if bucket.is_scattered else shard.param) for shard in bucket.shards]
    summed = sum(param.data.size * param.grad_dtype.itemsize for param in kept)
    yield Calls(("all_reduce sum", "buckets.finish", ""), bucket.rest, steps, steps * summed, "P w")


def _of_weights(bucket: Bucket, updates: int) -> Iterator[Calls]:
    """What each rank has updated, where that is its rows only."""
    if bucket.is_scattered:
        rows = sum(shard.piece.data.nbytes for shard in bucket.shards)
        yield Calls(("all_gather", "buckets.gather", ""), bucket.group, updates, updates * rows, "P s / p")


def _of_dealt(dealt: DealtParam, forward: int, backward: int) -> Iterator[Calls]:
    """A parameter that is whole only while its layer runs."""
    rows, size = dealt.param.data, dealt.param.grad_dtype.itemsize
    whole = prod(dealt.whole_shape)
    passes = forward + backward
    yield Calls(("all_gather", "gathered.start_gather", ""), dealt.group, passes, passes * rows.nbytes, "P s / p")
    key = "reduce_scatter", "gathered.start_scatter", ""
    yield Calls(key, dealt.group, backward, backward * whole * size, "P w")
    key = "all_reduce sum", "gathered.add", ""
    yield Calls(key, dealt.rest, backward, backward * rows.size * size, "P w / p")


def _in_order(reduction: InOrder, tracer: Tracer, steps: int) -> Iterator[Calls]:
    """Every parameter's gradient, in the order of the microbatches."""
    assert tracer.model is not None
    own = tracer.work.of(next(iter(tracer.model.layers)), BACKWARD)[0]  # microbatches of this rank, in all steps
    for shard in reduction.shards:
        size = shard.param.data.size * shard.param.grad_dtype.itemsize
        sums_so_far = steps * (reduction.rounds - 1) if shard.group.rank == 0 else 0
        key = "all_reduce_in_order", "reduction.batch_done", ""
        yield Calls(key, shard.group, steps * reduction.rounds, (own + sums_so_far) * size, "P w")


def _of_tied(model: LayeredModel, reduction: Reduction, tracer: Tracer) -> Iterator[Calls]:
    """A gradient whose parameter is on several stages: each hands its summand to the others."""
    group, params = model.site.mesh["pp"], dict(model.named_params())
    times = _spans(tracer, NORM) * (reduction.rounds if isinstance(reduction, InOrder) else 1)
    for first in dict.fromkeys(model.tied.values()):
        holders = model.stages_with(first)
        if group.rank in holders:
            size, calls = params[first].data.size * params[first].grad_dtype.itemsize, times * (len(holders) - 1)
            for op in ("send", "recv"):
                yield Calls((op, "runner.add_others", ""), group, calls, calls * size, "P w")
