"""`mpitp bench experts`: the step of a mixture of experts against the products of its tokens as routed.

An expert has as many rows as the router sends it, which no formula knows: the floor's products are those of the rows
that one pass over the very batch has sent to each expert. On several ranks the experts are dealt over all of them (ep),
each rank has a batch of its own, and forward and backward alone (a step also sums gradients, which are many bytes on
a slow link) are timed in turn with passes that wait for every exchange where it is started, all rows in one leg: what
hiding is worth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpitp.backend.arrays import Array
from mpitp.bench.machine import machine_facts
from mpitp.bench.products import Product, attention_products, linear_products, run_products
from mpitp.bench.profile import Stopwatch, watch_group
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import describe
from mpitp.bench.timing import CLOCKS, Samples, clocked, take_turns
from mpitp.bench.train import batch_to_time, num_params, step_of
from mpitp.comm.group import Group, Pending
from mpitp.comm.mesh import make_mesh
from mpitp.errors import UsageError
from mpitp.layers.exchange import ExchangeOverEp
from mpitp.layers.expert_matrices import DenseMatrices
from mpitp.layers.experts import Experts
from mpitp.layers.layer import walk
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import config_from_hf

STEP, PASSES, AT_ONCE = "step", "forward and backward", "the same, exchanges waited for"
FLOOR = ("linear products", "experts' products", "attention products")


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    config = mixture_config(args)
    site = make_site(make_mesh(group, {"ep": group.size, "tp": 1}), dtype=args.dtype)
    model = random_model(config, site)
    batch = batch_to_time(config, args.batch, args.seq, seed=1 + group.rank)
    step = step_of(model, batch)
    rows = routed_rows(model, batch)
    floor = {
        FLOOR[0]: linear_products(model, len(batch.tokens)),
        FLOOR[1]: expert_products(model, rows),
        FLOOR[2]: attention_products(model, [run.length for run in batch.rows.runs]),
    }
    clock = CLOCKS[args.clock]
    tasks = {STEP: clocked(step, clock)}
    tasks |= {name: clocked(partial(run_products, own), clock) for name, own in floor.items()}
    passes = _passes(model, batch)
    if group.size > 1:

        def at_once() -> None:
            with exchanged_at_once(model):
                passes()

        tasks |= {PASSES: clocked(passes, clock), AT_ONCE: clocked(at_once, clock)}
    samples = take_turns(tasks, args.rounds, group, "bench experts")
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(model)),
        "experts": {"number": args.experts, "of_a_token": args.top_k, "shared_columns": args.shared},
        "tokens_per_rank": len(batch.tokens),
        "rounds": args.rounds,
        "rows_of_experts": rows_of_all(rows, group),
        **_times(samples),
        **({"exchange": _hiding(samples, model, passes, len(batch.tokens))} if group.size > 1 else {}),
    }


def _passes(model: CausalLM, batch: Batch) -> Callable[[], None]:
    """Forward and backward, gradients left where they are."""

    def passes() -> None:
        model.zero_grad()
        _, ctx = model.loss_forward(batch)
        model.loss_backward(ctx, 1.0 / batch.num_targets)

    return passes


def mixture_config(args: argparse.Namespace) -> DecoderConfig:
    """A Mixtral of the sizes given, or with a shared expert a Qwen2-MoE."""
    if args.top_k > args.experts:
        raise UsageError(
            f"--top-k {args.top_k} exceeds --experts {args.experts}: a token can't go to more than there are"
        )
    raw = {
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads or args.heads,
        "max_position_embeddings": args.seq,
        "num_experts_per_tok": args.top_k,
        "output_router_logits": True,
    }
    width = args.ffn or args.hidden
    if not args.shared:
        return config_from_hf(
            {**raw, "model_type": "mixtral", "num_local_experts": args.experts, "intermediate_size": width}
        )
    own = {"num_experts": args.experts, "moe_intermediate_size": width, "shared_expert_intermediate_size": args.shared}
    return config_from_hf({**raw, **own, "model_type": "qwen2_moe", "intermediate_size": width})


def experts_of(model: CausalLM) -> list[Experts]:
    """Those of all blocks."""
    return [layer for _, layer in walk(model.layers) if isinstance(layer, Experts)]


def routed_rows(model: CausalLM, batch: Batch) -> list[np.ndarray]:
    """For each block the rows that come to each of this rank's experts, of one pass. A collective."""
    found: list[np.ndarray] = []

    def noting(layer: Experts) -> Any:
        forward = layer.forward

        def noted(*args: Any) -> Any:
            y, ctx = forward(*args)
            found.append(np.concatenate([leg.counts for leg in ctx.trip.legs]))
            return y, ctx

        return noted

    for layer in experts_of(model):
        setattr(layer, "forward", noting(layer))  # noqa: B010  (hides the method on this object)
    try:
        model.loss_forward(batch)
    finally:
        for layer in experts_of(model):
            del layer.forward
    return found


def rows_of_all(rows: list[np.ndarray], group: Group) -> dict[str, float]:
    """Of all blocks and ranks: the fewest rows, the mean and the most."""
    everyones = np.concatenate([each for own in group.all_gather_objects(rows) for each in own])
    return {"least": int(everyones.min()), "mean": float(everyones.mean()), "most": int(everyones.max())}


