"""`mpitp bench replicas`: steps of data-parallel replicas, with and without ZeRO, against as many ranks by themselves.

    apart      every rank trains a model of its own, all at the same time: what these cores can do at most
    alone      the first rank trains, the others wait
    zero 0-3   one model on all ranks along dp, each with as many sequences as a rank by itself

All in turn. A ratio is seconds apart (or alone) / seconds of a step: 1 is N times one rank's throughput.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mpitp.bench.machine import machine_facts
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import CLOCKS, Samples, clocked, take_turns
from mpitp.bench.train import batch_to_time, num_params
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.comm.serial import SerialGroup
from mpitp.layers.gathered import deal_weights
from mpitp.layers.site import Site, make_site
from mpitp.models.batch import Batch
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.models.registry import abstract_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.optim.dealt_weights import WithDealtWeights
from mpitp.optim.reduction import InBuckets
from mpitp.train.step import TrainStep

STAGES = (0, 1, 2, 3)


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    config = config_of(args, args.model, max_positions=args.seq)
    batches = [batch_to_time(config, args.batch, args.seq)] * args.microbatches
    mesh = make_mesh(group, {"dp": group.size, "tp": 1})
    site, own = make_site(mesh, dtype=args.dtype), make_site(SerialGroup(), dtype=args.dtype)
    by_itself = _step(config, own, 0, batches)
    steps = {f"zero {zero}": _step(config, site, zero, batches) for zero in STAGES}
    steps |= {"apart": by_itself, "alone": by_itself if group.rank == 0 else lambda: None}
    tasks = {name: clocked(step, CLOCKS["wall"]) for name, step in steps.items()}
    samples = take_turns(tasks, args.rounds, group, "bench replicas")
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(abstract_model(config, own))),
        "replicas": group.size,
        "tokens_per_step": group.size * args.microbatches * args.batch * args.seq,
        "rounds": args.rounds,
        "steps": {name: _numbers(samples, name) for name in steps},
    }


def _step(config: DecoderConfig, site: Site, zero: int, batches: list[Batch]) -> Callable[[], Any]:
    model: CausalLM = random_model(config, site)
    if zero == 3:
        deal_weights(model.layers, site.mesh)
    reduction = WithDealtWeights(model) if zero == 3 else InBuckets(model, zero)
    optimizer = AdamW(reduction.params, AdamWSettings())
    step = TrainStep(model, optimizer, clip_norm=1.0, reduction=reduction)
    return lambda: step(batches, lr=1e-5)


def _numbers(samples: Samples, name: str) -> dict[str, float]:
    """Seconds; and how much of the ranks' throughput by themselves it has, by the least times and by the rounds."""
    found = {"least_seconds": samples.least(name), "median_seconds": samples.median(name)}
    for other in ("apart", "alone"):
        least, median = samples.ratio(other, name)
        found |= {f"{other}_least": least, f"{other}_median": median}
    return found


def report(facts: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [
        facts["model"],
        f"{facts['replicas']} replicas, {facts['tokens_per_step']} tokens a step; {facts['rounds']} rounds, in turn",
        f"{'step':8} {'least s':>9} {'median s':>9}   of every rank by itself      of one rank alone",
    ]
    for name, found in facts["steps"].items():
        ratios = [
            f"{found[f'{other}_least']:.3f} (rounds {found[f'{other}_median']:.3f})" for other in ("apart", "alone")
        ]
        lines.append(
            f"{name:8} {found['least_seconds']:9.4f} {found['median_seconds']:9.4f}   {ratios[0]:26} {ratios[1]}"
        )
    return lines
