"""Mistakes that people make where several kinds of parallelism meet: `with LAYOUT_FAULTS[name].planted(): ...`.

As in `planted_bugs.py` each breaks the parallel model only. Here a fault also says on which mesh it is one, with which
settings, and along which axis `verify` (or the check of types, before anything runs) must place it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import mpitp.layers.build
import mpitp.layers.mappings
import mpitp.optim.buckets
import mpitp.optim.reduction
import mpitp.pipeline.runner
from examples.planted_bugs import Planting, in_method, in_model, replaced
from mpitp.backend.arrays import Array
from mpitp.comm.group import Pending
from mpitp.comm.serial import SerialGroup
from mpitp.layers.build import Builder
from mpitp.layers.dropout import Dropout
from mpitp.layers.embedding import PositionEmbedding
from mpitp.layers.gathered import DealtParam
from mpitp.layers.linear import RowParallelLinear
from mpitp.layers.mappings import CopyToTP, GatherFromSP, ReduceFromTP, ReduceScatterToSP
from mpitp.layers.recompute import Recompute
from mpitp.layers.rows import Rows
from mpitp.layers.summation import local_sum
from mpitp.models import CausalLM
from mpitp.optim.buckets import Bucket
from mpitp.optim.grad_norm import GradNorm
from mpitp.train.step import TrainStep

Keys = dict[str, Any]
SP = {"sequence_parallel": True}


@dataclass(frozen=True)
class LayoutFault:
    """A mistake in a layout. `seen`: as of `planted_bugs.Fault`; {"types": place}: refused when the model is built.

    `axis`: of the mesh, along which it is said to have gone wrong ("": it doesn't show). `site`: what the model is laid
    on beside `mesh`. `training`: zero, schedule, recompute, sequences of a microbatch, steps of the comparison.
    """

    mistake: str
    planted: Planting
    seen: dict[str, str]
    axis: str = ""
    mesh: Keys = field(default_factory=lambda: {"dp": 2, "tp": 2})
    site: Keys = field(default_factory=dict)
    training: Keys = field(default_factory=dict)
    model: str = "gpt2"


def in_place_of(owner: Any, name: str, make: Callable[[Any], Any]) -> Planting:
    """`owner.name` is make(what it was)."""
    return lambda: replaced(owner, name, make)


def world_of(model: CausalLM) -> Any:
    return model.site.ranks


# Token shards


def begin_positions_at_0(original: Any) -> Any:
    """Each rank counts the positions of its shard from its first row on."""

    def forward(layer: PositionEmbedding, x: Array, run: Any) -> Any:
        if run.shard is None:
            return original(layer, x, run)
        return original(layer, x, replace(run, shard=Rows(tuple(replace(each, first=0) for each in run.shard.runs))))

    return forward


def draw_masks_by_local_rows(original: Any, layer: Dropout, x: Array, run: Any) -> Any:
    """The mask of a shard is that of the first rows of the batch."""
    return original(layer, x, replace(run, shard=run.rows.part(range(run.shard_rows.num_tokens))))


def in_dropout() -> AbstractContextManager[None]:
    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def masked(layer: Dropout, x: Array, run: Any) -> Any:
            if run.shard is None:
                return original(layer, x, run)
            return draw_masks_by_local_rows(original, layer, x, run)

        return masked

    return replaced(Dropout, "_masked", wrapped)


def gather_over_the_wrong_ranks(model: CausalLM) -> None:
    """A pair is made with the group of another axis of the same size."""
    model["blocks.1.attention.qkv"].copy = GatherFromSP(model.site.mesh["dp"])


class OwnRows(GatherFromSP):
    """Backward takes this rank's rows of its own part of dx."""

    def start_backward(self, dx_partials: Any, like: Array) -> Pending:
        rows = np.array_split(np.arange(len(like)), self.group.size)[self.group.rank]
        return Pending.done(local_sum(dx_partials, like)[rows])


def forget_sum_of_dx(model: CausalLM) -> None:
    model["blocks.1.mlp.up"].copy = OwnRows(model.site.tp)


class MeanBackward(ReduceScatterToSP):
    """Backward averages dy over the ranks, though each has its own rows."""

    def backward(self, dy: Array) -> Array:
        return ReduceScatterToSP.backward(self, dy) / self.group.size


def average_dy(model: CausalLM) -> None:
    model["blocks.1.mlp.down"].reduce = MeanBackward(model.site.tp)


class BiasBeforeSum(ReduceScatterToSP):
    """The bias is in every rank's summand."""

    bias: Any

    def forward(self, y_partials: Any, like: Array) -> Array:
        others = self.group.size - 1
        return ReduceScatterToSP.forward(self, y_partials, like) + others * self.bias


def add_bias_before_scatter(model: CausalLM) -> None:
    layer: RowParallelLinear = model["blocks.0.attention.out"]
    pair = BiasBeforeSum(model.site.tp)
    assert layer.bias is not None
    object.__setattr__(pair, "bias", layer.bias.data)
    layer.reduce = pair


def forget_that_norms_are_partial(original: Any) -> Any:
    """The weights that meet token shards are declared as those that meet whole rows."""
    return lambda build, *shape, std=0.0, value=0.0: build.site.whole(*shape, std=std, value=value)


def copy_at_the_head(original: Any) -> Any:
    """The head takes its rows for those of all ranks."""

    def head(build: Builder, table: Any, vocab: Any) -> Any:
        made = original(build, table, vocab)
        made.copy = CopyToTP(build.site.summation())
        return made

    return head


def sum_whole_embeddings(original: Any) -> Any:
    """The embedding hands whole rows to blocks that take shards."""

    def embedding(build: Builder, table: Any, vocab: Any) -> Any:
        made = original(build, table, vocab)
        made.reduce = ReduceFromTP(build.site.summation())
        return made

    return embedding


# Gradients over the axes of data


def skip_the_sum_over_tp(original: Any) -> Any:
    """Gradients that are partial along tp too are summed over the axes of data alone."""

    def buckets(*args: Any, **named: Any) -> Any:
        return [replace(bucket, rest=SerialGroup()) for bucket in original(*args, **named)]

    return buckets


def average_over_replicas(original: Any, bucket: Bucket) -> None:
    """Replicas' gradients are averaged, though each replica has divided by the targets of all."""
    original(bucket)
    for shard in bucket.shards:
        shard.param.grad /= bucket.group.size


def sum_over_replicas_twice(original: Any, bucket: Bucket) -> None:
    """What has been summed is summed again."""
    original(bucket)
    for shard in bucket.shards:
        shard.param.grad = bucket.group.all_reduce(shard.param.grad)


def start_buckets_early(original: Any) -> Any:
    """A tied table's bucket starts when the head is done; the embedding adds to its gradient afterwards."""

    def order(layers: Any) -> Any:
        seen: set[int] = set()
        found = []
        for name, layer in reversed(layers.items()):
            new = [param for param in layer.params().values() if id(param) not in seen]
            seen |= {id(param) for param in new}
            found.append((name, new))
        return found

    return order


def count_own_targets(original: Any, step: TrainStep, batches: Any) -> Any:
    """Each replica divides by the number of its own targets."""
    data, step.data = step.data, SerialGroup()
    try:
        return original(step, batches)
    finally:
        step.data = data


def number_samples_from_0(model: CausalLM) -> None:
    """Each replica's samples begin at 0 in its masks."""
    layer, first = model["embedding dropout"], 2 * model.site.mesh.coordinates["dp"]
    original = layer._masked

    def masked(x: Array, run: Any) -> Any:
        runs = tuple(replace(each, sample=each.sample - first) for each in run.rows.runs)
        return original(x, replace(run, rows=Rows(runs)))

    layer._masked = masked


# ZeRO


def keep_stale_weights(original: Any) -> Any:
    """Nobody gathers the rows that the others have updated."""
    return lambda buckets: None


def gather_freed_weights_once(original: Any, dealt: DealtParam) -> Pending:
    """What was gathered in the first step is taken for the weights of all later ones."""
    kept = _gathered.setdefault(id(dealt), (dealt, original(dealt).wait()))
    return Pending.done(kept[1])


_gathered: dict[int, Any] = {}


def overwrite_rows(original: Any, bucket: Bucket) -> None:
    """A microbatch's rows replace those of the one before."""
    for shard in bucket.shards:
        shard.piece.grad = None
    original(bucket)


# The gradient norm


def leave_replicas_out(original: Any, norm: GradNorm) -> float:
    """Parameters that every rank holds whole have no part in the norm."""
    slots, norm.slots = norm.slots, [slot for slot in norm.slots if not slot[0].placement.is_replicated]
    try:
        return original(norm)
    finally:
        norm.slots = slots


def count_replicas(original: Any, norm: GradNorm) -> float:
    """Every rank adds the squares of all that it holds."""
    grads = [param.grad for _, param in norm.params if param.grad is not None]
    squares = np.array(sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads))
    return float(np.sqrt(norm.group.all_reduce(squares)))


