"""Attention's rates for a machine file: forward and backward of some heads over one sequence, by length and width."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from mpitp.bench.timing import Task, clocked
from mpitp.comm.group import Group
from mpitp.ops.attention import HeadMap, Kept, attention_backward, attention_forward
from mpitp.ops.sight import CAUSAL
from mpitp.plan.work import Sequences, tiles_of

if TYPE_CHECKING:
    from mpitp.bench.measure_machine import Effort

BEYOND_BYTES, MOST_COPIES = 1 << 23, 16  # more than a core's own caches
LENGTHS, WIDTHS, HEADS = (64, 256, 512, 1024), (32, 64, 128), 3


def attention_rows(dtype: str, effort: Effort, group: Group) -> tuple[tuple[float, ...], ...]:
    """Rows (tokens, width, elements of scores a second forward, backward). A collective."""
    every = ((length, width) for length in LENGTHS for width in WIDTHS)
    sizes = [(length, width) for length, width in every if 4 * length * HEADS * width <= effort.most_bytes]
    tasks: dict[str, Task] = {}
    for length, width in sizes:
        tasks |= attention_tasks(length, width, HEADS, dtype)
    samples = effort.samples(tasks, group, f"attention in {dtype}")
    rows = []
    for length, width in sizes:
        elements = HEADS * tiles_of(CAUSAL, Sequences(length))[0]
        times = [samples.least(f"{phase} {length} {width}") for phase in ("forward", "backward")]
        rows.append((float(length), float(width), *(elements / seconds for seconds in times)))
    return tuple(rows)


def attention_tasks(length: int, width: int, heads: int, dtype: str) -> dict[str, Task]:
    """Both passes of causal attention, each time on other arrays."""
    rng = np.random.default_rng(0)
    of = HeadMap(range(heads), width**-0.5)
    sets = []
    for _ in range(copies(4 * 5 * length * heads * width)):
        q, k, v, do = rng.standard_normal((4, length, heads, width), np.float32).astype(dtype)
        sets.append((do, Kept(q, k, v, *attention_forward(q, k, v, of))))
    turns = itertools.cycle(sets)

    def forward() -> float:
        _, kept = next(turns)
        return clocked(lambda: attention_forward(kept.q, kept.k, kept.v, of), time.perf_counter)()

    def backward() -> float:
        do, kept = next(turns)
        return clocked(lambda: attention_backward(do, kept, of), time.perf_counter)()

    return {f"forward {length} {width}": forward, f"backward {length} {width}": backward}


def copies(num_bytes: int) -> int:
    """Sets of operands of so many bytes that, taken in turn, aren't found in the nearest caches again."""
    return max(1, min(MOST_COPIES, BEYOND_BYTES // max(num_bytes, 1)))
