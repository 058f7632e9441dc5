"""The communication ledger: what each kind of collective carried at each place, beside the closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpitp.trace.tracer import Traffic
from mpitp.trace.traffic import Expected, Key, folded, wire_bytes


@dataclass(slots=True)
class LedgerRow:
    """One kind of collective at one place, all blocks together.

    Bytes are those handed in, on each rank; `wire_bytes` what the textbook algorithm then sends from a rank. Seconds
    and wire bytes are means over the ranks. `expected_bytes`: of all ranks together, None where there is no formula.
    """

    kind: str
    place: str
    phase: str
    calls: int  # of the rank that calls most often
    bytes_by_rank: list[int]
    wire_bytes: float = 0.0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    expected_calls: int | None = None
    expected_bytes: int | None = None
    formula: str = ""
    axis: str = ""

    @property
    def key(self) -> Key:
        """What the row is about."""
        return self.kind, self.place, self.phase

    @property
    def is_expected(self) -> bool:
        """Whether calls and bytes are those of the closed form, or there is none."""
        if self.expected_bytes is None:
            return True
        return (self.calls, sum(self.bytes_by_rank)) == (self.expected_calls, self.expected_bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Stay:
    """How long one rank was in one collective: until the last rank came, and from then on."""

    wait: float
    transfer: float


def make_ledger(
    traffic: list[list[Traffic]], stays: list[list[Stay]], expected: Mapping[Key, Expected]
) -> list[LedgerRow]:
    """The rows, from every rank's collectives and stays (in step with each other), in the order of first use."""
    ranks = len(traffic)
    rows: dict[Key, LedgerRow] = {}
    calls: Counter[tuple[Key, int]] = Counter()
    for rank in range(ranks):
        for entry, stay in zip(traffic[rank], stays[rank], strict=True):
            key = entry.kind, folded(entry.place), entry.phase
            row = rows.setdefault(key, LedgerRow(*key, 0, [0] * ranks, axis=entry.axis))
            calls[key, rank] += 1
            row.calls = max(row.calls, calls[key, rank])
            row.bytes_by_rank[rank] += entry.given_bytes
            size = len(entry.members) or ranks
            row.wire_bytes += wire_bytes(entry.op, size, entry.given_bytes, _result_bytes(entry)) / ranks
            row.wait_seconds += stay.wait / ranks
            row.transfer_seconds += stay.transfer / ranks
    for key, form in expected.items():  # a collective that is missing is a row too
        row = rows.setdefault(key, LedgerRow(*key, 0, [0] * ranks, axis=form.axis))
        row.expected_calls, row.expected_bytes, row.formula = form.calls, form.total_bytes, form.formula
    return list(rows.values())


def sent_from(traffic: Iterable[Traffic], ranks: int) -> float:
    """Bytes that the textbook algorithms send from a rank with these collectives, of `ranks` in the job."""
    return sum(_sent_bytes(entry, ranks) for entry in traffic)


def _sent_bytes(entry: Traffic, ranks: int) -> float:
    if entry.op == "recv":
        return 0.0
    return wire_bytes(entry.op, len(entry.members) or ranks, entry.given_bytes, _result_bytes(entry))


def _result_bytes(entry: Traffic) -> int:
    """Of an ordered sum: one partial. Elsewhere it isn't needed."""
    return int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize if entry.op == "all_reduce_in_order" else 0


def table(rows: Iterable[LedgerRow], title: str, letters: str = "") -> str:
    """The ledger as text, 116 columns, more where names are longer. `letters`: what those of the formulas stand for."""
    rows = list(rows)
    width = max([24, *(len(row.place) for row in rows)])
    lines = [
        f"communication ledger: {title}",
        letters,
        f"{'collective':20} {'place':{width}} {'pass':8} {'axis':5} {'calls':>6} {'bytes a rank':>12}  {'formula':9} "
        f"{'wait s':>8} {'transfer s':>10} {'MB/s':>7}",
    ]
    lines += [_line(row, width) for row in rows]
    total = sum(sum(row.bytes_by_rank) / len(row.bytes_by_rank) for row in rows)
    wait, transfer = sum(row.wait_seconds for row in rows), sum(row.transfer_seconds for row in rows)
    calls = sum(row.calls for row in rows)
    lines.append(
        f"{'total':20} {'':{width}} {'':8} {'':5} {calls:6d} {total:12,.0f}  {'':9} {wait:8.3f} {transfer:10.3f}"
    )
    wrong = [row for row in rows if not row.is_expected]
    verdict = "=: calls and bytes are those of the formula" if not wrong else f"{len(wrong)} rows differ (!) from it"
    return "\n".join([*lines, "", *_LEGEND, verdict])


_LEGEND = (
    "bytes: handed in, the mean of the ranks. Formula: a call; t tokens, h width, d head width, v vocabulary, b",
    "sequences, p ranks, s bytes an element (w: of a gradient), P parameters. Wait: until the last rank came;",
    "transfer: from then on. MB/s: what the textbook algorithm sends from a rank (ring all-reduce: 2 (p-1)/p of the",
    "bytes), a second of transfer.",
)


def _line(row: LedgerRow, width: int) -> str:
    mean = sum(row.bytes_by_rank) / len(row.bytes_by_rank)
    mark = "" if row.expected_bytes is None else "= " if row.is_expected else "! "
    speed = f"{row.wire_bytes / row.transfer_seconds / 1e6:7.0f}" if row.transfer_seconds and row.wire_bytes else ""
    note = "" if row.is_expected else f"   expected {row.expected_calls} calls, {_expected_mean(row):,.0f} bytes a rank"
    return (
        f"{row.kind:20} {row.place:{width}} {row.phase:8} {row.axis:5} {row.calls:6d} {mean:12,.0f}  "
        f"{mark + row.formula:9} "
        f"{row.wait_seconds:8.3f} {row.transfer_seconds:10.3f} {speed:>7}{note}".rstrip()
    )


def _expected_mean(row: LedgerRow) -> float:
    return (row.expected_bytes or 0) / len(row.bytes_by_rank)
