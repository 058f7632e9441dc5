"""Puts the ranks' traces together: one file for the Perfetto or Chrome trace viewer, and the communication ledger.

Times come from each rank's own clock and are brought to rank 0's (`clock.py`). The k-th collective of a group is the
same one on all of its ranks, so the moment at which its last rank came tells how long the others waited for it, without
a barrier that would disturb what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitp.comm.group import Group
from mpitp.errors import FileError
from mpitp.files import check_place, os_failure, read_json
from mpitp.trace.arrows import Arrow, arrows
from mpitp.trace.clock import clock_offset
from mpitp.trace.ledger import LedgerRow, Stay, make_ledger, table
from mpitp.trace.tracer import Span, Tracer, Traffic
from mpitp.trace.traffic import Key, Own, expected_traffic, letters, own_traffic

KEY = "mpitp"  # where the ledger lies in the file


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run was, and its ledger."""

    title: str
    ranks: int
    facts: dict[str, Any]
    ledger: list[LedgerRow]

    def __str__(self) -> str:
        told = (f"{letter} {value:g}" for letter, value in self.facts.get("letters", {}).items())
        return table(self.ledger, self.title, ", ".join(told))


def check_writable(path: str | Path) -> None:
    """Raise FileError, before anything is computed, when a trace can't be written to `path`."""
    check_place(path, "write the trace to")


def finish(
    tracer: Tracer, group: Group, path: str | Path, verb: str, more: Mapping[Key, Own] | None = None
) -> Trace | None:
    """Write the trace of all ranks to `path`; the trace on rank 0, None elsewhere. A collective.

    `group` is the one that the ranks were started with. `more`: this rank's part of closed forms that don't follow from
    the model's layers. Raises FileError on rank 0 when the file can't be written.
    """
    tracer.is_open = False
    own = {} if tracer.model is None else own_traffic(tracer.model, tracer.work) | dict(more or {})
    everyones = group.all_gather_objects((own, _coordinates(tracer)))
    offset = clock_offset(group)
    logs = _gather(group, tracer, offset)
    if logs is None or tracer.model is None:
        return None
    model = tracer.model
    spans, traffic = [log[0] for log in logs], [log[1] for log in logs]
    latest = latest_arrivals(traffic)
    stays = [[stay_of(entry, latest) for entry in entries] for entries in traffic]
    expected = expected_traffic(model, tracer.work, [traffic for traffic, _ in everyones])
    cut = f", the first {tracer.work.passes} passes" if tracer.is_full else ""
    layout = f"invariant, {model.site.num_blocks} blocks" if model.site.num_blocks else "plain layout"
    layout += ", sequence-parallel" if model.site.sequence_parallel else ""
    plural = "s" * (group.size > 1)
    title = f"mpitp {verb}, {model.config.model_type}, {group.size} rank{plural}, {layout}, {model.dtype}{cut}"
    facts = {
        "config": asdict(model.config) | {"hf": None},
        "work": tracer.work.as_dict(),
        "letters": letters(model, tracer.work),
    }
    trace = Trace(title, group.size, facts, make_ledger(traffic, stays, expected))
    _write(Path(path), trace, Rows([place for _, place in everyones], spans, traffic), latest)
    return trace


