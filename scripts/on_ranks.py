"""A run on 1 and on 3 ranks that must come to the same score: what `train_digits.py` and `train_reverse.py` share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

RANKS = (1, 3)


def train_on_ranks(run: str, write_data: Callable[[Path], None], score: str, least: float) -> int:
    """Train the run file `run` (FOLDER: where its data is written; RANKS: their number) on 1 and on 3 ranks, print what
    metrics.jsonl says last of valid_`score`; the exit code: 1 where one is below `least`, or where they differ.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        found = {ranks: _score(folder, run, ranks, score) for ranks in RANKS}
    print(", ".join(f"{ranks} rank{'s' * (ranks > 1)}: {score} {value:.4f}" for ranks, value in found.items()))
    return 0 if min(found.values()) >= least and len(set(found.values())) == 1 else 1


def _score(folder: Path, run: str, ranks: int, score: str) -> float:
    run_file = folder / f"run{ranks}.toml"
    run_file.write_text(run.replace("FOLDER", str(folder)).replace("RANKS", str(ranks)))
    words = ["launch", "-n", str(ranks), "--"] if ranks > 1 else []
    command = [sys.executable, "-m", "mpitp", *words, "train", str(run_file)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    lines = (folder / f"run{ranks}" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])[f"valid_{score}"])