def expert_products(model: CausalLM, rows: list[np.ndarray]) -> list[Product]:
    """The three products of gate and up, and of down, of every own expert, for as many rows as it has."""
    made: dict[tuple[str, int], Array] = {}
    rng = np.random.default_rng(0)

    def array(role: str, width: int, most: int) -> Array:
        if (role, width) not in made:
            made[role, width] = rng.standard_normal((most, width), np.float32).astype(model.dtype)
        return made[role, width]

    products = []
    most = max((int(counts.sum()) for counts in rows), default=0)
    for layer, counts in zip(experts_of(model), rows, strict=True):
        ends = np.cumsum(counts).tolist()
        for matrices in (layer.gate_up, layer.down):
            assert isinstance(matrices, DenseMatrices), "a model that can be trained"
            weights, (_, n, k) = matrices.weight.data, matrices.shape
            x, dy = array("x", k, most), array("dy", n, most)
            y, dx = array("y", n, most), array("dx", k, most)
            for w, dw, end, count in zip(weights, np.empty_like(weights), ends, counts.tolist(), strict=True):
                own = slice(end - count, end)
                if count:
                    products.append(Product(x[own], w.T, y[own]))
                    products.append(Product(dy[own], w, dx[own]))
                    products.append(Product(dy[own].T, x[own], dw))
    return products


@contextmanager
def exchanged_at_once(model: CausalLM) -> Iterator[None]:
    """Until the end of the block rows travel in one leg, and are waited for where they are sent off."""
    layers = experts_of(model)
    pairs, group = [layer.pairs for layer in layers], model.site.mesh["ep"]
    start = group.start_all_to_all
    group.start_all_to_all = lambda *args: Pending.done(start(*args).wait())  # type: ignore[method-assign]
    for layer in layers:
        exchange = layer.pairs.exchange
        assert isinstance(exchange, ExchangeOverEp), "the experts are dealt over several ranks"
        layer.pairs = replace(layer.pairs, exchange=replace(exchange, num_legs=1))
    try:
        yield
    finally:
        del group.start_all_to_all
        for layer, kept in zip(layers, pairs, strict=True):
            layer.pairs = kept


def _times(samples: Samples) -> dict[str, Any]:
    least, median = samples.ratio(STEP, *FLOOR)
    return {
        "step_seconds": {"least": samples.least(STEP), "median": samples.median(STEP)},
        "floor_seconds": {"least": samples.least(*FLOOR), "median": samples.median(*FLOOR)},
        "floor_parts_least_seconds": {name: samples.least(name) for name in FLOOR},
        "step_to_floor": {"least": least, "median": median},
    }


def _hiding(samples: Samples, model: CausalLM, passes: Callable[[], None], tokens: int) -> dict[str, Any]:
    """What the exchange sends, against the closed form; what hiding it is worth."""
    world, watch, ep = model.site.ranks, Stopwatch(), model.site.mesh["ep"]
    world.barrier()
    with watch_group(ep, watch) as calls:
        passes()
    sent = sum(size for name, size in calls.sizes if name == "all_to_all")
    expected = [send for layer in experts_of(model) for send in layer.pairs.exchange.sends(*_width(layer))]
    item = model.dtype.itemsize
    closed = sum(send.calls * (tokens * send.width * item + send.fixed_bytes) for send in expected)
    both = world.all_reduce(np.array([sent, closed], np.int64))
    least, median = samples.ratio(AT_ONCE, PASSES)
    return {
        "legs": max(getattr(layer.pairs.exchange, "num_legs") for layer in experts_of(model)),  # noqa: B009
        "bytes": int(both[0]),
        "expected_bytes": int(both[1]),
        "passes_seconds": {"least": samples.least(PASSES), "median": samples.median(PASSES)},
        "passes_seconds_at_once": {"least": samples.least(AT_ONCE), "median": samples.median(AT_ONCE)},
        "times_as_fast_least": least,
        "times_as_fast_median": median,
    }


def _width(layer: Experts) -> tuple[int, int]:
    return layer.down.shape[1], layer.sizes.top_k


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    step, floor, ratio = facts["step_seconds"], facts["floor_seconds"], facts["step_to_floor"]
    experts, rows, parts = facts["experts"], facts["rows_of_experts"], facts["floor_parts_least_seconds"]
    shared = f", {experts['shared_columns']} columns of a shared one" if experts["shared_columns"] else ""
    lines = [
        facts["model"],
        f"{experts['of_a_token']} of {experts['number']} experts a token{shared}; {facts['tokens_per_rank']} tokens a "
        f"rank; an expert has {rows['least']} to {rows['most']} rows, {rows['mean']:.0f} in the mean",
        f"{facts['rounds']} rounds, the step and its products in turn",
        "",
        f"{'':32}{'least':>12}{'median':>12}",
        f"{'step':32}{step['least']:10.3f} s{step['median']:10.3f} s",
        f"{'products of tokens as routed':32}{floor['least']:10.3f} s{floor['median']:10.3f} s   "
        + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items()),
        f"{'step / products':32}{ratio['least']:12.3f}{ratio['median']:12.3f}   (least by least; median of pairs)",
    ]
    return lines + (_exchange_lines(facts["exchange"]) if "exchange" in facts else [])


def _exchange_lines(found: dict[str, Any]) -> list[str]:
    verdict = "as" if found["bytes"] == found["expected_bytes"] else "NOT as"
    lines = [
        f"{name:32}{seconds['least']:10.3f} s{seconds['median']:10.3f} s"
        for name, seconds in ((PASSES, found["passes_seconds"]), (AT_ONCE, found["passes_seconds_at_once"]))
    ]
    return [
        *lines,
        "",
        f"exchange of rows: {found['legs']} legs, {found['bytes']} bytes a step on all ranks, {verdict} the closed "
        f"form says ({found['expected_bytes']}); behind other work the passes are {found['times_as_fast_least']:.3f} "
        f"times as fast (least by least), {found['times_as_fast_median']:.3f} by the median of pairs",
    ]
