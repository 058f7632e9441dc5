"""`mpitp bench train`: the training step against the time of its own matrix products."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from mpitp.bench.against import comparison, comparison_lines, torch_tasks
from mpitp.bench.machine import machine_facts
from mpitp.bench.overlap import compare_steps, measure_overlap, overlap_lines
from mpitp.bench.products import Product, attention_products, linear_products, run_products
from mpitp.bench.profile import COMMUNICATION, Stopwatch, watch_functions, watch_group
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import CLOCKS, Clock, Samples, Task, clocked, say_progress, take_turns
from mpitp.bench.traffic import step_traffic
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.comm.serial import SerialGroup
from mpitp.errors import UsageError
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.layered import LayeredModel
from mpitp.models.model import CausalLM
from mpitp.models.registry import recompute_blocks
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep

CONTEXT, ALONE = "context-parallel step", "one rank's step"
SQUARE = 1024  # side of the product whose rate is called the SGEMM rate
PROFILED_STEPS = 3
OVERLAP_ROUNDS = 5
FLOOR = ("linear products", "attention products")
AGAIN = "recomputing step"
REST = "Python, residual sums and the rest"


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    config = config_of(args, args.model, max_positions=args.seq)
    batch = batch_to_time(config, args.batch, args.seq)
    model = random_model(config, make_site(group, dtype=args.dtype))
    step = step_of(model, batch)
    linears = linear_products(model, len(batch.tokens))
    attention = attention_products(model, [run.length for run in batch.rows.runs])
    square = square_product(args.dtype)
    clock = CLOCKS[args.clock]
    tasks = {
        "step": clocked(step, clock),
        FLOOR[0]: clocked(lambda: run_products(linears), clock),
        FLOOR[1]: clocked(lambda: run_products(attention), clock),
        "square": clocked(lambda: run_products([square]), clock),
    }
    blocks = (args.invariant_blocks or config.heads) if args.invariant else 0
    tasks |= {name: clocked(work, clock) for name, work in _other_steps(args, config, group, batch, blocks).items()}
    with _peer_tasks(args, config, group) as (peer_tasks, version):
        samples = take_turns({**tasks, **peer_tasks}, args.steps, group, "bench train")
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(model)),
        "tokens_per_step": len(batch.tokens),
        "sequences": len([run.length for run in batch.rows.runs]),
        "dtype": args.dtype,
        "clock": args.clock,
        "steps": args.steps,
        **_times(samples, len(batch.tokens), linears, attention, square),
        "profile": _profile(step, group, clock),
        "communication": _communication(step, config, batch, model),
        "overlap": measure_overlap(step, group, OVERLAP_ROUNDS),
        "sums_at_once": compare_steps(step, group, max(args.steps, OVERLAP_ROUNDS)),
        **({"invariant": {"blocks": blocks} | _cost(samples, "invariant step")} if blocks else {}),
        **({"sequence_parallel": _cost(samples, "sequence-parallel step")} if args.sequence_parallel else {}),
        **({"context_parallel": _of_context(samples, group.size)} if args.context_parallel else {}),
        **({"recompute": {"wish": args.recompute} | _cost(samples, AGAIN)} if args.recompute != "none" else {}),
        **({"against": comparison(samples, len(batch.tokens), version)} if version else {}),
    }


def _other_steps(
    args: argparse.Namespace, config: DecoderConfig, group: Group, batch: Batch, blocks: int
) -> dict[str, Callable[[], Any]]:
    """Steps in the layouts that are asked for, beside the plain one. `blocks`: of the invariant layout; 0: without."""
    steps: dict[str, Callable[[], Any]] = {}
    if blocks:
        invariant_model = random_model(config, make_site(group, dtype=args.dtype, invariant_blocks=blocks))
        steps["invariant step"] = step_of(invariant_model, batch)
    if args.sequence_parallel:
        cut_by_tokens = random_model(config, make_site(group, dtype=args.dtype, sequence_parallel=True))
        steps["sequence-parallel step"] = step_of(cut_by_tokens, batch)
    if args.context_parallel:
        steps |= _context_steps(args, config, group, batch)
    if args.recompute != "none":
        forgetful = recompute_blocks(random_model(config, make_site(group, dtype=args.dtype)), args.recompute)
        steps[AGAIN] = step_of(forgetful, batch)
    return steps


def _context_steps(
    args: argparse.Namespace, config: DecoderConfig, group: Group, batch: Batch
) -> dict[str, Callable[[], Any]]:
    """A step with every sequence cut over all ranks, and one of the whole batch on each rank by itself, all at once."""
    mesh = make_mesh(group, {"cp": group.size})
    cut = random_model(config, make_site(mesh, dtype=args.dtype, cp_form=args.context_parallel))
    alone = random_model(config, make_site(SerialGroup(), dtype=args.dtype))
    return {CONTEXT: step_of(cut, batch.cut(group.rank, group.size)), ALONE: step_of(alone, batch)}


def _of_context(samples: Samples, ranks: int) -> dict[str, float]:
    """How much of `ranks` times one rank's speed the cut step reaches."""
    least, median = samples.ratio(ALONE, CONTEXT)
    return {
        "step_least_seconds": samples.least(CONTEXT),
        "one_rank_least_seconds": samples.least(ALONE),
        "efficiency_least": least / ranks,
        "efficiency_median": median / ranks,
    }


