"""Hold the cost function of `mpitp plan` against measured steps, of layouts that the machine file was not made from.

    mpirun -n 2 python scripts/validate_cost.py --seconds 240 --out cases.json
    scripts/validate_cost_hosts --rate 1gbit -- --seconds 110 --out hosts.json

One job does all, in rounds: in each the machine is measured as `mpitp bench machine` does, and a training step of
every case, so that both see the same machine; of each the least time of all rounds counts, and a step is as long as on
its slowest rank. A case is a small model in a layout of all ranks, or, on one host, of the first rank alone while the
others wait. It prints a line a case, the median and the worst error, and, for each model, size and number of ranks,
whether the fastest measured layout is among the first two foretold. `--with`: an earlier run's cases count as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.device import make_device
from mpitp.backend.malloc import keep_blocks_in_heap
from mpitp.backend.threads import limit_blas_threads
from mpitp.bench.measure_machine import measure
from mpitp.bench.timing import Samples
from mpitp.checkpoint.load import ModelSource
from mpitp.comm.group import Group
from mpitp.comm.serial import SerialGroup
from mpitp.comm.start_world import world_group
from mpitp.config import RunConfig, run_config_from
from mpitp.models.batch import Batch
from mpitp.models.registry import config_from_hf
from mpitp.optim.adamw import AdamW
from mpitp.plan.choice import problem_of
from mpitp.plan.cost import StepCost, cost_of
from mpitp.plan.layout import layout_of
from mpitp.plan.machine_file import machine_from
from mpitp.train.deal import Deal
from mpitp.train.setup import optimizer_settings, run_reduction, run_site
from mpitp.train.stages import make_runner
from mpitp.train.step import TrainStep

GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 6, "n_positions": 1024}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2 384": {**GPT2, "n_embd": 384, "vocab_size": 2048},
    "gpt2 192": {**GPT2, "n_embd": 192, "vocab_size": 4096},
    "llama 384": {**LLAMA, "hidden_size": 384, "intermediate_size": 1024, "vocab_size": 2048},
    "llama 240": {**LLAMA, "hidden_size": 240, "intermediate_size": 640, "vocab_size": 6000},
}
SIZES = ((256, 8, 1), (512, 4, 2))  # tokens of a sequence, sequences of a step, of a microbatch
Keys = dict[str, Any]
ALONE: list[Keys] = [{}, {"train.recompute": "full"}, {"train.micro_batch_size": 4}]
SHARED: list[Keys] = [
    {"mesh.tp": 2},
    {"mesh.tp": 2, "mesh.sequence_parallel": True},
    {"mesh.tp": 2, "train.recompute": "full"},
    {"mesh.dp": 2, "mesh.tp": 1},
    {"mesh.dp": 2, "mesh.tp": 1, "optim.zero": 1},
    {"mesh.pp": 2, "mesh.tp": 1},
    {"mesh.pp": 2, "mesh.tp": 1, "mesh.schedule": "zb"},
]
MACHINE_SECONDS = 20.0  # of a round's measuring of the machine


@dataclass(slots=True)
class Case:
    """A model of a size in a layout on some ranks; the least seconds of a step so far."""

    model: str
    size: tuple[int, int, int]
    keys: Keys
    ranks: int
    least: float = float("inf")

    @property
    def config(self) -> RunConfig:
        """Its run file."""
        return config_for(self.model, self.size, self.keys)

    @property
    def choice(self) -> tuple[Any, ...]:
        """What it is compared with others of."""
        return self.model, self.size, self.ranks


def config_for(model: str, size: tuple[int, int, int], keys: Keys) -> RunConfig:
    """The run file of a case."""
    length, sequences, micro = size
    tables: dict[str, dict[str, Any]] = {
        "model": dict(MODELS[model]),
        "data": {"train": "none", "seq_len": length},
        "train": {"global_batch_size": sequences, "micro_batch_size": micro, "steps": 1, "run_dir": "none"},
    }
    tables["model"] |= (
        dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0) if "n_embd" in tables["model"] else {}
    )
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return run_config_from(tables)


def step_seconds(config: RunConfig, world: Group, steps: int) -> float:
    """The quickest of some steps, each as long as on its slowest rank, behind one that warms up. A collective."""
    decoder = config_from_hf(config.model.fields)
    site = run_site(config, decoder, world, make_device("cpu"))
    model = ModelSource(decoder, recompute=config.train.recompute).make(site)
    reduction = run_reduction(config, model)
    optimizer = AdamW(reduction.params, optimizer_settings(config), model.dtype)
    step = TrainStep(model, optimizer, 1.0, world, make_runner(config, model, reduction), reduction)
    batches = own_batches(config, decoder.vocab_size, Deal.on(site.mesh))
    times = []
    for _ in range(steps + 1):
        world.barrier()
        start = time.perf_counter()
        step(batches, 1e-5)
        times.append(float(world.all_reduce(np.array([time.perf_counter() - start]), op="max")[0]))
    return min(times[1:])


def own_batches(config: RunConfig, vocab: int, deal: Deal) -> list[Batch]:
    """This rank's microbatches of random tokens."""
    size, micro, length = config.global_batch_size, config.train.micro_batch_size, config.data.seq_len
    tokens = np.random.default_rng(0).integers(0, vocab, (size, length + 1))
    batches = []
    for number in deal.of(-(-size // micro)):
        rows = tokens[number * micro : (number + 1) * micro]
        batches.append(
            Batch.of_rows(rows[:, :-1], rows[:, 1:], samples=range(number * micro, number * micro + len(rows)))
        )
    return batches


def cases_on(world: Group, models: Sequence[str]) -> list[Case]:
    """Every case of a job: on one host some for a rank alone too."""
    hosts = set(world.all_gather_objects(platform.node()))
    kinds = [(SHARED, world.size)] + ([(ALONE, 1)] if len(hosts) == 1 else [])
    return [
        Case(model, size, keys, ranks)
        for model in models
        for size in SIZES
        for layouts, ranks in kinds
        for keys in layouts
    ]


def rounds_of(world: Group, cases: Sequence[Case], seconds: float, steps: int, machine_seconds: float) -> str:
    """Measure the machine and all cases in turn, twice at least, for about so many seconds; the machine's file."""
    before: dict[str, Samples] = {}
    args = argparse.Namespace(seconds=machine_seconds, most_bytes=1 << 26, dtype=None, name=None)
    start, rounds, text = time.perf_counter(), 0, ""
    while rounds < 2 or world.broadcast_object(_has_time(start, rounds, seconds)):
        text = measure(args, world, before)["file"]
        for case in cases:
            _take(case, world, steps)
        rounds += 1
        if world.rank == 0:
            print(f"round {rounds}: {time.perf_counter() - start:.0f} s", flush=True)
    return text


def _has_time(start: float, rounds: int, seconds: float) -> bool:
    """Whether one more round of the usual length ends in time."""
    taken = time.perf_counter() - start
    return taken * (rounds + 1) / rounds <= seconds


def _take(case: Case, world: Group, steps: int) -> None:
    """One more measurement of a case. A collective: who isn't in it waits for those who are."""
    group = world if case.ranks == world.size else SerialGroup()
    seconds = step_seconds(case.config, group, steps) if world.rank < case.ranks else 0.0
    case.least = min(case.least, float(world.all_reduce(np.array([seconds]), op="max")[0]))


def told(case: Case, cost: StepCost) -> dict[str, Any]:
    """For JSON."""
    return {
        "model": case.model, "size": list(case.size), "layout": str(cost.layout), "ranks": case.ranks,
        "choice": str(case.choice), "foretold": cost.seconds, "measured": case.least, "parts": cost.parts,
    }  # fmt: skip


def line_of(case: dict[str, Any]) -> str:
    """One case."""
    length, sequences, _ = case["size"]
    label = f"{case['model']} {length} x {sequences:<2} {case['layout']:<36}"
    error = case["foretold"] / case["measured"] - 1
    return f"{label} foretold {case['foretold']:.3f} s, measured {case['measured']:.3f} s, {error:+.1%}"


def summary(cases: list[dict[str, Any]]) -> str:
    """Errors, and how often the fastest is among the first two foretold."""
    errors = [abs(case["foretold"] / case["measured"] - 1) for case in cases]
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["choice"], []).append(case)
    hits = 0
    for group in groups.values():
        fastest = min(group, key=lambda case: case["measured"])
        hits += fastest in sorted(group, key=lambda case: case["foretold"])[:2]
    return (
        f"{len(cases)} cases: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
        f"the fastest is among the first two in {hits} of {len(groups)} choices"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long, about; two rounds or more")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a case in a round; default 1")
    parser.add_argument("--machine-seconds", type=float, default=MACHINE_SECONDS, help="of a round, for the machine")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--machine-out", help="write the machine file there")
    parser.add_argument("--out", help="write the cases here, as JSON")
    parser.add_argument("--with", dest="others", action="append", default=[], help="cases of another run")
    args = parser.parse_args()
    limit_blas_threads(1)
    keep_blocks_in_heap()  # as the command line does, for training and bench machine alike
    world = world_group()
    cases = cases_on(world, args.models)
    text = rounds_of(world, cases, args.seconds, args.steps, args.machine_seconds)
    if world.rank == 0:
        machine, found = machine_from(tomllib.loads(text)), []
        for case in cases:
            problem = problem_of(case.config, machine)
            found.append(told(case, cost_of(problem.anatomy, problem.step, layout_of(case.config, case.ranks))))
        print("\n".join(map(line_of, found)))
        if args.machine_out:
            Path(args.machine_out).write_text(text)
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
        for path in args.others:
            found += [{**case, "choice": f"{path} {case['choice']}"} for case in json.loads(Path(path).read_text())]
        print(summary(found))


if __name__ == "__main__":
    main()
