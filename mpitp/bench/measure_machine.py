r"""`mpitp bench machine`: a machine in numbers, measured, as the file that plans read (`plan/machine_file.py`).

| what                  | how                                                                                        |
|-----------------------|--------------------------------------------------------------------------------------------|
| products              | x W^T of shapes from small to large, all ranks at a time: they share memory and caches     |
| attention             | forward and backward of some heads by length and width, products and softmax together      |
| passes, optimizer     | a sum of two arrays by size; AdamW over some megabytes                                     |
| exponentials          | GELU, less its pass                                                                        |
| start of an operation | what a block of a tiny model takes without attention, by the operations that it starts     |
| start of a step       | a step of a tiny model, less its passes and its update                                     |
| sums                  | all-reduces over 2, 4, ... ranks of a node, and over nodes, by size; the smallest: latency |
| sends                 | a message there and back, half of it                                                       |
| overlap               | a product and a sum, by themselves and with the sum started before the product             |
| links                 | sums of all ranks of a node with other nodes at a time, against those of one alone         |

All in turn, a time is that of the slowest rank, and the least of the rounds counts: what the machine can do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitp.bench.machine import machine_facts
from mpitp.bench.machine_attention import attention_rows, copies
from mpitp.bench.timing import Samples, Task, clocked, say_progress, take_turns
from mpitp.comm.group import Group
from mpitp.comm.mesh import make_mesh
from mpitp.errors import UsageError
from mpitp.plan.machine_file import (
    AttentionSection,
    ComputeSection,
    Level,
    Machine,
    MachineSection,
    ProductsSection,
    WideLevel,
    machine_text,
)

LABEL = "bench machine"
PRODUCT_SHAPES = [  # m, n, k: small to large, and narrow in each of the three
    (32, 32, 32), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (512, 512, 64), (512, 64, 512), (64, 512, 512), (256, 96, 96), (96, 256, 96), (96, 96, 256),
    (256, 192, 192), (192, 192, 256), (1024, 192, 192), (192, 192, 1024),
    (256, 768, 192), (256, 192, 768), (768, 192, 256), (1024, 768, 192), (1024, 192, 768), (768, 192, 1024),
    (256, 4096, 192), (256, 192, 4096), (4096, 192, 256), (256, 1536, 384), (256, 384, 1536), (1536, 384, 256),
    (1024, 1536, 384), (1024, 384, 1536), (1536, 384, 1024), (512, 2048, 512), (512, 512, 2048), (2048, 512, 512),
]  # fmt: skip
PASS_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000)
SEND_BYTES = 1 << 20  # about what stages send
SUM_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
LEAST_SHAPE, LEAST_PASS = (1, 1, 1), 12
LEAST_ROUNDS, MOST_ROUNDS = 3, 200
QUICK_SECONDS = 2e-3
SumTask = Callable[[Group | None, int], Task]  # of a group and so many bytes; None: this rank looks on
TINY_BYTES = 8  # of a sum that tells the latency
ADAMW_TOUCHES = 7  # arrays: w, m and v read and written, the gradient read
LEAST_SECONDS, MOST_SHARE = 1e-7, 0.95  # what is told of differences that noise has eaten
LEAST_PART = 0.05  # of a sum's time that is transfer
LEAST_RATE, MOST_RATE = 1e5, 1e15  # bytes a second that a machine file takes


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds for each kind of measurements, the largest array, and what earlier calls have measured."""

    seconds: float
    most_bytes: int
    before: dict[str, Samples] = field(default_factory=dict)

    def samples(self, tasks: Mapping[str, Task], group: Group, what: str) -> Samples:
        """The tasks in turn, quick ones and slow ones by themselves, each kind for half of the time. A collective."""
        label = f"{LABEL}: {what}"
        once = take_turns(tasks, 1, group, label)
        quick = [name for name in tasks if once.least(name) < QUICK_SECONDS]
        found = dict(self.before.get(what, Samples()).seconds)
        for names in (quick, [name for name in tasks if name not in quick]):
            if names:
                rounds = int(self.seconds / 2 / max(once.least(*names), 1e-6))
                rounds = group.broadcast_object(min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS))
                made = take_turns({name: tasks[name] for name in names}, rounds, group, label).seconds
                found |= {name: found.get(name, []) + seconds for name, seconds in made.items()}
        self.before[what] = Samples(found)
        return self.before[what]


