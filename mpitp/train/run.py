"""A training run, from the run file to the final model directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.hf import Documents, NamedModel, save_model
from mpitp.checkpoint.hf_directory import read_generation_config
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.comm.checked import checked
from mpitp.comm.deaths import this_process
from mpitp.comm.group import Group
from mpitp.comm.watchdog import FOLDER, Watchdog
from mpitp.config import RunConfig, duration_seconds
from mpitp.error_stream import tell
from mpitp.errors import ConfigError
from mpitp.files import remove_empty
from mpitp.models.any_config import AnyConfig
from mpitp.train.checkpoints import exact_weights
from mpitp.train.directory import RunDirectory
from mpitp.train.finite import refuse_spoilt
from mpitp.train.kinds import open_task
from mpitp.train.loop import TrainLoop
from mpitp.train.metrics import Metrics
from mpitp.train.setup import check_own_group, mesh_sizes, run_mesh, run_site
from mpitp.train.shares import with_shares
from mpitp.train.stages import check_layout
from mpitp.train.stop import StopSignals
from mpitp.train.task import Judgement, Task


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. Losses are means in nats a token; `valid_loss` None: there was no held-out text."""

    first_loss: float | None  # None: a resumed run had nothing left to do
    last_loss: float | None
    valid_loss: float | None
    model_directory: Path
    valid_accuracy: float | None = None  # part of right choices, where the task is one
    valid_exact: float | None = None  # part of wholly right texts, where there are such
    valid_f1: float | None = None  # of the labels of words


def train(
    config: RunConfig,
    world: Group,
    device: Device,
    *,
    resume: str | None = None,
    debug_collectives: bool = False,
    stop: StopSignals | None = None,
    observe: Callable[[TrainLoop], None] | None = None,
) -> RunResult:
    """Run the whole run file; a collective over all ranks.

    `resume`: a checkpoint's directory, or "auto": the newest whole one of the run directory, if there is one.
    `debug_collectives`: compare every collective between the ranks before it runs.
    `stop`: signals that the caller is listening to already; None: `[train] signals`, for as long as this lasts.
    `observe`: is handed the loop before its first step, and may observe it (`mpitp.trace`).

    Raises ConfigError and FileError before anything is computed, NumericError at the step whose loss isn't finite, and
    Preempted, with the state saved, when a signal or the end of the run's time has stopped it.
    """
    config, task = _opened(config, world, device)
    directory = RunDirectory(config)
    with contextlib.ExitStack() as stack:
        plan = on_first_rank(world, lambda: directory.take(resume, f"{FOLDER}*", stack))
        stack.callback(remove_empty, plan.made)  # of a run that has left nothing: by the last rank to go
        stop = stop or stack.enter_context(StopSignals(config.train.signals))
        world = _guarded_group(config, world, stack, debug_collectives)
        model = task.source.make(run_site(config, task.model_config, world, device))
        loop = TrainLoop(config, task, model, stop, world)
        first = loop.begin(resume, directory, plan)
        if observe is not None:
            observe(loop)
        log = directory.log if world.rank == 0 else None
        loop.metrics = stack.enter_context(Metrics(log, config.train.steps, first))
        losses = [loop.step(step).loss for step in range(first + 1, config.train.steps + 1)]
        valid = loop.end()
        _save(loop, directory)
    return _result(losses, valid, directory.model)


def _save(loop: TrainLoop, directory: RunDirectory) -> None:
    """The model that has come of it, where its weights are finite. A collective."""
    refuse_spoilt(loop.optimizer, loop.config.train.steps, loop.world)
    save(exact_weights(loop.model, loop.optimizer), loop.task, loop.config, directory.model, loop.world)
    if loop.world.rank == 0:
        directory.has_saved()


def _result(losses: Sequence[float], valid: Judgement | None, directory: Path) -> RunResult:
    first_loss, last_loss = (losses[0], losses[-1]) if losses else (None, None)
    if valid is None:
        return RunResult(first_loss, last_loss, None, directory)
    return RunResult(first_loss, last_loss, valid.loss, directory, valid.accuracy, valid.exact, valid.f1)


def _opened(config: RunConfig, world: Group, device: Device) -> tuple[RunConfig, Task]:
    """The data and the model they are for, checked; what is worth knowing about them is told. The run with it, as it is
    dealt to the ranks.
    """
    if config.mesh.plan != "given":
        raise ConfigError(
            f"mesh.plan = {config.mesh.plan!r}: this run has no layout yet; `mpitp train` finds one first "
            "(mpitp.plan.auto.planned)"
        )
    task = together(world, lambda: open_task(config))
    if world.rank == 0:
        tell(task.notices())
    check_own_group(config, world)
    config = with_shares(config, task.model_config.hidden_size, world, device)
    mesh = run_mesh(config, world)
    check_layout(config, task.source, mesh)
    task.check(world)
    return config, task


def save(model: NamedModel, task: Task, config: RunConfig, directory: Path, world: Group) -> None:
    """Write the model as a Hugging Face directory together with its tokenizer."""
    source = config.model.from_
    given = {} if source is None else read_generation_config(source)
    generation = {**given, **_generation_config(task.model_config), **task.generation_config()}
    documents = Documents(task.model_config.hf, generation or None, task.files)
    save_model(model, directory, world, documents, save_dtype=config.model.save_dtype, overwrite=True)


def _generation_config(decoder: AnyConfig) -> dict[str, Any]:
    ids = {"bos_token_id": decoder.bos_id, "eos_token_id": list(decoder.eos_ids) or None}
    return {key: value for key, value in ids.items() if value is not None}


def _guarded_group(config: RunConfig, world: Group, stack: contextlib.ExitStack, debug_collectives: bool) -> Group:
    """The world behind the watchdog (and the comparison of collectives, when asked for); one rank needs neither."""
    limit = duration_seconds(config.train.watchdog)
    if world.size == 1:
        return world
    group = checked(world) if debug_collectives else world
    if limit is None:
        return group
    processes = world.all_gather_objects(this_process(world.rank))
    # a folder of this job's own: what an earlier job that was killed has left must not be taken for its ranks
    name = world.broadcast_object(f"{processes[0].host}-{processes[0].pid}-{time.time():.0f}")
    directory = Path(config.train.run_dir) / f"{FOLDER}{name}"
    watchdog = stack.enter_context(Watchdog(directory, world.rank, world.size, limit, processes))
    axes = mesh_sizes(config)
    return watchdog.watch(group, "all" if any(axes[axis] > 1 for axis in axes if axis != "tp") else "tp")
