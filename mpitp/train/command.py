"""`mpitp train`: run a run file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitp.comm.environment import launch_claim
from mpitp.config import RunConfig, key_table
from mpitp.errors import Preempted
from mpitp.paths import path_option
from mpitp.run_file import load_run_config

if TYPE_CHECKING:
    from mpitp.backend.device import Device
    from mpitp.comm.group import Group
    from mpitp.train.loop import TrainLoop
    from mpitp.train.run import RunResult

    Observe = Callable[[TrainLoop], None]
    Arrange = Callable[[RunConfig, Group, str | None], tuple[RunConfig, Observe | None]]

_DESCRIPTION = """\
Train a model as a TOML file says, from scratch or from a Hugging Face directory, on any number of ranks. Progress goes
to stderr, one JSON object a step to RUN_DIR/metrics.jsonl; at the end RUN_DIR/model is a Hugging Face directory
with its tokenizer."""

_EXAMPLE = """\
example run file:
  [model]
  model_type = "llama"              # or: from = "models/smollm2-135m"     (fine-tune)
  hidden_size = 256                 # Hugging Face's own field names
  num_hidden_layers = 4
  num_attention_heads = 8
  num_key_value_heads = 2
  intermediate_size = 688
  max_position_embeddings = 256
  [data]
  train = "data/train"              # made by: mpitp data prepare book.txt --tokenizer bytes --out data
  valid = "data/valid"              #          --valid-fraction 0.05
  seq_len = 128
  [train]
  steps = 200
  global_batch_size = 16
  run_dir = "runs/first"

examples:
  mpitp train run.toml
  mpitp launch -n 4 -- train run.toml --set train.steps=100 --set optim.lr=1e-3
  mpitp launch -n 5 -- train run.toml --resume auto          go on after an interruption, on any number of ranks

On SIGUSR1 or SIGTERM, and when its time is nearly up, a run saves a checkpoint and exits with 75.

keys of the run file, with defaults:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mpitp train`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE + key_table()
    parser.add_argument("run_file", type=path_option, metavar="RUN.TOML", help="the run file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace one key, e.g. train.steps=100"
    )
    parser.add_argument(
        "--resume",
        type=path_option,
        metavar="auto|DIR",
        help="go on from a checkpoint, or the newest of a folder of them; auto: the run's newest whole one, or begin",
    )
    parser.add_argument(
        "--trace",
        type=path_option,
        metavar="OUT.JSON",
        help="write a timeline of all ranks, print the communication ledger (mpitp trace)",
    )
    parser.add_argument(
        "--debug-collectives", action="store_true", help="compare every collective between ranks before it runs (slow)"
    )


def run(args: argparse.Namespace, arrange: Arrange | None = None) -> int:
    """Train; every rank runs this, rank 0 prints the result.

    `arrange`: is handed the run, its ranks and what it resumes; gives the run with its layout, and an observer.
    """
    config = load_run_config(args.run_file, args.set, ranks=launch_claim(os.environ).size)

    from mpitp.comm.agreement import agree, call_facts
    from mpitp.comm.start import start_job
    from mpitp.train.facts import run_facts
    from mpitp.train.run import train
    from mpitp.train.stop import StopSignals

    with StopSignals(config.train.signals) as stop:  # before MPI starts, which can take its time on many nodes
        world, device = start_job(config.train.device, invariant=config.train.invariant)
        agree(world, lambda: run_facts(config) | call_facts("train", args, ["run_file", "set"]))
        config, observe = (config, None) if arrange is None else arrange(config, world, args.resume)
        options: dict[str, Any] = {"resume": args.resume, "debug_collectives": args.debug_collectives, "stop": stop}
        if args.trace:
            _train_traced(config, world, device, args.trace, observe, options)
            return 0
        result = train(config, world, device, observe=observe, **options)
        if world.rank == 0:
            print(_summary(result))
    return 0


def _train_traced(
    config: RunConfig, world: Group, device: Device, path: str, also: Observe | None, options: dict[str, Any]
) -> None:
    """Train with an observer around group, layers and optimizer; write what it saw, of a preempted run too."""
    from mpitp.trace.timeline import check_writable, finish
    from mpitp.trace.tracer import Tracer
    from mpitp.train.run import train
    from mpitp.train.traffic import NORM, OPTIMIZER, replica_traffic

    check_writable(path)
    tracer, reductions = Tracer(), []

    def observe(loop: TrainLoop) -> None:
        if also is not None:
            also(loop)
        reductions.append(loop.train_step.reduction)
        tracer.attach(loop.model)
        loop.train_step.grad_norm = tracer.timed(NORM, loop.train_step.grad_norm)  # type: ignore[assignment]
        loop.optimizer.step = tracer.timed(OPTIMIZER, loop.optimizer.step)  # type: ignore[method-assign]

    try:
        result = train(config, tracer.watch(world), device, observe=observe, **options)
    except Preempted:
        finish(tracer, world, path, "train", replica_traffic(reductions[0], tracer))
        raise
    trace = finish(tracer, world, path, "train", replica_traffic(reductions[0], tracer))
    if world.rank == 0:
        print(f"{_summary(result)}\n\n{trace}\n\ntimeline in {path}: open it in https://ui.perfetto.dev")


def _summary(result: RunResult) -> str:
    losses = "nothing left to do"
    if result.first_loss is not None and result.last_loss is not None:
        losses = f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}"
    held_out = "" if result.valid_loss is None else f", held-out loss {result.valid_loss:.4f}"
    held_out += "" if result.valid_accuracy is None else f", accuracy {result.valid_accuracy:.4f}"
    held_out += "" if result.valid_exact is None else f", exact {result.valid_exact:.4f}"
    held_out += "" if result.valid_f1 is None else f", F1 {result.valid_f1:.4f}"
    return f"{losses}{held_out}; model in {result.model_directory}"