def norm_of_the_stage(original: Any) -> Any:
    """Each stage clips by the norm of its own layers."""

    def init(step: TrainStep, model: CausalLM, *args: Any, **named: Any) -> None:
        original(step, model, *args, **named)
        step.grad_norm = GradNorm(step.reduction.counted, model.site.mesh.along("dp", "cp", "tp"))

    return init


# Pipelines


def forget_the_other_stage(original: Any) -> Any:
    """The gradient of a tied table has the first stage's summand on the first stage, the last's on the last."""
    return lambda model: None


def add_on_the_first_stage_alone(original: Any) -> Any:
    """The first stage adds the last one's summand to its own and doesn't hand the sum on."""

    def add(param: Any, group: Any, other: int) -> None:
        kept = param.grad
        original(param, group, other)
        param.grad = param.grad if group.rank == 0 else kept

    return add


def swap_messages(original: Any) -> Any:
    """A stage receives the activations of each microbatch's neighbour in the place of its own."""

    def expect(walk: Any, action: Any) -> None:
        batches = len(walk.batches)
        is_forward = action.kind is mpitp.pipeline.runner.Kind.FORWARD
        other = action.microbatch ^ 1
        if not is_forward or action in walk.coming or other >= batches:
            return original(walk, action)
        message = mpitp.pipeline.runner.receive_before(replace(action, microbatch=other), walk.group.rank, walk.grid)
        if message is not None:
            like = np.empty(walk.model.hidden_shape(walk.batches[action.microbatch]), walk.model.dtype)
            tag = mpitp.pipeline.runner._tag(message)
            walk.coming[action] = [walk.group.start_recv(like, message.peer, tag)]
        return None

    return expect


