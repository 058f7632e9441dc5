"""Hold the cost function of `mpitp plan` against measured steps, of layouts that the machine file was not made from.

    mpitp launch -n 2 -- bench machine --out machine.toml
    mpirun -n 1 python scripts/validate_cost.py machine.toml --out one.json
    mpirun -n 2 python scripts/validate_cost.py machine.toml --out two.json --with one.json

Every case is a training step of a small model in a layout of the job's ranks, measured as the least of some rounds,
each as long as its slowest rank. It prints a line a case, the median and the worst error, and, for each model and size,
whether the fastest measured layout is among the first two of those foretold. `--with`: an earlier run's cases as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.device import make_device
from mpitp.backend.threads import limit_blas_threads
from mpitp.checkpoint.load import ModelSource
from mpitp.comm.group import Group
from mpitp.comm.start_world import world_group
from mpitp.config import RunConfig, run_config_from
from mpitp.models.batch import Batch
from mpitp.models.registry import config_from_hf
from mpitp.optim.adamw import AdamW
from mpitp.plan.choice import problem_of
from mpitp.plan.cost import cost_of
from mpitp.plan.layout import layout_of
from mpitp.plan.machine_file import read_machine
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
LAYOUTS: dict[int, list[Keys]] = {
    1: [{}, {"train.recompute": "full"}, {"train.micro_batch_size": 4}],
    2: [
        {"mesh.tp": 2},
        {"mesh.tp": 2, "mesh.sequence_parallel": True},
        {"mesh.tp": 2, "train.recompute": "full"},
        {"mesh.dp": 2, "mesh.tp": 1},
        {"mesh.dp": 2, "mesh.tp": 1, "optim.zero": 1},
        {"mesh.pp": 2, "mesh.tp": 1},
        {"mesh.pp": 2, "mesh.tp": 1, "mesh.schedule": "zb"},
    ],
}


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


def measured(config: RunConfig, world: Group, rounds: int) -> float:
    """Seconds of the quickest of some steps, each as long as on its slowest rank. A collective."""
    decoder = config_from_hf(config.model.fields)
    site = run_site(config, decoder, world, make_device("cpu"))
    model = ModelSource(decoder, recompute=config.train.recompute).make(site)
    reduction = run_reduction(config, model)
    optimizer = AdamW(reduction.params, optimizer_settings(config), model.dtype)
    step = TrainStep(model, optimizer, 1.0, world, make_runner(config, model, reduction), reduction)
    batches = own_batches(config, decoder.vocab_size, Deal.on(site.mesh))
    least = float("inf")
    for number in range(rounds + 1):  # the first one warms up
        world.barrier()
        start = time.perf_counter()
        step(batches, 1e-5)
        took = float(world.all_reduce(np.array([time.perf_counter() - start]), op="max")[0])
        least = min(least, took) if number else least
    return least


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


def cases_of(world: Group, machine_path: str, rounds: int) -> list[dict[str, Any]]:
    """Every case of the job's ranks, foretold and measured."""
    machine, found = read_machine(machine_path), []
    for model in MODELS:
        for size in SIZES:
            for keys in LAYOUTS[world.size]:
                config = config_for(model, size, keys)
                layout = layout_of(config, world.size)
                problem = problem_of(config, machine)
                foretold = cost_of(problem.anatomy, problem.step, layout).seconds
                took = measured(config, world, rounds)
                case = {"model": model, "size": list(size), "layout": str(layout), "ranks": world.size}
                found.append({**case, "foretold": foretold, "measured": took})
                if world.rank == 0:
                    told = f"{model} {size[0]} x {size[1]:<2} {layout!s:<36}"
                    print(
                        f"{told} foretold {foretold:.3f} s, measured {took:.3f} s, {foretold / took - 1:+.1%}",
                        flush=True,
                    )
    return found


def summary(cases: list[dict[str, Any]]) -> str:
    """Errors, and how often the fastest is among the first two foretold."""
    errors = [abs(case["foretold"] / case["measured"] - 1) for case in cases]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault((case["model"], case["ranks"], *case["size"]), []).append(case)
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
    parser.add_argument("machine", help="the machine file, as mpitp bench machine writes it")
    parser.add_argument("--rounds", type=int, default=4, help="steps of a case, of which the quickest counts")
    parser.add_argument("--out", help="write the cases here, as JSON")
    parser.add_argument("--with", dest="others", action="append", default=[], help="cases of another run")
    args = parser.parse_args()
    world = world_group()
    if world.size not in LAYOUTS:
        sys.exit(f"validate_cost.py has layouts for 1 and 2 ranks, this job has {world.size}")
    limit_blas_threads(1)
    cases = cases_of(world, args.machine, args.rounds)
    if world.rank == 0:
        if args.out:
            Path(args.out).write_text(json.dumps(cases, indent=1) + "\n")
        for path in args.others:
            cases += json.loads(Path(path).read_text())
        print(summary(cases))


if __name__ == "__main__":
    main()
