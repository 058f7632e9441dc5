"""`mpitp bench allreduce`: a collective at sizes from a gradient norm's to a large activation's, each way in turn.

The library's call; the shared-memory window with the operand produced there; the window with an operand that has to be
copied in; and, over nodes (real ones, or the ranks cut into nodes of a given size), the hierarchical sum. The choice by
size is the group's own, so at sizes where the window doesn't pay, its columns show the library behind the group. A
group of one's own, around the library's, is compared with it before it is timed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from mpitp.bench.machine import machine_facts
from mpitp.bench.timing import Samples, Task, say_progress, take_turns
from mpitp.checkpoint.together import together
from mpitp.comm.group import Group
from mpitp.comm.mpi import MpiGroup
from mpitp.comm.node import NodeGroup, place_on_nodes
from mpitp.comm.own_group import check_group, load_group
from mpitp.errors import UsageError

MIN_SECONDS, MIN_ROUNDS, MAX_ROUNDS = 0.2, 20, 1000  # a size is repeated for so long, within these numbers of rounds
LIBRARY, PRODUCED, COPIED, HIERARCHICAL = "library", "window", "window, copied in", "hierarchical"
ONE_KIND = "group"  # where there is nothing to choose from


def measure(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Least and median seconds of the collective of float32 of each size and way, as the slowest rank sees it."""
    ways = _ways(args, group)
    rows, size = [], 1024
    while size <= args.max_bytes:
        rows.append(_measure_size(ways, args.collective, size, group))
        size *= 4
    say_progress(group, "")
    facts = {"machine": machine_facts(group), "collective": args.collective, "ways": list(ways), "sizes": rows}
    return facts | {"ranks_per_node": args.ranks_per_node}


def _ways(args: argparse.Namespace, group: Group) -> dict[str, Group]:
    """The group behind every way."""
    per_node = args.ranks_per_node
    if per_node and (group.size % per_node or per_node >= group.size or per_node < 2):
        raise UsageError(
            f"--ranks-per-node must be at least 2 and cut {group.size} ranks into several equal nodes, got {per_node}"
        )
    if not isinstance(group, NodeGroup):
        ways: dict[str, Group] = {LIBRARY if args.group else ONE_KIND: group}
    elif group.across is not None:
        ways = {LIBRARY: group.inner, HIERARCHICAL: group}
    else:
        ways = {LIBRARY: group.inner, PRODUCED: group, COPIED: group}
    if per_node:
        plain = group.inner if isinstance(group, NodeGroup) else group
        plain = plain.bare() if isinstance(plain, MpiGroup) else plain  # ranks of one host act as hosts of their own
        ways[HIERARCHICAL] = place_on_nodes(plain, plain.split(group.rank // per_node, group.rank))
    if args.group:
        wrap = together(group, lambda: load_group(args.group))
        check_group(wrap, group, f"--group {args.group}")
        ways[args.group.rpartition(":")[2]] = wrap(ways[LIBRARY])
    return ways


def _measure_size(ways: dict[str, Group], collective: str, size: int, group: Group) -> dict[str, Any]:
    tasks = {
        name: _task(way, collective, size, in_window=name in (PRODUCED, HIERARCHICAL)) for name, way in ways.items()
    }
    label = f"bench allreduce: {size} bytes"
    first = take_turns(tasks, 3, group, label).least(*tasks)
    rounds = group.broadcast_object(int(min(max(MIN_SECONDS / max(first, 1e-7), MIN_ROUNDS), MAX_ROUNDS)))
    samples = take_turns(tasks, rounds, group, label)
    return {"bytes": size, "repeats": rounds, "ways": {name: _numbers(samples, name, size) for name in tasks}}


def _numbers(samples: Samples, name: str, size: int) -> dict[str, float]:
    found = {
        "least_seconds": samples.least(name),
        "median_seconds": samples.median(name),
        "gigabytes_per_second": size / samples.least(name) / 1e9,
    }
    if LIBRARY in samples.seconds and name != LIBRARY:
        least, median = samples.ratio(LIBRARY, name)
        found |= {"times_the_library_least": least, "times_the_library_median": median}
    return found


def _task(group: Group, collective: str, size: int, in_window: bool) -> Task:
    """One call on an operand of `size` bytes (an all-gather: pieces that make `size` bytes together)."""
    count = size // 4
    sizes = [count // group.size + (rank < count % group.size) for rank in range(group.size)]
    ordinary = np.ones(count if collective != "all-gather" else sizes[group.rank], np.float32)

    def task() -> float:
        x = ordinary
        if in_window and collective != "all-gather":
            x = group.empty((count,), np.float32, np)
        x.fill(1.0)  # as a product writes it: from this core's cache
        group.barrier()
        started = time.perf_counter()
        if collective == "all-reduce":
            group.all_reduce(x, out=x)
        elif collective == "reduce-scatter":
            group.reduce_scatter(x, sizes)
        else:
            group.all_gather(x)
        return time.perf_counter() - started

    return task


def report(facts: dict[str, Any]) -> list[str]:
    """The lines to print."""
    per_node = facts["ranks_per_node"]
    nodes = f"; hierarchical over simulated nodes of {per_node} ranks" if per_node else ""
    lines = [f"{facts['collective']} of float32, the ways in turn, least (median) us{nodes}", ""]
    lines += [f"{'size':>9}" + "".join(f"{way:>24}" for way in facts["ways"]) + f"{'rounds':>8}"]
    for row in facts["sizes"]:
        cells = "".join(_cell(row["ways"][way]) for way in facts["ways"])
        lines.append(f"{size_name(row['bytes']):>9}{cells}{row['repeats']:>8}")
    if LIBRARY in facts["ways"]:
        lines += ["", "times the library's speed: least by least (median of paired ratios)"]
        others = [way for way in facts["ways"] if way != LIBRARY]
        lines += [f"{'size':>9}" + "".join(f"{way:>24}" for way in others)]
        for row in facts["sizes"]:
            lines.append(f"{size_name(row['bytes']):>9}" + "".join(_ratio(row["ways"][way]) for way in others))
    if facts["machine"]["ranks"] == 1:
        lines.append(
            "on one rank an all-reduce returns its argument; start several: mpitp launch -n 2 -- bench allreduce"
        )
    return lines


def _cell(found: dict[str, float]) -> str:
    median = f"({1e6 * found['median_seconds']:.1f})"
    return f"{1e6 * found['least_seconds']:13.1f} {median:>10}"


def _ratio(found: dict[str, float]) -> str:
    median = f"({found['times_the_library_median']:.2f})"
    return f"{found['times_the_library_least']:15.2f} {median:>8}"


def size_name(size: int) -> str:
    """In KiB or MiB."""
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