def _coordinates(tracer: Tracer) -> str:
    """The rank's place along each axis that has several."""
    if tracer.model is None:
        return ""
    mesh = tracer.model.site.mesh
    return ", ".join(f"{axis} {place}" for axis, place in mesh.coordinates.items() if mesh.sizes[axis] > 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """What is drawn: for every rank its coordinates, spans and collectives."""

    places: Sequence[str]
    spans: Sequence[Sequence[Span]]
    traffic: Sequence[Sequence[Traffic]]


def read_trace(path: str | Path) -> Trace:
    """The title and ledger of a written trace. Raises FileError for another kind of file."""
    raw = read_json(Path(path)).get(KEY)
    if not isinstance(raw, dict) or "ledger" not in raw:
        raise FileError(f"{path} isn't a trace that mpitp has written: it has no {KEY!r} with a ledger in it")
    try:
        return Trace(raw["title"], raw["ranks"], raw["facts"], [LedgerRow(**row) for row in raw["ledger"]])
    except (KeyError, TypeError) as error:
        raise FileError(f"{path}: the ledger in it is damaged or of another version ({error})") from error


Arrivals = Mapping[tuple[str, int], float]


def latest_arrivals(traffic: Sequence[Sequence[Traffic]]) -> Arrivals:
    """When the last rank came to each collective, by (group, number)."""
    latest: dict[tuple[str, int], float] = {}
    for entry in (entry for entries in traffic for entry in entries):
        if entry.number >= 0:
            key = entry.group, entry.number
            latest[key] = max(latest.get(key, entry.start), entry.start)
    return latest


def stay_of(entry: Traffic, latest: Arrivals) -> Stay:
    """How long a rank waited in a collective for the last one to come, and how long the rest took."""
    came = latest.get((entry.group, entry.number), entry.start)
    first = split_at(entry.start, entry.stop, came)
    second = split_at(entry.waits_from, entry.waits_to, came)
    return Stay(first[0] + second[0], first[1] + second[1])


def split_at(start: float, stop: float, moment: float) -> tuple[float, float]:
    """Seconds of start .. stop before and after a moment."""
    moment = min(max(moment, start), stop)
    return moment - start, stop - moment


def _gather(group: Group, tracer: Tracer, offset: float) -> list[tuple[list[Span], list[Traffic]]] | None:
    """Every rank's spans and collectives in rank 0's time, on rank 0. As bytes: there may be too many for a pickle."""
    for span in tracer.spans:
        span.start, span.stop = span.start - offset, span.stop - offset
    for entry in tracer.traffic:
        entry.start, entry.stop = entry.start - offset, entry.stop - offset
        if entry.waits_to:
            entry.waits_from, entry.waits_to = entry.waits_from - offset, entry.waits_to - offset
    own = [list(map(astuple, tracer.spans)), list(map(astuple, tracer.traffic))]
    packed = np.frombuffer(json.dumps(own).encode(), np.uint8) if group.rank else np.zeros(0, np.uint8)
    sizes = group.all_gather_objects(packed.size)
    if group.rank:
        group.send(packed, 0)
        return None
    logs = [(tracer.spans, tracer.traffic)]
    for rank in range(1, group.size):
        spans, traffic = json.loads(group.recv(np.zeros(sizes[rank], np.uint8), rank).tobytes())
        logs.append(([Span(*row) for row in spans], [Traffic(*row) for row in traffic]))
    return logs


def _write(path: Path, trace: Trace, rows: Rows, latest: Arrivals) -> None:
    """Chrome's trace event format, one event a line."""
    about = {"title": trace.title, "ranks": trace.ranks, "facts": trace.facts}
    about |= {"ledger": [row.as_dict() for row in trace.ledger]}
    starts = [span.start for spans in rows.spans for span in spans]
    starts += [entry.start for entries in rows.traffic for entry in entries]
    zero = min(starts, default=0.0)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms", "{KEY}": {json.dumps(about)},\n"traceEvents": [\n')
            file.write(",\n".join(_lines(trace.title, rows, latest, zero)))
            file.write("\n]}\n")
    except OSError as error:
        raise os_failure("write the trace to", path, error) from error


def _lines(title: str, rows: Rows, latest: Arrivals, zero: float) -> Iterator[str]:
    yield json.dumps({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}})
    for rank, place in enumerate(rows.places):
        name = f"rank {rank} ({place})" if place else f"rank {rank}"
        yield json.dumps({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}})
        yield json.dumps({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}})
        for span in rows.spans[rank]:
            yield _event(span.name, span.phase or "step", rank, span.start - zero, span.stop - zero)
        for entry in rows.traffic[rank]:
            yield from _collective_events(entry, rank, latest, zero)
    for number, arrow in enumerate(arrows(rows.traffic)):
        yield from _arrow_events(number, arrow, zero)


def _collective_events(entry: Traffic, rank: int, latest: Arrivals, zero: float) -> Iterator[str]:
    """The collective, and within it the wait for the last rank and the transfer; twice where it was started before."""
    came = latest.get((entry.group, entry.number), entry.start)
    about = {
        "op": entry.kind, "bytes": entry.given_bytes, "shape": str(list(entry.shape)), "dtype": entry.dtype,
        "group": entry.group, "axis": entry.axis, "number": entry.number, "layer": entry.place, "pass": entry.phase,
    }  # fmt: skip
    visits = [(entry.kind, entry.start, entry.stop)]
    if entry.waits_to:
        visits = [
            (f"start {entry.kind}", entry.start, entry.stop),
            (f"end {entry.kind}", entry.waits_from, entry.waits_to),
        ]
    for name, start, stop in visits:
        yield _event(name, "collective", rank, start - zero, stop - zero, about)
        middle = min(max(came, start), stop)
        if middle > start:
            yield _event("wait", "wait", rank, start - zero, middle - zero)
        if stop > middle:
            yield _event("transfer", "transfer", rank, middle - zero, stop - zero)


def _arrow_events(number: int, arrow: Arrow, zero: float) -> Iterator[str]:
    """The two ends of an arrow, each within the event of its send or receive."""
    arrived = arrow.received.waits_to or arrow.received.stop
    ends = [("s", arrow.source, arrow.sent.start), ("f", arrow.dest, max(arrived, arrow.received.start))]
    for kind, rank, moment in ends:
        event = {"ph": kind, "id": number, "name": "message", "cat": "message", "pid": 0, "tid": rank}
        event |= {"ts": round((moment - zero) * 1e9) / 1e3}
        yield json.dumps(event | ({"bp": "e"} if kind == "f" else {}))


def _event(name: str, category: str, rank: int, start: float, stop: float, args: dict[str, Any] | None = None) -> str:
    """A complete event. Times become whole nanoseconds first, so that neighbours meet and children lie inside."""
    first, last = round(start * 1e9), round(stop * 1e9)
    event = {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": rank}
    event |= {"ts": first / 1e3, "dur": (last - first) / 1e3}  # in microseconds
    return json.dumps(event | ({"args": args} if args else {}))
