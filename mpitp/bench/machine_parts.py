"""What operations and steps take to start, and exponentials to be made: from a tiny model, GELU and a softmax."""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np

from mpitp.bench.sizes import config_of
from mpitp.bench.timing import Samples, Task, clocked
from mpitp.comm.serial import SerialGroup
from mpitp.layers.rows import Rows
from mpitp.layers.site import make_site
from mpitp.models.batch import Batch
from mpitp.models.model import CausalLM
from mpitp.ops.attention import HeadMap, attention_forward
from mpitp.ops.gelu import gelu_forward
from mpitp.plan.kept import Sizes
from mpitp.plan.machine_file import along, product_rate
from mpitp.plan.work import Both, Sequences, Work, tiles_of, work_of

FEW, MANY = 2, 6  # blocks of the tiny models
TINY_TOKENS = 8
GELU_SHAPE = (512, 1024)
HEAD_ROWS, HEAD_WIDTH = 768, 64
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
    return tasks


def _passes(model: CausalLM, batch: Batch) -> None:
    model.zero_grad()
    _, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, 1.0)


def _tiny_model(blocks: int) -> CausalLM:
    from mpitp.bench.random_model import random_model

    names = {"layers": blocks, "hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "vocab": 16}
    config = config_of(argparse.Namespace(**names), "gpt2", max_positions=TINY_TOKENS)
    return random_model(config, make_site(SerialGroup()))


def starts_of_tiny_model(samples: Samples) -> tuple[float, float]:
    """Seconds of the start of an operation, and of a step beside its passes.

    A block more takes its operations' starts and nothing else: its arrays fit into the nearest cache.
    """
    few, many = samples.least(f"passes {FEW}"), samples.least(f"passes {MANY}")
    block = max((many - few) / (MANY - FEW), LEAST_SECONDS)
    model = _tiny_model(FEW)
    sizes = Sizes.of(Rows.of((TINY_TOKENS,)), model.site, 8)
    operation = block / starts_of(work_of(model.layers["blocks.0"], sizes, Sequences(TINY_TOKENS)))
    return operation, max(samples.least("step") - few, LEAST_SECONDS)


def starts_of(work: Both) -> float:
    """Operations that a layer's passes start, as the cost of a layout counts them."""
    return sum(map(_starts, (work.forward, work.input_grad, work.weight_grad)))


def _starts(work: Work) -> float:
    return sum(count for *_, count in work.products) + sum(1 for size in work.passes if size) + work.starts


def exp_tasks() -> dict[str, Task]:
    """GELU of an activation, and one head of attention."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(GELU_SHAPE, np.float32)
    q, k, v = rng.standard_normal((3, HEAD_ROWS, 1, HEAD_WIDTH), np.float32)
    heads = HeadMap([0], HEAD_WIDTH**-0.5)
    return {
        "gelu": clocked(lambda: gelu_forward(x), time.perf_counter),
        "head": clocked(lambda: attention_forward(q, k, v, heads), time.perf_counter),
    }


def exps_per_second(samples: Samples, passes: Rows2, products: Rows2, operation: float) -> float:
    """Of both together: exponentials over what GELU takes beyond its pass, and the head beyond its products."""
    from mpitp.ops.sight import CAUSAL, TILE

    count = GELU_SHAPE[0] * GELU_SHAPE[1]
    gelu = samples.least("gelu") - operation - 8 * count / along(passes, 8 * count)
    area, tiles = tiles_of(CAUSAL, Sequences(HEAD_ROWS))
    wide = max(1, round(area / tiles / TILE))
    rates = product_rate(products, TILE, wide, HEAD_WIDTH), product_rate(products, TILE, HEAD_WIDTH, wide)
    flops = 2.0 * TILE * wide * HEAD_WIDTH * tiles
    head = samples.least("head") - sum(flops / rate for rate in rates) - 8 * tiles * operation
    seconds = max(gelu, LEAST_SECONDS) + max(head, LEAST_SECONDS)
    return min(max((count + area) / seconds, LEAST), MOST)
