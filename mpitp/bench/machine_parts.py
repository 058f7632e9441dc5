"""What operations and steps take to start, exponentials to be made, rows to be added to a table."""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np

from mpitp.bench.machine_attention import attention_tasks
from mpitp.bench.sizes import config_of
from mpitp.bench.timing import Samples, Task, clocked
from mpitp.comm.serial import SerialGroup
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.ops.embedding import embedding_backward
from mpitp.ops.gelu import gelu_forward
from mpitp.plan.kept import Sizes
from mpitp.plan.machine_file import along
from mpitp.plan.work import Both, Sequences, Work, work_of

FEW, MANY = 2, 6  # blocks of the tiny models
TINY_TOKENS, TINY_WIDTH = 8, 8
GELU_SHAPE = (512, 1024)
TABLE_SHAPE, ADDED_ROWS = (512, 256), 256
LEAST, MOST = 1e4, 1e16  # exponentials a second that a machine file takes
LEAST_SECONDS = 1e-7

Rows2 = tuple[tuple[float, ...], ...]


def tiny_tasks() -> dict[str, Task]:
    """Passes of two tiny models, and a step of the smaller one."""
    from mpitp.bench.train import batch_to_time, step_of

    tasks: dict[str, Task] = {}
    for blocks in (FEW, MANY):
        model = _tiny_model(blocks)
        batch = batch_to_time(model.config, 1, TINY_TOKENS)
        tasks[f"passes {blocks}"] = clocked(partial(_passes, model, batch), time.perf_counter)
        if blocks == FEW:
            tasks["step"] = clocked(step_of(model, batch), time.perf_counter)
    return tasks | attention_tasks(TINY_TOKENS, TINY_WIDTH, 1, "float32")


def _passes(model: CausalLM, batch: Batch) -> None:
    model.zero_grad()
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0)


def _tiny_model(blocks: int) -> CausalLM:
    from mpitp.bench.random_model import random_model

    names = {"layers": blocks, "hidden": TINY_WIDTH, "heads": 1, "kv_heads": 1, "head_dim": TINY_WIDTH}
    names |= {"ffn": TINY_WIDTH, "vocab": 16}
    config = config_of(argparse.Namespace(**names), "gpt2", max_positions=TINY_TOKENS)
    return random_model(config, make_site(SerialGroup()))


def starts_of_tiny_model(samples: Samples) -> tuple[float, float]:
    """Seconds of the start of an operation, and of a step beside its passes.

    A block more takes its attention, its operations' starts and nothing else: its arrays fit into the nearest cache.
    """
    few, many = samples.least(f"passes {FEW}"), samples.least(f"passes {MANY}")
    attention = samples.least(*(f"{phase} {TINY_TOKENS} {TINY_WIDTH}" for phase in ("forward", "backward")))
    block = max((many - few) / (MANY - FEW) - attention, LEAST_SECONDS)
    model = _tiny_model(FEW)
    sizes = Sizes.of(Rows.of((TINY_TOKENS,)), model.site, TINY_WIDTH)
    operation = block / starts_of(work_of(model.layers["blocks.0"], sizes, Sequences(TINY_TOKENS)))
    return operation, max(samples.least("step") - few, LEAST_SECONDS)


def starts_of(work: Both) -> float:
    """Operations that a layer's passes start beside attention, as the cost of a layout counts them."""
    return sum(map(_starts, (work.forward, work.input_grad, work.weight_grad)))


def _starts(work: Work) -> float:
    return sum(count for *_, count in work.products) + sum(1 for size in work.passes if size) + work.starts


def gelu_task() -> Task:
    """GELU of an activation."""
    x = np.random.default_rng(0).standard_normal(GELU_SHAPE, np.float32)
    return clocked(lambda: gelu_forward(x), time.perf_counter)


def exps_per_second(samples: Samples, passes: Rows2, start: float) -> float:
    """Exponentials over what GELU takes beyond its pass."""
    count = GELU_SHAPE[0] * GELU_SHAPE[1]
    seconds = samples.least("gelu") - start - 8 * count / along(passes, 8 * count)
    return min(max(count / max(seconds, LEAST_SECONDS), LEAST), MOST)


def row_tasks() -> dict[str, Task]:
    """The gradient of a table, of many rows and of none."""
    rows, width = TABLE_SHAPE
    rng = np.random.default_rng(0)
    dy, ids = rng.standard_normal((ADDED_ROWS, width), np.float32), rng.integers(0, rows, ADDED_ROWS)
    return {
        "rows": clocked(lambda: embedding_backward(dy, ids, rows), time.perf_counter),
        "no rows": clocked(lambda: embedding_backward(dy[:0], ids[:0], rows), time.perf_counter),
    }


def row_seconds(samples: Samples) -> float:
    """Of one row more."""
    return max(samples.least("rows") - samples.least("no rows"), 0.0) / ADDED_ROWS
