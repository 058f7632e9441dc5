"""What the answers of the exercises are computed with: layers, models and groups, looked at from outside."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.comm import Group, SerialGroup, abstract_mesh, run_threads
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.errors import ConfigError, PlacementError
from mpitp.layers import ArrayType, Builder, init_params, make_site
from mpitp.layers.layer import walk
from mpitp.models import CausalLM, abstract_model, config_from_hf

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Exercise:
    """A question. `answer` computes what is right; `why`, the reason, is turned (`check.py`)."""

    question: str
    answer: Callable[[], Any]
    hint: str
    why: str


class Calls(GroupObserver):
    """The operations that one rank has called, with what it handed in."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def around_collective(self, call: Any, arrays: Any, group: Any, run: Callable[[], Any]) -> Any:
        op = call.op.removeprefix("start ")
        if not op.startswith("wait"):
            self.ops.append(op)
            self.shapes.append(call.shape)
        return run()


def watched(group: Group) -> tuple[Group, Calls]:
    """A group whose calls are noted, and the notes."""
    calls = Calls()
    return ObservedGroup(group, calls), calls


def site_on(ranks: int, rank: int = 0, **sizes: int) -> Any:
    """A site on ranks that don't run."""
    return make_site(abstract_mesh(sizes or {"tp": ranks}, rank))


def llama(heads: int = 9, kv_heads: int = 3, hidden: int = 36, ranks: int = 2) -> CausalLM:
    """A model without memory on ranks that don't run."""
    raw = {"model_type": "llama", "vocab_size": 50, "hidden_size": hidden, "num_attention_heads": heads}
    raw |= {"num_key_value_heads": kv_heads, "num_hidden_layers": 1, "intermediate_size": 2 * hidden}
    return abstract_model(config_from_hf(raw | {"max_position_embeddings": 64}), site_on(ranks))


def sends_of(model: CausalLM, prefix: str) -> list[Any]:
    """What the layers under a name say that they send."""
    return [send for name, layer in walk(model.all_layers()) if name.startswith(prefix) for send in layer.sends()]


def given_out(pair: Any) -> str:
    """The letter along tp that a pair turns whichever letter it takes into."""
    for letter in "IRVP":
        try:
            return pair.placements(ArrayType.of(("tp",), tp=letter)).along("tp")
        except PlacementError:
            continue
    raise AssertionError("it takes none")


def taken_in(pair: Any) -> str:
    """The letter along tp that a pair takes."""
    for letter in "IRVP":
        try:
            pair.placements(ArrayType.of(("tp",), tp=letter))
            return letter
        except PlacementError:
            continue
    raise AssertionError("it takes none")


def linear_pass(kind: str, ranks: int, tokens: int, width: int, out: int) -> Calls:
    """Rank 0's calls of a forward and a backward pass of a linear."""

    def program(group: Group) -> Calls:
        seen, calls = watched(group)
        build = Builder(make_site(seen), 1.0)
        share = build.site.share(out if kind == "column" else width)
        made: Any = build.column(("",), width, share, bias=False) if kind == "column" else None
        made = made or build.row("", share, out, bias=False)
        calls.ops.clear(), calls.shapes.clear()
        _, ctx = made.forward(np.ones((tokens, width if kind == "column" else share.size), np.float32))
        made.backward(np.ones((tokens, share.size if kind == "column" else out), np.float32), ctx)
        return calls

    return run_threads(ranks, program)[0]


def unnoticed_without_sum() -> int:
    """The number of ranks, up to 4, at which dx is right though nobody sums it."""

    def error(group: Group) -> float:
        build = Builder(make_site(group, dtype="float64"), 1.0)
        linear = build.column(("",), 4, build.site.share(7), bias=False)
        init_params(linear.params().items(), seed=1)
        y, ctx = linear.forward(np.ones((3, 4)))
        alone = np.ones_like(y) @ linear.product.weight.data
        return float(np.abs(alone - linear.backward(np.ones_like(y), ctx)).max())

    return next(ranks for ranks in (1, 2, 3, 4) if max(run_threads(ranks, error)) < 1e-12)


def mlp_forward_calls() -> int:
    def program(group: Group) -> int:
        seen, calls = watched(group)
        build = Builder(make_site(seen), 0.1)
        mlp = build.mlp(4, build.site.share(8), gated=False, bias=True)
        calls.ops.clear()
        mlp.forward(np.ones((5, 4), np.float32))
        return len(calls.ops)

    return run_threads(3, program)[0]


def loss_of_equal_logits(vocab: int) -> float:
    """Of one token, where all logits are alike."""
    builder = Builder(make_site(SerialGroup()), 1.0)
    loss, _ = builder.loss(builder.site.share(vocab)).forward(np.zeros((1, vocab), np.float32), np.zeros(1, np.int64))
    return float(loss[0])


def own_tensor_equals_whole() -> str:
    """Whether rank 1's initial weights are rows of the one-rank model's."""

    def weight(group: Group) -> Any:
        build = Builder(make_site(group), 1.0)
        made = build.column(("",), 4, build.site.share(9), bias=False)
        init_params(made.params().items(), seed=7)
        return made.product.weight.data

    whole, pieces = weight(SerialGroup()), run_threads(3, weight)
    return "yes" if np.array_equal(np.concatenate(pieces), whole) else "no"


def most_ranks(blocks: int) -> int:
    """The most ranks that so many blocks go to."""
    ranks = 1
    while True:
        try:
            make_site(abstract_mesh({"tp": ranks + 1}), invariant_blocks=blocks).check_blocks({"heads": 12})
        except ConfigError:
            return ranks
        ranks += 1


def messages(algorithm: str, ranks: int) -> int:
    """How many messages rank 0 sends in example 10's all-reduce."""
    functions = runpy.run_path(str(HERE / "10_ring_and_tree.py"))["ALGORITHMS"]

    def program(group: Group) -> int:
        seen, calls = watched(group)
        functions[algorithm](seen, np.ones(100))
        return calls.ops.count("send")

    return run_threads(ranks, program)[0]


def work_to_bytes(hidden: int) -> float:
    """Numbers multiplied over numbers sent, of a block."""
    model = llama(heads=4, kv_heads=4, hidden=hidden)
    weights = sum(param.data.size for name, param in model.named_params() if "blocks" in name)
    return weights / sum(send.width for send in sends_of(model, "blocks.0"))
