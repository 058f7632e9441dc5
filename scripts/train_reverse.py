#!/usr/bin/env python3
"""Train a small encoder-decoder to copy words and to turn them round, on 1 and on 3 ranks: one score.

    python scripts/train_reverse.py            (half a minute on one core)

All words of 2 to 4 letters out of six; "=fade" must become "fade", "<fade" "edaf". A tenth of the words, chosen by a
fixed permutation, is held out in both forms. Ends with code 1 where fewer than 0.95 of the held-out targets are right
from beginning to end, or where 1 and 3 ranks differ: in the invariant mode they are equal to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

LEAST = 0.95
RUN = """
[model]
model_type = "bart"
d_model = 32
encoder_layers = 1
decoder_layers = 1
encoder_attention_heads = 4
decoder_attention_heads = 4
encoder_ffn_dim = 64
decoder_ffn_dim = 64
max_position_embeddings = 8
init_std = 0.2
dropout = { embd = 0.0, attn = 0.0, resid = 0.0 }
[task]
kind = "translation"
[data]
train = "FOLDER/train.tsv"
valid = "FOLDER/valid.tsv"
tokenizer = "bytes"
seq_len = 6
[train]
steps = 150
global_batch_size = 64
micro_batch_size = 64
log_every = 50
invariant = true
run_dir = "FOLDER/run"
[optim]
lr = 1e-2
warmup_steps = 20
"""


def write_data(folder: Path) -> None:
    """train.tsv and valid.tsv, which have no word in common."""
    words = ["".join(letters) for length in (2, 3, 4) for letters in product("abcdef", repeat=length)]
    order = np.random.default_rng(0).permutation(len(words))
    held_out = len(words) // 10
    for name, chosen in (("train", order[held_out:]), ("valid", order[:held_out])):
        lines = [f"={words[i]}\t{words[i]}\n<{words[i]}\t{words[i][::-1]}\n" for i in chosen]
        (folder / f"{name}.tsv").write_text("".join(lines))


def exact(folder: Path, ranks: int) -> float:
    """Train on so many ranks; the part of held-out targets that are wholly right, as the run reports it."""
    run_file = folder / f"run{ranks}.toml"
    run_file.write_text(RUN.replace("FOLDER/run", f"{folder}/run{ranks}").replace("FOLDER", str(folder)))
    words = ["launch", "-n", str(ranks), "--"] if ranks > 1 else []
    command = [sys.executable, "-m", "mpitp", *words, "train", str(run_file)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    lines = (folder / f"run{ranks}" / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["valid_exact"])


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        found = {ranks: exact(folder, ranks) for ranks in (1, 3)}
    print(", ".join(f"{ranks} rank{'s' * (ranks > 1)}: exact {value:.4f}" for ranks, value in found.items()))
    return 0 if min(found.values()) >= LEAST and found[1] == found[3] else 1


if __name__ == "__main__":
    sys.exit(main())
