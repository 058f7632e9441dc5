"""`mpitp bench decode`: generation against the time that reading the weights takes.

A token of one text needs every weight once and little else, so the products of all weights with one vector each, timed
alone in the same run, are its floor: the weight-reading bound. They are made as generation makes them (on one core a
dot product a row, see `ops/linear.py`); what BLAS's matrix-vector product W @ x takes for the same stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitp.bench.against import Peer
from mpitp.bench.machine import machine_facts
from mpitp.bench.products import linear_weights
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import CLOCKS, Samples, Task, clocked, take_turns
from mpitp.bench.train import num_params
from mpitp.comm.group import Group
from mpitp.error_stream import tell
from mpitp.infer.generate import Follower, generate
from mpitp.layers.site import make_site
from mpitp.models.model import CausalLM
from mpitp.ops.linear import linear_forward

BOUND_PASSES = 3  # of all weights a round
CACHE_BYTES = 128 * 2**20  # weights well above this can't stay in a cache


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    model = model_of(args, group)
    weights = list(linear_weights(model))
    batches, clock = sorted({1, args.batch}), CLOCKS[args.clock]
    tasks: dict[str, Task] = {way: clocked(_reading(weights, product), clock) for way, product in READINGS.items()}
    prefills: dict[int, list[float]] = {batch: [] for batch in batches}
    for batch in batches:
        tasks[_name(batch)] = _generation(model, batch, args, prefills[batch])
    with contextlib.ExitStack() as stack:
        version = ""
        if args.against:
            peer = Peer(args.peer_python, "transformers_decode.py", {"model": args.model})
            stack.callback(peer.end)
            version = peer.version
            tasks |= {f"peer, {_name(batch)}": _peer_generation(peer, model, batch, args) for batch in batches}
        samples = take_turns(tasks, args.rounds, group, "bench decode")
    for way in READINGS:
        samples.seconds[way] = [seconds / BOUND_PASSES for seconds in samples.seconds[way]]
    weight_bytes = sum(weight.nbytes for weight in weights)
    return {
        "machine": machine_facts(group),
        "model": describe(model.config, num_params(model)),
        "dtype": str(model.dtype),
        "rounds": args.rounds,
        "clock": args.clock,
        "prompt_tokens": args.prompt,
        "new_tokens": args.tokens,
        "weight_bytes_a_rank": weight_bytes,
        "weights_exceed_cache": weight_bytes >= CACHE_BYTES,
        "bound_seconds": {"least": samples.least("bound"), "median": samples.median("bound")},
        "bound_bytes_per_second": weight_bytes / samples.least("bound"),
        "blas_seconds": {"least": samples.least("blas"), "median": samples.median("blas")},
        "batches": [_of_batch(batch, samples, min(prefills[batch][1:]) / args.prompt, group) for batch in batches],
        **({"against": _comparison(samples, batches, version)} if version else {}),
    }


def model_of(args: argparse.Namespace, group: Group) -> CausalLM:
    """The model of a directory, or one of the sizes asked for with weights of chance."""
    if args.model is None:
        return random_model(config_of(args, "llama", args.prompt + args.tokens + 1), make_site(group, dtype=args.dtype))
    from mpitp.checkpoint.load import load_model

    model = load_model(args.model, make_site(group, dtype=args.dtype))
    if group.rank == 0:
        tell(model.config.notices)
    return model


def _name(batch: int) -> str:
    return f"batch {batch}"


def _one_row(w: Any, x: Any, out: Any) -> None:
    linear_forward(x, w, out=out)


def _matrix_vector(w: Any, x: Any, out: Any) -> None:
    np.matmul(w, x[0], out=out[0])


READINGS: dict[str, Callable[[Any, Any, Any], None]] = {"bound": _one_row, "blas": _matrix_vector}


def _reading(weights: list[Any], product: Callable[[Any, Any, Any], None]) -> Callable[[], None]:
    """All weights times one vector each, a few times."""
    rng = np.random.default_rng(0)
    vectors = {(w.shape[1], w.dtype): rng.standard_normal((1, w.shape[1])).astype(w.dtype) for w in weights}
    outs = {w.shape[0]: np.empty((1, w.shape[0]), w.dtype) for w in weights}

    def read() -> None:
        for _ in range(BOUND_PASSES):
            for w in weights:
                product(w, vectors[w.shape[1], w.dtype], outs[w.shape[0]])

    return read


def _generation(model: CausalLM, batch: int, args: argparse.Namespace, prefills: list[float]) -> Task:
    """A task whose time is the seconds of one decode step, all `batch` texts together; prefill seconds are appended."""
    prompts = _prompts(model, batch, args)
    clock = CLOCKS[args.clock]

    def task() -> float:
        times = [clock()]  # then when each token was known: `batch` of them a step
        follower = Follower(lambda _index, _token: times.append(clock()))
        generate(model, prompts, args.tokens, eos_ids=(), follower=follower)
        prefills.append(times[1] - times[0])
        return (times[-1] - times[batch]) / (args.tokens - 1)

    return task


def _prompts(model: CausalLM, batch: int, args: argparse.Namespace) -> list[list[int]]:
    drawn: list[list[int]] = (
        np.random.default_rng(3).integers(0, model.config.vocab_size, (batch, args.prompt)).tolist()
    )
    return drawn


def _peer_generation(peer: Peer, model: CausalLM, batch: int, args: argparse.Namespace) -> Task:
    """The same by the peer: its seconds of one decode step."""
    question = json.dumps({"prompts": _prompts(model, batch, args), "tokens": args.tokens})
    return lambda: float(peer.ask(question)["seconds"])


def _comparison(samples: Samples, batches: list[int], version: str) -> dict[str, Any]:
    """Tokens per second of the peer, and how many times its speed ours is."""
    rows = []
    for batch in batches:
        peer = f"peer, {_name(batch)}"
        least, median = samples.ratio(peer, _name(batch))
        speed = {"best": batch / samples.least(peer), "median": batch / samples.median(peer)}
        rows.append({"batch": batch, "tokens_per_second": speed, "ours_is_times": {"least": least, "median": median}})
    return {"peer": version, "batches": rows}


def _comparison_lines(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = ["", f"{found['peer']}, the same model and prompts, one thread, in turn with ours:"]
    for row in found["batches"]:
        speed, times = row["tokens_per_second"], row["ours_is_times"]
        lines.append(
            f"  batch {row['batch']}: {speed['best']:.1f} tokens/s (median {speed['median']:.1f}); ours is "
            f"{times['least']:.2f} times as fast (least by least), {times['median']:.2f} (median of paired ratios)"
        )
    return lines


def _of_batch(batch: int, samples: Samples, prefill_seconds: float, group: Group) -> dict[str, Any]:
    """`prefill_seconds`: this rank's least, for one prompt token of each text; the slowest rank's counts."""
    name = _name(batch)
    prefill_seconds = float(group.all_reduce(np.array([prefill_seconds]), op="max")[0])
    ratios = {way: dict(zip(("least", "median"), samples.ratio(way, name), strict=True)) for way in READINGS}
    return {
        "batch": batch,
        "step_seconds": {"least": samples.least(name), "median": samples.median(name)},
        "tokens_per_second": {"best": batch / samples.least(name), "median": batch / samples.median(name)},
        "of_bound": ratios["bound"],
        "of_blas": ratios["blas"],
        "prefill_tokens_per_second": batch / prefill_seconds,
    }


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    bound = facts["bound_seconds"]
    megabytes, rate = facts["weight_bytes_a_rank"] / 1e6, facts["bound_bytes_per_second"] / 1e9
    lines = [
        facts["model"],
        f"prompts of {facts['prompt_tokens']} tokens, {facts['new_tokens']} new ones, greedy, {facts['dtype']}; "
        f"{facts['rounds']} rounds, generation and weight reading in turn, {facts['clock']} time",
        f"weight-reading bound: {megabytes:.1f} MB a rank in {1e3 * bound['least']:.1f} ms "
        f"(median {1e3 * bound['median']:.1f} ms) = {rate:.2f} GB/s; by BLAS's W @ x in "
        f"{1e3 * facts['blas_seconds']['least']:.1f} ms",
    ]
    if not facts["weights_exceed_cache"]:
        lines.append("(weights this small may stay in a cache: the bound is then not that of the memory)")
    titles = ("ms a step", "median", "tokens/s", "median", "of bound", "median", "of W @ x", "prefill tok/s")
    lines += ["", f"{'batch':>5}" + "".join(f"{title:>14}" for title in titles)]
    for row in facts["batches"]:
        step, speed, of_bound = row["step_seconds"], row["tokens_per_second"], row["of_bound"]
        lines.append(
            f"{row['batch']:>5}{1e3 * step['least']:>14.1f}{1e3 * step['median']:>14.1f}{speed['best']:>14.1f}"
            f"{speed['median']:>14.1f}{of_bound['least']:>14.2f}{of_bound['median']:>14.2f}"
            f"{row['of_blas']['least']:>14.2f}{row['prefill_tokens_per_second']:>14.1f}"
        )
    if len(facts["batches"]) > 1:
        first, last = facts["batches"][0], facts["batches"][-1]
        gain = last["tokens_per_second"]["best"] / first["tokens_per_second"]["best"]
        lines.append(f"{last['batch']} texts together: {gain:.2f} times the tokens/s of one")
    return lines + _comparison_lines(facts.get("against"))
