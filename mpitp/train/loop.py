"""The steps of a training run, and what is due after each of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mpitp.backend.accelerator import accelerator_in_use
from mpitp.checkpoint.together import on_first_rank
from mpitp.comm.group import Group
from mpitp.config import RunConfig, duration_seconds
from mpitp.error_stream import tell
from mpitp.errors import NumericError, Preempted
from mpitp.models.layered import LayeredModel
from mpitp.optim.adamw import AdamW
from mpitp.train.checkpoints import RunCheckpoints
from mpitp.train.deal import Deal
from mpitp.train.directory import Plan, RunDirectory
from mpitp.train.log import truncate_metrics
from mpitp.train.metrics import Metrics
from mpitp.train.setup import optimizer_settings, run_reduction, schedule
from mpitp.train.stages import make_runner
from mpitp.train.step import StepResult, TrainStep, quiet_overflow
from mpitp.train.stop import Deadline, StopSignals, agreed_reason
from mpitp.train.task import Judgement, Task


class TrainLoop:
    """Steps of one run: batches by number, learning rate, metrics, held-out loss, checkpoints, early stops.

    `world`: the ranks of the run, which write its files and stop together.
    """

    def __init__(self, config: RunConfig, task: Task, model: LayeredModel, stop: StopSignals, world: Group) -> None:
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
            record |= {f"valid_{name}": value for name, value in found.measures().items()}
            self.metrics.say(f"step {step}: loss {result.loss:.4f}, {found.told()}")
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
