"""Mistakes that people make in tensor-parallel code, to be planted one at a time: `with FAULTS[name].planted(): ...`.

Each one breaks the parallel model only: a model on one rank stays as it is, so `mpitp.verify.run.verify` has an oracle
to compare with. A fault says in a sentence what is wrong, in which model it can be made, and where it must first show.

Most are made in a finished model, in one layer (`in_model`); the others replace a function of the product.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import mpitp.layers.attention
import mpitp.verify.run
from mpitp.comm.group import Pending
from mpitp.layers.attention import AttentionDropout, AttentionHeads, SelfAttention
from mpitp.layers.embedding import VocabParallelEmbedding
from mpitp.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpitp.layers.loss import VocabParallelCrossEntropy
from mpitp.layers.mappings import CopyToTP, ReduceFromTP
from mpitp.layers.param import Param
from mpitp.layers.partition import Share
from mpitp.models import CausalLM, DecoderConfig, config_from_hf
from mpitp.models.config import Dropouts
from mpitp.optim.grad_norm import GradNorm
from mpitp.train.step import TrainStep

Array = Any
Planting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """A mistake. `seen`: for each kind of row in a report ("y" forward, "dx" backward, ...) the first one that differs.

    `ranks`: fewest and most ranks at which it is a mistake at all. `types`: written as a composition of layers and
    pairs that say what they do, it is an error when the model is built; otherwise only the numbers show it.
    """

    mistake: str
    planted: Planting
    seen: dict[str, str]
    models: tuple[str, ...] = ("gpt2", "llama")
    ranks: tuple[int, int] = (2, 99)
    types: bool = False


# How to plant


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is make(what it was) for a while."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def in_model(damage: Callable[[CausalLM], None]) -> Planting:
    """Every finished model on more than one rank is damaged before it is run."""

    def planted() -> AbstractContextManager[None]:
        def wrapped(record: Callable[[CausalLM], Any]) -> Callable[[CausalLM], Any]:
            def damaged(model: CausalLM) -> Any:
                if model.site.ranks.size > 1:
                    damage(model)
                return record(model)

            return damaged

        return replaced(mpitp.verify.run, "record_layers", wrapped)

    return planted


def in_method(owner: type, name: str, group_of: Callable[[Any], Any], wrong: Callable[..., Any]) -> Planting:
    """`owner.name` is `wrong(original, self, *args)` where the object's group has more than one rank."""

    def planted() -> AbstractContextManager[None]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **named: Any) -> Any:
                if group_of(self).size == 1:
                    return original(self, *args, **named)
                return wrong(original, self, *args, **named)

            return method

        return replaced(owner, name, wrapped)

    return planted


def attention(model: CausalLM, block: int = 1) -> SelfAttention:
    layer: SelfAttention = model[f"blocks.{block}.attention"]
    return layer


def up(model: CausalLM, block: int = 1) -> ColumnParallelLinear:
    layer: ColumnParallelLinear = model.blocks[block].mlp.up
    return layer


def down(model: CausalLM, block: int = 1) -> RowParallelLinear:
    layer: RowParallelLinear = model[f"blocks.{block}.mlp.down"]
    return layer


# Forward


def local_sum(partials: Any, like: Array) -> Array:
    """What this rank alone has."""
    return sum(partials, start=np.zeros_like(like))


class LocalSum(ReduceFromTP):
    """Takes this rank's partial sum for the whole."""

    def forward(self, y_partials: Any, like: Array) -> Array:
        return local_sum(y_partials, like)


def forget_all_reduce_forward(model: CausalLM) -> None:
    down(model).reduce = LocalSum(model.site.summation())


class SumWithBias(ReduceFromTP):
    """Adds the bias to the partial sum of every rank but one; the layer adds it once more after the sum."""

    def forward(self, y_partials: Any, like: Array) -> Array:
        if self.summation.group.rank:
            y_partials = [*y_partials, np.zeros_like(like) + self.bias]
        return ReduceFromTP.forward(self, y_partials, like)


def add_bias_on_every_rank(model: CausalLM) -> None:
    layer = attention(model).out
    assert layer.bias is not None
    pair = SumWithBias(model.site.summation())
    object.__setattr__(pair, "bias", layer.bias.data)
    layer.reduce = pair


def cut_fused_qkv_straight_through(model: CausalLM) -> None:
    """The fused matrix [q; k; v] is cut in p slabs as if its rows were all alike; a rank takes its own for q, k, v."""
    cut_rows_straight_through(attention(model).qkv, model)


def cut_gate_and_up_straight_through(model: CausalLM) -> None:
    """The fused matrix [gate; up] is cut in p slabs: the first ranks hold gates only, the last ones only ups."""
    cut_rows_straight_through(up(model), model)


