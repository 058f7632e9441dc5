"""Every layout equals one rank: a whole run, from the run file to its checkpoints, compared tensor by tensor.

`check_layout(4, {"dp": 2, "tp": 2})` trains three steps on four thread ranks and on one, in float64, with clipping and
dropout, and compares losses, gradient norms, held-out loss, weights and optimizer state, by their names in the files.
The first moments are sums of the steps' clipped gradients, so that every gradient is compared too.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.backend.device import CpuDevice
from mpitp.checkpoint.hf_directory import HfWeights
from mpitp.checkpoint.training import OPTIMIZER
from mpitp.comm import Group, SerialGroup
from mpitp.config import RunConfig, run_config_from
from mpitp.train.run import train
from mpitp.train.stop import StopSignals
from tests.models.model_cases import LATER_RAW, MIXTURE_RAW, RAW
from tests.sharded import assert_close, assert_same_bits
from tests.train.run_case import make_data, run, tables

Arrays = dict[str, Any]
Changes = Mapping[str, Any]  # of the run file, such as {"train_steps": 5}

STEPS = 3
# eps damps gradients that are zero but for rounding (a key's bias), which AdamW would blow up to whole steps
COMMON = {
    "model_dtype": "float64", "train_steps": STEPS, "train_global_batch_size": 5, "train_micro_batch_size": 1,
    "train_eval_every": 2, "optim_eps": 1e-3, "optim_clip_norm": 0.5, "optim_weight_decay": 0.3,
    "checkpoint_every": STEPS,
}  # fmt: skip


def check_layout(
    ranks: int, mesh: Changes, layout: Changes | None = None, tolerance: float = 1e-10, **same: Any
) -> None:
    """Train on `ranks` thread ranks and on one, and compare; tolerance 0: the bits.

    `mesh`: keys of [mesh]. `layout`: other keys that belong to the layout ({"optim_zero": 2}). `same`: what both runs
    have: model="llama 9/3" (a name of `model_cases.RAW`), model_num_hidden_layers=3, train_global_batch_size=7, ...
    """
    settings = layout_config(scratch(), new_folder(), mesh, layout, **same)
    run(ranks, settings)
    compare(found_in(settings), on_one_rank(_frozen(same)), tolerance)


def check_resumed(*layouts: tuple[int, Changes, Changes], tolerance: float = 1e-10, **same: Any) -> None:
    """Train a step on each of the layouts (ranks, [mesh], other keys), each going on from the one before, and compare
    with one rank that never stopped.
    """
    same = {"optim_schedule": "constant", "train_eval_every": 1, "train_steps": len(layouts), **same}
    run_dir = new_folder()
    for step, (ranks, mesh, layout) in enumerate(layouts, 1):
        settings = layout_config(scratch(), run_dir, mesh, layout, **{**same, "train_steps": step})
        run(ranks, settings, resume="auto")
    compare(found_in(settings), on_one_rank(_frozen(same)), tolerance)


def check_layout_on(world: Group, folder: Path, mesh: Changes, layout: Changes | None = None, **same: Any) -> None:
    """The same on the ranks of a job, in a folder that all see; the first rank compares."""
    if world.rank == 0:
        make_data(folder)
    world.barrier()
    settings = layout_config(folder, folder / "run", mesh, layout, **same)
    train(settings, world, CpuDevice(), stop=StopSignals(()))
    if world.rank == 0:
        compare(found_in(settings), on_one_rank(_frozen(same)), 1e-10)


def layout_config(
    folder: Path, run_dir: Path, mesh: Changes, layout: Changes | None = None, model: str = "gpt2", **same: Any
) -> RunConfig:
    """The run file of a layout; `folder` has the data."""
    changes = {**COMMON, **same, **(layout or {}), **{f"mesh_{key}": value for key, value in mesh.items()}}
    raw = tables(folder / "data", run_dir, **changes)
    fields = {
        key: value
        for key, value in (RAW | LATER_RAW | MIXTURE_RAW)[model].items()
        if key not in ("vocab_size", "eos_token_id")
    }
    raw["model"] = fields | {key[6:]: value for key, value in changes.items() if key.startswith("model_")}
    raw["model"] = {key: value for key, value in raw["model"].items() if value is not None}
    return run_config_from(raw)


def compare(found: Arrays, expected: Arrays, tolerance: float) -> None:
    """Named arrays of two runs."""
    if tolerance:
        assert_close(found, expected, tolerance)
    else:
        assert_same_bits(found, expected)


@cache
def on_one_rank(same: tuple[tuple[str, Any], ...]) -> Arrays:
    """What one rank makes of the run."""
    settings = layout_config(scratch(), new_folder(), {}, **dict(same))
    train(settings, SerialGroup(), CpuDevice(), stop=StopSignals(()))
    return found_in(settings)


def found_in(settings: RunConfig) -> Arrays:
    """Numbers of every step's line, and every tensor of the last checkpoint."""
    run_dir = Path(settings.train.run_dir)
    found: Arrays = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for key in ("loss", "grad_norm", "valid_loss", "valid_accuracy", "valid_exact", "valid_f1", "tokens"):
            if key in line:
                found[f"step {line['step']} {key}"] = np.array(line[key])
    path = run_dir / "checkpoints" / f"step-{settings.train.steps:08}"
    for folder, stem in ((path, "model"), (path / OPTIMIZER, "exp_avg"), (path / OPTIMIZER, "exp_avg_sq")):
        found |= {f"{stem} {name}": array for name, array in tensors(folder, stem).items()}
    return found


def tensors(folder: Path, stem: str) -> Arrays:
    """Every tensor of a set of files, as float64, which holds every stored value exactly."""
    found = {}
    with HfWeights(folder, stem) as weights:
        for name, shape in weights.shapes().items():
            found[name] = np.empty(shape)
            weights.read(name, found[name], [0] * len(shape))
    return found


@cache
def scratch() -> Path:
    """A folder with prepared data, for as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="mpitp-layouts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_data(folder)
    return folder


def new_folder() -> Path:
    """For one run."""
    return Path(tempfile.mkdtemp(dir=scratch()))


def _frozen(same: Changes) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(same.items()))