@contextlib.contextmanager
def _peer_tasks(args: argparse.Namespace, config: DecoderConfig, group: Group) -> Iterator[tuple[dict[str, Task], str]]:
    """The peer's tasks and version; none when there is nothing to measure against."""
    if args.against is None:
        yield {}, ""
        return
    cut = {
        "heads": config.heads,
        "KV heads": config.kv_heads,
        "FFN": config.ffn_hidden,
        "vocabulary": config.vocab_size,
    }
    uneven = [f"{name} {size}" for name, size in cut.items() if size % group.size]
    if uneven:
        raise UsageError(
            f"PyTorch's tensor parallelism needs sizes that {group.size} ranks divide; not {', '.join(uneven)}"
        )
    settings = {
        "model": config.model_type,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn_hidden,
        "vocab": config.vocab_size,
        "batch": args.batch,
        "seq": args.seq,
    }
    with torch_tasks(args.peer_python, settings, group) as tasks_and_version:
        yield tasks_and_version


def batch_to_time(config: DecoderConfig, sequences: int, length: int, seed: int = 1) -> Batch:
    """Random token ids and targets, the same on every rank that names the same seed."""
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, (sequences, length + 1))
    return Batch.of_rows(ids[:, :-1], ids[:, 1:])


def step_of(model: CausalLM, batch: Batch) -> Callable[[], Any]:
    """One optimizer step of the model on the batch: forward, backward, gradient norm, clipping, AdamW."""
    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    return lambda: step([batch], lr=1e-5)


def num_params(model: LayeredModel) -> int:
    """Elements of all global parameters."""
    owned = sum(param.placement.num_owned() for _, param in model.named_params())
    return int(model.site.ranks.all_reduce(np.array([owned]))[0])


def square_product(dtype: str) -> Product:
    """A product large enough for the BLAS to show its best."""
    a, b = np.random.default_rng(2).standard_normal((2, SQUARE, SQUARE)).astype(dtype)
    return Product(a, b, np.empty_like(a))


def _times(
    samples: Samples, tokens: int, linears: list[Product], attention: list[Product], square: Product
) -> dict[str, Any]:
    flops = sum(product.flops for product in (*linears, *attention))
    least, median = samples.ratio("step", *FLOOR)
    return {
        "step_seconds": {"least": samples.least("step"), "median": samples.median("step")},
        "floor_seconds": {"least": samples.least(*FLOOR), "median": samples.median(*FLOOR)},
        "floor_parts_least_seconds": {name: samples.least(name) for name in FLOOR},
        "step_to_floor": {"least": least, "median": median},
        "step_to_linear_products": dict(zip(("least", "median"), samples.ratio("step", FLOOR[0]), strict=True)),
        "tokens_per_second": {"best": tokens / samples.least("step"), "median": tokens / samples.median("step")},
        "floor_flops": flops,
        "floor_gflops": flops / samples.least(*FLOOR) / 1e9,
        "square_gflops": square.flops / samples.least("square") / 1e9,
    }


def _profile(step: Callable[[], Any], group: Group, clock: Clock) -> dict[str, float]:
    """Seconds a step by category, rank 0's, of the fastest of a few profiled steps."""
    best: dict[str, float] = {}
    for _ in range(PROFILED_STEPS):
        say_progress(group, "bench train: profiled steps")
        watch = Stopwatch(clock)
        group.barrier()
        with watch_functions(watch), watch_group(group, watch):
            started = clock()
            step()
            total = clock() - started
        parts = dict(sorted(watch.seconds.items(), key=lambda item: -item[1]))
        parts |= {REST: total - sum(parts.values()), "total": total}
        best = parts if not best or total < best["total"] else best
    say_progress(group, "")
    return group.broadcast_object(best)