def cut_rows_straight_through(layer: ColumnParallelLinear, model: CausalLM) -> None:
    weight: Param = layer.children()["weight"]
    group = model.site.ranks
    whole = np.concatenate([group.all_gather(weight.data[place]) for _, place in weight.placement.places()])
    first = sum(group.all_gather_objects(len(weight.data))[: group.rank])
    weight.data[...] = whole[first : first + len(weight.data)]


def shift_vocabulary(model: CausalLM) -> None:
    """Ranks after the first believe that their rows of the table begin one id later than they do."""
    layer: VocabParallelEmbedding = model["embedding"]
    if model.site.ranks.rank:
        rows = layer.vocab.span
        layer.vocab = Share(layer.vocab.units, (range(rows.start + 1, rows.stop + 1),))


def count_target_logits_twice(original: Any, loss: Any, sums: Array, target: Array) -> Any:
    """The target's logit is summed over the ranks by itself, and then once more together with the denominators."""
    return original(loss, sums, loss.reduce.summation.group.all_reduce(target))


def keep_local_denominators(original: Any, loss: Any, sums: Array, target: Array) -> Any:
    """The softmax is normalised over this rank's vocabulary only."""
    _, summed_target = original(loss, sums, target)
    return sums.sum(axis=0), summed_target


def forget_kv_offset(model: CausalLM) -> None:
    """The map from query heads to KV heads is that of rank 0, whatever rank holds which heads."""
    for block in range(len(model.blocks)):
        layer = attention(model, block).heads
        last = len(layer.heads.kv) - 1
        stale = [min(j // layer.heads.group_size, last) for j in range(layer.heads.query.size)]
        layer.head_map = replace(layer.head_map, kv_index=stale)


_here = threading.local()


def interleaved(rope: Callable[..., Array]) -> Callable[..., Array]:
    """RoPE turns neighbouring columns as pairs instead of column j and j + d/2."""

    def turn(x: Array, cos: Array, sin: Array, out: Array) -> Array:
        if not getattr(_here, "is_parallel", False):
            return rope(x, cos, sin, out=out)
        order = np.arange(x.shape[2]).reshape(-1, 2).T.reshape(-1)  # even columns, then odd ones
        out[..., order] = rope(x[..., order], cos, sin)
        return out

    return turn


def marked(original: Any, layer: AttentionHeads, *args: Any) -> Any:
    """The attention of a parallel model, as the replaced RoPE is to know it."""
    _here.is_parallel = True
    try:
        return original(layer, *args)
    finally:
        _here.is_parallel = False


def ranks_of_heads(layer: AttentionHeads) -> Any:
    return layer.replicas.summation.group


@contextmanager
def interleaved_rope() -> Iterator[None]:
    with (
        replaced(mpitp.layers.attention, "rope_forward", interleaved),
        replaced(mpitp.layers.attention, "rope_backward", interleaved),
        in_method(AttentionHeads, "forward", ranks_of_heads, marked)(),
        in_method(AttentionHeads, "backward", ranks_of_heads, marked)(),
    ):
        yield


# Dropout


def draw_other_residual_masks(model: CausalLM) -> None:
    """The generator's key includes the rank, though the residual stream is equal on all of them."""
    for dropout in (model.blocks[0].dropout1, model.blocks[0].dropout2):
        dropout.name += f" of rank {model.site.ranks.rank}"


def draw_other_embedding_masks(model: CausalLM) -> None:
    model["embedding dropout"].name += f" of rank {model.site.ranks.rank}"


def count_heads_from_zero_in_masks(model: CausalLM) -> None:
    """The masks of the attention's heads are drawn by local numbers: every rank's first head gets the same one."""
    layer = attention(model, 0).heads

    class LocalHeads(AttentionDropout):
        def masks(self, run: Any, rows: Any, heads: Any, like: Array) -> Any:
            local = Share(heads.query.size, (range(heads.query.size),))
            return AttentionDropout.masks(self, run, rows, replace(heads, query=local), like)

    layer.dropout = LocalHeads(layer.dropout.rate, layer.dropout.name)


# Backward


class OwnGradient(CopyToTP):
    """Takes this rank's part of dx for the whole."""

    def start_backward(self, dx_partials: Any, like: Array) -> Pending:
        return Pending.done(local_sum(dx_partials, like))


def forget_all_reduce_of_dx(model: CausalLM) -> None:
    attention(model).qkv.copy = OwnGradient(model.site.summation())


def forget_all_reduce_of_head_dx(model: CausalLM) -> None:
    model["head"].copy = OwnGradient(model.site.summation())


class SummedTwice(ReduceFromTP):
    """The conjugate is mistaken for an all-reduce: dy, equal on all ranks, is multiplied by their number."""

    def backward(self, dy: Array) -> Array:
        return self.summation.group.all_reduce(dy)


def all_reduce_in_both_directions(model: CausalLM) -> None:
    down(model).reduce = SummedTwice(model.site.summation())


def forget_sum_over_kv_replicas(model: CausalLM) -> None:
    heads = attention(model).heads
    heads.replicas = replace(heads.replicas, summation=local_sum)  # type: ignore[arg-type]


def count_replicated_heads_in_dx(model: CausalLM) -> None:
    """dx counts a replicated KV head on each rank that holds it."""
    qkv = attention(model).qkv
    qkv.dx_blocks = qkv.blocks


# Parameters


def overwrite_tied_gradient(model: CausalLM) -> None:
    """The embedding's gradient takes the place of the head's instead of being added to it."""
    layer: VocabParallelEmbedding = model["embedding"]

    class Overwriting(VocabParallelEmbedding):
        def backward(self, dy: Array, ctx: Any) -> None:
            self.weight.grad = None
            VocabParallelEmbedding.backward(self, dy, ctx)

    model.layers["embedding"] = Overwriting(layer.weight, layer.vocab, layer.reduce)


def sum_bias_gradient(model: CausalLM) -> None:
    """The gradient of a row-parallel bias is summed over the ranks, each of which has all of it already."""
    layer = down(model)
    assert layer.bias is not None
    group = model.site.ranks

    class Summed(Param):
        def accumulate(self, grad: Array) -> None:
            Param.accumulate(self, group.all_reduce(grad))

    layer.bias = Summed(layer.bias.data, layer.bias.placement, decay=False)


def start_from_other_weights(model: CausalLM) -> None:
    """A replicated parameter was initialised by each rank for itself."""
    model["final_norm"].weight.data[0] += 1e-3 * model.site.ranks.rank


def ranks_of_loss(loss: VocabParallelCrossEntropy) -> Any:
    return loss.reduce.summation.group


def count_replicas_in_norm(original: Any, norm: GradNorm) -> float:
    """Every rank's squares are added up, those of replicated parameters too."""
    grads = [param.grad for _, param in norm.params if param.grad is not None]
    squares = np.array(sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads))
    return float(np.sqrt(norm.group.all_reduce(squares)))


def clip_by_own_norm(original: Any, step: TrainStep, *args: Any) -> Any:
    """Each rank clips by the norm of its own shards."""
    step.grad_norm = lambda: float(np.sqrt(sum((param.grad**2).sum() for _, param in step.optimizer.params)))  # type: ignore[assignment]
    step._agreed = lambda *numbers: numbers  # type: ignore[method-assign]
    return original(step, *args)


FAULTS: dict[str, Fault] = {
    "missing all-reduce forward": Fault(
        "a row-parallel linear returns its partial sum",
        in_model(forget_all_reduce_forward),
        {"y": "blocks.1.mlp.down"},
        types=True,
    ),
    "missing all-reduce of dx": Fault(
        "a column-parallel linear returns its part of dx",
        in_model(forget_all_reduce_of_dx),
        {"dx": "blocks.1.attention.qkv"},
        types=True,
    ),
    "missing all-reduce of dx at the head": Fault(
        "the language-model head returns its part of dx",
        in_model(forget_all_reduce_of_head_dx),
        {"dx": "head"},
        types=True,
    ),
    "all-reduce in both directions": Fault(
        "a row-parallel linear sums dy as well as y",
        in_model(all_reduce_in_both_directions),
        {"dx": "blocks.1.mlp.down"},
        types=True,
    ),
    "bias added on every rank": Fault(
        "a row-parallel bias is added before the sum",
        in_model(add_bias_on_every_rank),
        {"y": "blocks.1.attention.out"},
        models=("gpt2",),
        types=True,
    ),
    "KV gradients not summed": Fault(
        "dk and dv of a KV head that lives on several ranks aren't added up",
        in_model(forget_sum_over_kv_replicas),
        {"dx": "blocks.1.attention.heads"},
        models=("llama",),
        ranks=(2, 2),  # 9 query heads on 3 ranks share no KV head
    ),
    "replicated KV heads counted twice in dx": Fault(
        "every holder of a KV head adds it to dx",
        in_model(count_replicated_heads_in_dx),
        {"dx": "blocks.1.attention.qkv"},
        models=("llama",),
        ranks=(2, 2),
    ),
    "fused qkv cut straight through": Fault(
        "[q; k; v] is cut by rows, not each of the three by heads",
        in_model(cut_fused_qkv_straight_through),
        {"start": "blocks.1.attention.qkv.weight", "y": "blocks.1.attention.qkv"},
        models=("gpt2",),
        types=True,
    ),
    "fused gate and up cut straight through": Fault(
        "[gate; up] is cut by rows, not each of the two by columns of the MLP",
        in_model(cut_gate_and_up_straight_through),
        {"start": "blocks.1.mlp.gate_up.weight", "y": "blocks.1.mlp.gate_up"},
        models=("llama",),
        types=True,
    ),
    "vocabulary shard off by one": Fault(
        "a shard's first row is taken for the id after it",
        in_model(shift_vocabulary),
        {"y": "embedding"},
    ),
    "target logits counted twice": Fault(
        "the target's logit is summed over the ranks two times",
        in_method(VocabParallelCrossEntropy, "_sum", ranks_of_loss, count_target_logits_twice),
        {"y": "loss", "value": "loss"},
        types=True,
    ),
    "softmax over the local vocabulary": Fault(
        "the softmax's denominators aren't summed over the ranks",
        in_method(VocabParallelCrossEntropy, "_sum", ranks_of_loss, keep_local_denominators),
        {"y": "loss", "dx": "loss"},
        types=True,
    ),
    "norm counts replicas": Fault(
        "the gradient norm counts replicated parameters once a rank",
        in_method(GradNorm, "__call__", lambda norm: norm.group, count_replicas_in_norm),
        {"value": "gradient norm"},
    ),
    "clipping by the local norm": Fault(
        "each rank scales its gradients by the norm of its own shards",
        in_method(TrainStep, "__call__", lambda step: step.model.site.ranks, clip_by_own_norm),
        {"value": "gradient norm of step 1", "update": "embedding.weight"},
    ),
    "other residual masks": Fault(
        "each rank drops other elements of the residual stream",
        in_model(draw_other_residual_masks),
        {"y": "blocks.0.dropout1"},
    ),
    "other embedding masks": Fault(
        "each rank drops other elements of the embedding's output",
        in_model(draw_other_embedding_masks),
        {"y": "embedding dropout"},
    ),
    "attention masks by local heads": Fault(
        "the masks of the attention's heads repeat on every rank",
        in_model(count_heads_from_zero_in_masks),
        {"y": "blocks.0.attention.heads"},
    ),
    "tied gradients not added": Fault(
        "the embedding's gradient replaces that of the tied head",
        in_model(overwrite_tied_gradient),
        {"grad": "embedding.weight"},
        models=("gpt2",),
    ),
    "RoPE pairs interleaved": Fault(
        "neighbouring columns are turned as pairs",
        interleaved_rope,
        {"y": "blocks.0.attention.heads"},
        models=("llama",),
    ),
    "stale KV head map": Fault(
        "query heads look their KV head up as if they were rank 0's",
        in_model(forget_kv_offset),
        {"y": "blocks.0.attention.heads"},
        models=("llama",),
        ranks=(2, 2),  # 9 heads on 3 ranks: the map is the same everywhere
    ),
    "bias gradient summed over ranks": Fault(
        "the gradient of a replicated bias is multiplied by the number of ranks",
        in_model(sum_bias_gradient),
        {"grad": "blocks.1.mlp.down.bias"},
        models=("gpt2",),
        types=True,
    ),
    "replicas start differently": Fault(
        "a replicated weight isn't the same on all ranks",
        in_model(start_from_other_weights),
        {"start": "final_norm.weight", "y": "final_norm"},
    ),
}

# For example 12: small models in which the bugs can be made. On 2, 3 and 4 ranks some KV head lives on two of them.
GPT2 = {"model_type": "gpt2", "vocab_size": 53, "n_embd": 12, "n_head": 6, "n_layer": 2, "n_positions": 24}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 16,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 24,
}

# The dozen of example 12, roughly from easy to hard.
COURSE = (
    "missing all-reduce forward",
    "vocabulary shard off by one",
    "missing all-reduce of dx",
    "softmax over the local vocabulary",
    "bias added on every rank",
    "fused gate and up cut straight through",
    "all-reduce in both directions",
    "stale KV head map",
    "tied gradients not added",
    "KV gradients not summed",
    "bias gradient summed over ranks",
    "attention masks by local heads",
)


def choices(number: int) -> list[str]:
    """The mistake that is bug `number` of the course and two others, in an order of the number's own."""
    fault, order = FAULTS[COURSE[number - 1]], random.Random(number)
    others = [FAULTS[name].mistake for name in COURSE if FAULTS[name].seen != fault.seen]
    picked = [fault.mistake, *order.sample(others, 2)]
    order.shuffle(picked)
    return picked


def course_config(number: int) -> DecoderConfig:
    """A small model in which bug `number` of the course can be made, with dropout in all places."""
    config = config_from_hf(GPT2 if FAULTS[COURSE[number - 1]].models[0] == "gpt2" else LLAMA)
    return replace(config, dropouts=Dropouts(embedding=0.1, attention=0.2, residual=0.15))
