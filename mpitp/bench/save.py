"""`mpitp bench save`: a checkpoint against writing as many bytes into one file, and the cost of one in the background.

Weights and both moments are saved as a training run saves them: slices into global tensors, checksums, manifest, one
rename, the checkpoint before removed. In turn with that, the first rank writes as many bytes of its arrays one after
the other into a plain file and waits until they are on the disk. A step of a run that saves in the background stands
still while the state is copied, so a copy alone is timed too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.bench.machine import machine_facts
from mpitp.bench.random_model import random_model
from mpitp.bench.sizes import config_of, describe
from mpitp.bench.timing import Samples, take_turns
from mpitp.checkpoint.training import BackgroundSave, Contents, Save, frozen
from mpitp.comm.group import Group
from mpitp.files import os_failure
from mpitp.layers.site import make_site
from mpitp.models.model import CausalLM

BLOCK_BYTES = 1 << 24  # of a plain write
PLAIN, SAVE, COPY, STALL = "plain writes", "checkpoint", "copy of the state", "standstill in the background"


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Seconds of each, in turn; the directory is empty again afterwards."""
    config = config_of(args, "llama", 128)
    model = random_model(config, make_site(group))
    contents = contents_of(model)
    params = sum(group.all_gather_objects(sum(param.placement.num_owned() for _, param in model.named_params())))
    root = Path(group.broadcast_object(_make_directory(args.dir) if group.rank == 0 else None))
    try:
        samples = take_turns(_tasks(contents, 12 * params, root, group), args.rounds, group, "bench save")
    finally:
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    return {
        "machine": machine_facts(group),
        "model": describe(config, params),
        "directory": args.dir,
        "state_bytes": 12 * params,
        "rounds": args.rounds,
        "seconds": {name: {"least": samples.least(name), "median": samples.median(name)} for name in samples.seconds},
        "checkpoint_to_plain": _ratio(samples, SAVE, PLAIN),
        "standstill_to_copy": _ratio(samples, STALL, COPY),
    }


def contents_of(model: CausalLM) -> Contents:
    """The model with moments of its own size, as a training run has them."""
    moments = {
        kind: {name: np.full(param.data.shape, value, param.data.dtype) for name, param in model.named_params()}
        for kind, value in (("exp_avg", 1e-3), ("exp_avg_sq", 1e-6))
    }
    return Contents(model, moments, "float32", {"model_type": "llama"}, {"format": 1, "step": 1}, {}, {})


def _tasks(contents: Contents, num_bytes: int, root: Path, group: Group) -> dict[str, Callable[[], float]]:
    steps = iter(range(1, 1_000_000))

    def save() -> float:
        started = time.perf_counter()
        saving = Save(root / "checkpoints", next(steps), contents, group, 1)
        saving.run()
        seconds = time.perf_counter() - started
        saving.wait_for_removal()
        return seconds

    def copy() -> float:
        started = time.perf_counter()
        frozen(contents)
        return time.perf_counter() - started

    def stall() -> float:
        started = time.perf_counter()
        under_way = BackgroundSave(Save(root / "checkpoints", next(steps), frozen(contents), group, 1))
        seconds = time.perf_counter() - started
        while True:  # as at the boundaries of steps that take a twentieth of a second
            time.sleep(0.05)
            group.barrier()  # a rank that comes late to a step's end isn't the save's doing
            started = time.perf_counter()
            is_done = under_way.advance()
            seconds += time.perf_counter() - started
            if is_done:
                under_way.save.wait_for_removal()
                return seconds

    own = [param.data for _, param in contents.model.named_params()]
    own += [array for arrays in contents.moments.values() for array in arrays.values()]

    def plain() -> float:
        return write_plainly(root / "plain", own, num_bytes) if group.rank == 0 else 0.0

    return {PLAIN: plain, SAVE: save, COPY: copy, STALL: stall}


def write_plainly(path: Path, arrays: Sequence[Any], num_bytes: int) -> float:
    """Seconds to write `num_bytes` of the arrays, over again if need be, in order into a new file and to the disk.

    An old file is removed before the clock starts.
    """
    left = num_bytes
    try:
        path.unlink(missing_ok=True)
        started = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for array in itertools.cycle(arrays):
                view = memoryview(array).cast("B")[:left]
                left -= len(view)
                while view:
                    view = view[file.write(view[:BLOCK_BYTES]) :]
                if not left:
                    break
            os.fsync(file.fileno())
        return time.perf_counter() - started
    except OSError as error:
        raise os_failure("write", path, error) from error


def _make_directory(parent: str) -> str:
    try:
        return tempfile.mkdtemp(prefix="mpitp-bench-save-", dir=parent)
    except OSError as error:
        raise os_failure("write to", parent, error) from error


def _ratio(samples: Samples, name: str, to: str) -> dict[str, float]:
    least, median = samples.ratio(name, to)
    return {"least": least, "median": median}


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    size = facts["state_bytes"]
    lines = [facts["model"], f"weights and two moments, {size / 1e6:.0f} MB, into {facts['directory']}", ""]
    lines.append(f"{'':<32}{'least':>10}{'median':>10}{'MB/s':>10}")
    for name, seconds in facts["seconds"].items():
        rate = size / seconds["least"] / 1e6
        lines.append(f"{name:<32}{seconds['least']:>8.3f} s{seconds['median']:>8.3f} s{rate:>10.0f}")
    save, stall = facts["checkpoint_to_plain"], facts["standstill_to_copy"]
    lines += [
        "",
        f"checkpoint / plain writes   {save['least']:6.2f} (least by least), {save['median']:.2f} (median by round)",
        f"standstill / copy           {stall['least']:6.2f} (least by least), {stall['median']:.2f} (median by round)",
    ]
    return lines
