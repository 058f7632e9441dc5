"""A training run, from the run file to the final model directory."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.hf import read_generation_config, save_model
from mpitp.checkpoint.together import on_first_rank, together
from mpitp.comm.checked import CheckedGroup
from mpitp.comm.group import Group
from mpitp.comm.peers import this_process
from mpitp.comm.watchdog import FOLDER, Watchdog
from mpitp.config import RunConfig, duration_seconds
from mpitp.errors import FileError, Preempted
from mpitp.files import discard, discard_leftovers, os_failure
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.optim.adamw import AdamW
from mpitp.train.checkpoints import METRICS, RunCheckpoints, checkpoint_root, truncate_metrics
from mpitp.train.lock import RunLock
from mpitp.train.metrics import Metrics
from mpitp.train.setup import (
    RunData,
    held_out_batches,
    make_model,
    model_config,
    open_data,
    optimizer_settings,
    run_mesh,
    schedule,
    step_batches,
)
from mpitp.train.step import StepResult, TrainStep, evaluate
from mpitp.train.stop import Deadline, StopSignals, agreed_reason

MODEL = "model"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. Losses are means in nats a token; `valid_loss` None: there was no held-out text."""

    first_loss: float | None  # None: a resumed run had nothing left to do
    last_loss: float | None
    valid_loss: float | None
    model_directory: Path


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
    `observe`: is handed the loop before its first step, and may put stand-ins into it (`mpitp.trace`).

    Raises ConfigError and FileError before anything is computed, NumericError at the step whose loss isn't finite, and
    Preempted, with the state saved, when a signal or the end of the run's time has stopped it.
    """
    data = together(world, lambda: open_data(config))
    decoder = together(world, lambda: model_config(config, data))
    run_mesh(config, world)
    directory = Path(config.train.run_dir)
    with contextlib.ExitStack() as stack:
        on_first_rank(world, lambda: _take_directory(config, resume, stack))
        stop = stop or stack.enter_context(StopSignals(config.train.signals))
        group = _guarded_group(config, world, stack, debug_collectives)
        model = make_model(config, decoder, group, device)
        loop = TrainLoop(config, decoder, data, model, stop)
        first = loop.begin(resume)
        if observe is not None:
            observe(loop)
        metrics_path = directory / METRICS if world.rank == 0 else None
        loop.metrics = stack.enter_context(Metrics(metrics_path, config.train.steps, first))
        losses = [loop.step(step).loss for step in range(first + 1, config.train.steps + 1)]
        valid_loss = loop.end()
        save(model, decoder, data, config, directory / MODEL)
    return RunResult(losses[0] if losses else None, losses[-1] if losses else None, valid_loss, directory / MODEL)


class TrainLoop:
    """Steps of one run: batches by number, learning rate, metrics, held-out loss, checkpoints, early stops."""

    def __init__(
        self, config: RunConfig, decoder: DecoderConfig, data: RunData, model: CausalLM, stop: StopSignals
    ) -> None:
        self.config, self.decoder, self.data, self.model, self.stop = config, decoder, data, model, stop
        self.group = model.layout.group
        self.optimizer = AdamW(model.named_params(), optimizer_settings(config))
        self.train_step = TrainStep(model, self.optimizer, config.optim.clip_norm)
        self.schedule = schedule(config)
        self.checkpoints = RunCheckpoints(config, decoder, data, self.group)
        self.deadline = Deadline(duration_seconds(config.train.stop_after))
        self.metrics = Metrics(None, config.train.steps)
        self._held_out = held_out_batches(config, data.valid) if data.valid is not None else []
        self._last_valid: tuple[int, float] | None = None

    def begin(self, resume: str | None) -> int:
        """Load the checkpoint to go on from; the number of steps that are done."""
        done = 0 if resume is None else self.checkpoints.resume(resume, self.model, self.optimizer)
        on_first_rank(self.group, lambda: truncate_metrics(Path(self.config.train.run_dir) / METRICS, done))
        return done

    def step(self, step: int) -> StepResult:
        """Optimizer step `step`, its line in metrics.jsonl, and what is due after it."""
        started = time.perf_counter()
        lr = self.schedule.at(step)
        result = self.train_step(step_batches(self.config, self.decoder, self.data.train, step), lr)
        seconds = time.perf_counter() - started
        self.deadline.slowest_step = max(self.deadline.slowest_step, seconds)
        self._log(step, result, lr, seconds)
        self._after(step)
        return result

    def held_out_loss(self) -> float | None:
        """Mean loss over the held-out text with the weights as they are; None without held-out text."""
        if not self._held_out:
            return None
        if self._last_valid is None or self._last_valid[0] != self.optimizer.steps_done:
            self._last_valid = (self.optimizer.steps_done, evaluate(self.model, self._held_out))
        return self._last_valid[1]

    def end(self) -> float | None:
        """Wait for what is still being written; the final held-out loss."""
        self.checkpoints.finish()
        return self.held_out_loss()

    def _log(self, step: int, result: StepResult, lr: float, seconds: float) -> None:
        every, last = self.config.train.eval_every, step == self.config.train.steps
        is_due = bool(self._held_out) and (last or (every and step % every == 0))
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.tokens,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
        }
        if is_due:
            record["valid_loss"] = self.held_out_loss()
            self.metrics.say(f"step {step}: loss {result.loss:.4f}, held-out loss {record['valid_loss']:.4f}")
        if last or is_due or step % self.config.train.log_every == 0:
            self.metrics.log(record)
        self.metrics.show(loss=f"{result.loss:.4f}", tokens_per_s=f"{record['tokens_per_second']:.0f}")

    def _after(self, step: int) -> None:
        """Checkpoint when due; stop when asked to. All ranks agree on both."""
        self.checkpoints.advance()
        self.deadline.slowest_save = self.checkpoints.slowest_seconds
        if self.checkpoints.is_due(step):
            self._save(step)
        mine = f"{self.stop.received} received" if self.stop.received else self.deadline.reason()
        reason = agreed_reason(self.group, mine)
        if reason is not None and step < self.config.train.steps:
            self._save(step, wait=True)
            raise Preempted(
                f"stopped after step {step} ({reason}); the state is saved in {self.checkpoints.root}: "
                "go on with the same command and --resume auto"
            )

    def _save(self, step: int, *, wait: bool = False) -> None:
        seconds = self.checkpoints.save(step, self.model, self.optimizer, wait=wait)
        self.metrics.say(f"step {step}: checkpoint, {seconds:.2f} s")


def save(model: CausalLM, decoder: DecoderConfig, data: RunData, config: RunConfig, directory: Path) -> None:
    """Write the model as a Hugging Face directory together with its tokenizer."""
    source = config.model.from_
    generation = read_generation_config(source) if source is not None else _generation_config(decoder)
    save_model(
        model,
        directory,
        model.layout.group,
        config=decoder.hf,
        generation_config=generation or None,
        extra_files=data.tokenizer.files,
        save_dtype=config.model.save_dtype,
        overwrite=True,
    )


def _generation_config(decoder: DecoderConfig) -> dict[str, Any]:
    ids = {"bos_token_id": decoder.bos_id, "eos_token_id": list(decoder.eos_ids) or None}
    return {key: value for key, value in ids.items() if value is not None}


def _guarded_group(config: RunConfig, world: Group, stack: contextlib.ExitStack, debug_collectives: bool) -> Group:
    """The world behind the watchdog (and the comparison of collectives, when asked for); one rank needs neither."""
    limit = duration_seconds(config.train.watchdog)
    if world.size == 1:
        return world
    group = CheckedGroup(world) if debug_collectives else world
    if limit is None:
        return group
    processes = world.all_gather_objects(this_process(world.rank))
    # a folder of this job's own: what an earlier job that was killed has left must not be taken for its ranks
    name = world.broadcast_object(f"{processes[0].host}-{processes[0].pid}-{time.time():.0f}")
    directory = Path(config.train.run_dir) / f"{FOLDER}{name}"
    watchdog = stack.enter_context(Watchdog(directory, world.rank, world.size, limit, processes))
    return watchdog.watch(group, "tp")


def _take_directory(config: RunConfig, resume: str | None, stack: contextlib.ExitStack) -> None:
    """Make the run directory, take its lock until `stack` ends, see that it can be written; refuse to mix two runs."""
    directory = Path(config.train.run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(RunLock(directory))  # before anything of another job's could be removed
        discard_leftovers(directory / MODEL)
        for leftover in directory.glob(f"{FOLDER}*"):
            discard(leftover)
        if not _continues(config, resume) and _holds_a_run(config):
            if not config.train.overwrite:
                raise FileError(
                    f"{directory} holds an earlier run; go on with it by --resume auto, choose another train.run_dir, "
                    "or replace it with --set train.overwrite=true"
                )
            (directory / METRICS).unlink(missing_ok=True)
            shutil.rmtree(checkpoint_root(config), ignore_errors=True)
        (directory / METRICS).touch()
    except OSError as error:
        raise os_failure("write to", directory, error) from error


def _holds_a_run(config: RunConfig) -> bool:
    """Whether an earlier run has left a step or a checkpoint; one that failed before its first step left neither."""
    metrics = Path(config.train.run_dir) / METRICS
    return checkpoint_root(config).exists() or (metrics.exists() and metrics.stat().st_size > 0)


def _continues(config: RunConfig, resume: str | None) -> bool:
    """Whether this run goes on with what its directory holds; a checkpoint from elsewhere begins another run."""
    if resume is None or resume == "auto":
        return resume == "auto"
    return Path(resume).resolve().parent == checkpoint_root(config).resolve()
