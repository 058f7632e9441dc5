"""A simulated step as a timeline for the Perfetto or Chrome trace viewer, as `mpitp/trace` writes of real runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mpitp.plan.events import WORK
from mpitp.plan.simulate import Simulated

MOST_ROWS = 512  # more can't be looked at


def trace_json(found: Simulated, title: str) -> str:
    """One event a line; a row for each class of ranks, named by its first one. Seconds become whole nanoseconds."""
    lines = ",\n".join(_lines(found, title))
    return f'{{"displayTimeUnit": "ms",\n"traceEvents": [\n{lines}\n]}}\n'


def _lines(found: Simulated, title: str) -> Iterator[str]:
    yield json.dumps({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}})
    classes = sorted(range(len(found.classes.first)), key=found.classes.first.__getitem__)[:MOST_ROWS]
    for row, each in enumerate(classes):
        yield json.dumps({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": _name(found, each)}})
        yield json.dumps({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": row, "args": {"sort_index": row}})
        for stay in found.outcome.stays[each]:
            first, last = round(stay.start * 1e9), round(stay.stop * 1e9)
            kind = "step" if stay.kind == WORK else stay.kind
            name = stay.label if stay.kind == WORK else f"{stay.kind}: {stay.label}"
            event = {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": row}
            yield json.dumps(event | {"ts": first / 1e3, "dur": (last - first) / 1e3})


def _name(found: Simulated, each: int) -> str:
    rank, count = found.classes.first[each], found.classes.count[each]
    sizes = found.places.sizes
    place = ", ".join(f"{axis} {found.places.coordinate(rank, axis)}" for axis in sizes if sizes[axis] > 1)
    others = f" and {count - 1} alike" if count > 1 else ""
    return f"rank {rank}{others}" + (f" ({place})" if place else "")
