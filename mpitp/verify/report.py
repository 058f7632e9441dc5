"""The report of `mpitp verify` as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from mpitp.verify.compare import Row
from mpitp.verify.run import FiniteDifference, Report

_KINDS = {
    "y": "output",
    "dx": "gradient of the input",
    "dy": "gradient of the output",
    "grad": "parameter gradient",
    "weight": "updated weights",
    "value": "value",
}


def table(report: Report, *, failures_only: bool = False) -> str:
    """A line for each row, aligned, in the order of computation."""
    rows = [row for row in report.rows if not (failures_only and row.ok)]
    cells = [("name", "what", "shape", "largest abs", "relative", "verdict")]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "-"
        numbers = (f"{row.largest_abs:.2e}", f"{row.largest_rel:.2e}")
        cells.append((row.name, _KINDS[row.kind], shape, *numbers, _verdict(row)))
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    aligns = "<<<>><"
    return "\n".join(
        "  ".join(f"{cell:{align}{width}}" for cell, align, width in zip(line, aligns, widths, strict=True)).rstrip()
        for line in cells
    )


def summary(report: Report, ranks: int) -> str:
    """What it comes to, and where to look first."""
    failed = [row for row in report.rows if not row.ok]
    worst = max(report.rows, key=lambda row: row.largest_rel)
    if not failed:
        return (
            f"equal: {len(report.rows)} comparisons of {ranks} ranks with the one-rank model; "
            f"largest relative difference {worst.largest_rel:.2e} ({worst.name}, {_KINDS[worst.kind]})"
        )
    lines = [f"DIFFERENT: {len(failed)} of {len(report.rows)} comparisons failed"]
    for label, first in (
        ("first in forward order", report.first_forward),
        ("first in backward order", report.first_backward),
        ("first parameter gradient", report.first(("grad",))),
        ("first value", report.first(("value",))),
        ("first updated weights", report.first(("weight",))),
    ):
        if first is not None:
            lines.append(f"  {label}: {first.name} ({_KINDS[first.kind]}; {_verdict(first)})")
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
    ok = report.ok and all(check.ok for check in checks)
    first_forward, first_backward = report.first_forward, report.first_backward
    return {
        "ok": ok,
        "ranks": ranks,
        "first_forward": first_forward.name if first_forward else None,
        "first_backward": first_backward.name if first_backward else None,
        "rows": [row.as_dict() for row in report.rows],
        "finite_differences": [check.as_dict() for check in checks],
    }


def _verdict(row: Row) -> str:
    if row.ok:
        return "ok"
    return "REPLICAS DIFFER" if row.replicas else "DIFFERENT"