def _communication(step: Callable[[], Any], config: DecoderConfig, batch: Batch, model: CausalLM) -> dict[str, Any]:
    """Collectives of one step as counted, beside the closed form, and the time in them."""
    group, watch = model.site.ranks, Stopwatch()
    group.barrier()
    with watch_group(group, watch) as calls:
        step()
    tokens, itemsize = len(batch.tokens), model.dtype.itemsize
    pieces = model.site.summation().pieces((tokens, config.hidden_size), itemsize)
    expected = step_traffic(config, group.size, tokens, itemsize, pieces=len(pieces))
    counted = {
        "calls": len(calls.sizes) if group.size > 1 else 0,
        "bytes_a_rank": calls.total_bytes if group.size > 1 else 0,
        "seconds": watch.seconds[COMMUNICATION],
        "expected_calls": sum(row.calls for row in expected),
        "expected_bytes_a_rank": sum(row.total_bytes for row in expected),
        "expected": [asdict(row) for row in expected],
    }
    return group.broadcast_object(counted)


def _cost(samples: Samples, name: str) -> dict[str, float]:
    """A step of another kind beside the plain one."""
    least, median = samples.ratio(name, "step")
    return {
        "step_least_seconds": samples.least(name),
        "step_median_seconds": samples.median(name),
        "cost_percent_least": 100 * (least - 1),
        "cost_percent_median": 100 * (median - 1),
    }


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    step, floor = facts["step_seconds"], facts["floor_seconds"]
    ratio, speed, to_linears = facts["step_to_floor"], facts["tokens_per_second"], facts["step_to_linear_products"]
    parts = facts["floor_parts_least_seconds"]
    return [
        facts["model"],
        f"a step: {facts['sequences']} sequences, {facts['tokens_per_step']} tokens, {facts['dtype']}, "
        f"AdamW, clipping; {facts['steps']} rounds, the step and its products in turn, {facts['clock']} time",
        "",
        f"{'':26}{'least':>12}{'median':>12}",
        f"{'step':26}{step['least']:10.3f} s{step['median']:10.3f} s",
        f"{'floor (matrix products)':26}{floor['least']:10.3f} s{floor['median']:10.3f} s   "
        f"linears {parts[FLOOR[0]]:.3f} s, attention {parts[FLOOR[1]]:.3f} s",
        f"{'step / floor':26}{ratio['least']:12.3f}{ratio['median']:12.3f}   (least by least; median of paired ratios)",
        f"{'step / linear products':26}{to_linears['least']:12.3f}{to_linears['median']:12.3f}",
        f"{'tokens/s':26}{speed['best']:12.0f}{speed['median']:12.0f}",
        "",
        f"GEMM rate: {facts['square_gflops']:.1f} GFLOP/s in a {SQUARE}^3 product; "
        f"{facts['floor_gflops']:.1f} GFLOP/s in the floor's {facts['floor_flops'] / 1e9:.1f} GFLOP",
        *comparison_lines(facts),
        *_cost_lines(facts),
        *_profile_lines(facts["profile"]),
        *_communication_lines(facts),
        *overlap_lines(facts["overlap"], facts["sums_at_once"]),
    ]


def _cost_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    titles = {"invariant": "invariant mode, {blocks} blocks", "sequence_parallel": "sequence parallelism"}
    for key, title in {**titles, "recompute": "recompute = {wish}"}.items():
        if found := facts.get(key):
            lines += [
                "",
                f"{title.format(**found)}: least {found['step_least_seconds']:.3f} s, median "
                f"{found['step_median_seconds']:.3f} s; it costs {found['cost_percent_least']:.1f} % (least by least), "
                f"{found['cost_percent_median']:.1f} % (median of paired ratios)",
            ]
    if found := facts.get("context_parallel"):
        lines += [
            "",
            f"context parallelism: least {found['step_least_seconds']:.3f} s; one rank, all at once, each alone: "
            f"{found['one_rank_least_seconds']:.3f} s; {100 * found['efficiency_least']:.1f} % of as many ranks' speed "
            f"(least by least), {100 * found['efficiency_median']:.1f} % (median of paired ratios)",
        ]
    return lines


def _profile_lines(profile: dict[str, float]) -> list[str]:
    total = profile["total"]
    lines = ["", "where a profiled step goes (rank 0)"]
    for name, seconds in profile.items():
        lines.append(f"  {name:36}{1e3 * seconds:10.1f} ms{100 * seconds / total:8.1f} %")
    return lines


def _communication_lines(facts: dict[str, Any]) -> list[str]:
    found = facts["communication"]
    if not found["expected"]:
        return ["", "communication: none on one rank"]
    verdict = "as expected" if found["bytes_a_rank"] == found["expected_bytes_a_rank"] else "NOT as expected"
    lines = [
        "",
        f"communication: {1e3 * found['seconds']:.1f} ms, {found['calls']} collectives with {found['bytes_a_rank']} "
        f"bytes a rank ({verdict}: {found['expected_calls']} with {found['expected_bytes_a_rank']})",
    ]
    for row in found["expected"]:
        lines.append(f"  {row['what']:20}{row['calls']:6} x, together {row['total_bytes'] / 2**20:10.3f} MiB")
    return lines
