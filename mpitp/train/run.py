"""A training run, from the run file to the final model directory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpitp.backend.accelerator import accelerator_in_use
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
from mpitp.errors import ConfigError, NumericError, Preempted
from mpitp.models.any_config import AnyConfig
from mpitp.models.layered import LayeredModel
from mpitp.optim.adamw import AdamW
from mpitp.train.checkpoints import RunCheckpoints, exact_weights
from mpitp.train.deal import Deal
from mpitp.train.directory import Plan, RunDirectory
from mpitp.train.finite import refuse_spoilt
from mpitp.train.kinds import open_task
from mpitp.train.log import truncate_metrics
from mpitp.train.metrics import Metrics
from mpitp.train.setup import (
    check_own_group,
    mesh_sizes,
    optimizer_settings,
    run_mesh,
    run_reduction,
    run_site,
    schedule,
)
from mpitp.train.shares import with_shares
from mpitp.train.stages import check_layout, make_runner
from mpitp.train.step import StepResult, TrainStep, quiet_overflow
from mpitp.train.stop import Deadline, StopSignals, agreed_reason
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
    if config.mesh.plan != "given":
        raise ConfigError(
            f"mesh.plan = {config.mesh.plan!r}: this run has no layout yet; `mpitp train` finds one first "
            "(mpitp.plan.auto.planned)"
        )
    config, task = _opened(config, world, device)
    directory = RunDirectory(config)
    with contextlib.ExitStack() as stack:
        plan = on_first_rank(world, lambda: directory.take(resume, f"{FOLDER}*", stack))
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
        refuse_spoilt(loop.optimizer, config.train.steps, world)
        save(exact_weights(model, loop.optimizer), task, config, directory.model, world)
        if world.rank == 0:
            directory.has_saved()
    return _result(losses, valid, directory.model)


def _result(losses: Sequence[float], valid: Any, directory: Path) -> RunResult:
    first_loss, last_loss = (losses[0], losses[-1]) if losses else (None, None)
    if valid is None:
        return RunResult(first_loss, last_loss, None, directory)
    return RunResult(first_loss, last_loss, valid.loss, directory, valid.accuracy, valid.exact, valid.f1)


def _opened(config: RunConfig, world: Group, device: Device) -> tuple[RunConfig, Task]:
    """The data and the model they are for, checked; what is worth knowing about them is told. The run with it, as it is
    dealt to the ranks.
    """
    task = together(world, lambda: open_task(config))
    if world.rank == 0:
        tell(task.notices())
    check_own_group(config, world)
    config = with_shares(config, task.model_config.hidden_size, world, device)
    mesh = run_mesh(config, world)
    check_layout(config, task.source, mesh)
    task.check(world)
    return config, task


class TrainLoop:
    """Steps of one run: batches by number, learning rate, metrics, held-out loss, checkpoints, early stops.

    `world`: the ranks of the run, which write its files and stop together.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        model: LayeredModel,
        stop: StopSignals,
        world: Group,
    ) -> None:
        self.config, self.task, self.model, self.stop = config, task, model, stop
        self.world = world
        reduction = run_reduction(config, model)
        self.optimizer = AdamW(reduction.params, optimizer_settings(config), model.dtype)
        runner = make_runner(config, model, reduction)
        self.train_step = TrainStep(model, self.optimizer, config.optim.clip_norm, world, runner, reduction)
        self.deal = Deal.on(model.site.mesh, in_turn=config.train.invariant)
        self.schedule = schedule(config)
        self.checkpoints = RunCheckpoints(config, task, world)
        self.deadline = Deadline(duration_seconds(config.train.stop_after))
        self.metrics = Metrics(None, config.train.steps)
        self.checkpoints.tell = lambda line: self.metrics.say(line)
        self._last_valid: tuple[int, Judgement] | None = None
        self._take_over: Callable[[], None] | None = None  # before the first step's results are written

    def begin(self, resume: str | None, directory: RunDirectory, plan: Plan) -> int:
        """Load the checkpoint to go on from; the number of steps that are done."""
        if self.world.rank == 0:
            tell([note for note in (plan.note, self.deadline.ignored) if note])
        done = self.checkpoints.resume(resume, plan, self.model, self.optimizer) if resume is not None else 0
        self.train_step.reduction.updated()  # a rank has loaded what it updates
        if plan.goes_on and done:
            on_first_rank(self.world, lambda: truncate_metrics(directory.log, done))
        else:
            self._take_over = partial(directory.give_to_new_run, plan, resume)
        return done

    def step(self, step: int) -> StepResult:
        """Optimizer step `step`, its line in metrics.jsonl, and what is due after it."""
        started = time.perf_counter()
        lr = self.schedule.at(step)
        result = self.train_step(self.task.step_batches(step, self.deal), lr)
        seconds = time.perf_counter() - started
        if self._take_over is not None:
            on_first_rank(self.world, self._take_over)
            self.metrics.begin_again()
            self._take_over = None
        self.deadline.slowest_step = max(self.deadline.slowest_step, seconds)
        self._log(step, result, lr, seconds)
        self._after(step)
        return result

    def held_out(self) -> Judgement | None:
        """How good the weights are, as they are, on held-out data; None without such."""
        if not self.task.has_valid:
            return None
        if self._last_valid is None or self._last_valid[0] != self.optimizer.steps_done:
            with quiet_overflow():
                found = self.task.judge(self.train_step, self.task.held_out_batches(self.deal))
            if not math.isfinite(found.loss):
                raise NumericError(_spoilt(found.loss, self.optimizer.steps_done))
            self._last_valid = (self.optimizer.steps_done, found)
        return self._last_valid[1]

    def end(self) -> Judgement | None:
        """Wait for what is still being written; the final judgement on held-out data."""
        self.checkpoints.finish()
        return self.held_out()

    def _log(self, step: int, result: StepResult, lr: float, seconds: float) -> None:
        every, last = self.config.train.eval_every, step == self.config.train.steps
        is_due = self.task.has_valid and (last or (every and step % every == 0))
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.tokens,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "accelerator": accelerator_in_use(),
            **self._scaling(result),
        }
        if is_due and (found := self.held_out()) is not None:
            record["valid_loss"] = found.loss
            told = f"step {step}: loss {result.loss:.4f}, held-out loss {found.loss:.4f}"
            if found.accuracy is not None:
                record["valid_accuracy"] = found.accuracy
                told += f", accuracy {found.accuracy:.4f}"
            if found.exact is not None:
                record["valid_exact"] = found.exact
                told += f", exact {found.exact:.4f}"
            if found.f1 is not None:
                record["valid_f1"] = found.f1
                told += f", F1 {found.f1:.4f}"
            self.metrics.say(told)
        if last or is_due or step % self.config.train.log_every == 0:
            self.metrics.log(record)
        if result.skipped:
            self.metrics.say(f"step {step}: left out, gradients beyond float16; loss scale {record['loss_scale']:g}")
        self.metrics.show(loss=f"{result.loss:.4f}", tokens_per_s=f"{record['tokens_per_second']:.0f}")

    def _scaling(self, result: StepResult) -> dict[str, Any]:
        """What metrics.jsonl says of the loss scale where there is one; a gradient norm that overflowed is null."""
        scale = self.optimizer.loss_scale
        if not scale.is_dynamic:
            return {}
        facts: dict[str, Any] = {"loss_scale": scale.scale, "skipped": result.skipped}
        return facts | ({"grad_norm": None} if result.skipped else {})

    def _after(self, step: int) -> None:
        """Checkpoint when due; stop when asked to. All ranks agree on both."""
        self.checkpoints.advance()
        self.deadline.slowest_save = self.checkpoints.slowest_seconds
        if is_saved := self.checkpoints.is_due(step):
            self._save(step)
        mine = f"{self.stop.received} received" if self.stop.received else self.deadline.reason()
        reason = agreed_reason(self.world, mine)
        if reason is not None and step < self.config.train.steps:
            if is_saved:
                self.checkpoints.finish()  # it may be under way in the background
            else:
                self._save(step, wait=True)
            raise Preempted(
                f"stopped after step {step} ({reason}); the state is saved in {self.checkpoints.root}: "
                "go on with the same command and --resume auto"
            )

    def _save(self, step: int, *, wait: bool = False) -> None:
        lines = self.metrics.num_lines
        seconds = self.checkpoints.save(step, self.model, self.optimizer, log_lines=lines, wait=wait)
        self.metrics.say(f"step {step}: checkpoint, {seconds:.2f} s")


def _spoilt(loss: float, step: int) -> str:
    return (
        f"held-out loss {loss} after step {step}: its update left weights that aren't finite, or too large, and they "
        "aren't saved; a lower learning rate or a longer warmup may help (--resume auto: from the last that were)"
    )


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
