"""`mpitp bench pipeline`: the passes of a step through a pipeline against what its bubble allows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from mpitp.bench.machine import machine_facts
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import Task, take_turns
from mpitp.bench.train import batch_to_time, num_params
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.comm.serial import SerialGroup
from mpitp.errors import UsageError
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.models.runner import PlainRunner, Runner
from mpitp.pipeline.runner import PipelineRunner
from mpitp.pipeline.schedules import make_schedule
from mpitp.pipeline.simulate import simulate

ONE = "one rank"


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    if group.size < 2:
        raise UsageError(
            "a pipeline has several stages, and this is a job of 1 rank; mpitp launch -n 2 -- bench pipeline"
        )
    config = config_of(args, args.model, max_positions=args.seq)
    batches = [batch_to_time(config, args.batch, args.seq) for _ in range(args.microbatches)]
    model = random_model(config, make_site(make_mesh(group, {"pp": group.size, "tp": 1}), dtype=args.dtype))
    tasks: dict[str, Task] = {ONE: _nothing}
    if group.rank == 0:  # by itself, while the others wait
        whole = random_model(config, make_site(SerialGroup(), dtype=args.dtype))
        tasks[ONE] = _passes(PlainRunner(whole), whole, batches)
    for name in args.schedules:
        tasks[name] = _passes(PipelineRunner(model, name), model, batches)
    samples = take_turns(tasks, args.rounds, group, "bench pipeline")
    bubbles = {name: simulate(make_schedule(name, group.size, args.microbatches)).bubble for name in args.schedules}
    schedules = {}
    for name, bubble in bubbles.items():
        ratios = samples.ratio(ONE, name)  # one rank's time in the pipeline's
        least, median = (ratio / group.size / (1 - bubble) for ratio in ratios)
        schedules[name] = {
            "seconds": {"least": samples.least(name), "median": samples.median(name)},
            "bubble": bubble,
            "of_what_the_bubble_allows": {"least": least, "median": median},
        }
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(model)),
        "microbatches": args.microbatches,
        "tokens_per_microbatch": args.batch * args.seq,
        "rounds": args.rounds,
        "one_rank_seconds": {"least": samples.least(ONE), "median": samples.median(ONE)},
        "schedules": schedules,
    }


def _passes(runner: Runner, model: CausalLM, batches: list[Batch]) -> Task:
    scale = 1.0 / sum(batch.num_targets for batch in batches)

    def passes() -> None:
        model.zero_grad()
        runner(batches, scale)

    return _timed(passes)


def _timed(work: Callable[[], None]) -> Task:
    def task() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return task


def _nothing() -> float:
    return 0.0


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    one, ranks = facts["one_rank_seconds"], facts["machine"]["ranks"]
    lines = [
        facts["model"],
        f"a step's passes: {facts['microbatches']} microbatches of {facts['tokens_per_microbatch']} tokens; "
        f"{facts['rounds']} rounds, one rank alone and {ranks} stages in turn",
        "",
        f"{'':14}{'least':>12}{'median':>12}{'bubble':>10}   of what the bubble allows (least, median of pairs)",
        f"{ONE:14}{one['least']:10.3f} s{one['median']:10.3f} s",
    ]
    for name, found in facts["schedules"].items():
        seconds, share = found["seconds"], found["of_what_the_bubble_allows"]
        lines.append(
            f"{name:14}{seconds['least']:10.3f} s{seconds['median']:10.3f} s{found['bubble']:10.1%}"
            f"{share['least']:12.3f}{share['median']:8.3f}"
        )
    return lines
