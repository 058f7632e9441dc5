"""Add up the JUnit files that `scripts/test` collected, print what ran where, and fail when anything did.

    python scripts/test_summary.py RESULTS LIBRARY... -- SIZE...

RESULTS holds serial.xml and, for each library and size, LIBRARY-SIZE/rank0.xml (one file a rank) and, where the run
failed as a whole, LIBRARY-SIZE/status with its exit status. A test that failed beside others and passed alone
(alone.xml), and an MPI run that passed the second time (LIBRARY-SIZE.first is there), count as passed and are named.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def cases(file: Path) -> list[tuple[str, str]]:
    """Every test of a file with its outcome: passed, failed or skipped.

    Raises OSError, ElementTree.ParseError: the file is missing or broken.
    """
    return [
        (f"{case.get('classname')}::{case.get('name')}", _outcome({child.tag for child in case}))
        for case in ElementTree.parse(file).iter("testcase")
    ]


def _outcome(tags: set[str]) -> str:
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def outcomes(file: Path) -> Counter[str]:
    """How many tests passed, failed and were skipped; a missing or broken file is one failure."""
    try:
        return Counter(outcome for _, outcome in cases(file))
    except (OSError, ElementTree.ParseError):
        return Counter(failed=1)


def passed_alone(results: Path) -> list[str]:
    """The tests that failed beside others, and ran once more alone and passed."""
    if not (results / "alone.xml").exists():
        return []
    alone = {name for name, outcome in cases(results / "alone.xml") if outcome == "passed"}
    return sorted(name for name, outcome in cases(results / "serial.xml") if outcome == "failed" and name in alone)


def mpi_outcomes(folder: Path, size: int) -> Counter[str]:
    """Rank 0's counts; a test that failed on another rank alone, or a run that broke off, counts as failed."""
    counts = outcomes(folder / "rank0.xml")
    others = max((outcomes(folder / f"rank{rank}.xml")["failed"] for rank in range(1, size)), default=0)
    broken = (folder / "status").exists() and not counts["failed"]
    counts["failed"] = max(counts["failed"], others, int(broken))
    return counts


def describe(counts: Counter[str]) -> str:
    """One part of a line: how many of each."""
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def main(arguments: list[str]) -> int:
    """Print one line a run and the closing line; the exit status is 0 only when all is well."""
    cut = arguments.index("--")
    results, libraries, sizes = Path(arguments[0]), arguments[1:cut], [int(size) for size in arguments[cut + 1 :]]
    total = outcomes(results / "serial.xml")
    again = passed_alone(results)
    total += Counter(passed=len(again))
    total["failed"] -= len(again)
    print(f"\nserial and thread-rank tests: {describe(total)}")
    empty = []
    for library in libraries:
        for size in sizes:
            counts = mpi_outcomes(results / f"{library}-{size}", size)
            total += counts
            ran = counts["passed"] + counts["failed"]
            end = "" if (results / f"{library}-{size}" / "rank0.xml").exists() else "; the run BROKE OFF, see above"
            print(f"MPI tests, {library}, {size} rank{'s' if size > 1 else ''}: {ran} ran ({describe(counts)}){end}")
            again += [f"the MPI tests, {library} on {size}"] if (results / f"{library}-{size}.first").exists() else []
            empty += [] if counts["passed"] else [f"{library} on {size}"]
    if empty:
        print(f"FAILED: no count of passed MPI tests with {', '.join(empty)}")
    for name in again:
        print(f"ATTENTION: FAILED AT FIRST and passed when run once more: {name}")
    if total["skipped"]:
        print(f"ATTENTION: {total['skipped']} tests were SKIPPED; the reasons are above")
    print(describe(total))
    return 1 if total["failed"] or empty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