def measure(args: argparse.Namespace, group: Group, before: dict[str, Samples] | None = None) -> dict[str, Any]:
    """The machine file's text, and what it was measured on; equal on every rank. A collective.

    `before`: where calls that take turns with something else keep what they measured: the least of all calls counts.
    """
    if group.size < 2:
        raise UsageError(
            "a machine file tells of sums and messages between ranks, and this is a job of 1 rank; "
            "mpitp launch -n 2 -- bench machine --out machine.toml"
        )
    effort = Effort(args.seconds / 5, args.most_bytes, {} if before is None else before)
    per_node, nodes = ranks_on_nodes(group.all_gather_objects(platform.node()))
    facts = machine_facts(group)
    products = _products(args.dtype or ["float32"], effort, group)
    attention = AttentionSection(**{dtype: attention_rows(dtype, effort, group) for dtype in args.dtype or ["float32"]})
    compute = _compute(effort, group)
    in_node, wide = _communication(effort, group, per_node, nodes)
    memory = min(group.all_gather_objects(_free_bytes() / per_node))
    name = args.name or f"{facts['processor']}, {per_node} ranks a node"
    about = MachineSection(name, per_node, max(1, os.cpu_count() or 1), max(float(1 << 20), memory))
    text = group.broadcast_object(machine_text(Machine(about, compute, products, in_node, wide, attention)))
    return {"machine": facts, "nodes": nodes, "ranks_per_node": per_node, "file": text}


