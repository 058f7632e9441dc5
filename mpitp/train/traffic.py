"""What replicas send in a training step, in closed form: gradients in buckets, and with ZeRO the weights once more.

    P_b elements in bucket b, w bytes of one in which gradients are summed, s of a weight
    ZeRO 0      all_reduce of P_b w, a step
    ZeRO 1      reduce_scatter of P_b w a step, all_gather of this rank's rows of P_b s, an update
    ZeRO 2      reduce_scatter of P_b w a microbatch, the same all_gather

With sequence parallelism what is partial along tp too is summed on along it: all_reduce of P_b w (with ZeRO, of this
rank's rows of it), each time. ZeRO-3 and the invariant mode have no closed form here: their collectives are counted
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from mpitp.comm.group import Group
from mpitp.optim.buckets import Bucket
from mpitp.optim.reduction import InBuckets, Reduction
from mpitp.trace.tracer import Tracer
from mpitp.trace.traffic import Key, Own

NORM, OPTIMIZER = "gradient norm", "optimizer"  # spans: one a step, one an update


def replica_traffic(reduction: Reduction, tracer: Tracer) -> dict[Key, Own]:
    """This rank's part, for the steps that `tracer` has seen whole; {} where there is no closed form."""
    if not isinstance(reduction, InBuckets) or tracer.is_full:
        return {}
    spans = [span.name for span in tracer.spans]
    steps, updates = spans.count(NORM), spans.count(OPTIMIZER)
    steps *= reduction.rounds if reduction.zero > 1 else 1
    table: dict[Key, Own] = {}
    for bucket in reduction.buckets.buckets:
        for key, group, calls, size in _of_bucket(bucket, steps, updates):
            before = table.setdefault(key, Own(0, Fraction(0), "P w" if key[0] != "all_gather" else "P s / p", "dp"))
            before.calls, before.share = before.calls + calls, before.share + calls * size
            before.axis = tracer.axis_of(group)
    return table


def _of_bucket(bucket: Bucket, steps: int, updates: int) -> Iterator[tuple[Key, Group, int, int]]:
    """Kind and place of each of its collectives, over whom, how often it comes, and the bytes of one."""
    if bucket.rest.size > 1:
        kept = [(shard.piece if bucket.is_scattered else shard.param) for shard in bucket.shards]
        summed = sum(param.data.size * param.grad_dtype.itemsize for param in kept)
        yield ("all_reduce sum", "buckets.finish", ""), bucket.rest, steps, summed
    if bucket.group.size == 1:
        return
    whole = sum(shard.param.data.size * shard.param.grad_dtype.itemsize for shard in bucket.shards)
    op = "reduce_scatter" if bucket.is_scattered else "all_reduce sum"
    yield (op, "buckets.start", ""), bucket.group, steps, whole
    if bucket.is_scattered:
        weights = sum(shard.piece.data.nbytes for shard in bucket.shards)
        yield ("all_gather", "buckets.gather", ""), bucket.group, updates, weights