def drop_last_weight_gradients(original: Any) -> Any:
    """The weight gradients that were put off last are never computed."""

    def weight_grad(walk: Any, action: Any) -> None:
        if action.microbatch == len(walk.batches) - 1:
            walk.put_off.pop((action.microbatch, action.chunk))
        else:
            original(walk, action)

    return weight_grad


# Recompute


def recompute_with_other_masks(original: Any, layer: Recompute, dy: Array, ctx: Any) -> Array:
    """What is computed again drops other elements than before."""
    run = ctx.run
    other = replace(run.dropout, step=run.dropout.step + 1)
    return original(layer, dy, replace(ctx, run=replace(run, dropout=other)))


def in_recompute() -> AbstractContextManager[None]:
    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda layer, dy, ctx: recompute_with_other_masks(original, layer, dy, ctx)

    return replaced(Recompute, "backward", wrapped)


def group_of_bucket(bucket: Bucket) -> Any:
    return bucket.group


LAYOUT_FAULTS: dict[str, LayoutFault] = {
    "positions of a shard from 0": LayoutFault(
        "each rank counts the positions of its token shard from 0",
        in_place_of(PositionEmbedding, "forward", begin_positions_at_0),
        {"y": "positions"},
        "tp",
        {"tp": 2},
        SP,
    ),
    "masks of a shard by local rows": LayoutFault(
        "a token shard's dropout mask is that of the first rows of the batch",
        in_dropout,
        {"y": "embedding dropout"},
        "tp",
        {"dp": 2, "tp": 2},
        SP,
    ),
    "gather over the wrong axis": LayoutFault(
        "a pair gathers the tokens of the data-parallel neighbours",
        in_model(gather_over_the_wrong_ranks),
        {"y": "blocks.1.attention.qkv"},
        site=SP,
        training={"rows": 2},  # an even number of tokens, or it would end in an error
        model="llama",
    ),
    "dx of a shard not summed": LayoutFault(
        "backward keeps this rank's rows of its own part of dx",
        in_model(forget_sum_of_dx),
        {"dx": "blocks.1.mlp.up"},
        mesh={"tp": 3},
        site=SP,
    ),
    "dy of shards averaged": LayoutFault(
        "backward averages dy over the ranks that have rows of it",
        in_model(average_dy),
        {"dx": "blocks.1.mlp.down"},
        "tp",
        {"tp": 2},
        SP,
    ),
    "bias added before the scatter": LayoutFault(
        "a row-parallel bias is in every rank's summand",
        in_model(add_bias_before_scatter),
        {"y": "blocks.0.attention.out"},
        mesh={"tp": 2},
        site=SP,
    ),
    "norms not partial": LayoutFault(
        "the gradients of weights that meet token shards aren't declared partial",
        in_place_of(Builder, "between", forget_that_norms_are_partial),
        {"types": "positions"},
        "tp",
        {"tp": 2},
        SP,
    ),
    "head without a gather": LayoutFault(
        "the head takes its token shard for all rows",
        in_place_of(Builder, "head", copy_at_the_head),
        {"types": "head"},
        "tp",
        {"tp": 2},
        SP,
        model="llama",
    ),
    "whole rows into the blocks": LayoutFault(
        "the embedding sums whole rows, the blocks take shards",
        in_place_of(Builder, "embedding", sum_whole_embeddings),
        {"types": "blocks.0.norm1"},
        "tp",
        {"tp": 2},
        SP,
        model="llama",
    ),
    "norms not summed over tp": LayoutFault(
        "gradients that are partial along tp and dp are summed over dp alone",
        in_place_of(mpitp.optim.reduction, "_buckets", skip_the_sum_over_tp),
        {"grad": "positions.weight"},
        "tp",
        {"dp": 2, "tp": 2},
        SP,
    ),
    "gradients averaged over replicas": LayoutFault(
        "gradients are divided by the replicas, and by the targets of all",
        in_method(Bucket, "finish", group_of_bucket, average_over_replicas),
        {"grad": "embedding.weight"},
        "dp",
    ),
    "gradients summed twice over replicas": LayoutFault(
        "gradients are summed over the replicas two times",
        in_method(Bucket, "finish", group_of_bucket, sum_over_replicas_twice),
        {"grad": "embedding.weight"},
        "dp",
    ),
    "bucket started too early": LayoutFault(
        "a tied table's gradient is reduced before the embedding has added to it",
        in_place_of(mpitp.optim.reduction, "backward_order", start_buckets_early),
        {"grad": "embedding.weight"},
        "dp",
    ),
    "loss over the replica's own targets": LayoutFault(
        "each replica divides by the number of its own targets",
        in_method(TrainStep, "accumulate", lambda step: world_of(step.model), count_own_targets),
        {"dx": "loss", "value": "loss"},
        "dp",
    ),
    "masks by a replica's own samples": LayoutFault(
        "each replica numbers its samples from 0 in its dropout masks",
        in_model(number_samples_from_0),
        {"y": "embedding dropout"},
        "dp",
    ),
    "weights of other ranks stale": LayoutFault(
        "after the update nobody gathers the rows that other ranks have updated",
        in_place_of(mpitp.optim.reduction, "spread_weights", keep_stale_weights),
        {"value": "loss of step 2", "update": "embedding.weight"},
        "dp",
        training={"zero": 1, "steps": 2},
    ),
    "weights of a freed block stale": LayoutFault(
        "a block's weights of the first step are used in all later ones",
        in_method(DealtParam, "start_gather", lambda dealt: dealt.group, gather_freed_weights_once),
        {"value": "loss of step 2"},
        training={"zero": 3, "steps": 2},
    ),
    "microbatches replace one another": LayoutFault(
        "a microbatch's scattered gradient replaces that of the one before",
        in_method(Bucket, "finish", group_of_bucket, overwrite_rows),
        {"grad": "embedding.weight"},
        training={"zero": 2},
    ),
    "replicated weights not in the norm": LayoutFault(
        "the clipping norm leaves out what every rank holds whole",
        in_method(GradNorm, "__call__", lambda norm: norm.group, leave_replicas_out),
        {"value": "gradient norm"},
        site=SP,
    ),
    "replicas counted in the norm": LayoutFault(
        "the clipping norm counts replicas along dp and tp",
        in_method(GradNorm, "__call__", lambda norm: norm.group, count_replicas),
        {"value": "gradient norm"},
        site=SP,
    ),
    "norm of one stage": LayoutFault(
        "each stage clips by the norm of its own layers",
        in_place_of(TrainStep, "__init__", norm_of_the_stage),
        {"value": "gradient norm"},
        "pp",
        {"pp": 2, "tp": 2},
        training={"steps": 1},
    ),
    "tied table not summed over stages": LayoutFault(
        "the gradient of a tied table lacks the other stage's summand",
        in_place_of(mpitp.pipeline.runner, "sum_tied", forget_the_other_stage),
        {"grad": "embedding.weight"},
        "pp",
        {"pp": 2, "tp": 2},
    ),
    "tied table summed on one stage": LayoutFault(
        "only the first stage has the sum of a tied table's gradient",
        in_place_of(mpitp.pipeline.runner, "_add_others", add_on_the_first_stage_alone),
        {"grad": "embedding.weight"},
        "pp",
        {"pp": 2},
    ),
    "another microbatch's message": LayoutFault(
        "a stage takes the activations of another microbatch for this one's",
        in_place_of(mpitp.pipeline.runner._Walk, "_expect", swap_messages),
        {"y": "blocks.1.norm1"},
        mesh={"pp": 2},
        training={"schedule": "gpipe"},
    ),
    "weight gradients put off for ever": LayoutFault(
        "zero-bubble: the last microbatch's weight gradients are never computed",
        in_place_of(mpitp.pipeline.runner._Walk, "_weight_grad", drop_last_weight_gradients),
        {"grad": "embedding.weight"},
        mesh={"pp": 2},
        training={"schedule": "zb"},
    ),
    "recompute with other masks": LayoutFault(
        "what is computed again for backward drops other elements",
        in_recompute,
        {"y": "blocks.0.attention.heads"},
        mesh={"dp": 2},
        training={"recompute": "full"},
    ),
}
