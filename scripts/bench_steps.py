#!/usr/bin/env python3
"""What a step of the engine takes with so many rows: the base of speculation, and of many texts at once.

    python scripts/bench_steps.py DIR [--rows 1,2,4,8,16] [--past 200] [--rounds 30]

`together`: the rows are neighbours of one text, as when drafts are tried; `apart`: newest tokens of as many texts. All
take turns, the least time of each counts; one rank, with the threads that BLAS is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpitp.backend.malloc import keep_blocks_in_heap  # noqa: E402
from mpitp.checkpoint.load import load_model  # noqa: E402
from mpitp.comm import SerialGroup  # noqa: E402
from mpitp.infer.blocks import BLOCK, blocks_of  # noqa: E402
from mpitp.infer.executor import Executor  # noqa: E402
from mpitp.infer.orders import TextRun, WorkOrder  # noqa: E402
from mpitp.layers.site import make_site  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--past", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    counts = [int(word) for word in args.rows.split(",")]
    places = BLOCK * blocks_of(args.past + max(counts))
    keep_blocks_in_heap()  # as mpitp generate does
    executor = Executor(load_model(args.model, make_site(SerialGroup())), blocks_of(places) * max(counts))
    tables = [((places * i, places * (i + 1)),) for i in range(max(counts))]
    for table in tables:
        step(executor, [TextRun(1, 0, tuple(range(args.past)), table, 1)])
    orders = {("together", n): [TextRun(1, args.past, tuple(range(n)), tables[0], n)] for n in counts}
    orders |= {("apart", n): [TextRun(i, args.past, (i,), tables[i], 1) for i in range(n)] for n in counts}
    least = dict.fromkeys(orders, float("inf"))
    for _ in range(args.rounds):
        for name, runs in orders.items():
            least[name] = min(least[name], step(executor, runs))
    one = least["together", counts[0]]
    for kind in ("together", "apart"):
        figures = (f"{n}: {1e3 * least[kind, n]:.1f} ms ({least[kind, n] / one:.2f})" for n in counts)
        print(f"{kind:8} rows " + ", ".join(figures))
    return 0


def step(executor: Executor, runs: Sequence[TextRun]) -> float:
    """Seconds of a step of these runs."""
    started = time.perf_counter()
    executor.execute(WorkOrder(1, tuple(runs)))
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
