"""`mpitp bench allreduce`: the group's all-reduce at sizes from a gradient norm's to a large activation's."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from mpitp.bench.machine import machine_facts
from mpitp.bench.timing import say_progress
from mpitp.comm.group import Group

MIN_SECONDS, MIN_REPEATS = 0.2, 20  # a size is repeated for so long, and so often at least


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Least and median seconds of an all-reduce of float32 of each size, as the slowest rank sees it."""
    rows = []
    size = 1024
    while size <= args.max_bytes:
        say_progress(group, f"bench allreduce: {size} bytes")
        rows.append(_measure_size(group, size))
        size *= 4
    say_progress(group, "")
    return {"machine": machine_facts(group), "sizes": rows}


def _measure_size(group: Group, size: int) -> dict[str, Any]:
    x = np.ones(size // 4, np.float32)
    first = max(min(_once(group, x) for _ in range(3)), 1e-7)
    repeats = group.broadcast_object(int(min(max(MIN_SECONDS / first, MIN_REPEATS), 1000)))
    seconds = group.all_reduce(np.array([_once(group, x) for _ in range(repeats)]), op="max")
    least = float(seconds.min())
    return {
        "bytes": size,
        "repeats": repeats,
        "least_seconds": least,
        "median_seconds": float(np.median(seconds)),
        "gigabytes_per_second": size / least / 1e9,
    }


def _once(group: Group, x: np.ndarray) -> float:
    x.fill(1.0)
    group.barrier()
    started = time.perf_counter()
    group.all_reduce(x, out=x)
    return time.perf_counter() - started


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    lines = ["all-reduce (sum) in place of float32", ""]
    lines += [f"{'size':>10}{'least':>14}{'median':>14}{'GB/s':>9}{'repeats':>9}"]
    for row in facts["sizes"]:
        lines.append(
            f"{_size(row['bytes']):>10}{1e6 * row['least_seconds']:>11.1f} us{1e6 * row['median_seconds']:>11.1f} us"
            f"{row['gigabytes_per_second']:>9.2f}{row['repeats']:>9}"
        )
    if facts["machine"]["ranks"] == 1:
        lines.append(
            "on one rank an all-reduce returns its argument; start several: mpitp launch -n 2 -- bench allreduce"
        )
    return lines


def _size(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