def ranks_on_nodes(hosts: Sequence[str]) -> tuple[int, int]:
    """(ranks a node, nodes), from the host of every rank. Raises UsageError where nodes aren't filled alike."""
    names = list(dict.fromkeys(hosts))
    per_node = len(hosts) // len(names)
    if [names[rank // per_node] if per_node * len(names) == len(hosts) else "" for rank in range(len(hosts))] != [
        *hosts
    ]:
        told = ", ".join(f"{name}: {hosts.count(name)}" for name in names)
        raise UsageError(
            f"the ranks must fill nodes one after the other, with as many on each, and these are {told}; "
            "start as many ranks on each host"
        )
    return per_node, len(names)


def _free_bytes() -> float:
    """Of this node's memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            words = dict(line.split(":", 1) for line in file)
        return float(words["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


def _clocked(work: Callable[[], Any]) -> Task:
    import time

    return clocked(work, time.perf_counter)


def _products(dtypes: Sequence[str], effort: Effort, group: Group) -> ProductsSection:
    """Rates of every dtype, less the start of a product."""
    found: dict[str, tuple[tuple[float, ...], ...]] = {}
    for dtype in dtypes:
        shapes = [shape for shape in PRODUCT_SHAPES if max(_areas(*shape)) * 4 <= effort.most_bytes]
        tasks = {str(shape): _product_task(shape, dtype) for shape in [LEAST_SHAPE, *shapes]}
        samples = effort.samples(tasks, group, f"products in {dtype}")
        start = samples.least(str(LEAST_SHAPE))
        found[dtype] = tuple(
            (*shape, _within(2.0 * math.prod(shape), _beyond(start, samples.least(str(shape))))) for shape in shapes
        )
    return ProductsSection(**found)


def _beyond(start: float, seconds: float) -> float:
    """What is left of some seconds without a start, and a part at least where noise has eaten it."""
    return max(seconds - start, LEAST_PART * seconds)


def _areas(m: int, n: int, k: int) -> tuple[int, int, int]:
    return m * k, n * k, m * n


def _product_task(shape: tuple[int, int, int], dtype: str) -> Task:
    """Small products several times, so that the clock's own time is nothing; never twice the same arrays in a row, so
    that they come from where a step finds them.
    """
    from mpitp.ops.linear import linear_forward

    m, n, k = shape
    rng = np.random.default_rng(0)
    sets = []
    for _ in range(copies(4 * sum(_areas(*shape)))):
        x, w = (rng.standard_normal(size, np.float32).astype(dtype) for size in ((m, k), (n, k)))
        sets.append((x, w, np.empty((m, n), dtype)))
    times = min(max(1, 20_000_000 // (2 * m * n * k)), 100)
    turns = itertools.cycle(sets)

    def task() -> float:
        own = [next(turns) for _ in range(times)]
        work = _clocked(lambda: [linear_forward(x, w, out=out) for x, w, out in own])
        return work() / times

    return task


def _compute(effort: Effort, group: Group) -> ComputeSection:
    from mpitp.bench.machine_parts import (
        exps_per_second,
        gelu_task,
        row_seconds,
        row_tasks,
        starts_of_tiny_model,
        tiny_tasks,
    )
    from mpitp.ops.adamw import AdamWRule, adamw_update

    sizes = [size for size in PASS_BYTES if size <= effort.most_bytes] or [effort.most_bytes]
    tasks = {f"pass {size}": _pass_task(size) for size in [LEAST_PASS, *sizes]}
    count = min(1 << 22, effort.most_bytes // 4)
    rng = np.random.default_rng(0)
    param, grad, m, v = (np.abs(rng.standard_normal(count, np.float32)) for _ in range(4))
    rule = AdamWRule(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
    tasks["adamw"] = _clocked(lambda: adamw_update(param, grad, m, v, rule))
    tasks |= {"gelu": gelu_task(), **row_tasks()} | tiny_tasks()
    samples = effort.samples(tasks, group, "passes and starts")
    operation, step = starts_of_tiny_model(samples)
    start = samples.least(f"pass {LEAST_PASS}")
    passes = tuple((float(size), _within(size, _beyond(start, samples.least(f"pass {size}")))) for size in sizes)
    return ComputeSection(
        passes=passes,
        exps_per_second=exps_per_second(samples, passes, start),
        optimizer_bytes_per_second=_within(ADAMW_TOUCHES * 4 * count, samples.least("adamw")),
        step_seconds=step,
        operation_seconds=operation,
        added_row_seconds=row_seconds(samples),
    )


def _pass_task(num_bytes: int) -> Task:
    count = max(1, num_bytes // 12)
    turns = itertools.cycle([[np.ones(count, np.float32) for _ in range(3)] for _ in range(copies(num_bytes))])

    def task() -> float:
        a, b, out = next(turns)
        return _clocked(lambda: np.add(a, b, out=out))()

    return task


def _within(amount: float, seconds: float) -> float:
    """A rate; a time that noise has eaten counts as the least that is told."""
    return min(max(amount / max(seconds, LEAST_SECONDS), LEAST_RATE), MOST_RATE)


def _communication(effort: Effort, group: Group, per_node: int, nodes: int) -> tuple[Level, WideLevel | None]:
    """Within a node, and between nodes where there are several. A collective."""
    wide = None
    across = make_mesh(group, {"dp": nodes, "tp": per_node})["dp"] if nodes > 1 else None
    if across is not None:
        is_first = group.rank < group.size and group.rank % per_node == 0
        counts = {nodes: across if is_first else None}
        wide_facts = _level(effort, group, counts, "between nodes", _sum_behind_task)
        wide = WideLevel(**wide_facts, links=_links(effort, group, across, per_node, is_first=is_first))
    counts = {p: make_mesh(group, {"dp": group.size // p, "tp": p})["tp"] for p in _counts(per_node)}
    if not counts:  # one rank a node: nothing is measured inside of one, and nothing of it counts
        assert wide is not None
        return Level(**{**{name: getattr(wide, name) for name in wide_facts}, "overlap": 0.0}), wide
    return Level(**_level(effort, group, counts, "in a node", _sum_task)), wide


def _counts(per_node: int) -> list[int]:
    """2, 4, ... ranks as they divide those of a node, and all of them."""
    powers = [1 << i for i in range(1, 12)]
    return [p for p in powers if p < per_node and per_node % p == 0] + ([per_node] if per_node > 1 else [])


def _level(
    effort: Effort, group: Group, counts: Mapping[int, Group | None], where: str, of_sum: SumTask
) -> dict[str, Any]:
    """Sums over groups of each size; None: this rank looks on."""
    sizes = [size for size in SUM_BYTES if size <= effort.most_bytes]
    tasks = {f"sum {p} {size}": of_sum(own, size) for p, own in counts.items() for size in [TINY_BYTES, *sizes]}
    largest = max(counts)
    tasks["send"] = _send_task(counts[largest], min(SEND_BYTES, sizes[-1]))
    tasks |= _overlap_tasks(counts[largest], sizes[-1])
    samples = effort.samples(tasks, group, f"sums {where}")
    rows, latency = [], min(samples.least(f"sum {p} {TINY_BYTES}") / math.ceil(math.log2(p)) for p in counts)
    for p in counts:
        start = latency * math.ceil(math.log2(p))
        for size in sizes:
            seconds = samples.least(f"sum {p} {size}")
            rows.append((float(p), float(size), _within(size, max(seconds - start, LEAST_PART * seconds))))
    return {
        "latency_seconds": min(latency, 1.0),
        "sums": tuple(rows),
        "send_bytes_per_second": _within(min(SEND_BYTES, sizes[-1]), samples.least("send") - latency),
        "overlap": _overlap(samples),
    }


def _sum_task(own: Group | None, num_bytes: int) -> Task:
    """Its operand is made where the group likes it, as a product's is."""
    if own is None:
        return lambda: 0.0
    count = max(1, num_bytes // 4)

    def task() -> float:
        x = own.empty((count,), np.float32, np)
        x.fill(1)
        return _clocked(lambda: own.all_reduce(x, out=x))()

    return task


def _sum_behind_task(own: Group | None, num_bytes: int) -> Task:
    """Between nodes as layers make sums: started when a product has just ended, whose caches, ranks that come at
    different times and thread that has to wake cost a small sum several times what it takes in a row of sums.
    """
    if own is None:
        return lambda: 0.0
    product, count = _some_products(), max(1, num_bytes // 4)

    def task() -> float:
        x = own.empty((count,), np.float32, np)
        x.fill(1)
        product()
        return _clocked(lambda: own.start_all_reduce(x, out=x).wait())()

    return task


def _some_products() -> Callable[[], None]:
    """A few milliseconds of them."""
    a = np.ones((384, 384), np.float32)
    out = np.empty_like(a)

    def work() -> None:
        for _ in range(8):
            np.matmul(a, a, out=out)

    return work


def _send_task(own: Group | None, num_bytes: int) -> Task:
    """From the first rank to the last and back: half of that."""
    if own is None or own.rank not in (0, own.size - 1):
        return lambda: 0.0
    x, peer = np.ones(num_bytes // 4, np.float32), own.size - 1 - own.rank

    def there_and_back() -> None:
        if own.rank == 0:
            own.send(x, peer)
            own.recv(x, peer)
        else:
            own.recv(x, peer)
            own.send(x, peer)

    work = _clocked(there_and_back)
    return lambda: work() / 2


def _overlap_tasks(own: Group | None, num_bytes: int) -> dict[str, Task]:
    """A product, a sum, and the sum started before the product."""
    if own is None:
        return dict.fromkeys(("product", "sum", "both"), lambda: 0.0)
    product, count = _some_products(), num_bytes // 4

    def started(work: Callable[[], None]) -> Task:
        def task() -> float:
            x = own.empty((count,), np.float32, np)
            x.fill(1)

            def both() -> None:
                pending = own.start_all_reduce(x, out=x)
                work()
                pending.wait()

            return _clocked(both)()

        return task

    return {"product": _clocked(product), "sum": started(lambda: None), "both": started(product)}


def _overlap(samples: Samples) -> float:
    """The part of the shorter of the two that took no time of its own."""
    product, total, both = (samples.least(name) for name in ("product", "sum", "both"))
    return min(max((product + total - both) / max(min(product, total), LEAST_SECONDS), 0.0), MOST_SHARE)


def _links(effort: Effort, group: Group, across: Group, per_node: int, *, is_first: bool) -> int:
    """Sums of one place of each node, and of all places at a time: how many go at full speed together."""
    size = min(1 << 22, effort.most_bytes)
    tasks = {"one": _sum_task(across if is_first else None, size), "all": _sum_task(across, size)}
    samples = effort.samples(tasks, group, "links of a node")
    crowd = max(1.0, samples.least("all") / max(samples.least("one"), LEAST_SECONDS))
    say_progress(group, "")
    return max(1, round(per_node / crowd))


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print: the file itself."""
    nodes, per_node = facts["nodes"], facts["ranks_per_node"]
    return [f"{nodes} node{'s' * (nodes > 1)} of {per_node} ranks", "", *facts["file"].rstrip("\n").split("\n")]
