"""The report of `mpitp verify` as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from mpitp.verify.compare import Comparison
from mpitp.verify.record import KINDS
from mpitp.verify.run import FiniteDifference, Report

# In which order each kind of rows is computed, where one is the first that differs.
_ORDERS = {
    "start": "weights at the start",
    "y": "forward order",
    "dx": "backward order",
    "grad": "parameter gradients",
    "value": "values",
    "update": "changes of weights",
}


def text(report: Report, checks: list[FiniteDifference], ranks: int, *, failures_only: bool = False) -> str:
    """Tables and summary, a blank line between them."""
    parts = [] if failures_only and report.ok else [table(report, failures_only=failures_only)]
    parts += [differences_table(checks)] if checks else []
    return "\n\n".join([*parts, summary(report, checks, ranks)])


def table(report: Report, *, failures_only: bool = False) -> str:
    """A line for each row, aligned, in the order of computation; weights at the start only where they differ."""
    rows = [row for row in report.rows if not (row.ok and (failures_only or row.kind == "start"))]
    cells = [("name", "what", "shape", "largest abs", "relative", "verdict")]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "-"
        numbers = (f"{row.largest_abs:.2e}", f"{row.largest_rel:.2e}")
        cells.append((row.name, KINDS[row.kind], shape, *numbers, _verdict(row)))
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    aligns = "<<<>><"
    return "\n".join(
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(line, aligns, widths, strict=True)).rstrip()
        for line in cells
    )


def summary(report: Report, checks: list[FiniteDifference], ranks: int) -> str:
    """What it comes to, and where to look first."""
    failed = [row for row in report.rows if not row.ok]
    worst = max(report.rows, key=lambda row: row.largest_rel)
    compared = f"{len(report.rows)} comparisons of {ranks} rank{'s' * (ranks > 1)} with {report.oracle}"
    at_most = f"; largest relative difference {worst.largest_rel:.2e} ({worst.name}, {KINDS[worst.kind]})"
    lines = [f"equal: {compared}{at_most if worst.largest_rel else ', to the last bit'}"]
    if failed:
        lines = [f"DIFFERENT: {len(failed)} of {len(report.rows)} comparisons failed"]
    for kind, order in _ORDERS.items():
        if (row := report.first(kind)) is not None:
            lines.append(f"  first in {order}: {row.name} ({KINDS[kind]}; {_verdict(row)})")
            lines += [f"    along {row.axis}"] if row.axis else []
    wrong = [check.name for check in checks if not check.ok]
    if wrong:
        lines.append(f"WRONG: {len(wrong)} of {len(checks)} finite differences, the first in {wrong[0]}")
    return "\n".join(lines)


def differences_table(checks: list[FiniteDifference]) -> str:
    """A line for each finite-difference check."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'parameter':<{width}}  {'gradient':>15}  {'difference':>15}  verdict"]
    for check in checks:
        verdict = "ok" if check.ok else "WRONG"
        lines.append(f"{check.name:<{width}}  {check.gradient:>15.8e}  {check.difference:>15.8e}  {verdict}")
    return "\n".join(lines)


def as_dict(report: Report, checks: list[FiniteDifference], ranks: int) -> dict[str, Any]:
    """For JSON."""
    firsts = {order.replace(" ", "_"): report.first(kind) for kind, order in _ORDERS.items()}
    return {
        "ok": report.ok and all(check.ok for check in checks),
        "ranks": ranks,
        "first_in": {order: row.name if row is not None else None for order, row in firsts.items()},
        "rows": [row.as_dict() for row in report.rows],
        "finite_differences": [check.as_dict() for check in checks],
    }


def _verdict(row: Comparison) -> str:
    if row.ok:
        return "ok"
    return f"REPLICAS DIFFER by {row.replicas:.2e}" if row.replicas else "DIFFERENT"
