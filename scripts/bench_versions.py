#!/usr/bin/env python3
"""What `scripts/bench_versions` runs: the same `mpitp bench` of two checkouts, round by round, in turn."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

SIZES = "--layers 4 --hidden 384 --heads 6 --vocab 4096 --batch 4 --seq 128 --steps 8".split()
Seconds = Callable[[dict[str, Any]], float]


def of_train(facts: dict[str, Any]) -> float:
    return facts["step_seconds"]["least"]


def of_decode(facts: dict[str, Any]) -> float:
    return facts["batches"][0]["step_seconds"]["least"]


def of_sums(facts: dict[str, Any]) -> float:
    """All sizes from 64 KiB up, the way that the product takes."""
    rows = [row for row in facts["sizes"] if row["bytes"] >= 1 << 16]
    return sum(row["ways"]["window"]["least_seconds"] for row in rows)


CASES: dict[str, tuple[int, list[str], Seconds]] = {
    f"train {model}, {ranks} ranks": (ranks, ["train", "--model", model, *SIZES], of_train)
    for model in ("gpt2", "llama")
    for ranks in (1, 2)
}
CASES |= {f"decode, {ranks} ranks": (ranks, "decode --layers 8 --rounds 3".split(), of_decode) for ranks in (1, 2)}
CASES["allreduce, 2 ranks"] = (2, "allreduce --max-bytes 4194304".split(), of_sums)


def measured(checkout: str, ranks: int, words: list[str]) -> dict[str, Any]:
    """The numbers of one run, with the accelerator where there is one."""
    environment = {**os.environ, "MPITP_ACCELERATOR": "auto", "OPENBLAS_NUM_THREADS": "1"}
    program = f"{checkout}/.venv-test-mpich/bin/mpitp"
    command = [program, "launch", "-n", str(ranks), "--", "bench", *words, "--json"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("now")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    for name, (ranks, words, seconds) in CASES.items():
        if not name.startswith(args.only):
            continue
        times: dict[str, list[float]] = {args.before: [], args.now: []}
        for number in range(args.rounds):
            for checkout in (args.before, args.now) if number % 2 == 0 else (args.now, args.before):
                times[checkout].append(seconds(measured(checkout, ranks, words)))
        before, now = times[args.before], times[args.now]
        ratio = median(n / b for n, b in zip(now, before, strict=True))
        least = min(now) / min(before)
        print(f"{name:22} now / before: least {least:.3f}, median {ratio:.3f}   ({1e3 * min(now):.3f} ms)", flush=True)


if __name__ == "__main__":
    main()
