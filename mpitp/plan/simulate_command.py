"""`mpitp plan simulate`: a step of a run on thousands of simulated ranks, with slow ranks and deaths."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitp.paths import path_option

if TYPE_CHECKING:
    from mpitp.config import RunConfig
    from mpitp.plan.machine_file import Machine
    from mpitp.plan.simulate import Job, Recovery, Simulated, StepSimulator, Troubles

HELP = "a step on simulated ranks: who waits for whom, slow ranks, a death"

_DESCRIPTION = """\
Simulate a step of a run on any number of ranks of a machine: the schedules that training runs, its collectives and
messages on nodes whose links are shared, ranks that wait for one another as they come. Ranks that can't be told apart
are simulated once, without an error. Slow ranks, and a rank that dies, show what they cost the job.
"""

_EPILOG = """\
examples:
  mpitp plan simulate run.toml --ranks 4096 --machine examples/machines/fat_tree_gpu.toml
  mpitp plan simulate run.toml --ranks 256 --machine machine.toml --slow 17=1.3 --trace step.json
  mpitp plan simulate run.toml --ranks 256 --machine machine.toml --steps 1000 --die 17@3600 --save-every 100
  mpitp plan simulate run.toml --ranks 1024 --machine machine.toml --plot scaling.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp plan simulate`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("run_file", type=path_option, metavar="RUN.toml", help="what `mpitp train` takes")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="of the job")
    parser.add_argument("--machine", type=path_option, required=True, metavar="FILE", help="a machine file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run file"
    )
    parser.add_argument(
        "--slow", action="append", default=[], metavar="RANK=FACTOR", help="its own work takes so many times as long"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="of the job; default 1")
    parser.add_argument("--die", metavar="RANK@SECONDS", help="a rank dies so long after the start of the job")
    parser.add_argument(
        "--save-every", type=int, default=100, metavar="N", help="steps between checkpoints; default 100"
    )
    for name, usual, what in (
        ("save", 0.0, "of a checkpoint; default 0"),
        ("notice", 10.0, "until a death is noticed; default 10"),
        ("restart", 60.0, "until the job runs again; default 60"),
    ):
        parser.add_argument(f"--{name}-seconds", type=float, default=usual, metavar="S", help=what)
    parser.add_argument("--trace", type=path_option, metavar="FILE", help="a timeline for ui.perfetto.dev, as JSON")
    parser.add_argument("--plot", type=path_option, metavar="FILE", help="weak scaling up to these ranks, as SVG")
    parser.add_argument("--no-fold", action="store_true", help="simulate ranks that are alike one by one")
    parser.add_argument("--json", action="store_true", help="the numbers for programs")


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and write what was asked for."""
    from mpitp.error_stream import tell
    from mpitp.files import check_place, replace_file
    from mpitp.plan.auto import settled
    from mpitp.plan.counts import MOST, MOST_RANKS, check_counts
    from mpitp.plan.layout import tell_of_shares
    from mpitp.plan.machine_file import read_machine
    from mpitp.plan.scaling_picture import scaling_svg
    from mpitp.plan.simulate import simulate_job
    from mpitp.plan.simulated_trace import trace_json
    from mpitp.run_file import load_run_config

    check_counts(MOST_RANKS, ranks=args.ranks)
    check_counts(MOST, steps=args.steps, save_every=args.save_every)
    for name in ("trace", "plot"):
        if getattr(args, name):
            check_place(getattr(args, name), f"write the {name} to")
    machine = read_machine(args.machine)
    config, lines = settled(load_run_config(args.run_file, args.set), args.ranks, machine)
    tell(lines)
    tell_of_shares(config)
    simulator = simulator_of(config, args.ranks, machine)
    troubles = _troubles(args)
    slow = type(troubles)(troubles.slow)
    found = simulator.run(slow, fold=not args.no_fold, keeps_stays=bool(args.trace))
    job = simulate_job(simulator, args.steps, troubles, _recovery(args))
    scaling = _scaling(config, args.ranks, machine) if args.plot else []
    tokens = config.global_batch_size * config.data.seq_len
    if args.json:
        print(json.dumps(_numbers(found, job, tokens, scaling)))
    else:
        print("\n".join([*_words(found, simulator, slow, tokens), *_job_words(job), *_scaling_words(scaling)]))
    title = f"mpitp plan simulate, {args.ranks} ranks: {found.layout}"
    if args.trace:
        replace_file(Path(args.trace), trace_json(found, title))
    if args.plot:
        replace_file(Path(args.plot), scaling_svg(scaling, title))
    return 0


def simulator_of(config: RunConfig, ranks: int, machine: Machine) -> StepSimulator:
    """Of a run on a machine. Raises ConfigError for a run that can't be laid on so many ranks."""
    from mpitp.comm.mesh import abstract_mesh
    from mpitp.errors import ConfigError
    from mpitp.plan.anatomy import Anatomy, Facts
    from mpitp.plan.choice import planned_model
    from mpitp.plan.cost import Step
    from mpitp.plan.graph_models import source_of
    from mpitp.plan.layout import layout_of
    from mpitp.plan.planned_models import PLANNED_TASKS
    from mpitp.plan.simulate import StepSimulator
    from mpitp.train.setup import mesh_sizes
    from mpitp.train.stages import check_layout

    if config.task.kind not in PLANNED_TASKS:
        raise ConfigError(
            f"plan simulate knows models that continue or translate text, and task.kind = {config.task.kind!r} trains "
            "another kind; plan memory takes this run file, and a short run with train --trace tells its times"
        )
    model = planned_model(config)
    check_layout(config, source_of(config, model), abstract_mesh(mesh_sizes(config), 0, ranks))
    facts = Facts(model, config.model.dtype, config.data.seq_len, config.mesh.cp_form)
    step = Step(config.global_batch_size, int(config.optim.bucket_mib * (1 << 20)))
    return StepSimulator(Anatomy(facts, machine), step, layout_of(config, ranks))


def _troubles(args: argparse.Namespace) -> Troubles:
    from mpitp.plan.simulate import Troubles

    slow = dict(_pair("--slow", word, "=", "RANK=FACTOR, such as 17=1.3") for word in args.slow)
    dies = dict([_pair("--die", args.die, "@", "RANK@SECONDS, such as 17@3600")]) if args.die else {}
    troubles = Troubles(slow, dies)
    troubles.check(args.ranks)
    return troubles


def _pair(option: str, word: str, sign: str, expected: str) -> tuple[int, float]:
    from mpitp.errors import UsageError

    rank, _, value = word.partition(sign)
    try:
        return int(rank), float(value)
    except ValueError:
        raise UsageError(f"{option} {word}: expected {expected}") from None


def _recovery(args: argparse.Namespace) -> Recovery:
    from mpitp.errors import UsageError
    from mpitp.plan.simulate import Recovery

    seconds = args.save_seconds, args.notice_seconds, args.restart_seconds
    if not all(0 <= each < 1e9 for each in seconds):
        raise UsageError("--save-seconds, --notice-seconds and --restart-seconds must be numbers from 0 up")
    return Recovery(args.save_every, *seconds)


def _scaling(config: RunConfig, all_ranks: int, machine: Machine) -> list[tuple[int, float]]:
    """(ranks, tokens a second of a rank) of 1, 2, 4, ... replicas up to the run's, with as much each."""
    from dataclasses import replace

    from mpitp.errors import ConfigError

    dp = config.mesh.dp
    counts = [
        *(1 << i for i in range(dp.bit_length()) if 1 << i < dp and config.global_batch_size * (1 << i) % dp == 0),
        dp,
    ]
    points = []
    for count in counts:
        size = config.global_batch_size * count // dp
        try:
            run = replace(
                config,
                mesh=replace(config.mesh, dp=count),
                train=replace(config.train, global_batch_size=size),
            )
            ranks = all_ranks * count // dp
            seconds = simulator_of(run, ranks, machine).run().seconds
        except ConfigError:  # fewer sequences than a microbatch, say
            continue
        points.append((ranks, size * config.data.seq_len / seconds / ranks))
    return points


def _words(found: Simulated, simulator: StepSimulator, slow: Troubles, tokens: int) -> list[str]:
    from mpitp.plan.graph_text import duration

    ranks, classes = found.places.ranks, len(found.classes.first)
    lines = [
        f"{ranks:,} ranks ({classes:,} kinds of them) as {found.layout}, on {simulator.machine.machine.name}",
        f"a step takes {duration(found.seconds)}: {tokens / found.seconds:,.0f} tokens a second",
        "",
        "of a rank's time, the mean of all:",
    ]
    spent = sorted(found.mean_spent().items(), key=lambda item: -item[1])
    for (kind, label), seconds in spent:
        lines.append(f"  {seconds / found.seconds:6.1%}  {kind:8} {label}")
    if slow.slow:
        plain = simulator.run().seconds
        told = ", ".join(f"{rank} ({factor:g} x)" for rank, factor in slow.slow.items())
        lines += ["", f"slow ranks {told}: {found.seconds / plain:.3f} times the {duration(plain)} without them"]
    return lines


def _job_words(job: Job) -> list[str]:
    from mpitp.plan.graph_text import duration

    if job.steps == 1 and job.died_in < 0:
        return []
    lines = ["", f"{job.steps:,} steps take {duration(job.seconds)}, checkpoints included"]
    if job.died_in >= 0:
        lines.append(
            f"a rank dies in step {job.died_in + 1}: nothing moves {duration(job.standstill)} later; {job.redone} "
            f"whole steps are done again; {duration(job.lost)} are lost"
        )
    return lines


def _scaling_words(points: list[tuple[int, float]]) -> list[str]:
    if not points:
        return []
    head = ["", f"{'ranks':>8} {'tokens/s a rank':>16} {'of the first':>13}"]
    return head + [f"{ranks:8,} {value:16,.1f} {value / points[0][1]:13.1%}" for ranks, value in points]


def _numbers(found: Simulated, job: Job, tokens: int, scaling: list[tuple[int, float]]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "ranks": found.places.ranks, "classes": len(found.classes.first), "layout": str(found.layout),
        "seconds": found.seconds, "tokens_per_second": tokens / found.seconds,
        "mean_seconds": {f"{kind} {label}": value for (kind, label), value in found.mean_spent().items()},
        "job": asdict(job) | {"lost": job.lost},
        "scaling": [{"ranks": ranks, "tokens_per_second_a_rank": value} for ranks, value in scaling],
    }  # fmt: skip
