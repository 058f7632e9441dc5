"""Which kind of learning a run file asks for."""

from __future__ import annotations

from mpitp.config import RunConfig
from mpitp.train.encoder_task import TASKS, EncoderTask
from mpitp.train.image_task import ImageTask
from mpitp.train.pair_task import PairTask
from mpitp.train.setup import model_config, open_data
from mpitp.train.task import Task, TextTask
from mpitp.train.tokens_task import TokensTask

ENCODER_TASKS: dict[str, type[EncoderTask]] = {**TASKS, "token-classification": TokensTask, "image": ImageTask}


def open_task(config: RunConfig) -> Task:
    """The task of `[task] kind`, its data open and checked."""
    if config.task.kind in ENCODER_TASKS:
        return ENCODER_TASKS[config.task.kind](config)
    if config.task.kind == "translation":
        return PairTask(config)
    data = open_data(config)
    return TextTask(config, model_config(config, data), data)
