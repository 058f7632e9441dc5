"""`mpitp bench shares`: a step whose last rank is slowed, with equal shares and with measured ones.

    equal      heads, FFN columns and vocabulary dealt evenly: the step waits for the slow rank
    measured   dealt by the ranks' speeds, as [mesh] shares = "measured" does

In turn. With speeds v_r (of the fastest) of p ranks, work that is dealt to the last bit takes 1 / (p min v) with equal
shares and 1 / sum v with measured ones: their ratio, sum v / (p min v), is what can be had at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitp.backend.device import CpuDevice
from mpitp.bench.machine import machine_facts
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.slowed import slowed
from mpitp.bench.timing import CLOCKS, clocked, take_turns
from mpitp.bench.train import batch_to_time, num_params
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.comm.serial import SerialGroup
from mpitp.errors import UsageError
from mpitp.layers.init import init_params
from mpitp.layers.site import make_site
from mpitp.layers.speeds import measure_speeds, weights_of_speeds
from mpitp.models.config import DecoderConfig
from mpitp.models.registry import abstract_model, build_model
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """All numbers of the benchmark, equal on every rank."""
    if group.size < 2:
        raise UsageError("shares are dealt to several ranks, and this is a job of 1; mpitp launch -n 2 -- bench shares")
    if not 0.05 <= args.slow <= 1:
        raise UsageError(f"--slow {args.slow}: expected the part of the time that the last rank runs, 0.05 to 1")
    config = config_of(args, args.model, max_positions=args.seq)
    with slowed(args.slow if group.rank == group.size - 1 else 1):
        speeds = group.broadcast_object(measure_speeds(group, CpuDevice(), args.dtype, config.hidden_size))
        weights = weights_of_speeds(speeds, make_mesh(group).sizes)
        losses: dict[str, float] = {}
        steps = {
            "equal": _step(args, config, group, {}, losses, "equal"),
            "measured": _step(args, config, group, weights, losses, "measured"),
        }
        samples = take_turns(
            {n: clocked(s, CLOCKS["wall"]) for n, s in steps.items()}, args.rounds, group, "bench shares"
        )
    least, median = samples.ratio("equal", "measured")
    return {
        "machine": machine_facts(group),
        "model": describe(config, num_params(abstract_model(config, make_site(SerialGroup())))),
        "tokens_per_step": args.batch * args.seq,
        "rounds": args.rounds,
        "slow": args.slow,
        "speeds": speeds,
        "shares": list(weights.get("tp", (1.0,) * group.size)),
        "seconds": {name: {"least": samples.least(name), "median": samples.median(name)} for name in steps},
        "times_as_fast": {"least": least, "median": median, "at_most": sum(speeds) / (group.size * min(speeds))},
        "losses": losses,
    }


def _step(
    args: argparse.Namespace,
    config: DecoderConfig,
    group: Group,
    weights: Mapping[str, Sequence[float]],
    losses: dict[str, float],
    name: str,
) -> Callable[[], Any]:
    """A step of a model that begins with the same weights in any layout; its loss is noted."""
    model = build_model(config, make_site(make_mesh(group, weights=weights), dtype=args.dtype))
    init_params(model.named_params(), 0)
    train = TrainStep(model, AdamW(list(model.named_params()), AdamWSettings()), clip_norm=1.0)
    batch = batch_to_time(config, args.batch, args.seq)

    def step() -> None:
        losses[name] = train([batch], lr=1e-4).loss

    return step


def report(facts: dict[str, Any]) -> list[str]:
    """For people."""
    shares, times = facts["shares"], facts["times_as_fast"]
    lines = [
        facts["model"],
        f"{facts['tokens_per_step']} tokens a step; {facts['rounds']} rounds, in turn; the last rank runs "
        f"{100 * facts['slow']:.0f}% of the time",
        "measured speeds " + ", ".join(f"{speed:.2f}" for speed in facts["speeds"]) + f"; tp = {shares}",
        f"{'shares':10} {'least s':>9} {'median s':>9}   {'loss at the end':>16}",
    ]
    for name, seconds in facts["seconds"].items():
        lines.append(f"{name:10} {seconds['least']:9.4f} {seconds['median']:9.4f}   {facts['losses'][name]:16.6f}")
    return [
        *lines,
        f"measured shares are {times['least']:.2f} times as fast (least by least), {times['median']:.2f} (median of "
        f"paired ratios); at most {times['at_most']:.2f}",
    ]
