"""A training run, from the run file to the final model directory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitp.backend.device import Device
from mpitp.checkpoint.hf import read_generation_config, save_model
from mpitp.checkpoint.together import together
from mpitp.comm.group import Group
from mpitp.config import RunConfig
from mpitp.errors import FileError
from mpitp.files import os_failure
from mpitp.models.config import DecoderConfig
from mpitp.models.model import CausalLM
from mpitp.optim.adamw import AdamW
from mpitp.train.metrics import Metrics
from mpitp.train.setup import (
    RunData,
    held_out_batches,
    make_model,
    model_config,
    open_data,
    optimizer_settings,
    schedule,
    step_batches,
)
from mpitp.train.step import StepResult, TrainStep, evaluate

METRICS = "metrics.jsonl"
MODEL = "model"


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. Losses are means in nats a token; `valid_loss` None: there was no held-out text."""

    first_loss: float
    last_loss: float
    valid_loss: float | None
    model_directory: Path


def train(config: RunConfig, world: Group, device: Device) -> RunResult:
    """Run the whole run file; a collective over all ranks.

    Raises ConfigError and FileError before anything is computed, NumericError at the step whose loss isn't finite.
    """
    data = together(world, lambda: open_data(config))
    decoder = together(world, lambda: model_config(config, data))
    model = make_model(config, decoder, world, device)
    together(world, lambda: _prepare_directory(config) if world.rank == 0 else None)
    with Metrics(_metrics_path(config) if world.rank == 0 else None, config.train.steps) as metrics:
        loop = TrainLoop(config, decoder, data, model, metrics)
        losses = [loop.step(step).loss for step in range(1, config.train.steps + 1)]
        valid_loss = loop.held_out_loss()
    directory = Path(config.train.run_dir) / MODEL
    save(model, decoder, data, config, directory)
    return RunResult(losses[0], losses[-1], valid_loss, directory)


class TrainLoop:
    """Steps of one run: batches by number, learning rate, metrics, held-out loss."""

    def __init__(
        self, config: RunConfig, decoder: DecoderConfig, data: RunData, model: CausalLM, metrics: Metrics
    ) -> None:
        self.config, self.decoder, self.data, self.model, self.metrics = config, decoder, data, model, metrics
        self.optimizer = AdamW(model.named_params(), optimizer_settings(config))
        self.train_step = TrainStep(model, self.optimizer, config.optim.clip_norm)
        self.schedule = schedule(config)
        self._held_out = held_out_batches(config, data.valid) if data.valid is not None else []
        self._last_valid: tuple[int, float] | None = None

    def step(self, step: int) -> StepResult:
        """Optimizer step `step`, its line in metrics.jsonl, and the held-out loss when it is due."""
        started = time.perf_counter()
        lr = self.schedule.at(step)
        result = self.train_step(step_batches(self.config, self.decoder, self.data.train, step), lr)
        seconds = time.perf_counter() - started
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
        return result

    def held_out_loss(self) -> float | None:
        """Mean loss over the held-out text with the weights as they are; None without held-out text."""
        if not self._held_out:
            return None
        if self._last_valid is None or self._last_valid[0] != self.optimizer.steps_done:
            self._last_valid = (self.optimizer.steps_done, evaluate(self.model, self._held_out))
        return self._last_valid[1]


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


def _metrics_path(config: RunConfig) -> Path:
    return Path(config.train.run_dir) / METRICS


def _prepare_directory(config: RunConfig) -> None:
    """Make the run directory and see that it can be written; refuse to mix two runs."""
    directory = Path(config.train.run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / METRICS).exists():
            if not config.train.overwrite:
                raise FileError(
                    f"{directory} holds an earlier run ({METRICS}); choose another train.run_dir, "
                    "or replace it with --set train.overwrite=true"
                )
            (directory / METRICS).unlink()
        (directory / METRICS).touch()
    except OSError as error:
        raise os_failure("write to", directory, error) from error
